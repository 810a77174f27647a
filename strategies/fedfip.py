"""FEDFIP: Fisher-informed channel pruning for clients that hold several domains.

Lin, Yuan, Xu, Wang, "Domain Sensitive Federated Learning with Fisher-Informed Pruning", CVPR 2026.

DSFP  1. Client i estimates the Fisher F_i^(k) of every channel for each of its domains k and
         uploads the data-weighted sum Ft_i = sum_k alpha_i^(k) F_i^(k).
      2. The server forms F_g = sum_i w_i Ft_i; the global mask M_g keeps the top ``keep`` of it.
      3. Client i reactivates pruned channels that matter locally, R_i = [Ft_i > phi * reference],
         and trains the physically small network M_i = M_g + R_i.
DSR   4. Signatures V_i^(k) = F_i^(k) M_g / sum; prototypes
         p^(k) <- mu p^(k) + (1 - mu) mean_i V_i^(k).
      5. Local loss: cross-entropy + lambda * sum_k -log softmax_k(cos(V^(k), p^(.)) / tau).
SA    6. The server averages the entries whose both ends are shared; private channels never leave.

Differences from the paper
- Masks, Fisher and prototypes of round t act in round t + 1; the first ``warmup`` rounds are dense.
- The top ``keep`` is taken inside every channel group (``scope = "layer"``); the paper's single
  threshold is ``scope = "global"``.
- phi is relative to the mean Fisher of the group's shared channels, with a budget, since raw Fisher
  falls tenfold during training (``phi-mode = "absolute"`` is the literal reading).
- The network on a client is sliced, so channels it does not hold have no gradient. Every
  ``fisher-refresh`` rounds the dense network is sent for the Fisher pass (its bytes are counted);
  in between, their last value moves with their group.
- Between those rounds Fisher is uploaded for shared channels alone: few clients hold a private one,
  those where it is large, and their mean would bias the mask and tell which channels are private.
- Signatures are made of the gate Fisher, whose gradient L_con has, also with ``fisher = "weight"``.
- Beyond the paper: a device that carries less than M_g trains the top of M_g's ranking (the leading
  channels before there is one) and uploads exactly that; an entry is averaged over those that hold
  it, Fisher over those that measured it. Its distribution over fewer channels compares with nobody
  else's, so it sends no signatures and gets no prototypes. No device gets private channels or a
  Fisher pass beyond what it carries; a channel that none has measured is not in M_g.
- L_con is differentiated for real through the Fisher (``dsr-grad``); a constant V has no gradient.
  It is estimated on its own batches of one domain in turn, scaled to the sum over domains.
"""

import math
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from strategies.base import SubmodelStrategy
from strategies.errors import ShapeError
from strategies.local import ClientHalf, cpu_state, relative
from strategies.memory import Memory, Personal
from strategies.ops.contrastive import (
    move_prototypes,
    reproject,
    signature,
    structural_loss,
)
from strategies.ops.fisher import cap_per_domain, gate_fisher, pool, renew, weight_fisher
from strategies.ops.select import jaccard, nested, reactivate, tied, top_channels
from strategies.records import Hello, Job, Update
from strategies.signatures import (
    check_fisher,
    check_signatures,
    disclosed,
    pack_mask,
    read_prototypes,
    read_signatures,
    unpack_mask,
    write_prototypes,
    write_signatures,
)
from task.channels import ChannelMap, Kept, State
from task.device import move
from task.options import Interval, check_options
from task.submodel import extract, scatter
from task.train import Step

__all__ = ["FedFIP", "FedFIPClient", "FedFIPOptions"]

FISHERS = {"gate": gate_fisher, "weight": weight_fisher}

ENOUGH = 16
"""Samples of a domain below which its signature in a batch is noise."""


