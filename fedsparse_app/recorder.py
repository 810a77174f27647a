"""What a run leaves: a folder with its options, its numbers per round and its model."""

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.supercore import log
from safetensors.torch import save
from torch import nn

from fedsparse_app import journal
from fedsparse_app.checkpoint import Checkpoint, save_checkpoint
from fedsparse_app.config import Config
from fedsparse_app.files import write_atomically
from fedsparse_app.plan import Forecast, Planner, document
from fedsparse_app.recipe import recipe_toml
from fedsparse_app.workload import Workload
from strategies.base import SubmodelStrategy
from strategies.ops.average import coverage
from strategies.records import Hello, Update, encode_update, wire_bytes
from strategies.rounds import Round
from task.channels import Kept, count_kept
from task.cost import mask_counted_parameters
from task.data.folder import NAME as FOLDER
from task.submodel import extract, slice_module
from task.train import Scores, evaluate

__all__ = ["Recorder"]

HEADER = (
    "round | clients | failed |   loss |   AVG |  STD | personal | keep | MB up | MB down |   s |"
    " left"
)


class Recorder:
    """Called by the driver after every round; writes the run folder and one line of log.

    ``metrics.jsonl`` depends on the options and the seed alone; times go to ``timing.jsonl`` and
    ``clients.jsonl``.
    """

    def __init__(
        self, folder: Path, config: Config, work: Workload, strategy: SubmodelStrategy
    ) -> None:
        self.folder, self.config, self.work, self.strategy = folder, config, work, strategy
        self.begin = self.last = time.monotonic()
        self.first = 0  # the round after which this process began
        self.personal: dict[str, float] = {}
        self.met: dict[str, dict[str, Any]] = {}  # as partition.json has them
        self.shapes = {name: tuple(p.shape) for name, p in work.model.named_parameters()}
        self.dense = work.costs(work.model)
        self.dense_bytes = _dense_upload(work)
        self.planner = Planner(config, work, strategy)
        self.upload_ratio = self.flops_ratio = 1.0  # of the last merged round, against dense
        write_atomically(folder / "config.toml", recipe_toml(config).encode())
        log(INFO, "%s", HEADER)

    def __call__(self, round: Round) -> None:
        """Write down ``round``."""
        kept = self.strategy.global_kept()
        state = extract(self.strategy.state, self.work.channels, kept)
        network = slice_module(self.work.model, self.work.channels, kept, state)
        row = self._row(round, kept, network, self._global_scores(round, network))
        now = time.monotonic()
        if self.work.data.name == FOLDER:
            self._partition()
        if round.number == 0:
            plan = json.dumps(document(self.planner), indent=1).encode()
            write_atomically(self.folder / "plan.json", plan)
        journal.write(self.folder / "metrics.jsonl", [row])
        journal.write(self.folder / "timing.jsonl", [_timing(round, now - self.last)])
        forecast = self.planner.forecast(round.jobs, round.number)
        clients = [self._client(round, name, forecast[name]) for name in sorted(round.jobs)]
        journal.write(self.folder / "clients.jsonl", clients)
        save_checkpoint(self.folder, round.number, self.strategy, self.config, self._memory())
        self._log(row, now)
        self.last = now

    def resume(self, checkpoint: Checkpoint) -> None:
        """Take up what the recorder of the stopped run carried from round to round."""
        self.first = checkpoint.round
        self.met = self._held({hello.client: hello for hello in checkpoint.clients})
        self.personal = dict(checkpoint.recorder["personal"])
        self.upload_ratio, self.flops_ratio = checkpoint.recorder["ratios"]

    def _memory(self) -> dict[str, Any]:
        return {"personal": self.personal, "ratios": [self.upload_ratio, self.flops_ratio]}

    def close(self) -> None:
        """Write the final model with the channels it keeps, and say what it cost."""
        log(
            INFO,
            "last round: uploads %.2f of a dense network's bytes, %.2f of its training FLOPs",
            self.upload_ratio,
            self.flops_ratio,
        )
        if self.config.privacy.on:
            spent = self.strategy.ledger.spent()
            log(
                INFO,
                "privacy spent: epsilon %.4g against whoever sees the merged models, %.4g against "
                "the server, at delta %g",
                *spent.values(),
            )
        kept = self.strategy.global_kept()
        state = extract(self.strategy.state, self.work.channels, kept)
        metadata = {
            "kept": json.dumps({group: index.tolist() for group, index in kept.items()}),
            "recipe": json.dumps(self.config.flat()),
            "round": str(self.config.run.rounds),
        }
        data = save({name: t.contiguous() for name, t in state.items()}, metadata)
        write_atomically(self.folder / "model.safetensors", data)

    def _global_scores(self, round: Round, network: nn.Module) -> Scores | None:
        if self.config.federation.evaluate_on == "clients":
            return round.scores
        if not (round.number == 0 or self.strategy.evaluates(round.number)):
            return None
        return evaluate(network, self.work.data.test, *self.work.score_shape)

    def _row(
        self, round: Round, kept: Kept, network: nn.Module, scores: Scores | None
    ) -> dict[str, Any]:
        channels, costs = self.work.channels, self.work.costs(network)
        told = [] if self.config.privacy.on else round.updates  # clients keep their loss then
        samples = sum(u.samples for u in told)
        bytes_up = sum(round.bytes_up.get(u.client, 0) for u in round.updates)
        if round.merged:
            self.upload_ratio = bytes_up / (len(round.updates) * self.dense_bytes)
            flops = statistics.fmean(u.costs.get("train-flops", 0.0) for u in round.updates)
            self.flops_ratio = flops / self.dense["train-flops"]
        keep = count_kept(kept) / max(1, channels.size)
        uploads = [self.strategy.uploaded(round.jobs[u.client], u) for u in round.updates]
        spent = {"privacy": self.strategy.ledger.spent()} if self.config.privacy.on else {}
        return {
            **spent,
            "round": round.number,
            "replies": len(round.updates),
            "merged": round.merged,
            "failures": [
                {"client": client, "reason": reason}
                for client, reason in sorted((*round.failures.items(), *round.refused.items()))
            ],
            "loss": sum(u.loss * u.samples for u in told) / samples if told else None,
            "global": None if scores is None else self._accuracy(scores),
            "personal": self._personal(round),
            "keep": keep,
            "width": {group: len(index) for group, index in kept.items()},
            "parameters": int(costs["parameters"]),
            "parameters_mask_counted": mask_counted_parameters(channels, self.work.model, keep),
            "flops": int(costs["flops"]),
            "train_flops": int(costs["train-flops"]),
            "bytes_down": sum(round.bytes_down.values()),
            "bytes_up": sum(round.bytes_up.values()),
            "upload_ratio": self.upload_ratio if round.merged else None,
            "train_flops_ratio": self.flops_ratio if round.merged else None,
            # Entries of the global network by the number of uploads that they are merged from.
            "coverage": coverage(channels, self.shapes, uploads),
            "strategy": round.diagnostics,
        }

    def _accuracy(self, scores: Scores) -> dict[str, Any]:
        accuracy = {self.work.data.domains[k]: a for k, a in scores.per_domain().items()}
        values = list(accuracy.values())
        return {
            "accuracy": accuracy,
            "avg": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else 0.0,
            "std0": statistics.pstdev(values),
            "loss": scores.mean_loss(),
        }

    def _personal(self, round: Round) -> dict[str, Any] | None:
        scored = {u.client: u.scores.accuracy() for u in round.updates if u.scores is not None}
        self.personal.update(scored)
        if not scored:
            return None
        return {
            "mean": statistics.fmean(scored.values()),
            "min": min(scored.values()),
            "clients": scored,
        }

    def _client(self, round: Round, client: str, forecast: Forecast) -> dict[str, Any]:
        row: dict[str, Any] = {
            "round": round.number,
            "client": client,
            "bytes_down": round.bytes_down.get(client, 0),
            "bytes_up": round.bytes_up.get(client, 0),
            "failure": round.failures.get(client),
            "accuracy": None,
            "predicted": {key: value for key, value in asdict(forecast).items() if key != "client"},
        }
        update = next((u for u in round.updates if u.client == client), None)
        if update is None:
            return row
        hidden = self.config.privacy.on  # what the update says instead are constants
        held = count_kept(round.jobs[client].kept)
        private = int(update.costs.get("private", 0))
        row |= {
            "keep": (held + private) / max(1, self.work.channels.size),
            "parameters": int(update.costs.get("parameters", 0)),
            "flops": int(update.costs.get("flops", 0)),
            "train_flops": int(update.costs.get("train-flops", 0)),
            "round_flops": None
            if hidden
            else int(update.costs.get("train-flops", 0))
            * update.samples
            * self.config.train.epochs,
            "seconds": update.costs.get("seconds"),
            "samples": None if hidden else update.samples,
            "steps": None if hidden else update.steps,
            "loss": None if hidden else update.loss,
            "private": private,
        }
        if update.scores is not None:
            right, seen = update.scores.correct.sum(1).tolist(), update.scores.total.sum(1).tolist()
            names = self.work.data.domains
            row["accuracy"] = {
                "correct": sum(right),
                "total": sum(seen),
                "domains": {names[k]: [right[k], n] for k, n in enumerate(seen) if n},
            }
        return row

    def _partition(self) -> None:
        """Write who holds what, as the clients introduced themselves, when that has changed."""
        held, path = self._held(self.strategy.exchange.clients), self.folder / "partition.json"
        if held == self.met and path.exists():
            return
        for name, said in held.items():
            before = self.met.get(name, said)
            if said["skipped"] and (name not in self.met or said != before):
                log(WARNING, "%s: files skipped: %d", name, said["skipped"])
            if said != before:
                log(WARNING, "%s: holds other images than before: %s, was %s", name, said, before)
        self.met, data = held, self.work.data
        table = {"domains": data.domains, "classes": data.classes, "clients": held}
        write_atomically(path, json.dumps(table).encode())

    def _held(self, clients: Mapping[str, Hello]) -> dict[str, dict[str, Any]]:
        """Return what clients say they hold; under differential privacy they say nothing."""
        told = {} if self.config.privacy.on else dict(sorted(clients.items()))
        return {
            name: {"domains": hello.domains, "classes": hello.classes, "skipped": hello.skipped}
            for name, hello in told.items()
        }

    def _log(self, row: dict[str, Any], now: float) -> None:
        rounds, number = self.config.run.rounds, row["round"]
        here = number - self.first
        left = (now - self.begin) / here * (rounds - number) if here else 0.0
        score, personal = row["global"], row["personal"]
        log(
            INFO,
            "%5s | %7d | %6d | %6s | %5s | %4s | %8s | %3.0f%% | %5.1f | %7.1f | %3.0f | %3.0f s",
            f"{number}/{rounds}",
            row["replies"],
            len(row["failures"]),
            "-" if row["loss"] is None else f"{row['loss']:.3f}",
            "-" if score is None else f"{100 * score['avg']:.1f}",
            "-" if score is None else f"{100 * score['std']:.1f}",
            "-" if personal is None else f"{100 * personal['mean']:.1f}",
            100 * row["keep"],
            row["bytes_up"] / 1e6,
            row["bytes_down"] / 1e6,
            now - self.last,
            left,
        )


def _dense_upload(work: Workload) -> int:
    """Return the bytes of an upload of the whole network and nothing else, as FedAvg's is."""
    counts = torch.zeros(work.score_shape, dtype=torch.int64)
    scores = Scores(counts, counts, torch.zeros(work.score_shape[0], dtype=torch.float64))
    costs = dict.fromkeys(("parameters", "flops", "train-flops", "private", "seconds"), 0.0)
    update = Update("client-00", 1, work.model.state_dict(), 1, 1, 0.0, {}, scores, costs)
    return wire_bytes(encode_update(update))


def _timing(round: Round, seconds: float) -> dict[str, Any]:
    return {
        "round": round.number,
        "seconds": seconds,
        "train_seconds": round.train_seconds,
        "evaluate_seconds": round.evaluate_seconds,
    }
