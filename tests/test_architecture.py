"""What keeps the project readable: direction of imports, one list of options, nothing left out."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest

from fedsparse_app.config import SECTIONS, read
from strategies import STRATEGIES
from task.data import DATASETS
from task.models import MODELS

ROOT = Path(__file__).parent.parent
PACKAGES = ("task", "strategies", "fedsparse_app")
FLWR_FILES = {"base.py", "exchange.py", "records.py", "hello.py", "arrays.py"}


def sources(*packages):
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path, *, top_level_only=False):
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", sources("task"), ids=str)
def test_task_knows_nothing_of_federation(path):
    assert not {"strategies", "fedsparse_app", "flwr"} & set(imports(path))


@pytest.mark.parametrize("path", sources("strategies"), ids=str)
def test_strategies_do_not_know_the_app_and_flwr_stays_in_its_files(path):
    found = set(imports(path))
    assert "fedsparse_app" not in found
    assert "flwr" not in found or path.name in FLWR_FILES


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=str)
def test_heavy_packages_are_not_imported_with_a_module(path):
    heavy = {"ot", "matplotlib", "sklearn", "mlxtend", "flwr_datasets", "datasets", "PIL"}
    heavy |= {"onnx", "onnxscript", "onnxruntime"}
    if path.name == "multidomain.py":  # a subclass of their partitioner, itself imported late
        heavy -= {"flwr_datasets", "datasets"}
    assert not heavy & set(imports(path, top_level_only=True))


def test_client_imports_without_ot_matplotlib_and_sklearn():
    code = (
        "import sys\n"
        "for name in ('ot', 'matplotlib', 'sklearn', 'mlxtend', 'flwr_datasets', 'ray'):\n"
        "    sys.modules[name] = None\n"
        "import fedsparse_app.client_app\n"
        "print(fedsparse_app.client_app.app)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pyproject_lists_every_option_with_the_default_of_its_class():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    listed = {f"{section}.{key}": v for section, keys in table.items() for key, v in keys.items()}
    known = {
        f"{section}.{field.name.replace('_', '-')}": field.default
        for section, options in SECTIONS.items()
        for field in fields(options)
    }
    assert listed == known
    assert read(listed) == read({})


def test_every_option_in_pyproject_has_a_comment_or_speaks_for_itself():
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("[tool.flwr.app.config]")[1].split("\n[tool.")[0]
    bare = [line for line in block.splitlines() if "=" in line and "#" not in line]
    assert {line.split(" ")[0] for line in bare} <= {
        "run.rounds",
        "train.lr",
        "train.momentum",
        "train.weight-decay",
        "train.batch-size",
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_the_file_of_its_name_with_paper_and_differences(name):
    text = ast.get_docstring(ast.parse((ROOT / "strategies" / f"{name}.py").read_text()))
    assert text is not None
    assert "Differences from the paper" in text


def test_tables_have_the_promised_entries():
    assert set(STRATEGIES) >= {"fedavg", "fedfip"}
    assert set(DATASETS) >= {"digits"}
    assert set(MODELS) >= {"cnn", "resnet10", "resnet18", "vgg11", "mobilenetv2"}


def test_files_are_of_a_readable_size():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources(*PACKAGES)
        if (lines := len(path.read_text().splitlines())) > 300
    }
    # FEDFIP's two halves stay in one file, as the paper's algorithm is one.
    assert set(long) <= {"strategies/fedfip.py"}


def test_every_test_asserts():
    silent = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                names = [n for n in ast.walk(node) if isinstance(n, ast.Assert | ast.Call)]
                if not any(isinstance(n, ast.Assert) or _asserts(n) for n in names):
                    silent.append(f"{path.name}::{node.name}")
    assert silent == []


def _asserts(call):
    name = ast.unparse(call.func)
    return name in {"pytest.raises", "pytest.fail"} or name.split(".")[-1].startswith("assert")


def test_the_bundle_that_flower_ships_holds_the_three_packages(tmp_path):
    flwr = Path(sys.executable).with_name("flwr")
    done = subprocess.run(
        [flwr, "build", "--app", str(ROOT)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (bundle,) = tmp_path.glob("*.fab")
    packed = set(zipfile.ZipFile(bundle).namelist())
    wanted = {str(path.relative_to(ROOT)) for path in sources(*PACKAGES)}
    assert wanted <= packed
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in packed)
