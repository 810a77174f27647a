"""The table of the README: methods on the embedded digits, over seeds, with reference rows.

    python benchmarks/digits.py --seeds 3 --workers 2

Every row is a recipe (options that differ from the defaults), one process a seed; "one domain"
trains one network centrally on a single domain, as many epochs as the clients train on theirs.
"""

import argparse
import os
import platform
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

RECIPES = {
    "FedAvg": {"strategy.name": "fedavg"},
    "FEDFIP keep 0.8": {},
    "FEDFIP keep 0.5": {"fedfip.keep": 0.5},
    "FEDFIP keep 0.3": {"fedfip.keep": 0.3},
    "DSFP": {"fedfip.dsr": False, "fedfip.sa": False},
    "DSFP + DSR": {"fedfip.sa": False},
    "DSFP + SA": {"fedfip.dsr": False},
}
ABLATION = {"DSFP", "DSFP + DSR", "DSFP + SA"}


def federated(recipe, seed, rounds, folder):
    from fedsparse_app import inprocess
    from fedsparse_app.run_folder import read_run

    os.environ["OMP_NUM_THREADS"] = "1"
    options = {**recipe, "run.seed": seed, "run.rounds": rounds, "run.output-dir": folder}
    run = read_run(inprocess.run(options))
    last = run.rounds[-1]
    return {
        "avg": 100 * last["global"]["avg"],
        "std": 100 * last["global"]["std"],
        "personal": 100 * last["personal"]["mean"],
        "upload": last["upload_ratio"],
        "train": last["train_flops_ratio"],
        "parameters": last["parameters"],
    }


def one_domain(domain, seed, rounds):
    import torch

    from fedsparse_app.config import read
    from fedsparse_app.workload import workload
    from task.seeding import generator
    from task.submodel import slice_module
    from task.train import evaluate, fit

    torch.set_num_threads(1)
    config = read({"run.seed": seed})
    work = workload(config)
    data = work.data.train
    own = data.take(data.rows(domain).numpy())
    net = slice_module(work.model, work.channels, work.channels.full())
    options = config.train
    for number in range(rounds):
        fit(net, own, options, generator(seed, "one domain", domain, number))
    accuracy = list(evaluate(net, work.data.test, *work.score_shape).per_domain().values())
    return {"avg": 100 * statistics.fmean(accuracy), "std": 100 * statistics.stdev(accuracy)}


def spread(rows, key, digits=1):
    values = [row[key] for row in rows if key in row]
    if not values:
        return ""
    wide = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {wide:.{digits}f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ablation", action="store_true", help="rows of the ablation as well")
    parser.add_argument("--output-dir", type=Path, default=Path(tempfile.gettempdir()) / "digits")
    args = parser.parse_args()
    seeds = range(1, args.seeds + 1)
    names = [name for name in RECIPES if args.ablation or name not in ABLATION]
    with ProcessPoolExecutor(args.workers) as pool:
        runs = {
            (name, seed): pool.submit(
                federated, RECIPES[name], seed, args.rounds, str(args.output_dir / str(seed))
            )
            for name in names
            for seed in seeds
        }
        alone = {
            (k, seed): pool.submit(one_domain, k, seed, args.rounds)
            for k in range(4)
            for seed in seeds
        }
        results = {name: [runs[name, s].result() for s in seeds] for name in names}
        singles = {k: [alone[k, s].result() for s in seeds] for k in range(4)}
    print(f"{args.seeds} seeds, {args.rounds} rounds, mean ± sample standard deviation")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, 1 thread a run\n")
    print("| method | AVG | STD | personal | bytes up | training FLOPs | parameters |")
    print("|---|---|---|---|---|---|---|")
    for name, rows in results.items():
        upload, train = (statistics.fmean(row[key] for row in rows) for key in ("upload", "train"))
        print(
            f"| {name} | {spread(rows, 'avg')} | {spread(rows, 'std')} | {spread(rows, 'personal')}"
            f" | {upload:.2f} | {train:.2f} | {rows[0]['parameters']:,} |"
        )
    best = max(singles.values(), key=lambda rows: statistics.fmean(row["avg"] for row in rows))
    print(
        f"| best single domain, central | {spread(best, 'avg')} | {spread(best, 'std')} | | | | |"
    )


if __name__ == "__main__":
    main()
