"""Arrays that outlive a round: a client's own, or a server's about one client."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from task.channels import Kept, State

__all__ = ["InMemory", "Memory", "Personal"]


class Memory(Protocol):
    """Arrays saved per round, so that a round that is done again starts from the one before it."""

    def load(self, round: int) -> dict[str, Tensor]:
        """Return what was saved last in a round before ``round``, or nothing."""

    def save(self, round: int, arrays: Mapping[str, Tensor]) -> None:
        """Save for the rounds after ``round``, all or nothing."""


class InMemory:
    """A memory without a disk, for tests and for strategies used on their own."""

    def __init__(self) -> None:
        self.saved: dict[int, dict[str, Tensor]] = {}

    def load(self, round: int) -> dict[str, Tensor]:
        """Return copies of what was saved last in a round before ``round``, or nothing."""
        earlier = [number for number in self.saved if number < round]
        latest = self.saved[max(earlier)] if earlier else {}
        return {name: tensor.clone() for name, tensor in latest.items()}

    def save(self, round: int, arrays: Mapping[str, Tensor]) -> None:
        """Save copies; what is not one of the last two rounds goes."""
        kept = sorted(number for number in self.saved if number < round)[-1:]
        self.saved = {number: self.saved[number] for number in kept}
        self.saved[round] = {name: tensor.clone() for name, tensor in arrays.items()}


@dataclass(frozen=True)
class Personal:
    """The network that a client has: its own as trained in ``round``, or the ``shared`` one."""

    round: int
    kept: Kept
    state: State
    shared: bool = False
