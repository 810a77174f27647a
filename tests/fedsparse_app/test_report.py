"""Reports of run folders, against numbers worked out by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fedsparse_app import plots
from fedsparse_app.report import markdown, report, write_report
from fedsparse_app.run_folder import Run, read_run
from fedsparse_app.summary import (
    mean_and_spread,
    personal_curve,
    recipes,
    summarise,
    summarise_clients,
)

CLIENTS = ("client-00", "client-01", "client-02")


def make_run(
    folder: Path,
    *,
    accuracy: tuple[tuple[float, float] | None, ...] = (
        (0.1, 0.1),
        (0.5, 0.7),
        (0.9, 0.7),
        (0.8, 0.6),
    ),
    personal: tuple[dict[str, float] | None, ...] = (
        None,
        {"client-00": 0.99},
        {"client-00": 0.6, "client-01": 0.8, "client-02": 0.7},
        {"client-01": 0.5, "client-02": 0.6},
    ),
    failures: dict[int, list[dict[str, str]]] | None = None,
    importance: bool = True,
    **options: object,
) -> Path:
    """Write a run folder of ``len(accuracy) - 1`` rounds, round 0 being the initial model."""
    folder.mkdir(parents=True)
    rounds = len(accuracy) - 1
    config = {
        "run.rounds": rounds,
        "run.seed": 1,
        "run.output-dir": str(folder.parent),
        "strategy.name": "fedfip",
        "fedfip.warmup": 1,
    } | options
    lines = ["[options]", *(f'"{key}" = {json.dumps(value)}' for key, value in config.items())]
    (folder / "config.toml").write_text("\n".join([*lines, "[versions]", 'torch = "2.14"']))
    (folder / "partition.json").write_text(json.dumps(_partition()))
    metrics, timing, clients = [], [], []
    for number in range(rounds + 1):
        failed = (failures or {}).get(number, [])
        metrics.append(_metrics(number, accuracy[number], personal[number], failed, importance))
        timing.append(
            {"round": number, "seconds": 1.5, "train_seconds": 1.0, "evaluate_seconds": 0.5}
        )
        clients += [_client(number, name, failed) for name in CLIENTS if number]
    for name, rows in (("metrics", metrics), ("timing", timing), ("clients", clients)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _metrics(
    number: int,
    accuracy: tuple[float, float] | None,
    personal: dict[str, float] | None,
    failed: list[dict[str, str]],
    importance: bool,
) -> dict[str, object]:
    judged = told = None
    if accuracy is not None:
        a, b = accuracy
        judged = {"accuracy": {"mnist": a, "usps": b}, "avg": (a + b) / 2, "loss": 1.0}
        judged |= {"std": abs(a - b) / math.sqrt(2), "std0": abs(a - b) / 2}
    if personal is not None:
        values = list(personal.values())
        told = {"mean": sum(values) / len(values), "min": min(values), "clients": personal}
    shares = {"0": {"conv1": 0.25, "conv2": 0.75}, "1": {"conv1": 0.5, "conv2": 0.5}}
    return {
        "round": number,
        "replies": 3 - len(failed) if number else 0,
        "failures": failed,
        "loss": 2.0 if number else None,
        "global": judged,
        "personal": told,
        "keep": 1.0 if number < 2 else 0.75,
        "width": {"conv1": 8, "conv2": 16} if number < 2 else {"conv1": 6, "conv2": 12},
        "parameters": 1000 if number < 2 else 640,
        "parameters_mask_counted": 1000 if number < 2 else 600,
        "flops": 2_000_000 if number < 2 else 1_500_000,
        # round 1 is dense: 9 MB each way; 4 MB down and 3 MB up after it
        "bytes_down": (0, 9_000_000)[number] if number < 2 else 4_000_000,
        "bytes_up": (0, 9_000_000)[number] if number < 2 else 3_000_000,
        "coverage": {"0": 100, "2": 200, "3": 700} if number else {},
        "strategy": {"jaccard": 0.9, "prototype_share": shares} if importance and number else {},
    }


def _client(number: int, name: str, failed: list[dict[str, str]]) -> dict[str, object]:
    reason = next((row["reason"] for row in failed if row["client"] == name), None)
    row: dict[str, object] = {"round": number, "client": name, "bytes_down": 1_000_000}
    row |= {"bytes_up": 0 if reason else 500_000, "failure": reason, "accuracy": None}
    if reason is None:
        row |= {"keep": 0.8, "parameters": 700, "flops": 1, "train_flops": 3, "seconds": 0.1}
        row |= {"samples": 30, "loss": 1.0, "private": number}
    return row


def _partition() -> dict[str, object]:
    held = {"domains": {"mnist": 20, "usps": 10}, "classes": [15, 15]}
    return {
        "domains": ["mnist", "usps"],
        "classes": ["0", "1"],
        "clients": dict.fromkeys(CLIENTS, held),
    }


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes half a second a picture; only some tests look at pictures."""
    monkeypatch.setattr(plots, "find_spec", lambda name: None)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(make_run(tmp_path / "a-run"))


