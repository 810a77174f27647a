import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from task.channels import Axis, ChannelMap, GatePoint
from task.channels_view import describe
from task.errors import DataError
from task.segments import pack, unpack
from tests.task.networks import NAMES, some, traced

laws = settings(max_examples=40, derandomize=True, deadline=None)


def axis(group: list[int], channel: list[int], role: str) -> Axis:
    return Axis(np.array(group, np.int32), np.array(channel, np.int64), role)


def toy() -> ChannelMap:
    """Two groups of three and two channels; a reader of both over two places, one fixed column."""
    reader = axis([0, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1], [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 0], "in")
    return ChannelMap(
        groups={"a": 3, "b": 2},
        axes={
            "a.weight": (axis([0, 0, 0], [0, 1, 2], "out"), None),
            "b.weight": (axis([1, 1], [0, 1], "out"), axis([0, 0, 0], [0, 1, 2], "in")),
            "c.weight": (None, reader),
            "count": (),
        },
        gates=(
            GatePoint("a", 1, np.zeros(3, np.int32), np.arange(3)),
            GatePoint("b", 1, np.ones(2, np.int32), np.arange(2)),
        ),
        exact={"a": True, "b": True},
        pinned={"c": "gives the outputs of the network"},
    )


KEPT = {"a": np.array([0, 2]), "b": np.array([1])}


def test_index_names_the_coordinates_that_stay() -> None:
    rows = [None if x is None else x.tolist() for x in toy().index("c.weight", KEPT)]
    assert rows == [None, [0, 1, 4, 5, 8, 9, 10]]
    rows = [None if x is None else x.tolist() for x in toy().index("b.weight", KEPT)]
    assert rows == [[1], [0, 2]]
    assert toy().index("count", KEPT) == ()
    with pytest.raises(DataError, match="'d' is not in the channel map"):
        toy().index("d", KEPT)


def test_a_group_that_is_not_named_stays_whole() -> None:
    rows = toy().index("b.weight", {"b": np.array([0])})
    assert [None if x is None else x.tolist() for x in rows] == [[0], [0, 1, 2]]


def test_restrict_numbers_channels_from_zero_again() -> None:
    small = toy().restrict(KEPT)
    assert small.groups == {"a": 2, "b": 1}
    assert small.size == 3
    reader = small.axes["c.weight"][1]
    assert reader is not None
    assert reader.group.tolist() == [0, 0, 0, 0, 1, 1, -1]
    assert reader.channel.tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert small.gates[0].channel.tolist() == [0, 1]


def test_restricting_twice_is_restricting_to_what_is_left() -> None:
    once = toy().restrict({"a": np.array([1, 2])}).restrict({"a": np.array([1])})
    assert once.to_json() == toy().restrict({"a": np.array([2])}).to_json()


@pytest.mark.parametrize(("keep", "widths"), [(1.0, (3, 2)), (0.5, (2, 1)), (0.01, (1, 1))])
def test_prefix_keeps_the_first_channels_and_at_least_one(
    keep: float, widths: tuple[int, int]
) -> None:
    kept = toy().prefix(keep)
    assert {name: channels.tolist() for name, channels in kept.items()} == {
        "a": list(range(widths[0])),
        "b": list(range(widths[1])),
    }


@laws
@given(st.lists(st.booleans(), min_size=5, max_size=5))
def test_mask_and_kept_undo_each_other(bits: list[bool]) -> None:
    bits[0] = bits[3] = True
    mask = np.array(bits)
    kept = toy().kept(mask)
    assert np.array_equal(toy().mask(kept), mask)
    assert all(np.array_equal(kept[n], toy().kept(toy().mask(kept))[n]) for n in kept)
    with pytest.raises(DataError, match=r"shape \(4,\)"):
        toy().kept(mask[:4])


