"""A client's own arrays on disk: they survive a restart and never leave the device."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save
from torch import Tensor

from fedsparse_app.files import write_atomically
from strategies.hello import check_client_id

__all__ = ["ClientState", "rewind", "state_root"]


def state_root(folder: Path, chosen: str | Path) -> Path:
    """Return where clients keep their arrays of the run in ``folder``: under ``chosen``, if any."""
    return Path(chosen).expanduser() / folder.name if str(chosen) else folder / "clients"


class ClientState:
    """Arrays saved per round under ``folder``; the last two rounds are kept.

    Two, because a server that resumes from its checkpoint asks for a round again, and the client
    must then start from what it had before that round.

    Raises
    ------
    ValueError
        ``client`` cannot be the name of a folder.
    """

    def __init__(self, root: Path, client: str) -> None:
        check_client_id(client)
        self.folder = root / client

    def load(self, round: int) -> dict[str, Tensor]:
        """Return what was saved last in a round before ``round``, or nothing."""
        earlier = [path for number, path in self._saved() if number < round]
        return load_file(earlier[-1]) if earlier else {}

    def save(self, round: int, arrays: Mapping[str, Tensor]) -> None:
        """Save ``arrays`` for the rounds after ``round``, all or nothing."""
        data = save({name: tensor.contiguous() for name, tensor in arrays.items()})
        write_atomically(self.folder / f"round-{round:06d}.safetensors", data)
        self.forget_after(round)
        for _, path in self._saved()[:-2]:
            path.unlink()

    def forget_after(self, round: int) -> None:
        """Remove what was saved in a future that a resumed server took back."""
        for number, path in self._saved():
            if number > round:
                path.unlink()

    def _saved(self) -> list[tuple[int, Path]]:
        return [(int(p.stem[6:]), p) for p in sorted(self.folder.glob("round-*.safetensors"))]


def rewind(root: Path, round: int) -> None:
    """Forget what every client below ``root`` saved after ``round``."""
    for folder in root.iterdir() if root.is_dir() else ():
        ClientState(root, folder.name).forget_after(round)