def test_last_is_the_last_evaluated_round_and_best_the_highest_average(run: Run) -> None:
    numbers = summarise(run)
    assert (numbers.round_last, numbers.round_best) == (3, 2)
    assert numbers.avg_last == pytest.approx(0.7)
    assert numbers.avg_best == pytest.approx(0.8)
    # two domains 0.2 apart: 0.2 / sqrt(2) with n - 1
    assert numbers.std_last == pytest.approx(0.1414, abs=1e-4)
    assert numbers.std_best == pytest.approx(0.1414, abs=1e-4)


def test_rounds_without_evaluation_are_neither_last_nor_best(tmp_path: Path) -> None:
    numbers = summarise(
        read_run(make_run(tmp_path / "r", accuracy=((0.1, 0.1), None, (0.5, 0.5), None)))
    )
    assert (numbers.round_last, numbers.round_best, numbers.rounds) == (2, 2, 3)


def test_of_equal_averages_the_first_is_best(tmp_path: Path) -> None:
    equal = ((0.1, 0.1), (0.6, 0.6), (0.7, 0.5), (0.5, 0.7))
    assert summarise(read_run(make_run(tmp_path / "r", accuracy=equal))).round_best == 1


def test_personal_accuracy_takes_the_latest_evaluation_of_each_client(run: Run) -> None:
    # after round 3: client-00 still 0.6 from round 2, the others 0.5 and 0.6 from round 3
    numbers = summarise(run)
    assert numbers.personal_last == pytest.approx((0.6 + 0.5 + 0.6) / 3)
    assert numbers.personal_min == pytest.approx(0.5)


def test_a_lucky_single_client_is_not_the_best_personal_round(run: Run) -> None:
    # round 1 evaluated client-00 alone, at 0.99; it does not count, the three were not all seen
    assert [point.round for point in personal_curve(run)] == [2, 3]
    assert summarise(run).personal_best == pytest.approx((0.6 + 0.8 + 0.7) / 3)


def test_traffic_per_round_leaves_the_dense_warm_up_out(run: Run) -> None:
    numbers = summarise(run)
    assert (numbers.bytes_down, numbers.bytes_up) == (17_000_000, 15_000_000)
    assert (numbers.bytes_down_per_round, numbers.bytes_up_per_round) == (4e6, 3e6)


def test_a_method_without_warm_up_averages_over_every_training_round(tmp_path: Path) -> None:
    options = {"strategy.name": "fedavg"}  # fedfip.warmup is another method's option then
    numbers = summarise(read_run(make_run(tmp_path / "r", **options)))
    assert numbers.bytes_down_per_round == pytest.approx(17e6 / 3)


def test_size_and_cost_are_those_after_the_last_round(run: Run) -> None:
    numbers = summarise(run)
    assert (numbers.keep, numbers.parameters, numbers.parameters_mask_counted) == (0.75, 640, 600)
    assert (numbers.flops, numbers.seconds) == (1_500_000, 6.0)


def test_a_run_that_never_evaluates_has_no_accuracy_but_a_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", accuracy=(None, None), personal=(None, None))
    numbers = summarise(read_run(folder))
    assert (numbers.avg_last, numbers.avg_best, numbers.personal_last) == (None, None, None)
    assert "The global network was not evaluated." in markdown(read_run(folder))
    assert "| AVG, last (%) | – |" in markdown(read_run(folder))


def test_clients_are_told_apart(tmp_path: Path) -> None:
    failures = {2: [{"client": "client-01", "reason": "boom"}]}
    first, second, third = summarise_clients(read_run(make_run(tmp_path / "r", failures=failures)))
    assert (first.personal_last, first.personal_best) == (0.6, 0.99)
    assert (second.personal_last, second.personal_best) == (0.5, 0.8)
    assert (third.client, third.private, third.keep) == ("client-02", 3, 0.8)
    assert (first.bytes_up, second.bytes_up, first.bytes_down) == (1_500_000, 1_000_000, 3_000_000)
    assert (first.failures, second.failures) == (0, 1)