@dataclass(frozen=True)
class FedFIPOptions:
    """Options of FEDFIP; see docs/fedfip.md for what each does to a run."""

    keep: Annotated[float, Interval(0, 1, open_low=True)] = 0.8
    scope: Literal["layer", "global"] = "layer"
    minimum: Annotated[float, Interval(0, 1)] = 0.05
    prune_residual: bool = True
    warmup: Annotated[int, Interval(1)] = 1
    mask_every: Annotated[int, Interval(1)] = 1
    fisher: Literal["gate", "weight"] = "gate"
    fisher_samples: Annotated[int, Interval(1)] = 256
    fisher_refresh: Annotated[int, Interval(0)] = 5
    kappa: Annotated[float, Interval(0, 1, open_high=True)] = 0.0
    phi: Annotated[float, Interval(0)] = 1.0
    phi_mode: Literal["relative", "quantile", "absolute"] = "relative"
    react_max: Annotated[float, Interval(0, 1)] = 0.1
    mu: Annotated[float, Interval(0, 1)] = 0.4
    lambda_con: Annotated[float, Interval(0, open_high=True)] = 0.01
    tau: Annotated[float, Interval(0, open_low=True, open_high=True)] = 1.0
    signature_norm: Literal["global", "layer"] = "global"
    dsr_grad: Literal["double", "gate-fd", "none"] = "double"
    dsr_every: Annotated[int, Interval(1)] = 4
    dsr_batch: Annotated[int, Interval(2)] = 32
    dsfp: bool = True
    dsr: bool = True
    sa: bool = True

    def __post_init__(self) -> None:
        check_options(self)
        if self.phi_mode == "quantile" and 1 < self.phi < math.inf:
            raise ValueError(
                f"phi = {self.phi!r}: must be in [0, 1], or inf, with phi-mode = 'quantile'"
            )

    @property
    def regularises(self) -> bool:
        """Whether the contrastive term can change the weights."""
        return self.dsr and self.lambda_con > 0 and self.dsr_grad != "none"

    @property
    def unprotected(self) -> str:
        """Return why differential privacy cannot cover the messages, "" if it can."""
        return "" if self.sa else "tells with fedfip.sa = false which channels are private"

    @property
    def reactivates(self) -> bool:
        """Whether clients can hold private channels."""
        return self.dsfp and self.keep < 1 and self.phi < math.inf and self.react_max > 0


