import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from task.data import folder
from task.data.folder import Agreement, read
from task.errors import DataError

TWO = Agreement(("cat", "dog"), ("photo", "sketch"), channels=3, side=8)
ONE = Agreement(("cat", "dog"), ("all",), channels=1, side=8)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FEDSPARSE_CACHE", str(place))
    return place


def pixels(seed, shape=(8, 8, 3)):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def put(path: Path, array: np.ndarray, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)
    return path


@pytest.fixture
def root(tmp_path):
    for i, place in enumerate(("photo/cat/b", "photo/cat/a", "photo/dog/c", "sketch/dog/d")):
        put(tmp_path / f"data/{place}.png", pixels(i))
    return tmp_path / "data"


def test_images_come_with_class_and_domain_in_the_order_of_paths(root):
    got = read(root, TWO)
    assert got.skipped == ()
    assert got.samples.y.tolist() == [0, 0, 1, 1]
    assert got.samples.domain.tolist() == [0, 0, 0, 1]
    wanted = np.stack([pixels(i).transpose(2, 0, 1) for i in (1, 0, 2, 3)])
    assert got.samples.x.dtype == torch.uint8
    assert np.array_equal(got.samples.x.numpy(), wanted)
    assert got.samples.y.dtype == got.samples.domain.dtype == torch.int64


def test_indices_are_those_of_the_agreement_whatever_a_client_holds(root):
    other = Agreement(("emu", "dog", "cat"), ("sketch", "clip", "photo"), 3, 8)
    samples = read(root, other).samples
    assert samples.y.tolist() == [2, 2, 1, 1]
    assert samples.domain.tolist() == [2, 2, 2, 0]


def test_without_domain_folders_the_only_domain_or_the_folders_name_counts(root):
    only = Agreement(("cat", "dog"), ("all",), 3, 8)
    assert read(root / "photo", only).samples.domain.tolist() == [0, 0, 0]
    assert read(root / "sketch", TWO).samples.domain.tolist() == [1]


def test_of_many_domains_a_nameless_one_is_refused(root):
    (root / "photo").rename(root.parent / "mine")
    with pytest.raises(DataError, match=r"mine: holds class folders \(cat\).*photo, sketch"):
        read(root.parent / "mine", TWO)


def image(root, place):
    put(root / f"{place}/x.png", pixels(9))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: image(r, "photo/bird"), ["photo/bird", "'bird' is no class", "cat, dog"]),
        (lambda r: image(r, "clip/dog"), ["clip", "'clip' is no domain", "photo, sketch"]),
        (lambda r: (r / "sketch/cat").mkdir(), ["sketch/cat", "class 'cat' holds no image"]),
        (lambda r: (r / "cat").mkdir(), ["cat", "no name says of which domain"]),
        (lambda r: (r / "sketch/dog/d.png").write_bytes(b"?"), ["class 'dog'", "d.png", "read"]),
    ],
)
def test_what_the_federation_does_not_know_and_empty_classes_are_refused(root, change, words):
    change(root)
    with pytest.raises(DataError) as caught:
        read(root, TWO)
    for word in words:
        assert word in str(caught.value)


def test_an_empty_domain_and_an_empty_or_missing_root_are_refused(root, tmp_path):
    (tmp_path / "bare/photo").mkdir(parents=True)
    with pytest.raises(DataError, match="domain 'photo' holds no class folder"):
        read(tmp_path / "bare", TWO)
    (tmp_path / "bare/photo").rmdir()
    with pytest.raises(DataError, match="bare: no folders; wanted are <domain>/<class>/image"):
        read(tmp_path / "bare", TWO)
    with pytest.raises(DataError, match="nowhere: No such file"):
        read(tmp_path / "nowhere", TWO)
    with pytest.raises(DataError, match=r"a\.png: Not a directory"):
        read(root / "photo/cat/a.png", TWO)