def test_the_report_of_a_run_says_everything(tmp_path: Path) -> None:
    reason = "ShapeError: a|b\nsecond line"
    failures = {n: [{"client": "client-01", "reason": reason}] for n in (1, 3)}
    text = markdown(read_run(make_run(tmp_path / "r", failures=failures)))
    assert "Last is round 3, best is round 2." in text
    assert "| AVG, last (%) | 70.00 |" in text
    assert "| MB down, a round after warm-up | 4.00 |" in text
    assert "| best (round 2) | 90.00 | 70.00 | 80.00 | 14.14 |" in text
    assert "| client-02 | mnist 20, usps 10 | 60.00 | 70.00 | 0.800 | 3 | 1.50 | 3.00 | 0 |" in text
    assert "Round 3: 100 of 1000 entries came from no client." in text
    assert "2: 200 (20.0 %)" in text
    assert "| client-01 | 1, 3 | ShapeError: a\\|b second line |" in text
    for word in ("global best", "personal last", "personal best", "`fedfip.warmup`", "torch: 2.14"):
        assert word in text


def test_the_report_says_what_was_scored_on_validation_samples(tmp_path: Path) -> None:
    tuned = make_run(tmp_path / "tuned", **{"partition.validation-fraction": 0.2})
    assert "scored on their validation samples" in markdown(read_run(tuned))
    assert "validation samples" not in markdown(read_run(make_run(tmp_path / "plain")))


def test_the_report_says_how_far_the_plan_was_from_what_came(run: Run) -> None:
    assert "No round was predicted." in markdown(run)
    predicted = {"bytes_up": 400_000, "bytes_down": 1_000_000, "seconds": None}
    predicted |= {"parameters": 700, "round_flops": 10}
    clients = [{**row, "predicted": predicted, "round_flops": 11} for row in run.clients]
    clients[0] |= {"failure": "late", "bytes_up": 10**9}
    assert (
        "Real against predicted, all clients and rounds: bytes up +25.00 %, bytes down +0.00 %, "
        "parameters +0.00 %, training FLOPs +10.00 %." in markdown(replace(run, clients=clients))
    )


def test_a_report_lands_in_the_folder_with_its_plots_and_leaves_no_draft(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    (folder / "report.md").write_text("old")
    written = write_report(folder)
    names = ["report.md", "accuracy.png", "traffic.png", "channels.png", "partition.png"]
    assert [path.name for path in written] == names
    assert "![channels](channels.png)" in (folder / "report.md").read_text()
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written[1:])
    kept = {"config.toml", "partition.json", "metrics.jsonl", "timing.jsonl", "clients.jsonl"}
    assert {path.name for path in folder.iterdir()} == {*names, *kept}


@pytest.mark.usefixtures("no_plots")
def test_without_matplotlib_there_is_a_report_and_a_hint(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    assert report([make_run(tmp_path / "r")], console) == []
    assert "pip install matplotlib" in console.export_text()
    assert not list((tmp_path / "r").glob("*.png"))


def test_pictures_show_what_the_run_holds(run: Run) -> None:
    accuracy, traffic = plots.accuracy_picture(run), plots.traffic_picture(run)
    assert accuracy is not None
    assert traffic is not None
    lines = {line.get_label(): line for line in accuracy.axes[0].get_lines()}
    assert list(lines) == ["mnist", "usps", "AVG", "personal mean"]
    assert lines["usps"].get_xydata().tolist() == [[0, 10], [1, 70], [2, 70], [3, 60]]
    # 18 MB after round 1, then 7 MB a round
    average = traffic.axes[0].get_lines()[0].get_xydata()
    assert average[:, 0].tolist() == [0.0, 18.0, 25.0, 32.0]
    assert average[:, 1].tolist() == pytest.approx([10, 60, 80, 70])


def test_the_channels_picture_names_domains_where_the_method_counts_them(tmp_path: Path) -> None:
    with_shares = plots.channels_picture(read_run(make_run(tmp_path / "a")))
    without = plots.channels_picture(read_run(make_run(tmp_path / "b", importance=False)))
    assert with_shares is not None
    assert without is not None
    kept, shares = with_shares.axes[:2]
    assert [bar.get_height() for bar in kept.patches] == [8, 16, 6, 12]
    assert [label.get_text() for label in shares.get_yticklabels()] == ["mnist", "usps"]
    assert shares.images[0].get_array().tolist() == [[0.25, 0.75], [0.5, 0.5]]
    assert len(without.axes) == 1


def test_runs_that_differ_in_the_seed_are_one_recipe(tmp_path: Path) -> None:
    seeds = [
        read_run(
            make_run(tmp_path / f"s{seed}" / "r", accuracy=(None, (a, a)), **{"run.seed": seed})
        )
        for seed, a in ((1, 0.6), (2, 0.8))
    ]
    other = read_run(make_run(tmp_path / "o", **{"strategy.name": "fedavg", "model.name": "cnn"}))
    groups = recipes([*seeds, other])
    assert [[run.name for run in group] for _, group in groups] == [["r", "r"], ["o"]]
    assert "run.seed" not in groups[0][0]
    assert groups[1][0]["model.name"] == "cnn"
    mean, spread = mean_and_spread([summarise(run) for run in seeds])["avg_last"]
    assert mean == pytest.approx(0.7)
    assert spread == pytest.approx(0.1414, abs=1e-4)
    assert mean_and_spread([summarise(other)])["avg_last"] == (pytest.approx(0.7), None)


@pytest.mark.usefixtures("no_plots")
def test_several_runs_are_compared_on_the_terminal(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"seed-{seed}", accuracy=(None, (a, a)), **{"run.seed": seed})
        for seed, a in ((1, 0.6), (2, 0.8))
    ]
    folders.append(make_run(tmp_path / "dense", **{"strategy.name": "fedavg"}))
    console = Console(record=True, width=220)
    assert report(folders, console) == []
    text = console.export_text()
    table = next(line for line in text.splitlines() if "70.00 ±14.14" in line)
    assert table.split()[:3] == ["fedfip", "run.rounds=1", "2"]
    assert "dense" in text
    assert str(tmp_path / "seed-2" / "report.md") in text.replace("\n", "")