class FedFIP(SubmodelStrategy):
    """Server half: global mask, prototypes, structure-aware aggregation."""

    options: FedFIPOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.importance: Tensor | None = None  # F_g
        self.mask = np.ones(self.channels.size, dtype=bool)  # M_g of the coming round
        self.trained_mask = self.mask  # M_g of the last merged round
        self.prototypes: dict[int, Tensor] = {}
        self.selected = self.refreshed = 0  # the rounds of the last mask, of the last dense Fisher
        self._narrow: dict[str, Kept] = {}  # of this round: what cannot be M_g whole

    def jobs(self, clients: list[Hello], round: int) -> dict[str, Job]:
        """Send w restricted to M_g and the prototypes; the dense w when Fisher is refreshed."""
        made = {keep: self._job(keep, round) for keep in {c.keep for c in clients}}
        jobs = {c.client: replace(made[c.keep], client=c.client) for c in clients}
        self._narrow = {client: job.kept for client, job in jobs.items() if narrow(job)}
        return jobs

    def merge(self, round: int, updates: list[Update]) -> dict[str, Any]:
        """Aggregate what is shared (SA), then the next mask (DSFP) and prototypes (DSR)."""
        options, weights = self.options, [u.samples for u in updates]
        self.trained_mask = self.mask
        dense = self._refreshes(round)
        if dense or self.mask.all():
            self.refreshed = round
        alike = not any(u.client in self._narrow for u in updates)
        if options.sa and alike:
            shared = self.average.networks([u.state for u in updates], weights)
            scatter(shared, self.channels, self.channels.kept(self.mask), self.state)
        else:
            subs = [(u.state, self._sent(u)) for u in updates]
            self.state = self.average.overlapping(self.state, self.channels, subs, weights)
        diagnostics: dict[str, Any] = {"refresh": dense}
        if options.dsr:
            extras = [u.extras for u in updates if u.client not in self._narrow]
            uploads = read_signatures(extras, self.mask, noised=self.privacy.on)
            self.prototypes = move_prototypes(self.prototypes, uploads, options.mu)
            diagnostics["prototype_share"] = self._shares()
        if options.dsfp:
            measured = self.average.vectors([u.extras["fisher"] for u in updates], weights)
            measured.clamp_min_(0)  # the mean of noised Fisher may be negative
            self.importance = renew(self.importance, measured, self.channels, options.kappa)
            diagnostics["private"] = {
                u.client: int(u.costs["private"]) for u in updates if "private" in u.costs
            }
            diagnostics["jaccard"] = self._next_mask(round)
        return diagnostics

    def global_kept(self) -> Kept:
        """Return the channels of the mask that was trained last."""
        return self.channels.kept(self.trained_mask)

    def uploaded(self, job: Job, update: Update) -> Kept:
        """Return M_g, or without structure-aware aggregation all that the client held."""
        if self.options.sa:
            return job.kept
        held = self._held(update)
        if (self.channels.mask(job.kept) & ~self.channels.mask(held)).any():
            raise ShapeError("held: shared channels are missing from the client's channels")
        return held

    def validate(self, job: Job, update: Update) -> None:
        """Check the Fisher vector and the signatures."""
        noised, shared, domains = self.privacy.on, int(self.mask.sum()), self.score_shape[0]
        if self.options.dsfp:
            check_fisher(update.extras, self.channels.size, noised=noised)
        if self.options.dsr and not narrow(job):
            check_signatures(update.extras, shared, domains, update.samples, noised=noised)
        elif noised and (rows := update.extras.get("signatures")) is not None and rows.numel():
            raise ShapeError(f"signatures: shape {tuple(rows.shape)}, a narrow client sends none")

    def rehearsal(self, round: int) -> "FedFIP":
        """Return a copy whose channels are all alike important, without a refresh of Fisher."""
        twin, hellos = super().rehearsal(round), self.exchange.clients.values()
        twin.mask, twin.importance = np.ones_like(self.mask), None
        twin.selected, twin.refreshed, twin.prototypes = 0, round, {}
        if self.options.dsfp and round > 1:
            widest = self.channels.prefix(max((h.keep or 1.0 for h in hellos), default=1.0))
            measured = torch.from_numpy(self.channels.mask(widest))
            twin.importance = torch.where(measured, 1.0, math.nan)
            twin._next_mask(round - 1)
        twin.trained_mask = twin.mask
        if self.options.dsr and round > 1:
            signing = [h for h in hellos if np.array_equal(twin._carried(h.keep), twin.mask)]
            domains = {domain for h in signing for domain in h.domains}
            twin.prototypes = {k: torch.ones(self.channels.size) for k in range(len(domains))}
        return twin

    def replied(self, job: Job, hello: Hello) -> dict[str, Tensor]:
        """Return Fisher and signatures of the shapes that the client will send."""
        extras: dict[str, Tensor] = {}
        if self.options.dsfp:
            extras["fisher"] = torch.zeros(self.channels.size)
        if self.options.dsr and not narrow(job):
            rows = dict.fromkeys(range(len(hello.domains)), torch.ones(int(self.mask.sum())))
            extras |= write_signatures(rows, dict.fromkeys(rows, 1))
        if not self.options.sa:
            extras["held"] = pack_mask(self.channels.mask(job.kept))
        if self.privacy.on:
            return protected(extras, job, self.channels, self.score_shape[0], self.options)
        return extras

    def personal(self, client: str, round: int, own: Memory) -> Personal | None:
        """Return M_i as the client trained it: its private channels are on its device alone."""
        if not self.options.reactivates:
            most = self._most(self.exchange.clients[client].keep)
            best = nested(self.importance, self.trained_mask, self.channels, most)
            kept = self.channels.kept(best)
            return Personal(round, kept, extract(self.state, self.channels, kept), shared=True)
        memory = own.load(round + 1)
        if "held" not in memory:
            return None
        held = self.channels.kept(memory["held"].numpy())
        state = extract(_own_state(memory), self.channels, held)
        return Personal(int(memory["round"]), held, state)

    def memory(self) -> dict[str, Tensor]:
        """Return F_g, the masks and the prototypes."""
        masks = {"mask": self.mask, "trained-mask": self.trained_mask}
        arrays = {name: torch.from_numpy(mask.copy()) for name, mask in masks.items()}
        arrays["rounds"] = torch.tensor([self.selected, self.refreshed])
        if self.importance is not None:
            arrays["importance"] = self.importance
        return arrays | {f"prototype.{k}": p for k, p in self.prototypes.items()}

    def recall(self, memory: dict[str, Tensor]) -> None:
        """Take up ``memory``."""
        self.importance = memory.get("importance")
        self.mask, self.trained_mask = memory["mask"].numpy(), memory["trained-mask"].numpy()
        self.selected, self.refreshed = memory["rounds"].tolist()
        self.prototypes = {
            int(name.removeprefix("prototype.")): p
            for name, p in memory.items()
            if name.startswith("prototype.")
        }

    def _job(self, keep: float | None, round: int) -> Job:
        """Return the job of clients whose device carries ``keep``; None = everything."""
        most = self._most(keep)
        whole, mask = most == self.channels.groups, self._carried(keep)
        kept, refresh = self.channels.kept(mask), whole and self._refreshes(round)
        # Without SA private channels are the server's too, so clients need all of them.
        dense = whole and (refresh or not self.options.sa)
        state = self.state if dense else extract(self.state, self.channels, kept)
        sent = self.channels.full() if dense else kept
        extras = {"refresh": torch.tensor(refresh)}
        cut = not np.array_equal(mask, self.mask)
        if not whole:
            private = [0 if cut or not self.options.sa else most[g] - len(kept[g]) for g in kept]
            extras |= {"narrow": torch.tensor(cut), "room": torch.tensor(private)}
        if self.options.regularises and not cut:
            extras |= write_prototypes(self.prototypes, self.mask)
        return Job("", round, kept, state, sent, extras)

    def _most(self, keep: float | None) -> dict[str, int]:
        return {group: len(index) for group, index in self.channels.prefix(keep or 1.0).items()}

    def _carried(self, keep: float | None) -> np.ndarray:
        """Return M_g, or the top of it where the device carries less."""
        return nested(self.importance, self.mask, self.channels, self._most(keep))

    def _refreshes(self, round: int) -> bool:
        every = self.options.fisher_refresh
        due = every > 0 and round - self.refreshed >= every
        return due and self.options.dsfp and not self.mask.all()

    def _next_mask(self, round: int) -> float:
        """Select M_g for the next round; return the Jaccard similarity with the present one."""
        o, before = self.options, self.mask
        due = self.selected == 0 or round - self.selected >= o.mask_every
        if self.importance is not None and round >= o.warmup and due:
            self.mask = top_channels(
                self.importance,
                self.channels,
                o.keep,
                scope=o.scope,
                minimum=o.minimum,
                whole=() if o.prune_residual else tied(self.channels),
            )
            self.mask &= ~self.importance.isnan().numpy()  # nobody carries these
            self.prototypes = reproject(self.prototypes, self.mask)
            self.selected = round
        return jaccard(before, self.mask)

    def _shares(self) -> dict[str, dict[str, float]]:
        """Return how each domain's prototype spreads over the groups, by domain index."""
        return {
            str(k): {g: round(float(v.sum()), 4) for g, v in self.channels.split(p).items()}
            for k, p in sorted(self.prototypes.items())
        }

    def _sent(self, update: Update) -> Kept:
        """Return the channels of an update that is merged."""
        if not self.options.sa:
            return self._held(update)
        return self._narrow.get(update.client) or self.channels.kept(self.mask)

    def _held(self, update: Update) -> Kept:
        packed = update.extras.get("held", torch.empty(0))
        return self.channels.kept(unpack_mask(packed, self.channels.size))


