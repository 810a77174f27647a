import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import fedsparse_app
from fedsparse_app.pictures import split_picture

PARTITION = {
    "domains": ["mnist", "syn"],
    "classes": ["0", "1", "2"],
    "clients": {
        "client-01": {"domains": {"mnist": 3, "syn": 4}, "classes": [7, 0, 0]},
        "client-00": {"domains": {"syn": 5}, "classes": [1, 2, 2]},
    },
}


def bars(axes):
    """Client, start and length of every bar that has a length, by its legend."""
    drawn = {}
    for container in axes.containers:
        for client, bar in enumerate(container):
            if bar.get_width() > 0:
                drawn[client, container.get_label()] = (bar.get_x(), bar.get_width())
    return drawn


def test_bars_stack_the_counts_of_each_client_by_domain_and_by_class():
    left, right = split_picture(PARTITION).axes
    assert bars(left) == {(0, "syn"): (0, 5), (1, "mnist"): (0, 3), (1, "syn"): (3, 4)}
    assert bars(right) == {(0, "0"): (0, 1), (0, "1"): (1, 2), (0, "2"): (3, 2), (1, "0"): (0, 7)}
    assert [label.get_text() for label in left.get_yticklabels()] == ["client-00", "client-01"]


@pytest.mark.parametrize("classes", [1, 10, 40])
def test_the_picture_can_be_written_without_a_display(tmp_path, classes):
    clients = {
        f"client-{k:02d}": {"domains": {"a": classes}, "classes": [1] * classes} for k in range(3)
    }
    names = [f"class {c}" for c in range(classes)]
    figure = split_picture({"domains": ["a"], "classes": names, "clients": clients})
    figure.savefig(tmp_path / "split.png")
    assert isinstance(figure, Figure)
    assert (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")


def test_every_name_has_a_colour_of_its_own():
    names = [str(c) for c in range(30)]
    clients = {"client-00": {"domains": {"a": 30}, "classes": [1] * 30}}
    right = split_picture({"domains": ["a"], "classes": names, "clients": clients}).axes[1]
    assert len({container[0].get_facecolor() for container in right.containers}) == 30


def test_importing_the_module_does_not_import_matplotlib():
    code = "import sys, fedsparse_app.pictures; print('matplotlib' in sys.modules)"
    root = Path(fedsparse_app.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
