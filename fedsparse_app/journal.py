"""The files of a run with one JSON object a line, and what of them a resumed run keeps."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedsparse_app.files import append, write_atomically

__all__ = ["FILES", "cut", "write"]

FILES = ("metrics.jsonl", "timing.jsonl", "clients.jsonl")
"""All of them; every object has its ``round``."""


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add ``rows`` to a file."""
    lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
    if lines:
        append(path, "".join(lines).encode())


def cut(folder: Path, round: int) -> None:
    """Drop what the files of ``folder`` say about rounds after ``round``.

    Raises
    ------
    ValueError
        A line before that is damaged, or metrics.jsonl does not hold every round up to ``round``;
        no file was changed then.
    """
    kept = {folder / name: list(_until(folder / name, round)) for name in FILES}
    found = [number for number, _ in kept[folder / "metrics.jsonl"]]
    if found != list(range(round + 1)):
        raise ValueError(
            f"{folder / 'metrics.jsonl'}: holds rounds {found}, and the checkpoint is of round "
            f"{round}; put the file back as the run wrote it, or start a new run"
        )
    for path, lines in kept.items():
        if path.exists():
            write_atomically(path, b"".join(line + b"\n" for _, line in lines))


def _until(path: Path, last: int) -> Iterator[tuple[int, bytes]]:
    """Yield (round, line) up to round ``last``; a kill may have left a part of a later line."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for place, line in enumerate(lines, 1):
        try:
            number = int(json.loads(line)["round"])
        except (ValueError, TypeError, KeyError):
            if place == len(lines):
                return  # what follows the last newline: nothing, or a line that was cut off
            raise ValueError(
                f"{path}, line {place}: damaged ({line[:40]!r}); put the file back as the run "
                "wrote it, or start a new run"
            ) from None
        if number <= last:
            yield number, line
