"""SubFLOT on the embedded digits: ablations and baselines, each with tuned options, over seeds.

    python -m benchmarks.subflot --seeds 3 --workers 2

Two splits: label skew (Dirichlet 0.1) and one domain a client. Lambda is chosen for SubFLOT, whose
ablations keep it, then the learning rate for every method: by personal accuracy on a validation
share of the clients' training samples (one seed, fewer rounds); only then are the test shares
scored. Runs that are in the output folder already are not repeated, so the study can be stopped and
taken up.
"""

import argparse
import json
import os
import platform
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

SPLITS = {
    "label skew": {"partition.kind": "dirichlet", "partition.alpha": 0.1},
    "one domain": {"partition.kind": "one-domain"},
}
OFF = {"subflot.otp": False, "subflot.sar": False, "subflot.ota": False}
METHODS = {
    "SubFLOT": {},
    "w/o OTP": {"subflot.otp": False},
    "w/o SAR": {"subflot.sar": False},
    "w/o OTA": {"subflot.ota": False},
    "HeteroFL's average": OFF,
    "FedAvg": {"strategy.name": "fedavg"},
    "FedAvg, smallest width": {"strategy.name": "fedavg", "fedavg.keep": 0.25},
}
RATES = (0.02, 0.05, 0.1)
LAMBDAS = (0.001, 0.01, 0.1)


def recipe(method, split):
    return {"strategy.name": "subflot"} | SPLITS[split] | METHODS[method]


def regularised(method):
    options = recipe(method, "label skew")
    return options["strategy.name"] == "subflot" and options.get("subflot.sar", True)


def scored(folder, rounds, options):
    """Run once; what was run before is read back."""
    from fedsparse_app import inprocess
    from fedsparse_app.run_folder import read_run

    os.environ["OMP_NUM_THREADS"] = "1"
    options = options | {
        "run.rounds": rounds,
        "federation.evaluate-every": 5,
        "run.output-dir": str(folder / "runs"),
    }
    known = folder / "runs.jsonl"
    lines = known.read_text().splitlines() if known.exists() else []
    key = json.dumps({k: v for k, v in options.items() if k != "run.output-dir"}, sort_keys=True)
    for row in map(json.loads, lines):
        if row["options"] == key:
            return row
    rows = read_run(inprocess.run(options)).rounds
    last = rows[-1]
    row = {
        "options": key,
        "personal": 100 * last["personal"]["mean"],
        "global": 100 * last["global"]["avg"],
        "bytes": last["upload_ratio"],
        "flops": last["train_flops_ratio"],
        "curve": [[r["round"], 100 * r["personal"]["mean"]] for r in rows if r["personal"]],
        "distinct": last["strategy"].get("distinct_rows"),
    }
    with known.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def tuned(pool, run, split, rounds):
    """Choose lambda at the default learning rate, then every learning rate; return the options."""
    held = {"partition.validation-fraction": 0.25, "run.seed": 1}

    def ask(method, candidates):
        return [(c, pool.submit(run, rounds, recipe(method, split) | held | c)) for c in candidates]

    def best(asked):
        return max(asked, key=lambda pair: pair[1].result()["personal"])[0]

    strength = best(ask("SubFLOT", [{"subflot.lambda-sar": value} for value in LAMBDAS]))
    options = {name: strength if regularised(name) else {} for name in METHODS}
    asked = {
        name: ask(name, [options[name] | {"train.lr": rate} for rate in RATES]) for name in METHODS
    }
    return {name: best(pairs) for name, pairs in asked.items()}


def spread(rows, key):
    values = [row[key] for row in rows]
    wide = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.1f} ± {wide:.1f}"


def table(split, chosen, results):
    print(f"\n{split}\n")
    print("| method | lr | lambda | personal | global AVG | bytes up | training FLOPs |")
    print("|---|---|---|---|---|---|---|")
    for name, rows in results.items():
        rate, strength = chosen[name]["train.lr"], chosen[name].get("subflot.lambda-sar", "")
        cost = (f"{statistics.fmean(row[key] for row in rows):.2f}" for key in ("bytes", "flops"))
        print(
            f"| {name} | {rate:g} | {strength} | {spread(rows, 'personal')} | "
            f"{spread(rows, 'global')} | {' | '.join(cost)} |"
        )


def plot(path, results):
    """Personal accuracy over the rounds, one panel a split."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(11, 4), sharey=True)
    for panel, (split, methods) in zip(panels, results.items(), strict=True):
        for name, rows in methods.items():
            rounds = [number for number, _ in rows[0]["curve"]]
            values = [[value for _, value in row["curve"]] for row in rows]
            mean = [statistics.fmean(at) for at in zip(*values, strict=True)]
            line = panel.plot(rounds, mean, label=name)[0]
            low, high = zip(*((min(at), max(at)) for at in zip(*values, strict=True)), strict=True)
            panel.fill_between(rounds, low, high, alpha=0.15, color=line.get_color(), lw=0)
        panel.set_title(split)
        panel.set_xlabel("round")
    panels[0].set_ylabel("personal accuracy (%), mean and range over seeds")
    panels[0].set_ylim(bottom=55)  # room for the legend
    panels[0].legend(loc="lower right", ncols=2, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tuning-rounds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    run, seeds = partial(scored, args.output_dir), range(1, args.seeds + 1)
    chosen, results = {}, {}
    with ProcessPoolExecutor(args.workers) as pool:
        for split in SPLITS:
            chosen[split] = tuned(pool, run, split, args.tuning_rounds)
            asked = {
                name: [
                    pool.submit(
                        run,
                        args.rounds,
                        recipe(name, split) | chosen[split][name] | {"run.seed": s},
                    )
                    for s in seeds
                ]
                for name in METHODS
            }
            results[split] = {name: [job.result() for job in jobs] for name, jobs in asked.items()}
            table(split, chosen[split], results[split])
    plot(args.output_dir / "subflot.png", results)
    print(
        f"\n{args.seeds} seeds, {args.rounds} rounds (tuning {args.tuning_rounds}), mean ± sample "
        f"standard deviation; {platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
