import os

import pytest
import torch

from fedsparse_app.files import write_atomically
from fedsparse_app.state import ClientState


def test_what_was_saved_in_an_earlier_round_comes_back(tmp_path):
    state = ClientState(tmp_path, "client-00")
    assert state.load(1) == {}
    state.save(1, {"a": torch.arange(3), "b": torch.tensor(2.5)})
    assert state.load(1) == {}
    back = ClientState(tmp_path, "client-00").load(2)
    assert torch.equal(back["a"], torch.arange(3))
    assert back["b"].item() == 2.5


def test_only_the_last_two_rounds_are_kept(tmp_path):
    state = ClientState(tmp_path, "x")
    for round in (1, 4, 7):
        state.save(round, {"round": torch.tensor(round)})
    assert [state.load(r)["round"].item() for r in (8, 7)] == [7, 4]
    assert state.load(4) == {}


def test_a_round_that_is_done_again_replaces_what_came_after_it(tmp_path):
    state = ClientState(tmp_path, "x")
    for round in (1, 2, 3):
        state.save(round, {"round": torch.tensor(round)})
    state.save(2, {"round": torch.tensor(20)})
    assert state.load(9)["round"].item() == 20
    assert len(list((tmp_path / "x").iterdir())) == 1


def test_arrays_that_share_memory_or_are_not_contiguous_can_be_saved(tmp_path):
    whole, state = torch.arange(6.0).view(2, 3), ClientState(tmp_path, "x")
    state.save(1, {"t": whole.t()})
    assert torch.equal(state.load(2)["t"], whole.t())


@pytest.mark.parametrize("client", ["", "..", "../x", "a/b", ".hidden", "x" * 65, "a b"])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path, client):
    with pytest.raises(ValueError, match="client id"):
        ClientState(tmp_path, client)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def broken(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
