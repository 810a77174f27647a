"""What Fisher information and the structural loss cost, in units of a plain training step.

    python -m benchmarks.fisher --models cnn resnet18 --batch 64 --repeats 5

Columns: seconds of one step (forward, backward, SGD), then ratios to it at the same batch: one
Fisher pass (by gates, by filters) and a whole step with L_con in each mode. CPU seconds of one
thread, so that other programs on the machine disturb little; the best and the median of the
repeats, after one that is not counted.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from strategies.ops.contrastive import structural_loss
from strategies.ops.fisher import gate_fisher, weight_fisher
from task.data.dataset import Samples
from task.models import build, example
from task.trace import trace

SHAPE, CLASSES, DOMAINS = (3, 32, 32), 10, 4
MODES = ("none", "gate-fd", "double")


def seconds(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Time all jobs in turn, so that a slow spell of the machine hits all of them alike."""
    times: dict[str, list[float]] = {job: [] for job in work}
    for _ in range(1 + repeats):
        for job, do in work.items():
            start = time.process_time()
            do()
            times[job].append(time.process_time() - start)
    return {job: taken[1:] for job, taken in times.items()}


def jobs(name: str, batch: int, seed: int) -> dict[str, Callable[[], object]]:
    """Return what is timed for one network, on random inputs: their values do not matter here."""
    torch.manual_seed(seed)
    model = build(name, SHAPE, CLASSES)
    cmap = trace(model, example(name, SHAPE))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, y = torch.randn(batch, *SHAPE), torch.randint(0, CLASSES, (batch,))
    mixed = Samples(x, y, torch.arange(batch) % DOMAINS)
    prototypes = {k: torch.rand(cmap.size) for k in range(DOMAINS)}
    mask = torch.arange(cmap.size) % 5 != 0  # keep 0.8

    def step(mode: str) -> None:
        model.train()
        loss = cross_entropy(model(x), y)
        extra = structural_loss(model, cmap, x, y, 0, prototypes, mask, mode=mode)
        optimizer.zero_grad()
        (loss if extra is None else loss + 0.01 * extra).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

    return {
        "step": partial(step, "none"),
        "gate": lambda: gate_fisher(model, cmap, mixed, batch=batch),
        "weight": lambda: weight_fisher(model, cmap, mixed, batch=batch),
        **{f"dsr {mode}": partial(step, mode) for mode in MODES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["cnn", "resnet10", "resnet18", "mobilenetv2"]
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{platform.platform()}, {platform.processor() or platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread; images {SHAPE}, batch {options.batch}, "
        f"{options.repeats} repeats, seed {options.seed}"
    )
    columns = ["gate", "weight", *(f"dsr {mode}" for mode in MODES)]
    print("| model | of repeats | step, ms | " + " | ".join(columns) + " |")
    print("|---|---|" + "---:|" * (1 + len(columns)))
    for name in options.models:
        times = seconds(jobs(name, options.batch, options.seed), options.repeats)
        for word, pick in (("best", min), ("median", statistics.median)):
            base = pick(times["step"])
            ratios = " | ".join(f"{pick(times[column]) / base:.2f}" for column in columns)
            print(f"| {name} | {word} | {1000 * base:.0f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
