"""Who takes part in a run, who evaluates, and how their values are merged."""

from dataclasses import dataclass
from typing import Annotated, Literal

from task.options import Interval, check_options

__all__ = ["FederationOptions"]


@dataclass(frozen=True)
class FederationOptions:
    """Who takes part and who evaluates.

    Parameters
    ----------
    clients : int
        Clients to wait for before round 1.
    fraction : float
        Share of the clients sampled in each round.
    min_replies : int
        Fewer usable replies leave the global model as it was.
    patience : int
        Rounds in a row without ``min_replies`` after which the run fails.
    timeout, wait : float
        Seconds for the replies of a round; seconds for the clients to appear.
    evaluate_every : int
        Rounds between evaluations; the last round is always evaluated.
    evaluate_on : str
        Who scores the global network: ``server`` (test sets) or ``clients`` (their own shares).
    bind_keys : bool
        A client id stays with the SuperNode key that introduced it first; needs SuperNode
        authentication, without which every start of a SuperNode makes a new key.
    merge, trim : str, float
        How an entry is merged: weighted ``mean``, ``median``, or ``trimmed``, the mean without the
        fraction ``trim`` on each side.
    """

    clients: Annotated[int, Interval(1)] = 20
    fraction: Annotated[float, Interval(0, 1, open_low=True)] = 1.0
    min_replies: Annotated[int, Interval(1)] = 2
    patience: Annotated[int, Interval(1)] = 3
    timeout: Annotated[float, Interval(1)] = 600.0
    wait: Annotated[float, Interval(1)] = 120.0
    evaluate_every: Annotated[int, Interval(1)] = 1
    evaluate_on: Literal["server", "clients"] = "server"
    bind_keys: bool = False
    merge: Literal["mean", "median", "trimmed"] = "mean"
    trim: Annotated[float, Interval(0, 0.5, open_low=True, open_high=True)] = 0.2

    def __post_init__(self) -> None:
        check_options(self)
        if self.min_replies > self.sampled(self.clients):
            raise ValueError(
                f"min-replies = {self.min_replies}: must be at most {self.sampled(self.clients)}, "
                f"the clients sampled in a round (fraction {self.fraction:g} of {self.clients})"
            )
        sampled = self.sampled(self.clients)
        if self.merge == "trimmed" and int(self.trim * sampled) == 0:
            raise ValueError(
                f"trim = {self.trim:g}: drops nobody of the {sampled} clients in a round; must be "
                f"at least 1/{sampled} and below 0.5, or take merge = 'median'"
            )

    def sampled(self, clients: int) -> int:
        """Return how many of ``clients`` a round samples: ``fraction`` of them, at least one."""
        return max(1, int(self.fraction * clients + 0.5))
