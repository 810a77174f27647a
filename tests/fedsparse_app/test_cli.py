"""The command line: what it understands, and what it says and returns when things go wrong."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedsparse_app import inprocess, launch, plots
from fedsparse_app.cli import app
from fedsparse_app.overrides import app_options, parse_overrides
from tests.fedsparse_app.test_report import make_run


class FakeLink:
    """A SuperLink that has already run everything: it answers from what it was given."""

    def __init__(self, lines: list[str], statuses: list[tuple[str, str]]) -> None:
        self.lines, self.statuses = lines, statuses
        self.submitted: tuple[Path, Mapping[str, object], str] | None = None

    def submit(self, app: Path, run_config: Mapping[str, object], federation: str) -> str:
        self.submitted = app, run_config, federation
        return "17"

    def log(self, run_id: str) -> Iterator[str]:
        yield from self.lines

    def status(self, run_id: str) -> tuple[str, str]:
        return self.statuses.pop(0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in the folder of a Flower App with three options."""
    (tmp_path / "pyproject.toml").write_text(
        "[tool.flwr.app.config]\nrun.rounds = 20\nrun.output-dir = '~/x'\nfederation.clients = 5\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.0)
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def run_with(
    monkeypatch: pytest.MonkeyPatch, link: FakeLink, *arguments: str
) -> tuple[Result, FakeLink]:
    @contextmanager
    def fake() -> Iterator[FakeLink]:
        yield link

    monkeypatch.setattr(launch, "local_superlink", fake)
    return invoke("run", *arguments), link


COMPLETED = [("finished:completed", "")]


def test_overrides_are_read_as_flower_reads_them(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('[strategy]\nname = "fedavg"\n[run]\nseed = 3\n')
    items = ["run.rounds=5 strategy.name='a b' fedfip.sa=true", 'x.y="="', "model.lr=1e-3"]
    assert parse_overrides(items) == {
        "run.rounds": 5,
        "strategy.name": "a b",
        "fedfip.sa": True,
        "x.y": "=",
        "model.lr": 0.001,
    }
    both = parse_overrides([str(tmp_path / "recipe.toml"), "run.seed=4"])
    assert both == {"strategy.name": "fedavg", "run.seed": 4}


def test_options_of_one_section_may_come_in_several_places() -> None:
    assert parse_overrides(["run.rounds=5", "run.seed=2"]) == {"run.rounds": 5, "run.seed": 2}


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("run.rounds", "run.rounds: not key=value"),
        ("run.rounds=5 nonsense", "nonsense: not key=value"),
        ("strategy.name=fedfip", "strategy.name: fedfip is no TOML value.*strategy.name='fedfip'"),
        ("train.sizes=[1,2]", r"train.sizes: \[1, 2\] is a list.*'a,b,c'"),
        ("no-such.toml", "no-such.toml: cannot be read"),
    ],
)
def test_an_override_that_cannot_be_read_is_named(item: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_overrides([item])


def test_a_run_gets_its_options_clients_and_an_absolute_output_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, link = run_with(monkeypatch, FakeLink(["hello"], list(COMPLETED)), "--rounds", "3")
    assert result.exit_code == 0
    options = {"run.rounds": 3, "run.output-dir": str(home / "runs")}
    settings = "num-supernodes=5 client-resources-num-cpus=1"
    assert link.submitted == (home, options, settings)
    assert result.output == "hello\n"


def test_options_of_their_own_win_over_overrides(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ["-c", "run.rounds=9 federation.clients=9 run.output-dir='b'"]
    typed += ["--rounds", "2", "--clients", "4", "--workers", "1", "--output-dir", "a"]
    result, link = run_with(monkeypatch, FakeLink([], list(COMPLETED)), ".", *typed)
    assert result.exit_code == 0
    assert link.submitted is not None
    _, options, settings = link.submitted
    expected = {"run.rounds": 2, "federation.clients": 4, "run.output-dir": str(home / "a")}
    assert options == expected
    assert settings == "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=1"


def test_a_relative_output_folder_in_an_override_is_the_callers(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ["-c", "run.output-dir='elsewhere'"]
    _, link = run_with(monkeypatch, FakeLink([], list(COMPLETED)), *place)
    assert link.submitted is not None
    assert link.submitted[1]["run.output-dir"] == str(home / "elsewhere")


def test_the_run_folder_is_found_in_the_log_and_printed_last(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "runs" / "17-fedfip").mkdir(parents=True)
    lines = [
        f"\x1b[92mINFO\x1b[0m: run folder: {home}/runs/17-fedfip",
        "round 1",
        f"{home}/runs/no",
    ]
    result, _ = run_with(monkeypatch, FakeLink(lines, list(COMPLETED)))
    assert result.output.splitlines()[-1] == f"run folder: {home}/runs/17-fedfip"
    assert "\x1b" not in result.output


def test_a_log_that_ends_early_does_not_decide(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = [("running", ""), ("running", ""), ("finished:failed", "out of memory")]
    result, link = run_with(monkeypatch, FakeLink(["INFO all is well"], statuses))
    assert result.exit_code == 1
    assert link.statuses == []
    assert "error: finished:failed: out of memory" in result.output


def test_a_failed_run_shows_the_last_errors_of_its_log(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["Traceback (most recent call last):", "  File x", "ValueError: no such model", "bye"]
    result, _ = run_with(monkeypatch, FakeLink(lines, [("finished:failed", "")]))
    assert result.stderr == "error: finished:failed\n  ValueError: no such model\n"


def test_an_option_the_app_does_not_have_is_named_before_anything_starts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FakeLink([], [])
    result, _ = run_with(monkeypatch, link, "-c", "run.round=5")
    assert (result.exit_code, link.submitted) == (1, None)
    assert "run.round: the app has no such option, did you mean 'run.rounds'?" in result.stderr


def test_a_folder_without_an_app_is_named(home: Path) -> None:
    (home / "empty").mkdir()
    result = invoke("run", "empty")
    assert result.exit_code == 1
    assert "pyproject.toml: no Flower App" in result.stderr
    assert "Traceback" not in result.output


def test_the_projects_own_app_declares_the_options_the_command_sets() -> None:
    known = app_options(Path(__file__).parents[2])
    assert {"run.rounds", "run.output-dir", "federation.clients"} <= known.keys()


def test_in_process_hands_over_the_same_options(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Mapping[str, object]] = []

    def fake(overrides: Mapping[str, object]) -> Path:
        seen.append(overrides)
        return home / "runs" / "1"

    monkeypatch.setattr(inprocess, "run", fake)
    result = invoke("run", "--in-process", "--clients", "4", "-c", "run.seed=2")
    options = {"run.seed": 2, "federation.clients": 4, "run.output-dir": str(home / "runs")}
    assert seen == [options]
    assert (result.exit_code, result.output) == (0, f"run folder: {home}/runs/1\n")


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_in_process_failures_say_why(
    home: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(overrides: Mapping[str, object]) -> Path:
        raise kind("run.rounds = 0: must be >= 1")

    monkeypatch.setattr(inprocess, "run", fail)
    result = invoke("run", "--in-process")
    assert result.exit_code == 1
    assert result.stderr == "error: run.rounds = 0: must be >= 1\n"
    # a wrong option is the user's to mend; where a run failed is for the log
    assert ("Traceback" in result.stdout) == (kind is RuntimeError)


def test_in_process_refuses_what_it_cannot_honour(home: Path) -> None:
    result = invoke("run", "--in-process", "--workers", "2")
    assert result.exit_code == 1
    assert "one client at a time" in result.stderr


def test_report_exits_with_1_when_a_folder_is_no_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    good = make_run(tmp_path / "good")
    assert invoke("report", str(good)).exit_code == 0
    result = invoke("report", str(good), str(tmp_path / "none"))
    assert result.exit_code == 1
    assert f"error: {tmp_path}/none: no such folder" in result.stderr
    assert str(good / "report.md") in result.stdout.replace("\n", "")


def test_channels_prints_the_groups_of_a_model() -> None:
    result = invoke("channels", "cnn", "--shape", "3,28,28")
    assert result.exit_code == 0
    assert "conv1" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cnm",), "did you mean"),
        (("cnn", "--shape", "3,x"), "--shape 3,x: not a shape"),
        (("cnn", "--shape", "0,28,28"), "--shape 0,28,28: not a shape"),
    ],
)
def test_channels_names_what_is_wrong(arguments: tuple[str, ...], words: str) -> None:
    result = invoke("channels", *arguments)
    assert result.exit_code == 1
    assert words.lower() in result.stderr.lower()


def test_a_report_needs_neither_torch_nor_flower() -> None:
    code = "import sys, fedsparse_app.cli, fedsparse_app.report, fedsparse_app.launch; "
    code += "print(sorted({'torch', 'flwr', 'ray', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