@pytest.mark.usefixtures("no_plots")
def test_a_narrow_terminal_cuts_no_number_off(tmp_path: Path) -> None:
    console = Console(record=True, width=40)
    report([make_run(tmp_path / "1234567890123456789-fedfip-digits")], console)
    row = next(line for line in console.export_text().splitlines() if "fedfip " in line)
    accuracy, cost = "3 70.00 80.00 14.14 56.67 70.00 50.00", "0.750 640 600 1.50M"
    assert " ".join(row.split()[-17:]) == f"{accuracy} {cost} 15.00 17.00 3.00 4.00 6.0 0"


def test_a_line_that_was_cut_off_is_left_out_and_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    for name in ("clients", "metrics"):
        path = folder / f"{name}.jsonl"
        path.write_bytes(path.read_bytes()[:-20])
    run = read_run(folder)
    assert [row["round"] for row in run.rounds] == [0, 1, 2]
    assert len(run.clients) == 8
    assert not run.finished
    assert "metrics.jsonl: the last line (4) is cut off and left out" in run.notes
    assert "unfinished: 2 of 3 rounds are there" in run.notes


@pytest.mark.usefixtures("no_plots")
def test_a_cut_line_alone_is_no_error(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r") / "timing.jsonl"
    path.write_text(path.read_text()[:-5])
    console = Console(record=True, width=200)
    assert report([tmp_path / "r"], console) == []
    assert "timing.jsonl: the last line (4) is cut off" in console.export_text()


@pytest.mark.usefixtures("no_plots")
def test_an_unfinished_run_is_reported_and_is_an_error(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", **{"run.rounds": 10})
    problems = report([folder], Console(record=True, width=200))
    assert problems == [f"{folder}: unfinished: 3 of 10 rounds are there"]
    assert "**unfinished: 3 of 10 rounds are there**" in (folder / "report.md").read_text()


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.jsonl", None, "metrics.jsonl: No such file"),
        ("clients.jsonl", None, "clients.jsonl: No such file"),
        ("partition.json", None, "partition.json: No such file"),
        ("partition.json", "[1]", "partition.json: damaged: an object was expected"),
        ("partition.json", '{"cli', "partition.json: damaged"),
        ("config.toml", "run.rounds = ", "config.toml: damaged"),
        ("metrics.jsonl", "", "metrics.jsonl: holds no round yet"),
        ("metrics.jsonl", '{"round": 0, "global"', "metrics.jsonl: holds no round yet"),
        ("metrics.jsonl", '{"rou\n{"round": 1}\n', "metrics.jsonl, line 1: damaged"),
        ("metrics.jsonl", '{"round": 0, "global": null}\n', "line 1: damaged: lacks personal"),
        ("timing.jsonl", "3\n", "timing.jsonl, line 1: damaged: no object"),
    ],
)
def test_what_is_missing_or_damaged_is_named(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    folder, good = make_run(tmp_path / "bad"), make_run(tmp_path / "good")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    problems = report([folder, good], Console(record=True, width=200))
    assert len(problems) == 1
    assert words in problems[0]
    assert (good / "report.md").exists()
    assert not (folder / "report.md").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no-such-run: no such folder"):
        read_run(tmp_path / "no-such-run")
