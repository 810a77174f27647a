"""The numbers of a run, each defined once."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fedsparse_app.run_folder import Row, Run

__all__ = [
    "DEFINITIONS",
    "ClientSummary",
    "Personal",
    "Summary",
    "mean_and_spread",
    "personal_curve",
    "recipes",
    "summarise",
    "summarise_clients",
    "warmup",
]

DEFINITIONS = {
    "AVG": "mean of the accuracies per domain of the global network, on the test data",
    "STD": "their spread over the domains, n - 1 in the denominator",
    "global last": "the last round in which the global network was evaluated",
    "global best": "the round with the highest AVG, the first of equals; STD is of the same round",
    "personal last": "each client's latest evaluation of its own network; mean and minimum",
    "personal best": "the same after each round that evaluated clients, from when each had been "
    "evaluated once; the round with the highest mean",
    "keep": "fraction of the channels in the global network, after the last round",
    "parameters": "of the global network; physical: as it is stored and sent; mask-counted: keep x "
    "the entries that carry channels + the others, as papers count that multiply by a mask",
    "FLOPs": "2 x multiply-adds of one forward pass of one sample through the global network",
    "MB": "10^6 bytes of serialised messages, all clients together; down is server to client",
    "after warm-up": "mean over the rounds that follow the method's dense warm-up rounds",
    "spread": "standard deviation over seeds, n - 1 in the denominator",
}

# What does not change the recipe, only where it ran or with which seed.
NOT_RECIPE = {"run.seed", "run.output-dir", "run.state-dir", "run.resume"}


UNJUDGED: Row = {"round": None, "global": {"avg": None, "std": None}}


@dataclass(frozen=True)
class Personal:
    """Accuracy of the clients' own networks as of one round."""

    round: int
    mean: float
    min: float


@dataclass(frozen=True)
class Summary:
    """One run in numbers; None where the run holds no such number.

    Units: accuracies and ``keep`` are fractions, traffic is in bytes, time in seconds.
    """

    rounds: int
    avg_last: float | None
    std_last: float | None
    avg_best: float | None
    std_best: float | None
    round_last: int | None
    round_best: int | None
    personal_last: float | None
    personal_min: float | None
    personal_best: float | None
    keep: float | None
    parameters: int | None
    parameters_mask_counted: int | None
    flops: int | None
    bytes_up: int
    bytes_down: int
    bytes_up_per_round: float | None
    bytes_down_per_round: float | None
    seconds: float | None
    failures: int


@dataclass(frozen=True)
class ClientSummary:
    """One client in numbers; None where the run holds no such number."""

    client: str
    personal_last: float | None
    personal_best: float | None
    keep: float | None
    private: int | None
    bytes_up: int
    bytes_down: int
    failures: int


def summarise(run: Run) -> Summary:
    """Return the numbers of a run, as ``DEFINITIONS`` says."""
    judged = [row for row in run.rounds if row["global"]]
    last = judged[-1] if judged else UNJUDGED
    best = max(judged, key=lambda row: row["global"]["avg"], default=UNJUDGED)  # first of equals
    curve, end = personal_curve(run), run.rounds[-1]
    after = [row for row in run.rounds if row["round"] > warmup(run)]
    return Summary(
        rounds=end["round"],
        avg_last=last["global"]["avg"],
        std_last=last["global"]["std"],
        avg_best=best["global"]["avg"],
        std_best=best["global"]["std"],
        round_last=last["round"],
        round_best=best["round"],
        personal_last=curve[-1].mean if curve else None,
        personal_min=curve[-1].min if curve else None,
        personal_best=max((point.mean for point in curve), default=None),
        keep=end.get("keep"),
        parameters=end.get("parameters"),
        parameters_mask_counted=end.get("parameters_mask_counted"),
        flops=end.get("flops"),
        bytes_up=_total(run.rounds, "bytes_up"),
        bytes_down=_total(run.rounds, "bytes_down"),
        bytes_up_per_round=_total(after, "bytes_up") / len(after) if after else None,
        bytes_down_per_round=_total(after, "bytes_down") / len(after) if after else None,
        seconds=sum(row.get("seconds") or 0.0 for row in run.timing) if run.timing else None,
        failures=sum(len(row.get("failures") or ()) for row in run.rounds),
    )


def warmup(run: Run) -> int:
    """Return how many dense rounds the method begins with, 0 where it has none."""
    return int(run.options.get(f"{run.strategy}.warmup", run.options.get("strategy.warmup", 0)))


def personal_curve(run: Run) -> list[Personal]:
    """Return the personal accuracy over the rounds: each client's latest evaluation so far.

    With partial participation a round evaluates some clients only; rounds count from when every
    client that is evaluated at all has been once, so that means are over the same clients.
    """
    everyone = {client for row in run.rounds for client in _personal(row)}
    latest: dict[str, float] = {}
    curve = []
    for row in run.rounds:
        if seen := _personal(row):
            latest |= seen
            if latest.keys() == everyone:
                values = latest.values()
                curve.append(Personal(row["round"], statistics.fmean(values), min(values)))
    return curve


def summarise_clients(run: Run) -> list[ClientSummary]:
    """Return the numbers of each client, sorted by client id."""
    accuracy: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, int] = defaultdict(int)
    for row in run.rounds:
        for client, value in _personal(row).items():
            accuracy[client].append(value)
        for failure in row.get("failures") or ():
            failed[failure["client"]] += 1
    rows = {client: [r for r in run.clients if r["client"] == client] for client in _names(run)}
    return [
        ClientSummary(
            client=client,
            personal_last=accuracy[client][-1] if accuracy[client] else None,
            personal_best=max(accuracy[client], default=None),
            keep=_latest(mine, "keep"),
            private=_latest(mine, "private"),
            bytes_up=_total(mine, "bytes_up"),
            bytes_down=_total(mine, "bytes_down"),
            failures=failed[client],
        )
        for client, mine in rows.items()
    ]


def recipes(runs: Sequence[Run]) -> list[tuple[dict[str, Any], list[Run]]]:
    """Group runs that differ in the seed only; with each group the options that set it apart."""
    groups: dict[tuple[tuple[str, Any], ...], list[Run]] = {}
    for run in runs:
        key = tuple(sorted((k, v) for k, v in run.options.items() if k not in NOT_RECIPE))
        groups.setdefault(key, []).append(run)
    common = set.intersection(*(set(key) for key in groups)) if groups else set()
    return [
        (dict(pair for pair in key if pair not in common), group) for key, group in groups.items()
    ]


def mean_and_spread(summaries: Sequence[Summary]) -> dict[str, tuple[float, float | None]]:
    """Return (mean, standard deviation with n - 1) of every number that all summaries have."""
    result = {}
    for field in fields(Summary):
        values = [getattr(summary, field.name) for summary in summaries]
        if None not in values:
            spread = statistics.stdev(values) if len(values) > 1 else None
            result[field.name] = statistics.fmean(values), spread
    return result


def _personal(row: Row) -> Mapping[str, float]:
    personal = row["personal"]
    return personal["clients"] if personal else {}


def _names(run: Run) -> list[str]:
    return sorted({*run.partition.get("clients", {}), *(row["client"] for row in run.clients)})


def _latest(rows: Sequence[Row], key: str) -> Any:
    return next((row[key] for row in reversed(rows) if row.get(key) is not None), None)


def _total(rows: Iterable[Row], key: str) -> int:
    return sum(row.get(key) or 0 for row in rows)
