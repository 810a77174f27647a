"""Differential privacy of a client: what leaves it is bounded and noised before it is sent.

An update has parts x_p: the change of its tensors, and the method's own vectors. Each is bounded,
||x_p|| <= C_p, and gets its own noise N(0, (z C_p)^2 / s_p) with sum_p s_p = 1, so that the whole
update is one Gaussian mechanism of noise multiplier z, however many parts it has. C is ``clip``
for the change and 1 for the other vectors, whose direction alone is sent. Everything else in an
update is a constant.

docs/privacy.md says against whom this protects.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from strategies.ops.gaussian import clip, direction, epsilon, normal
from strategies.records import Update
from task.channels import State
from task.options import Interval, check_options

__all__ = [
    "OFF",
    "Ledger",
    "PrivacyOptions",
    "fewest",
    "positive_variances",
    "release",
    "variances",
]

CHANGE_SHARE = 0.9
"""s of the change, where there are other parts: it has 1000 numbers for each of theirs."""


@dataclass(frozen=True)
class PrivacyOptions:
    """Differential privacy of every client.

    Parameters
    ----------
    noise_multiplier : float
        z: standard deviation of one client's noise, relative to what is clipped; 0 = off.
    clip : float
        Largest Euclidean norm of the change of a client's tensors.
    delta : float
        The probability up to which epsilon is stated.
    noise : str
        ``secret`` (the device's own entropy) or ``seeded`` (made from the run's seed, which every
        side knows: it can be repeated, and subtracted).
    """

    noise_multiplier: Annotated[float, Interval(0, open_high=True)] = 0.0
    clip: Annotated[float, Interval(0, open_low=True, open_high=True)] = 1.0
    delta: Annotated[float, Interval(0, 1, open_low=True, open_high=True)] = 1e-5
    noise: Literal["secret", "seeded"] = "secret"

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def on(self) -> bool:
        """Whether there is any noise."""
        return self.noise_multiplier > 0


OFF = PrivacyOptions()


def release(
    update: Update,
    anchor: State,
    vectors: Mapping[str, Tensor],
    options: PrivacyOptions,
    generator: torch.Generator | None,
) -> Update:
    """Return ``update`` with its tensors and ``vectors`` bounded and noised.

    Parameters
    ----------
    anchor : State
        The tensors as they were sent; integers go back as they came.
    vectors : mapping of str to tensor
        The method's parts, of which the direction is sent; NaN stays NaN and must not depend on
        data.
    generator : torch.Generator or None
        Of the noise; None = the operating system's entropy.
    """
    names = [name for name, tensor in anchor.items() if tensor.is_floating_point()]
    change = torch.cat([(update.state[n].double() - anchor[n]).flatten() for n in names])
    share = CHANGE_SHARE if vectors else 1.0
    z = options.noise_multiplier
    bounded = clip(change, options.clip)
    noised = bounded + z * options.clip / math.sqrt(share) * normal(len(change), generator)
    state, pieces = dict(anchor), torch.split(noised, [anchor[n].numel() for n in names])
    for name, piece in zip(names, pieces, strict=True):
        moved = anchor[name].double() + piece.view(anchor[name].shape)
        state[name] = moved.to(anchor[name].dtype)
    std = z / math.sqrt((1 - CHANGE_SHARE) / len(vectors)) if vectors else 0.0
    extras = {name: _directed(vector, std, generator) for name, vector in vectors.items()}
    return replace(update, state=state, extras=extras)


def _directed(vector: Tensor, std: float, generator: torch.Generator | None) -> Tensor:
    sent = ~vector.isnan()
    unit, noised = direction(vector[sent].double()), vector.clone()
    noised[sent] = (unit + std * normal(len(unit), generator)).to(vector.dtype)
    return noised


def variances(state: State) -> State:
    """Return copies of the running variances."""
    return {n: tensor.clone() for n, tensor in state.items() if n.endswith("running_var")}


def positive_variances(state: State, before: State) -> None:
    """Let no running variance fall below a tenth of what it was: noise can make it negative."""
    for name, tensor in state.items():
        if name.endswith("running_var"):
            tensor.copy_(torch.maximum(tensor, 0.1 * before[name]))


def fewest(updates: Sequence[Update], coverage: Mapping[int, int]) -> int:
    """Return how many updates sent the number that fewest sent, of those that any did.

    Parameters
    ----------
    updates : list of Update
        Merged together; NaN in their vectors is not sent.
    coverage : mapping of int to int
        Entries of the network by the number of updates that hold them.
    """
    least = min(clients for clients, entries in coverage.items() if clients and entries)
    # The method's own are in all updates, and checked; whatever else one carries is not merged.
    for name in set.intersection(*(set(update.extras) for update in updates)):
        vectors = [u.extras[name] for u in updates if u.extras[name].numel()]
        if vectors:
            senders = (~torch.stack(vectors).isnan()).sum(0)
            least = min(least, int(senders[senders > 0].min()))
    return least


@dataclass
class Ledger:
    """What the rounds so far have told about the client that was in most of them.

    Parameters
    ----------
    options : PrivacyOptions
        The mechanism that every client uses.
    asked : dict of str to int
        Client to the rounds in which it was sent a job: the server may have its update.
    merged : dict of str to float
        Client to the sum, over the rounds in which its update was merged, of 1 / the updates whose
        noises added up: those who see merged models only see no less noise than that.
    """

    options: PrivacyOptions
    asked: dict[str, int] = field(default_factory=dict)
    merged: dict[str, float] = field(default_factory=dict)

    def ask(self, clients: Iterable[str]) -> None:
        """Count a round for the clients that are sent a job."""
        for client in clients:
            self.asked[client] = self.asked.get(client, 0) + 1

    def merge(self, clients: Iterable[str], holders: int) -> None:
        """Count a merge in which every entry is the mean over at least ``holders`` clients."""
        for client in clients:
            self.merged[client] = self.merged.get(client, 0.0) + 1 / holders

    def spent(self) -> dict[str, float]:
        """Return epsilon against whoever sees merged models, and against the server."""
        return self._epsilons(
            max(self.merged.values(), default=0), max(self.asked.values(), default=0)
        )

    def planned(self, rounds: int, clients: int) -> dict[str, float]:
        """Return the same for a client in every one of ``rounds``, among ``clients`` each time."""
        return self._epsilons(rounds / clients, rounds)

    def lines(self, rounds: int, clients: int) -> list[str]:
        """Return what to tell the user before the first round."""
        o, most = self.options, self.planned(rounds, clients)
        lines = [
            f"differential privacy of a client: clip {o.clip:g}, noise multiplier "
            f"{o.noise_multiplier:g} a client, {o.noise_multiplier * math.sqrt(clients):g} "
            f"in a mean of {clients}",
            f"after {rounds} rounds epsilon is at most {most['epsilon']:.4g} against whoever sees "
            f"the merged models, {most['epsilon_server']:.4g} against the server, at delta "
            f"{o.delta:g}, if {clients} clients answer in each",
        ]
        if o.noise == "seeded":
            lines.append("privacy.noise = 'seeded': whoever knows run.seed can subtract the noise")
        return lines

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"asked": self.asked, "merged": self.merged}

    def recall(self, saved: Mapping[str, Any]) -> None:
        """Take up ``saved`` for a run that goes on.

        The round that was under way when the run stopped is asked for again; with secret noise the
        server may then have had two different answers, so it counts once more.
        """
        again = 1 if self.options.noise == "secret" else 0
        self.asked = {client: int(n) + again for client, n in saved["asked"].items()}
        self.merged = {client: float(n) for client, n in saved["merged"].items()}

    def _epsilons(self, merged: float, asked: float) -> dict[str, float]:
        o, z = self.options, self.options.noise_multiplier
        return {
            "epsilon": epsilon(math.sqrt(merged) / z, o.delta),
            # An update tells one data set from any other: twice the bound lies between them.
            "epsilon_server": epsilon(2 * math.sqrt(asked) / z, o.delta),
            "delta": o.delta,
        }