def test_split_and_join_undo_each_other() -> None:
    vector = torch.arange(10.0).reshape(2, 5)
    parts = toy().split(vector)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {"a": (2, 3), "b": (2, 2)}
    assert torch.equal(toy().join(parts), vector)
    with pytest.raises(DataError, match="must be 5"):
        toy().split(vector[:, :4])
    with pytest.raises(DataError, match=r"\['b'\]"):
        toy().join({"a": parts["a"]})


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"aa": np.array([0])}, "unknown group 'aa', did you mean 'a'"),
        ({"a": np.array([], np.int64)}, r"kept\['a'\] is empty"),
        ({"a": np.array([0, 3])}, r"kept\['a'\] reaches from 0 to 3, out of range"),
        ({"a": np.array([-1, 0])}, "out of range"),
        ({"b": np.array([1, 0])}, r"kept\['b'\] is not sorted"),
        ({"b": np.array([1, 1])}, "twice"),
        ({"b": np.array([True, False])}, "type bool"),
        ({"b": np.array([[0]])}, r"shape \(1, 1\)"),
    ],
)
def test_kept_channels_that_make_no_sense_are_refused_by_name(
    kept: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        toy().check(kept)
    with pytest.raises(ValueError, match=message):
        toy().mask(kept)


def test_sensible_channels_pass_the_check() -> None:
    assert toy().check(KEPT) is None
    assert toy().check({"a": np.array([2], np.int32)}) is None


@laws
@given(st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 3), st.integers(1, 3)), max_size=8))
def test_segments_give_back_any_coordinates(runs: list[tuple[int, int, int]]) -> None:
    group = np.array([g for g, _, n in runs for _ in range(n)], np.int32)
    channel = np.array([c if g >= 0 else 0 for g, c, n in runs for _ in range(n)], np.int64)
    segments = pack(group, channel)
    again = unpack(json.loads(json.dumps(segments)))
    assert np.array_equal(again[0], group)
    assert np.array_equal(again[1], channel)
    assert len(segments) <= max(1, len(runs))


def test_a_flattened_convolution_is_one_segment() -> None:
    group, channel = np.zeros(512 * 49, np.int32), np.repeat(np.arange(512), 49)
    assert pack(group, channel) == [[0, 0, 512, 49]]


@pytest.mark.parametrize("name", NAMES)
def test_json_gives_back_the_map(name: str) -> None:
    cmap = traced(name)[2]
    again = ChannelMap.from_json(cmap.to_json())
    assert again.to_json() == cmap.to_json()
    assert list(again.groups) == list(cmap.groups)
    kept = some(cmap, seed=1)
    for key, entries in cmap.axes.items():
        assert again.axes.keys() == cmap.axes.keys()
        for mine, theirs in zip(cmap.index(key, kept), again.index(key, kept), strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or np.array_equal(mine, theirs)
        for old, new in zip(entries, again.axes[key], strict=True):
            assert old is None or (new is not None and new.group.dtype == old.group.dtype)


def test_the_view_shows_groups_shares_pins_and_totals() -> None:
    state = {
        "a.weight": torch.zeros(3, 2),
        "b.weight": torch.zeros(2, 3),
        "c.weight": torch.zeros(4, 11),
        "count": torch.tensor(0),
    }
    lines = describe(toy(), state).splitlines()
    # a: 6 of its own, 6 read by b, 24 read by c, of 57; b: 6 and 16 of 57
    assert lines[1].split() == ["a", "3", "a", "b,", "c", "63.2", "%"]
    assert lines[2].split() == ["b", "2", "b", "c", "38.6", "%"]
    assert lines[4] == "stays whole:"
    assert lines[5].split(maxsplit=1) == ["c", "gives the outputs of the network"]
    assert lines[7].startswith("2 groups, 5 channels, 57 parameters, of which 1 ")
    assert lines[0].index("written by") == lines[1].index("a  ", 5)


@pytest.mark.parametrize("name", ["resnet18", "lstm", "own-attention"])
def test_the_view_fits_any_network(name: str) -> None:
    model, _, cmap = traced(name)
    text = describe(cmap, model.state_dict())
    assert all(name in text for name in [*cmap.groups, *cmap.pinned.values()])
    parameters = sum(p.numel() for p in model.parameters())
    assert f"{parameters:,} parameters" in text
