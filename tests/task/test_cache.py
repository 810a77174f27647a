import io
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from task.data import cache

ARRAYS = {"x": np.arange(600, dtype=np.uint8).reshape(2, 300), "z": np.array([1.5, -2.0])}


class Builder:
    """Counts how often it is asked."""

    calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return ARRAYS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSPARSE_CACHE", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a
    )


def test_the_first_call_builds_and_the_second_reads_the_same_arrays(folder):
    build = Builder()
    first, second = cache.cached("a-key", build), cache.cached("a-key", build)
    assert build.calls == 1
    assert same(first, ARRAYS)
    assert same(second, ARRAYS)
    assert [path.name for path in folder.iterdir()] == ["a-key.npz"]


def test_another_key_is_another_file(folder):
    build = Builder()
    cache.cached("a", build)
    cache.cached("b", build)
    assert build.calls == 2
    assert sorted(path.name for path in folder.iterdir()) == ["a.npz", "b.npz"]


def pickled(whole: bytes) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=np.array([{"code": "runs"}], dtype=object))
    return buffer.getvalue()


def one_byte_changed(whole: bytes) -> bytes:
    at = whole.index(bytes(range(100, 200)))  # inside the values of x
    return whole[:at] + b"\xff" + whole[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: b"not an archive",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-10],
        one_byte_changed,
        pickled,
    ],
)
def test_a_damaged_file_is_built_anew_and_repaired(folder, damage, caplog):
    build = Builder()
    cache.cached("a", build)
    path = folder / "a.npz"
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        again = cache.cached("a", build)
    assert same(again, ARRAYS)
    assert "building it anew" in caplog.text
    assert same(cache.cached("a", build), ARRAYS)
    assert build.calls == 2


def test_a_folder_that_cannot_be_written_means_no_cache_and_a_warning(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDSPARSE_CACHE", str(tmp_path / "file"))
    build = Builder()
    with caplog.at_level(logging.WARNING):
        assert same(cache.cached("a", build), ARRAYS)
    assert "cannot be written" in caplog.text
    assert same(cache.cached("a", build), ARRAYS)
    assert build.calls == 2


def test_a_write_that_fails_half_way_leaves_no_file_behind(folder, monkeypatch):
    def refuse(source, target):
        assert Path(source).stat().st_size > 600
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    assert same(cache.cached("a", Builder()), ARRAYS)
    assert list(folder.iterdir()) == []


def test_an_error_of_the_builder_reaches_the_caller_and_stores_nothing(folder):
    def fail():
        raise ValueError("no such source")

    with pytest.raises(ValueError, match="no such source"):
        cache.cached("a", fail)
    assert not folder.exists()


def test_a_key_depends_on_every_part_and_on_where_parts_end():
    keys = [
        cache.key("a"),
        cache.key("b"),
        cache.key("a", "x"),
        cache.key("a", "xy", "z"),
        cache.key("a", "x", "yz"),
        cache.key("a", "xyz"),
    ]
    assert len(set(keys)) == len(keys)
    assert cache.key("a", "xyz") == cache.key("a", b"xyz")


def test_versions_name_what_is_installed_and_what_is_not():
    assert cache.versions("numpy", "no-such-package-here") == (
        f"numpy=={np.__version__} no-such-package-here==absent"
    )


def test_the_default_folder_is_in_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDSPARSE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    cache.cached("a", Builder())
    assert (tmp_path / ".cache" / "fedsparse" / "a.npz").exists()
