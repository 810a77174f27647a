"""SubFLOT: submodels extracted and merged by optimal transport, for clients of different sizes.

Jiang, He, Chen, Li, "Submodel Extraction for Efficient and Personalized Federated Learning via
Optimal Transport", CVPR 2026, arXiv:2604.06631.

Client i removes the fraction rho_i of every layer's channels. H_i is what it uploaded last.

OTP  1. The server transports the global network W onto H_i, layer by layer, and fuses:
        sub_i = alpha * align(W, H_i) + (1 - alpha) * H_i;  at first the leading channels of W.
SAR  2. The client minimises cross-entropy + lambda * rho_i * ||w - sub_i||^2.
OTA  3. H_i <- w_i, and the server aligns every upload with W, which is then replaced by
        W <- sum over participants of n_i / n * align(w_i, W).

Differences from the paper
- A plan is normalised on each side for itself: columns sum to 1 where channels are written (a mean
  of channels), rows sum to 1 where they are read (a channel hands its whole outgoing weight on).
  The printed formulas use one matrix for both and scale activations wherever widths differ.
- Plans are integer assignments by default (``solver = "balanced"``); where widths divide each other
  this is the exact solution of the paper's problem. ``solver = "emd"`` is its letter.
- Running statistics of BatchNorm are transported, and recomputed on the client's own data before a
  network that was cut or merged without training is scored there.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import torch
from torch import Tensor

from strategies.base import SubmodelStrategy
from strategies.local import ClientHalf, cpu_state
from strategies.ops.average import average_overlap, weighted_mean
from strategies.ops.plans import Plan
from strategies.ops.transport import (
    TransportOptions,
    align,
    apply,
    distinct_rows,
    plan_groups,
    transpose,
)
from strategies.records import Hello, Job, Update
from task.channels import ChannelMap, Kept, State
from task.options import Interval, check_options
from task.seeding import generator
from task.submodel import extract
from task.train import Scores, Step, recalibrate

__all__ = ["SubFLOT", "SubFLOTClient", "SubFLOTOptions"]

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class SubFLOTOptions:
    """Options of SubFLOT; pyproject.toml says what each does."""

    rates: str = "0.0, 0.25, 0.5, 0.75"
    rate_mode: Literal["fixed", "dynamic"] = "fixed"
    alpha: Annotated[float, Interval(0, 1)] = 0.5
    lambda_sar: Annotated[float, Interval(0, open_high=True)] = 1.0
    ota_keep: Annotated[float, Interval(0, 1, open_high=True)] = 0.0
    ota_plan: Literal["solve", "reuse"] = "solve"
    solver: Literal["balanced", "emd", "cover", "sinkhorn"] = "balanced"
    squared: bool = True
    sweeps: Annotated[int, Interval(1)] = 1
    bn_in_cost: bool = True
    bn_local: bool = False
    sketch: Annotated[int, Interval(0)] = 0
    history_dtype: Literal["fp32", "fp16"] = "fp32"
    history_max_age: Annotated[int, Interval(0)] = 0
    otp: bool = True
    sar: bool = True
    ota: bool = True

    def __post_init__(self) -> None:
        check_options(self)
        self.removed()

    def removed(self) -> list[float]:
        """Return the rates rho.

        Raises
        ------
        ValueError
            ``rates`` is no list of fractions below 1.
        """
        try:
            rates = [float(part) for part in self.rates.split(",")]
        except ValueError:
            rates = []
        if not rates or not all(0 <= rate < 1 for rate in rates):
            raise ValueError(
                f"rates = {self.rates!r}: must be fractions removed, in [0, 1), as '0.0, 0.5'"
            )
        return rates

    def transport(self) -> TransportOptions:
        """Return what the transport needs to know."""
        return TransportOptions(
            solver=self.solver,
            squared=self.squared,
            sweeps=self.sweeps,
            bn_in_cost=self.bn_in_cost and not self.bn_local,
            sketch=self.sketch,
        )


class SubFLOT(SubmodelStrategy):
    """Server half: extraction from histories (OTP) and merging (OTA)."""

    options: SubFLOTOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transport = self.options.transport()
        self.local = norm_tensors(self.channels) if self.options.bn_local else frozenset()
        self._plans: dict[str, dict[str, Plan]] = {}  # global -> submodel, of this round

    def jobs(self, clients: list[Hello], round: int) -> dict[str, Job]:
        """Cut a submodel for every client (OTP)."""
        self._plans = {}
        return {j.client: j for j in in_threads(lambda client: self._job(client, round), clients)}

    def merge(self, round: int, updates: list[Update]) -> dict[str, Any]:
        """Align every upload with the global network and average (OTA); keep the histories."""
        rho = {u.client: self.removed(u.client, round) for u in updates}
        for update in updates if self.options.otp else ():
            self._remember(round, update, rho[update.client])
        if self.options.ota:
            merged = self._transported(updates, rho)
        else:
            subs = [(self._complete(u, rho[u.client]), self._kept(rho[u.client])) for u in updates]
            merged = average_overlap(self.state, self.channels, subs, [u.samples for u in updates])
        merged = mix(merged, self.state, 1 - self.options.ota_keep)
        self.state = {n: merged[n] if self.uploads(n) else t for n, t in self.state.items()}
        return {"removed": rho, "distinct_rows": distinct_rows(self.state, self.channels)}

    def uploads(self, tensor: str) -> bool:
        """Leave out BatchNorm where it stays with the client."""
        return tensor not in self.local

    def removed(self, client: str, round: int) -> float:
        """Return rho of a client: what its device says, else drawn from ``rates``."""
        said = self.exchange.clients[client].keep
        if said is not None:
            return 1 - said
        rates = self.options.removed()
        when = round if self.options.rate_mode == "dynamic" else 0
        draw = generator(self.seed, "capacity", when, client)
        return rates[int(torch.randint(len(rates), (), generator=draw))]

    def _kept(self, rho: float) -> Kept:
        return self.channels.prefix(1 - rho)

    def _job(self, client: Hello, round: int) -> Job:
        rho = self.removed(client.client, round)
        kept = self._kept(rho)
        state = extract(self.state, self.channels, kept)  # cold start: the leading channels
        history = self.store(client.client).load(round) if self.options.otp else {}
        if history:
            state = self._extracted(client.client, history, state, kept, round)
        return Job(client.client, round, kept, state, kept, {"rho": torch.tensor(rho)})

    def _extracted(
        self, client: str, history: dict[str, Tensor], prefix: State, kept: Kept, round: int
    ) -> State:
        """Return alpha * align(W, H) + (1 - alpha) * H, at the widths of ``kept``."""
        narrow, was = self.channels.restrict(kept), self._kept(float(history["rho"]))
        last = extract(self.state, self.channels, was)
        last |= {n: history[f"state.{n}"].to(t.dtype) for n, t in last.items() if self.uploads(n)}
        if any(len(was[group]) != len(kept[group]) for group in kept):
            # The capacity has changed: bring the history to the new widths first.
            last = align(last, prefix, self.channels.restrict(was), narrow, self.transport)
        plans = plan_groups(self.state, last, self.channels, narrow, self.transport)
        self._plans[client] = plans
        aligned = apply(self.state, self.channels, plans, narrow)
        return mix(aligned, last, self._alpha(round - int(history["round"])))

    def _alpha(self, age: int) -> float:
        """Return alpha; beyond ``history-max-age`` rounds it rises to 1 within as many again."""
        most = self.options.history_max_age
        stale = max(0.0, age / most - 1) if most else 0.0
        return self.options.alpha + (1 - self.options.alpha) * min(1.0, stale)

    def _transported(self, updates: list[Update], rho: dict[str, float]) -> State:
        """Return the mean of the uploads in the channels of the global network."""

        def widened(update: Update) -> State:
            state = self._complete(update, rho[update.client])
            narrow = self.channels.restrict(self._kept(rho[update.client]))
            if self.options.ota_plan == "reuse" and update.client in self._plans:
                return apply(state, narrow, transpose(self._plans[update.client]), self.channels)
            return align(state, self.state, narrow, self.channels, self.transport)

        return weighted_mean(in_threads(widened, updates), [u.samples for u in updates])

    def _complete(self, update: Update, rho: float) -> State:
        """Return the upload with the server's values for what stays with the client."""
        return extract(self.state, self.channels, self._kept(rho)) | update.state

    def _remember(self, round: int, update: Update, rho: float) -> None:
        half = self.options.history_dtype == "fp16"
        arrays = {
            f"state.{name}": tensor.half() if half and tensor.is_floating_point() else tensor
            for name, tensor in update.state.items()
        }
        about = {"rho": torch.tensor(rho, dtype=torch.float64), "round": torch.tensor(round)}
        self.store(update.client).save(round, arrays | about)


