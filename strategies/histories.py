"""What the server of SubFLOT remembers of a client, as arrays for a store."""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.memory import Memory, Personal
from task.channels import ChannelMap, Kept, State
from task.submodel import extract

__all__ = ["History", "read_history", "write_history"]


@dataclass(frozen=True)
class History:
    """The submodel that a client uploaded last.

    Parameters
    ----------
    state : State
        In the client's own channels.
    rho : float
        Fraction of the width that was removed.
    round : int
        When.
    fisher : (k,) tensor or None
        Importance of the client's channels, where the method asks for it.
    """

    state: State
    rho: float
    round: int
    fisher: Tensor | None = None

    def within(self, state: State, channels: ChannelMap) -> tuple[State, Kept]:
        """Return the submodel and its channels; what was not uploaded is cut from ``state``."""
        kept = channels.prefix(1 - self.rho)
        whole = extract(state, channels, kept)
        return whole | {n: t.to(whole[n].dtype) for n, t in self.state.items()}, kept

    def personal(
        self, state: State, channels: ChannelMap, own: Memory, local: Set[str]
    ) -> Personal | None:
        """Return the network as the client trained it; None if ``local`` tensors are missing."""
        last, kept = self.within(state, channels)
        mine = own.load(self.round + 1) if local else {}
        if local - mine.keys():
            return None
        return Personal(self.round, kept, last | {name: mine[name] for name in local})


def write_history(history: History, *, half: bool) -> dict[str, Tensor]:
    """Return a history as arrays; ``half`` stores the submodel in 16 bits."""
    arrays = {
        f"state.{name}": _half(tensor) if half and tensor.is_floating_point() else tensor
        for name, tensor in history.state.items()
    }
    arrays["rho"] = torch.tensor(history.rho, dtype=torch.float64)
    arrays["round"] = torch.tensor(history.round)
    return arrays if history.fisher is None else arrays | {"fisher": history.fisher}


def read_history(arrays: dict[str, Tensor]) -> History | None:
    """Return the history that was written as ``arrays``; None where there are none."""
    if not arrays:
        return None
    state = {k.removeprefix("state."): v for k, v in arrays.items() if k.startswith("state.")}
    return History(state, float(arrays["rho"]), int(arrays["round"]), arrays.get("fisher"))


def _half(tensor: Tensor) -> Tensor:
    """Round to 16 bits; what is too large for them becomes their largest value, not infinite."""
    most = torch.finfo(torch.half).max
    return tensor.clamp(-most, most).half()
