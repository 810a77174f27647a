"""Which data set, as run options."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from task.data import folder
from task.options import Interval, check_options

__all__ = ["DataOptions"]


@dataclass(frozen=True)
class DataOptions:
    """Which data set, and of ``folder`` what all sides agree on and where the images are.

    Parameters
    ----------
    classes, domains : str
        Names in index order, separated by commas; without domains there is one.
    size, channels : int
        Pixels of height and width; 3 (colour) or 1 (grey).
    dir : str
        One folder per client, for clients whose node config has no ``data-dir``.
    test_dir : str
        Images that the server scores the global network on.
    """

    name: str = "digits"
    classes: str = ""
    domains: str = ""
    size: Annotated[int, Interval(8)] = 32
    channels: Annotated[int, Interval(1, 3)] = 3
    dir: str = ""
    test_dir: str = ""

    def __post_init__(self) -> None:
        check_options(self)
        if self.channels == 2:
            raise ValueError("channels = 2: must be 1 (grey) or 3 (colour)")
        for name, value in (("dir", self.dir), ("test-dir", self.test_dir)):
            if value and not Path(value).expanduser().is_absolute():
                raise ValueError(
                    f"{name} = {value!r}: must be an absolute path, because Flower runs the app "
                    "in folders of its own"
                )
        if self.name == folder.NAME:
            self._check_names()

    def agreement(self) -> folder.Agreement:
        """Return what the federation has agreed on about its images."""
        domains = _names(self.domains) or ("all",)
        return folder.Agreement(_names(self.classes), domains, self.channels, self.size)

    def _check_names(self) -> None:
        classes, domains = _names(self.classes), _names(self.domains)
        if len(classes) < 2:
            raise ValueError(
                f"classes = {self.classes!r}: must name the classes that all clients agree on, "
                "two or more, for example 'cat,dog'"
            )
        for name, count in Counter(classes + domains).items():
            if count > 1 or name.startswith(".") or "/" in name:
                raise ValueError(
                    f"classes = {self.classes!r}, domains = {self.domains!r}: {name!r} must occur "
                    "once and be a visible folder's name"
                )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
