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
- ``lambda_sar`` is 0.01: with this project's SGD it pulls as hard over a round as the paper's 1.0
  with its learning rate of 0.001 and no momentum (docs/subflot.md has the arithmetic).
- Running statistics of BatchNorm are transported, and recomputed on the client's own data before a
  network that was cut or merged without training is scored there.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from strategies.base import SubmodelStrategy
from strategies.errors import ShapeError
from strategies.histories import History, read_history, write_history
from strategies.local import ClientHalf, cpu_state
from strategies.memory import Memory, Personal
from strategies.ops.average import mix, weighted_mean
from strategies.ops.fisher import cap_per_domain, gate_fisher, pool
from strategies.ops.plans import Plan
from strategies.ops.rows import distinct_rows, hand_on, norm_tensors
from strategies.ops.transport import TransportOptions, align, apply, plan_groups, transpose
from strategies.records import Hello, Job, Update
from strategies.signatures import check_fisher
from strategies.threads import in_threads
from task.channels import Kept, State, count_kept
from task.options import Interval, check_options
from task.seeding import generator
from task.submodel import extract
from task.train import Scores, Step, recalibrate

__all__ = ["SubFLOT", "SubFLOTClient", "SubFLOTOptions"]


@dataclass(frozen=True)
class SubFLOTOptions:
    """Options of SubFLOT; pyproject.toml says what each does."""

    rates: str = "0.0, 0.25, 0.5, 0.75"
    rate_mode: Literal["fixed", "dynamic"] = "fixed"
    alpha: Annotated[float, Interval(0, 1)] = 0.5
    lambda_sar: Annotated[float, Interval(0, open_high=True)] = 0.01
    ota_keep: Annotated[float, Interval(0, 1, open_high=True)] = 0.0
    ota_plan: Literal["solve", "reuse"] = "solve"
    solver: Literal["balanced", "emd", "cover", "sinkhorn"] = "balanced"
    squared: bool = True
    sweeps: Annotated[int, Interval(1)] = 1
    bn_in_cost: bool = True
    bn_local: bool = False
    sketch: Annotated[int, Interval(0)] = 0
    reg: Annotated[float, Interval(0, open_low=True)] = 0.01
    importance: Literal["none", "cost", "marginals"] = "none"
    fisher_samples: Annotated[int, Interval(1)] = 256
    history_dtype: Literal["fp32", "fp16"] = "fp32"
    history_max_age: Annotated[int, Interval(0)] = 0
    otp: bool = True
    sar: bool = True
    ota: bool = True
    unprotected = "needs every client's own network on the server, to cut and to align it"

    def __post_init__(self) -> None:
        check_options(self)
        self.removed()
        self.transport()
        if self.importance != "none" and not self.ota:
            raise ValueError(
                f"importance = {self.importance!r}: the global channels get theirs along the plans "
                "of the aggregation; use it with ota = true"
            )

    def removed(self) -> list[float]:
        """Return the rates rho; refuse what is no list of fractions below 1."""
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
        same = ("solver", "squared", "sweeps", "sketch", "reg", "importance")
        options = {name: getattr(self, name) for name in same}
        return TransportOptions(bn_in_cost=self.bn_in_cost and not self.bn_local, **options)


