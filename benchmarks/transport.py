"""What transport costs per client, beside a straightforward version and the paper's figures.

    python -m benchmarks.transport --models vgg11 mobilenetv2 resnet18 --repeats 5

A network of full width is expressed in the channels of one of a fraction of its width (OTP). Both
are random: nothing is alike, the hard case for solvers. CPU seconds of one thread, so that other
programs disturb little; best of the repeats; both versions in turn, so that a slow spell of the
machine hits both. Columns:

ours, plain   moving the inputs and comparing / solving / moving the outputs = total. Plain is
              float64, dense matrices, a loop over layers and `ot.emd`
optimum       largest relative difference, over the groups, between the cost of our plan and that of
              a reference on the same costs: `ot.emd`, or for --solver balanced where no width
              divides the other, an assignment to copies
floor         of moving and comparing: multiply-adds of the cost matrices and bytes of weights,
              matrices and result touched once, at the rates measured in the first line
threads       wall seconds of eight clients one by one over those with two threads; means
              something only where no other program runs (see the load in the first line)
"""

import argparse
import os
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import ot
import torch
from scipy.optimize import linear_sum_assignment

from strategies.ops import transport
from strategies.ops.plans import Plan
from strategies.ops.rows import distances, sketch
from strategies.ops.solvers import balanced
from strategies.ops.transport import TransportOptions, align
from task.channels import ChannelMap, State
from task.models import build, example
from task.submodel import extract
from task.trace import trace

SHAPE, CLASSES, CLIENTS, WORKERS = (3, 32, 32), 10, 8, 2
PAPER = {"vgg11": 0.12, "mobilenetv2": 1.15, "resnet18": 0.20}  # seconds, on another machine
Problem = tuple[State, State, ChannelMap, ChannelMap]
Times = tuple[float, float, float]  # seconds: moving inputs and comparing, solving, the rest
clock = time.thread_time


def problem(name: str, keep: float, seed: int) -> Problem:
    """Return two unrelated networks, the second one cut, and their maps."""
    torch.manual_seed(seed)
    wide, other = (build(name, SHAPE, CLASSES) for _ in range(2))
    cmap = trace(wide, example(name, SHAPE), verify=False)
    kept = cmap.prefix(keep)
    narrow = extract(other.state_dict(), cmap, kept)
    return wide.state_dict(), narrow, cmap, cmap.restrict(kept)


@contextmanager
def stopwatch() -> Iterator[list[tuple[np.ndarray, Plan, float, float]]]:
    """Note cost, plan, start and end of every call of a solver."""
    calls: list[tuple[np.ndarray, Plan, float, float]] = []
    solve = transport.solve

    def timed(cost: np.ndarray, *rest: object) -> Plan:
        start = clock()
        plan = solve(cost, *rest)
        calls.append((cost, plan, start, clock()))
        return plan

    transport.solve = timed
    try:
        yield calls
    finally:
        transport.solve = solve


def ours(case: Problem, options: TransportOptions) -> Times:
    with stopwatch() as calls:
        start = clock()
        align(*case, options)
        end = clock()
    solving = sum(stop - begin for _, _, begin, stop in calls)
    last = calls[-1][3]
    return last - start - solving, solving, end - last


