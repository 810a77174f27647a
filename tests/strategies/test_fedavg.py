import torch

from tests.strategies.federation import Federation


def test_the_new_model_is_the_mean_of_the_clients_weighted_by_samples():
    run = Federation(clients=3)
    state = run.run(rounds=1)
    updates = run.rounds[1].updates
    total = sum(u.samples for u in updates)
    for name, tensor in state.items():
        if tensor.is_floating_point():
            naive = sum(u.samples / total * u.state[name] for u in updates)
            assert torch.allclose(tensor, naive, atol=1e-6), name
        else:
            assert torch.equal(tensor, updates[0].state[name])


def test_every_client_starts_from_the_global_model():
    run = Federation(clients=2)
    run.run(rounds=2)
    for job in run.rounds[2].jobs.values():
        assert job.sent is job.kept
        assert job.state.keys() == run.model.state_dict().keys()


def test_one_client_alone_is_plain_training():
    from strategies import FederationOptions

    run = Federation(clients=1, federation=FederationOptions(min_replies=1, wait=1.0))
    state = run.run(rounds=1)
    alone = run.rounds[1].updates[0].state
    assert all(torch.equal(state[name], alone[name]) for name in state)


def test_a_small_width_is_fedavg_of_the_leading_channels_and_leaves_the_rest():
    run = Federation(keep=0.5)
    state = run.run(rounds=2)
    before = run.model.state_dict()
    assert run.rounds[2].updates[0].state["3.weight"].shape[:2] == (6, 4)
    assert torch.equal(state["3.weight"][6:], before["3.weight"][6:])
    assert torch.equal(state["3.weight"][:, 4:], before["3.weight"][:, 4:])
    assert not torch.equal(state["3.weight"][:6, :4], before["3.weight"][:6, :4])