def test_damaged_files_are_skipped_and_named_and_cost_nothing_else(root):
    whole = (root / "photo/cat/a.png").read_bytes()
    damaged = {"e.png": whole[:60], "f.jpg": b"", "g.png": b"not an image", "h.png": whole[:8]}
    for name, content in damaged.items():
        (root / "photo/cat" / name).write_bytes(content)
    (root / "photo/cat/i.png").symlink_to("nothing.png")
    got = read(root, TWO)
    assert got.samples.y.tolist() == [0, 0, 1, 1]
    assert np.array_equal(got.samples.x[2].numpy(), pixels(2).transpose(2, 0, 1))
    assert [reason.split(" ")[0] for reason in got.skipped] == [
        f"photo/cat/{name}" for name in ("e.png", "f.jpg", "g.png", "h.png", "i.png")
    ]
    assert "FileNotFoundError" in got.skipped[4]


def test_hidden_names_and_other_files_are_ignored_and_nested_images_and_links_count(root):
    cats = root / "photo/cat"
    put(cats / ".thumb.png", pixels(4))
    put(cats / ".hidden/x.png", pixels(4))
    put(root / ".git/dog/x.png", pixels(4))
    put(root / "loose.png", pixels(4))
    (cats / "notes.txt").write_text("notes")
    put(cats / "2024/may/x.JPG", pixels(4))
    (cats / "link.png").symlink_to(root / "photo/dog/c.png")
    (cats / "loop").symlink_to(cats)
    (root / "sketch/cat").symlink_to(cats)
    got = read(root, TWO)
    assert got.skipped == ()
    assert torch.bincount(got.samples.domain * 2 + got.samples.y).tolist() == [4, 1, 4, 1]


def test_images_of_any_kind_become_squares_of_the_agreed_size_and_channels(tmp_path):
    wide = np.zeros((8, 16, 3), dtype=np.uint8)
    wide[:, 4:12] = 200  # the middle square
    put(tmp_path / "cat/wide.png", wide)
    put(tmp_path / "cat/large.png", np.full((40, 40), 200, dtype=np.uint8))
    put(tmp_path / "cat/deep.png", np.full((8, 8), 200 * 256 + 7, dtype=np.uint16))
    alpha = np.full((8, 8, 4), 200, dtype=np.uint8)
    put(tmp_path / "cat/alpha.png", alpha)
    assert (read(tmp_path, ONE).samples.x == 200).all()
    colour = Agreement(("cat",), ("all",), 3, 8)
    assert read(tmp_path, colour).samples.x.shape == (4, 3, 8, 8)
    assert (read(tmp_path, colour).samples.x == 200).all()


def test_a_camera_that_was_held_sideways_is_righted(tmp_path):
    about = Image.Exif()
    about[0x0112] = 6  # the top of the scene is on the right of the picture
    lying = np.zeros((8, 8), dtype=np.uint8)
    lying[:, 4:] = 255
    put(tmp_path / "cat/a.png", lying, exif=about)
    upright = read(tmp_path, ONE).samples.x[0, 0]
    assert (upright[:4] == upright[0, 0]).all()
    assert upright[0, 0] != upright[7, 0]


def test_floating_point_pixels_are_skipped(root):
    put(root / "photo/cat/f.tif", np.ones((8, 8), dtype=np.float32))
    assert "no agreed range" in read(root, TWO).skipped[0]


def test_pixels_are_decoded_once_also_for_the_next_process_until_a_file_changes(root, monkeypatch):
    decoded, real = [], folder._picture
    monkeypatch.setattr(folder, "_picture", lambda path, *a: decoded.append(path) or real(path, *a))
    first = read(root, TWO)
    read(root, TWO)
    assert len(decoded) == 4
    folder._decoded.cache_clear()  # as a new process has it
    assert torch.equal(read(root, TWO).samples.x, first.samples.x)
    assert len(decoded) == 4
    changed = put(root / "photo/cat/a.png", pixels(7))
    os.utime(changed, ns=(1, 1))
    again = read(root, TWO).samples
    assert len(decoded) == 8
    assert np.array_equal(again.x[0].numpy(), pixels(7).transpose(2, 0, 1))


def test_a_data_set_without_samples_has_names_and_shape():
    data = folder.data_set(TWO)
    assert (data.shape, len(data.train), len(data.test)) == ((3, 8, 8), 0, 0)
    assert (data.classes, data.domains) == (TWO.classes, TWO.domains)
