"""Accuracy against epsilon on the embedded digits: the table of docs/privacy.md.

    python benchmarks/privacy.py --seeds 1

100 clients, so that their noises cancel in a mean; noise is made from the seed, to be repeatable.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

METHODS = {
    "FedAvg": {"strategy.name": "fedavg"},
    "FedAvg keep 0.3": {"strategy.name": "fedavg", "fedavg.keep": 0.3},
    "FEDFIP keep 0.3": {"fedfip.keep": 0.3, "fedfip.fisher-samples": 32},
}
NOISE = (0.0, 0.02, 0.05)


def federated(method, noise, seed, args):
    from fedsparse_app import inprocess
    from fedsparse_app.run_folder import read_run

    options = {
        "run.seed": seed,
        "run.rounds": args.rounds,
        "run.output-dir": str(args.output_dir),
        "federation.clients": args.clients,
        "federation.evaluate-every": args.rounds,
        "train.epochs": 1,
        "train.batch-size": 16,
        "privacy.noise-multiplier": noise,
        "privacy.noise": "seeded",
    }
    run = read_run(inprocess.run({**METHODS[method], **options}))
    last = run.rounds[-1]
    return 100 * last["global"]["avg"], last.get("privacy"), last["parameters"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--output-dir", type=Path, default=Path(tempfile.gettempdir()) / "privacy")
    args = parser.parse_args()
    began = time.process_time()
    print(f"{args.seeds} seeds, {args.clients} clients, {args.rounds} rounds\n", flush=True)
    print("| method | parameters | noise multiplier | epsilon | against the server | AVG |")
    print("|---|---|---|---|---|---|", flush=True)
    for method in METHODS:
        for noise in NOISE:
            runs = [federated(method, noise, 1 + s, args) for s in range(args.seeds)]
            avg = [run[0] for run in runs]
            spread = f" ± {statistics.stdev(avg):.1f}" if len(avg) > 1 else ""
            _, spent, parameters = runs[0]
            costs = f"{spent['epsilon']:.3g} | {spent['epsilon_server']:.3g}" if spent else "∞ | ∞"
            print(
                f"| {method} | {parameters:,} | {noise:g} | {costs} "
                f"| {statistics.fmean(avg):.1f}{spread} |",
                flush=True,
            )
    print(f"\n{time.process_time() - began:.0f} CPU seconds")


if __name__ == "__main__":
    main()