def plain(case: Problem) -> Times:
    source, target, wide, _ = case
    out: dict[int, np.ndarray] = {}
    into: dict[int, np.ndarray] = {}
    ours_, theirs = ({k: t.double().numpy() for k, t in s.items()} for s in (source, target))
    comparing = solving = 0.0

    def moved(array: np.ndarray, d: int, matrix: np.ndarray) -> np.ndarray:
        return np.moveaxis(np.tensordot(array, matrix, (d, 0)), -1, d)

    for number, (n, m) in enumerate(widths(case)):
        start, cost = clock(), np.zeros((n, m))
        for name, axes in wide.axes.items():
            if not axes or axes[0] is None or "running" in name or axes[0].group[0] != number:
                continue
            reads = int(axes[1].group[0]) if len(axes) > 1 and axes[1] else None
            if reads is None or reads in into:
                rows = ours_[name] if reads is None else moved(ours_[name], 1, into[reads])
                a, b = rows.reshape(n, -1), theirs[name].reshape(m, -1)
                cost += (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
        middle = clock()
        plan = ot.emd(np.full(n, 1 / n), np.full(m, 1 / m), np.maximum(cost, 0), numItermax=10**7)
        out[number], into[number] = plan / plan.sum(0), plan / plan.sum(1, keepdims=True)
        comparing, solving = comparing + middle - start, solving + clock() - middle
    start = clock()
    for name, axes in wide.axes.items():
        for d, axis in enumerate(axes):
            if axis is not None:
                side = into if axis.role == "in" else out
                ours_[name] = moved(ours_[name], d, side[int(axis.group[0])])
    return comparing, solving, clock() - start


def widths(case: Problem) -> list[tuple[int, int]]:
    return list(zip(case[2].groups.values(), case[3].groups.values(), strict=True))


def gap(case: Problem, options: TransportOptions) -> float:
    with stopwatch() as calls:
        align(*case, options)
    worst = 0.0
    for cost, plan, _, _ in calls:
        n, m = cost.shape
        found = float((plan.coupling * cost).sum())
        if n % m and options.solver == "balanced":
            copies = np.concatenate([np.tile(cost - 2 * cost.max(), n // m), cost], 1)
            rows, columns = linear_sum_assignment(copies)
            best = float(cost[rows, columns % m].mean())
        else:
            best = ot.emd2(np.full(n, 1 / n), np.full(m, 1 / m), cost, numItermax=10**7)
        worst = max(worst, abs(found / best - 1))
    return worst


def floor(case: Problem) -> tuple[float, float]:
    """Return GFLOP and GB of moving and comparing."""
    source, target, wide, _ = case
    pairs, flops = widths(case), 0.0
    for name, axes in wide.axes.items():
        if len(axes) > 1 and axes[0] is not None and axes[0].role != "in":
            n, m = pairs[int(axes[0].group[0])]
            flops += 2 * n * m * target[name][0].numel()
    weights = sum(t.nbytes for t in source.values()) + 2 * sum(t.nbytes for t in target.values())
    return flops / 1e9, (weights + 8 * sum(n * m for n, m in pairs)) / 1e9


def rates() -> tuple[float, float]:
    """Return the GFLOP/s of a product and the GB/s of a copy, in single precision."""
    a, b = torch.randn(1024, 1024), torch.randn(64 << 20)
    speeds = []
    for work, amount in ((lambda: a @ a, 2 * 1.024**3), (b.clone, 2 * b.nbytes / 1e9)):
        taken = []
        for _ in range(5):
            start = clock()
            work()
            taken.append(clock() - start)
        speeds.append(amount / min(taken))
    return speeds[0], speeds[1]


def speedup(case: Problem, options: TransportOptions) -> float:
    """Return wall seconds of clients one by one over those with two threads."""
    start = time.perf_counter()
    for _ in range(CLIENTS):
        align(*case, options)
    alone = time.perf_counter() - start
    with ThreadPoolExecutor(WORKERS) as pool:
        start = time.perf_counter()
        list(pool.map(lambda _: align(*case, options), range(CLIENTS)))
    return alone / (time.perf_counter() - start)


def sketches(width: int, sizes: list[int]) -> None:
    """Print what plans from sketched costs lose on a group of this width with as many inputs."""
    print(f"\nsketch of a group of {width} channels with {width} inputs onto {width // 2}")
    print("| rows | sketch | compare, s | solve, s | cost above the best plan | channels moved |")
    print("|---|---:|---:|---:|---:|---:|")
    source = torch.Generator().manual_seed(0)
    target = torch.randn(width // 2, width, generator=source)
    other = torch.randn(width, width, generator=source)
    for rows, name in ((other, "unrelated"), (target.repeat(2, 1) + other, "copies + noise")):
        exact = distances([(rows, target)], (width, width // 2), squared=True)
        reference = balanced(exact).target
        shuffled = np.random.default_rng(0).permutation(width) % (width // 2)

        def lost(
            chosen: np.ndarray, exact: np.ndarray = exact, best: np.ndarray = reference
        ) -> str:
            total, least = (exact[np.arange(len(exact)), k].sum() for k in (chosen, best))
            return f"{100 * (total / least - 1):.2f} % | {100 * (chosen != best).mean():.0f} % |"

        print(f"| {name} | any plan | | | {lost(shuffled)}")
        for size in [0, *sizes]:
            start = clock()
            pair = [sketch(x, size, "w") if size else x for x in (rows, target)]
            cost = distances([(pair[0], pair[1])], exact.shape, squared=True)
            middle = clock()
            plan = balanced(cost)
            seconds = f"{middle - start:.2f} | {clock() - middle:.2f}"
            print(f"| {name} | {size or 'exact'} | {seconds} | {lost(plan.target)}", flush=True)


def show(times: Times) -> str:
    return " / ".join(f"{t:.3f}" for t in times) + f" = {sum(times):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=[*PAPER, "resnet10"], default=[*PAPER])
    parser.add_argument("--widths", nargs="+", type=float, default=[0.25, 0.5, 0.75])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--solver", default="balanced")
    parser.add_argument("--sketch", nargs="*", type=int, default=[64, 256, 1024])
    parser.add_argument("--sketch-width", type=int, default=4096)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    options = TransportOptions(solver=flags.solver)
    gflops, gbytes = rates()
    print(
        f"{platform.platform()}, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
        f"POT {ot.__version__}; one thread: {gflops:.0f} GFLOP/s, {gbytes:.1f} GB/s; "
        f"solver {flags.solver}, seed {flags.seed}, best of {flags.repeats}"
    )
    print("| model | width | ours, s | plain, s | optimum | floor, s | threads | paper, s |")
    print("|---|---:|---|---|---:|---:|---:|---:|")
    for name in flags.models:
        totals = []
        for keep in flags.widths:
            case = problem(name, keep, flags.seed)
            align(*case, options)
            mine, naive = [], []
            for _ in range(flags.repeats):
                mine.append(ours(case, options))
                naive.append(plain(case))
            totals.append(min(map(sum, mine)))
            flop, size = floor(case)
            least = flop / gflops + size / gbytes
            print(
                f"| {name} | {keep:g} | {show(min(mine, key=sum))} | {show(min(naive, key=sum))} "
                f"| {gap(case, options):.0e} | {least:.3f} ({flop:.2f} GFLOP, {1e3 * size:.0f} MB) "
                f"| {speedup(case, options):.2f} | |",
                flush=True,
            )
        print(f"| {name} | mean | {np.mean(totals):.3f} | | | | | {PAPER.get(name, '')} |")
    if flags.sketch:
        sketches(flags.sketch_width, flags.sketch)


if __name__ == "__main__":
    main()