class FedFIPClient(ClientHalf):
    """Client half: reactivation, contrastive training, Fisher of every domain."""

    options: FedFIPOptions

    def train(self, job: Job) -> Update:
        """Train M_i = M_g + R_i and upload the part in M_g."""
        begin, channels = time.perf_counter(), self.me.channels
        memory = self.me.memory.load(job.round) if self.options.reactivates else {}
        mask = channels.mask(job.kept)
        private = self._reactivated(memory.get("fisher"), mask, job.extras.get("room"))
        held = channels.kept(mask | private)
        seen = self._take_up(job, memory, held)

        model = self.me.submodel(held, extract(seen, channels, held))
        trained = self.fit(model, job, self._contrast(job, held))
        state = cpu_state(model)
        scatter(state, channels, held, seen)

        extras: dict[str, Tensor] = {}
        if self.options.dsfp or self.options.dsr:
            counts, kind = self.me.train.counts(), self.options.fisher
            per_domain = self._measure(kind, job, model, held, seen)
            fisher = pool(per_domain, counts).float()
            if self.options.dsfp:
                shared = fisher.clone()
                if not refreshes(job):
                    shared[torch.from_numpy(~mask)] = math.nan
                extras["fisher"] = shared
            if self.options.dsr and not narrow(job):
                if kind != "gate":
                    per_domain = self._measure("gate", job, model, held, seen)
                extras |= write_signatures(self._signatures(per_domain, mask), counts)
            if self.options.reactivates:
                known = renew(memory.get("fisher"), fisher, channels)
                own = {f"state.{name}": tensor for name, tensor in seen.items()}
                own |= {"fisher": known, "round": torch.tensor(job.round)}
                own["held"] = torch.from_numpy(mask | private)
                self.me.memory.save(job.round, own)
        if self.options.sa:
            state = extract(state, channels.restrict(held), relative(job.kept, held))
        else:
            extras["held"] = pack_mask(mask | private)
        return self.update(
            job, model, trained, begin, state=state, extras=extras, private=int(private.sum())
        )

    def vectors(self, job: Job, extras: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return Fisher and signatures; which channels of them are sent, everybody knows."""
        return protected(extras, job, self.me.channels, self.me.score_shape[0], self.options)

    def _reactivated(
        self, fisher: Tensor | None, mask: np.ndarray, room: Tensor | None = None
    ) -> np.ndarray:
        """Return R_i; ``room`` is how many channels of each group the device carries beyond M_g."""
        if fisher is None or not self.options.reactivates:
            return np.zeros_like(mask)
        o, channels = self.options, self.me.channels
        chosen = reactivate(fisher, mask, channels, phi=o.phi, mode=o.phi_mode, budget=o.react_max)
        if room is None:
            return chosen
        most = dict(zip(channels.groups, room.tolist(), strict=True))
        return nested(fisher, chosen, channels, most)

    def _take_up(self, job: Job, memory: dict[str, Tensor], held: Kept) -> State:
        """Return the dense weights as this client sees them now.

        Shared entries are what the server sent. Entries that touch a private channel are the
        client's own, at first the last it saw of them: the initial network if it never did.
        Without structure-aware aggregation everything is what the server sent.
        """
        channels = self.me.channels
        if not self.options.sa and job.sent is not job.kept:
            return {k: v.clone() for k, v in job.state.items()}
        seen = _own_state(memory) or {k: v.clone() for k, v in cpu_state(self.me.model).items()}
        if job.sent is not job.kept:
            mine = extract(seen, channels, held)
            seen = {k: v.clone() for k, v in job.state.items()}
            scatter(mine, channels, held, seen)
        shared = job.state if job.sent is job.kept else extract(job.state, channels, job.kept)
        scatter(shared, channels, job.kept, seen)
        return seen

    def _contrast(self, job: Job, held: Kept) -> "Contrast | None":
        inside = torch.from_numpy(self.me.channels.mask(job.kept)[self.me.channels.mask(held)])
        prototypes = read_prototypes(job.extras, inside)
        if not prototypes or not self.options.regularises:
            return None
        return Contrast(self, job, held, inside, prototypes)

    def _measure(
        self, kind: str, job: Job, model: torch.nn.Module, held: Kept, seen: State
    ) -> dict[int, Tensor]:
        """Return F_i^(k), (C,), NaN where the client holds no weights to measure."""
        channels, fisher = self.me.channels, FISHERS[kind]
        draw = self.me.generator("fisher samples", job.round)
        samples = cap_per_domain(self.me.train, self.options.fisher_samples, draw)
        inside = torch.from_numpy(channels.mask(held))
        if refreshes(job):
            dense = self.me.submodel(channels.full(), seen)
            closed = channels.split(~inside)
            return {k: f.cpu() for k, f in fisher(dense, channels, samples, closed=closed).items()}
        per_domain = {}
        for k, f in fisher(model, channels.restrict(held), samples).items():
            per_domain[k] = torch.full((channels.size,), math.nan)
            per_domain[k][inside] = f.float().cpu()
        return per_domain

    def _signatures(self, per_domain: dict[int, Tensor], mask: np.ndarray) -> dict[int, Tensor]:
        shared, norm = torch.from_numpy(mask), self.options.signature_norm
        return {
            k: signature(f, shared, self.me.channels, norm=norm)[shared]
            for k, f in per_domain.items()
        }


class Contrast:
    """The penalty lambda * L_con, on batches of one domain after the other."""

    def __init__(
        self,
        client: FedFIPClient,
        job: Job,
        held: Kept,
        mask: Tensor,
        prototypes: dict[int, Tensor],
    ) -> None:
        self.options, self.samples = client.options, client.me.train
        self.channels, self.mask = client.me.channels.restrict(held), mask.to(client.me.device)
        self.prototypes = {k: p.to(client.me.device) for k, p in prototypes.items()}
        self.draw = client.me.generator("contrastive samples", job.round)
        self.rows = {
            k: self.samples.rows(k)
            for k, n in self.samples.counts().items()
            if n >= min(ENOUGH, self.options.dsr_batch) and k in prototypes
        }
        self.turn = job.round  # with few steps a round the domains take turns over the rounds

    def __call__(self, step: Step) -> Tensor | None:
        """Return the term every ``dsr-every``-th step, scaled to the mean lambda * L_con."""
        o = self.options
        if step.number % o.dsr_every or len(self.prototypes) < 2 or not self.rows:
            return None
        domain = list(self.rows)[self.turn % len(self.rows)]
        self.turn += 1
        pool = self.rows[domain]
        rows = pool[torch.randperm(len(pool), generator=self.draw)[: o.dsr_batch]]
        rows = move(rows, self.mask.device)
        loss = structural_loss(
            step.model,
            self.channels,
            self.samples.inputs(rows),
            self.samples.y[rows],
            domain,
            self.prototypes,
            self.mask,
            tau=o.tau,
            mode=o.dsr_grad,
            norm=o.signature_norm,
        )
        return None if loss is None else o.lambda_con * o.dsr_every * len(self.rows) * loss


def _own_state(memory: dict[str, Tensor]) -> State:
    return {k.removeprefix("state."): v for k, v in memory.items() if k.startswith("state.")}


def protected(
    extras: dict[str, Tensor], job: Job, channels: ChannelMap, domains: int, options: FedFIPOptions
) -> dict[str, Tensor]:
    """Return the vectors of a reply to ``job`` that get noise."""
    vectors = disclosed(extras, channels.mask(job.kept), domains, dense=refreshes(job))
    if options.dsr and narrow(job):
        # It sends none, and they count: noise of one size adds up as the ledger says.
        vectors["signatures"] = torch.zeros(0)
    return vectors


def refreshes(job: Job) -> bool:
    """Whether ``job`` brings the dense weights for the Fisher of pruned channels."""
    return bool(job.extras["refresh"])


def narrow(job: Job) -> bool:
    """Whether ``job`` is of less than M_g, for a device that cannot carry it."""
    return "narrow" in job.extras and bool(job.extras["narrow"])
