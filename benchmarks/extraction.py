"""What a submodel of SubFLOT is worth before it is trained: leading channels against transport.

    python -m benchmarks.extraction RUN [RUN ...]

For every client of a finished run the next submodel is cut in three ways from the same global
network: its leading channels (w/o OTP), the global network in the channels of the client's history
(alpha = 1), and that mixed with the history (OTP as it is). BatchNorm's statistics are made anew on
the client's training samples and the submodel is scored on its test share.
"""

import argparse
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

WAYS = {"leading channels": {"otp": False}, "transported": {"alpha": 1.0}, "with history": {}}


def scores(folder):
    """Return accuracy in percent by (removed fraction, way), one number a client."""
    import torch

    from fedsparse_app.export import restore
    from fedsparse_app.shares import served
    from task.submodel import slice_module
    from task.train import evaluate, recalibrate

    torch.set_num_threads(1)
    config, work, strategy, number = restore(folder)
    shares = served(config, {"partition-id": 0, "num-partitions": 1})
    hellos = [strategy.exchange.clients[name] for name in sorted(strategy.exchange.clients)]
    found, options = defaultdict(list), strategy.options
    for way, changed in WAYS.items():
        strategy.options = replace(options, **changed)
        for client, job in strategy.jobs(hellos, number + 1).items():
            network = slice_module(work.model, work.channels, job.kept, job.state)
            share = shares[client]()
            recalibrate(network, share.train)
            right = evaluate(network, share.test, *work.score_shape).accuracy()
            found[round(strategy.removed(client, number + 1), 3), way].append(100 * right)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    runs = [scores(folder) for folder in parser.parse_args().runs]
    rates = sorted({rate for run in runs for rate, _ in run})
    print(f"| removed | clients | {' | '.join(WAYS)} |")
    print("|---" * (2 + len(WAYS)) + "|")
    for rate in rates:
        cells = []
        for way in WAYS:
            means = [statistics.fmean(run[rate, way]) for run in runs if (rate, way) in run]
            wide = statistics.stdev(means) if len(means) > 1 else 0.0
            cells.append(f"{statistics.fmean(means):.1f} ± {wide:.1f}")
        count = sum(len(run.get((rate, "transported"), ())) for run in runs)
        print(f"| {rate:g} | {count} | {' | '.join(cells)} |")
    print(f"\n{len(runs)} runs; mean over clients, then mean ± standard deviation over runs")


if __name__ == "__main__":
    main()
