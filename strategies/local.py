"""The client half of a method: what a participant has, and what it does with a job."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from strategies.memory import Memory
from strategies.privacy import OFF, PrivacyOptions, release
from strategies.records import Job, Update
from task.channels import ChannelMap, Kept, State
from task.data.dataset import Samples
from task.device import Autocast, place, to_host
from task.seeding import generator, seeded
from task.submodel import extract, slice_module
from task.train import Fit, Penalty, Scores, TrainingOptions, evaluate, fit

__all__ = ["ClientHalf", "Participant", "cpu_state", "relative"]


@dataclass(frozen=True)
class Participant:
    """Everything a client has.

    Parameters
    ----------
    id : str
        Stable name.
    model : nn.Module
        The dense network with the initial weights that all sides regenerate from the seed.
    channels : ChannelMap
        Of ``model``.
    train, test : Samples
        Its own shares; both on ``device``.
    score_shape : (int, int)
        Domains and classes of every score.
    training : TrainingOptions
        Local SGD.
    seed : int
        Of the run.
    memory : Memory
        Its own persistent arrays.
    costs : callable
        Network -> parameters and FLOPs of one sample (``parameters``, ``flops``, ``train-flops``).
    device : torch.device
        Where it trains.
    autocast : str
        Precision of the forward pass in training: ``off``, ``bf16`` or ``fp16``.
    privacy : PrivacyOptions
        What is done to an update before it is sent.
    """

    id: str
    model: nn.Module
    channels: ChannelMap
    train: Samples
    test: Samples
    score_shape: tuple[int, int]
    training: TrainingOptions
    seed: int
    memory: Memory
    costs: Callable[[nn.Module], dict[str, float]]
    device: torch.device
    autocast: Autocast = "off"
    privacy: PrivacyOptions = OFF

    def submodel(self, kept: Kept, state: State) -> nn.Module:
        """Return the network cut down to ``kept`` with the tensors ``state``, on the device."""
        return place(slice_module(self.model, self.channels, kept, state), self.device)

    def generator(self, purpose: str, round: int) -> torch.Generator:
        """Return this client's own generator for one purpose in one round."""
        return generator(self.seed, purpose, round, self.id)


class ClientHalf(ABC):
    """Client half of every method; abstract in ``train``."""

    def __init__(self, me: Participant, options: Any) -> None:
        self.me, self.options = me, options

    @abstractmethod
    def train(self, job: Job) -> Update:
        """Train the submodel that ``job`` describes and answer with what is to be merged."""

    def evaluate(self, job: Job) -> Scores:
        """Score the network in ``job`` on the client's own test share, without training."""
        return self.scores(self.me.submodel(job.kept, job.state))

    def fit(self, model: nn.Module, job: Job, penalty: Penalty | None = None) -> Fit:
        """Train ``model`` in place on the client's own training share."""
        order = self.me.generator("order of samples", job.round)
        with seeded(self.me.seed, "local training", job.round, self.me.id):
            return fit(
                model,
                self.me.train,
                self.me.training,
                order,
                round=job.round,
                penalty=penalty,
                autocast=self.me.autocast,
            )

    def scores(self, model: nn.Module) -> Scores:
        """Score ``model`` on the client's own test share."""
        return evaluate(model, self.me.test, *self.me.score_shape)

    def update(
        self,
        job: Job,
        model: nn.Module,
        trained: Fit,
        begin: float,
        *,
        state: State | None = None,
        extras: dict[str, Tensor] | None = None,
        private: int = 0,
    ) -> Update:
        """Build the answer; ``state`` defaults to all tensors of ``model``."""
        state = cpu_state(model) if state is None else state
        if self.me.privacy.on:
            return self._released(job, state, extras or {})
        scores = self.scores(model) if job.evaluate else None
        return Update(
            client=job.client,
            round=job.round,
            state=state,
            samples=len(self.me.train),
            steps=trained.steps,
            loss=trained.loss / trained.samples,
            extras=extras or {},
            scores=scores,
            costs={
                **self.me.costs(model),
                "private": private,
                "seconds": time.perf_counter() - begin,
            },
        )

    def vectors(self, job: Job, extras: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what of ``extras`` leaves under differential privacy, as `release` takes it."""
        return {}

    def _released(self, job: Job, state: State, extras: dict[str, Tensor]) -> Update:
        """Build the answer of which ``privacy`` covers everything that depends on the data."""
        me = self.me
        anchor = job.state if job.sent is job.kept else extract(job.state, me.channels, job.kept)
        seeded_noise = me.privacy.noise == "seeded"
        draw = me.generator("dp noise", job.round) if seeded_noise else None
        costs = me.costs(me.submodel(job.kept, anchor))  # without private channels and seconds
        # One sample of every domain, as it said hello: weights and counts are the same for all.
        update = Update(
            job.client, job.round, state, samples=me.score_shape[0], steps=1, loss=0.0, costs=costs
        )
        return release(update, anchor, self.vectors(job, extras), me.privacy, draw)


def cpu_state(model: nn.Module) -> State:
    """Return the tensors of ``model`` detached and on the CPU."""
    return to_host(model.state_dict())


def relative(kept: Kept, within: Kept) -> Kept:
    """Return where the channels ``kept`` stand among the channels ``within`` that contain them."""
    return {group: np.searchsorted(within[group], kept[group]) for group in kept}