class SubFLOT(SubmodelStrategy):
    """Server half: extraction from histories (OTP) and merging (OTA)."""

    options: SubFLOTOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transport = self.options.transport()
        self.local = norm_tensors(self.channels) if self.options.bn_local else frozenset()
        self.importance: Tensor | None = None  # of the global channels
        self._plans: dict[str, dict[str, Plan]] = {}  # global -> submodel, of this round

    def jobs(self, clients: list[Hello], round: int) -> dict[str, Job]:
        """Cut a submodel for every client (OTP)."""
        self._plans = {}
        return {j.client: j for j in in_threads(lambda c: self._job(c, round), clients)}

    def merge(self, round: int, updates: list[Update]) -> dict[str, Any]:
        """Align every upload with the global network and average (OTA); keep the histories."""
        rho = {u.client: self.removed(u.client, round) for u in updates}
        for update in updates if self.options.otp else ():
            self._remember(round, update, rho[update.client])
        if self.options.ota:
            merged = self._transported(updates, rho)
        else:
            subs = [(self._complete(u, rho[u.client]), self._kept(rho[u.client])) for u in updates]
            weights = [u.samples for u in updates]
            merged = self.average.overlapping(self.state, self.channels, subs, weights)
        merged = mix(merged, self.state, 1 - self.options.ota_keep)
        self.state = {n: merged[n] if self.uploads(n) else t for n, t in self.state.items()}
        return {"removed": rho, "distinct_rows": distinct_rows(self.state, self.channels)}

    def uploads(self, tensor: str) -> bool:
        """Leave out BatchNorm where it stays with the client."""
        return tensor not in self.local

    def validate(self, job: Job, update: Update) -> None:
        """Refuse a Fisher vector that is none."""
        if self.options.importance != "none":
            check_fisher(update.extras, count_kept(job.kept))
            if update.extras["fisher"].isnan().any():
                raise ShapeError("fisher: NaN; every channel of a submodel is measured")

    def personal(self, client: str, round: int, own: Memory) -> Personal | None:
        """Return H_i, with the client's own BatchNorm where that is local."""
        history = read_history(self.store(client).load(round + 1))
        if history is None:  # it never answered, or none are kept
            return None if self.options.otp else super().personal(client, round, own)
        return history.personal(self.state, self.channels, own, self.local)

    def memory(self) -> dict[str, Tensor]:
        """Return the importance of the global channels; histories are in the clients' stores."""
        return {} if self.importance is None else {"importance": self.importance}

    def recall(self, memory: dict[str, Tensor]) -> None:
        """Take up ``memory``."""
        self.importance = memory.get("importance")

    def replied(self, job: Job, hello: Hello) -> dict[str, Tensor]:
        """Return a Fisher vector of the submodel's width, where one is sent."""
        held = count_kept(job.kept)
        return {"fisher": torch.zeros(held)} if self.options.importance != "none" else {}

    def removed(self, client: str, round: int) -> float:
        """Return rho of a client: what its device says, else drawn from ``rates``."""
        if (said := self.exchange.clients[client].keep) is not None:
            return 1 - said
        rates = self.options.removed()
        when = round if self.options.rate_mode == "dynamic" else 0
        draw = generator(self.seed, "capacity", when, client)
        return rates[int(torch.randint(len(rates), (), generator=draw))]

    def _kept(self, rho: float) -> Kept:
        return self.channels.prefix(round(1 - rho, 9))  # 1 - (1 - 0.3) is not 0.3

    def _job(self, client: Hello, round: int) -> Job:
        rho = self.removed(client.client, round)
        kept = self._kept(rho)
        state = extract(self.state, self.channels, kept)  # cold start: the leading channels
        history = read_history(self.store(client.client).load(round)) if self.options.otp else None
        if history:
            state = self._extracted(client.client, history, state, kept, round)
        return Job(client.client, round, kept, state, kept, {"rho": torch.tensor(rho)})

    def _extracted(
        self, client: str, history: History, prefix: State, kept: Kept, round: int
    ) -> State:
        """Return alpha * align(W, H) + (1 - alpha) * H, at the widths of ``kept``."""
        narrow = self.channels.restrict(kept)
        last, was = history.within(self.state, self.channels)
        if any(len(was[group]) != len(kept[group]) for group in kept):
            # The capacity has changed: bring the history to the new widths first.
            before = self.channels.restrict(was)
            last = align(last, prefix, before, narrow, self.transport, history.fisher)
        plans = plan_groups(
            self.state, last, self.channels, narrow, self.transport, self.importance
        )
        self._plans[client] = plans
        aligned = apply(self.state, self.channels, plans, narrow)
        return mix(aligned, last, self._alpha(round - history.round))

    def _alpha(self, age: int) -> float:
        """Return alpha; beyond ``history-max-age`` rounds it rises to 1 within as many again."""
        most = self.options.history_max_age
        stale = max(0.0, age / most - 1) if most else 0.0
        return self.options.alpha + (1 - self.options.alpha) * min(1.0, stale)

    def _transported(self, updates: list[Update], rho: dict[str, float]) -> State:
        """Return the mean of the uploads in the channels of the global network."""
        weights, handed = [u.samples for u in updates], []

        def states() -> Iterator[State]:
            for state, importance in in_threads(lambda u: self._widened(u, rho[u.client]), updates):
                handed.append(importance)
                yield state

        merged = self.average.networks(states(), weights)
        self.importance = weighted_mean(handed, weights).get("importance")
        return merged

    def _widened(self, update: Update, rho: float) -> tuple[State, State]:
        """Return an upload, and the importance it came with, in the global channels."""
        narrow, state = self.channels.restrict(self._kept(rho)), self._complete(update, rho)
        fisher = update.extras["fisher"] if self.options.importance != "none" else None
        if self.options.ota_plan == "reuse" and update.client in self._plans:
            plans = transpose(self._plans[update.client])
        elif fisher is not None:
            plans = plan_groups(state, self.state, narrow, self.channels, self.transport, fisher)
        else:
            return align(state, self.state, narrow, self.channels, self.transport), {}
        known = {} if fisher is None else {"importance": hand_on(fisher, narrow, plans)}
        return apply(state, narrow, plans, self.channels), known

    def _complete(self, update: Update, rho: float) -> State:
        """Return the upload with the server's values for what stays with the client."""
        return extract(self.state, self.channels, self._kept(rho)) | update.state

    def _remember(self, round: int, update: Update, rho: float) -> None:
        fisher = update.extras["fisher"] if self.options.importance != "none" else None
        history = History(update.state, rho, round, fisher)
        arrays = write_history(history, half=self.options.history_dtype == "fp16")
        self.store(update.client).save(round, arrays)