class SubFLOTClient(ClientHalf):
    """Client half: local training near the submodel that was sent (SAR)."""

    options: SubFLOTOptions

    def train(self, job: Job) -> Update:
        """Train under the pull lambda * rho * ||w - anchor||^2."""
        begin = time.perf_counter()
        model = self.me.submodel(job.kept, self._own_norms(job))
        anchor = [p.detach().clone() for p in model.parameters()]
        strength = self.options.lambda_sar * float(job.extras["rho"]) if self.options.sar else 0.0

        def pull(step: Step) -> Tensor:
            pairs = zip(step.model.parameters(), anchor, strict=True)
            return strength * torch.stack([(w - a).pow(2).sum() for w, a in pairs]).sum()

        trained = self.fit(model, job, pull if strength else None)
        state = cpu_state(model)
        if self.options.bn_local:
            norms = norm_tensors(self.me.channels)
            self.me.memory.save(job.round, {n: t for n, t in state.items() if n in norms})
            state = {n: t for n, t in state.items() if n not in norms}
        return self.update(job, model, trained, begin, state=state)

    def evaluate(self, job: Job) -> Scores:
        """Score a network that was cut or merged without training: statistics first."""
        model = self.me.submodel(job.kept, job.state)
        recalibrate(model, self.me.train)
        return self.scores(model)

    def _own_norms(self, job: Job) -> State:
        """Return the job's tensors with the client's own BatchNorm, where it fits the widths."""
        own = self.me.memory.load(job.round) if self.options.bn_local else {}
        return {
            name: own[name] if name in own and own[name].shape == tensor.shape else tensor
            for name, tensor in job.state.items()
        }


def mix(new: State, old: State, alpha: float) -> State:
    """Return ``alpha * new + (1 - alpha) * old``; counters are the new ones."""
    return {
        name: torch.lerp(old[name], tensor, alpha) if tensor.is_floating_point() else tensor
        for name, tensor in new.items()
    }


def norm_tensors(channels: ChannelMap) -> frozenset[str]:
    """Return the tensors of norms: affine parts, statistics, counters."""
    layer = {name: name.rpartition(".")[0] for name in channels.axes}
    norms = {
        layer[name]
        for name, axes in channels.axes.items()
        if any(axis is not None and axis.role == "norm" for axis in axes)
    }
    return frozenset(name for name in channels.axes if layer[name] in norms)


def in_threads(work: Callable[[In], Out], items: Iterable[In]) -> list[Out]:
    """Return ``work`` of every item, in order; POT and torch let other threads run."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(work, items))
