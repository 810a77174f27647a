"""A client's own arrays on disk: they survive a restart and never leave the device."""

import re
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save
from torch import Tensor

from fedsparse_app.files import write_atomically

__all__ = ["ClientState", "state_root"]


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
        if not re.fullmatch(r"[\w][\w.-]{0,63}", client):
            raise ValueError(f"client id {client!r}: use up to 64 letters, digits, '.', '_' or '-'")
        self.folder = root / client

    def load(self, round: int) -> dict[str, Tensor]:
        """Return what was saved last in a round before ``round``, or nothing."""
        earlier = [path for number, path in self._saved() if number < round]
        return load_file(earlier[-1]) if earlier else {}

    def save(self, round: int, arrays: Mapping[str, Tensor]) -> None:
        """Save ``arrays`` for the rounds after ``round``, all or nothing."""
        data = save({name: tensor.contiguous() for name, tensor in arrays.items()})
        write_atomically(self.folder / f"round-{round:06d}.safetensors", data)
        for number, path in self._saved():
            if number > round:
                path.unlink()  # from a future that a resumed server took back
        for _, path in self._saved()[:-2]:
            path.unlink()

    def _saved(self) -> list[tuple[int, Path]]:
        return [(int(p.stem[6:]), p) for p in sorted(self.folder.glob("round-*.safetensors"))]