class SubFLOTClient(ClientHalf):
    """Client half: local training near the submodel that was sent (SAR)."""

    options: SubFLOTOptions

    def train(self, job: Job) -> Update:
        """Train under the pull lambda * rho * ||w - anchor||^2."""
        begin, o = time.perf_counter(), self.options
        model = self.me.submodel(job.kept, self._own_norms(job))
        anchor = [p.detach().clone() for p in model.parameters()]
        strength = o.lambda_sar * float(job.extras["rho"]) if o.sar else 0.0

        def pull(step: Step) -> Tensor:
            pairs = zip(step.model.parameters(), anchor, strict=True)
            return strength * torch.stack([(w - a).pow(2).sum() for w, a in pairs]).sum()

        trained = self.fit(model, job, pull if strength else None)
        state = cpu_state(model)
        if o.bn_local:
            norms = norm_tensors(self.me.channels)
            self.me.memory.save(job.round, {n: t for n, t in state.items() if n in norms})
            state = {n: t for n, t in state.items() if n not in norms}
        extras = {"fisher": self._fisher(job, model)} if o.importance != "none" else {}
        return self.update(job, model, trained, begin, state=state, extras=extras)

    def evaluate(self, job: Job) -> Scores:
        """Score a network that was cut or merged without training: statistics first."""
        model = self.me.submodel(job.kept, job.state)
        recalibrate(model, self.me.train)
        return self.scores(model)

    def _fisher(self, job: Job, model: nn.Module) -> Tensor:
        """Return the Fisher information of the trained submodel's channels, (k,)."""
        draw = self.me.generator("fisher samples", job.round)
        samples = cap_per_domain(self.me.train, self.options.fisher_samples, draw)
        per_domain = gate_fisher(model, self.me.channels.restrict(job.kept), samples)
        return pool(per_domain, self.me.train.counts()).float()

    def _own_norms(self, job: Job) -> State:
        """Return the job's tensors with the client's own BatchNorm, where it fits the widths."""
        own = self.me.memory.load(job.round) if self.options.bn_local else {}
        return job.state | {n: t for n, t in own.items() if t.shape == job.state[n].shape}
