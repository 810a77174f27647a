import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord

from strategies import STRATEGIES, FederationOptions
from strategies.exchange import receive
from strategies.records import Hello
from tests.strategies.federation import Federation

METHODS = list(STRATEGIES)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("method", METHODS)
def test_too_few_replies_leave_the_model_as_it_was_and_the_run_goes_on(method):
    federation = FederationOptions(min_replies=4, wait=1.0)
    run = Federation(method, tamper={"client-02": ValueError("x")}, federation=federation)
    state = run.run(rounds=2)
    assert equal(state, run.model.state_dict())
    assert [r.merged for r in run.rounds] == [False, False, False]


def test_missing_clients_are_counted_in_the_error():
    run = Federation(clients=3, federation=FederationOptions(wait=1.0))
    run.server.exchange.federation = FederationOptions(clients=5, wait=1.0)
    with pytest.raises(RuntimeError, match=r"3 of 5 clients after 1 s.*federation\.clients"):
        run.run()


@pytest.mark.parametrize("method", METHODS)
def test_one_node_can_serve_many_clients_and_the_result_is_the_same(method):
    assert equal(Federation(method, nodes=2).run(), Federation(method, nodes=4).run())


def test_the_order_of_replies_does_not_matter(monkeypatch):
    straight = Federation().run()
    monkeypatch.setattr("strategies.base.receive", lambda *about: receive(*about)[::-1])
    assert equal(straight, Federation().run())


def test_sampling_depends_on_seed_and_round_only():
    federation = FederationOptions(fraction=0.5, wait=1.0)

    def sampled(seed):
        run = Federation(seed=seed, clients=6, federation=federation)
        run.run(rounds=4)
        return [sorted(r.jobs) for r in run.rounds[1:]]

    first = sampled(1)
    assert first == sampled(1)
    assert first != sampled(2)
    assert all(len(clients) == 3 for clients in first)
    assert len({tuple(clients) for clients in first}) > 1


def test_a_client_that_comes_back_under_a_new_node_id_is_itself_again():
    run = Federation(clients=3)
    before = dict(run.grid.contexts)

    def restart(round):
        run.rounds.append(round)
        if round.number == 1:
            old = next(iter(run.grid.contexts))
            run.grid.contexts[999] = run.grid.contexts.pop(old)

    run.server.on_round = restart
    run.run(rounds=3)
    assert set(before) != set(run.grid.contexts)
    assert [len(r.updates) for r in run.rounds] == [0, 3, 3, 3]


def test_a_node_that_is_gone_is_not_asked():
    run = Federation(clients=3)
    run.server.on_round = lambda round: (
        run.rounds.append(round),
        run.grid.contexts.pop(next(iter(run.grid.contexts))) if round.number == 1 else None,
    )
    run.run(rounds=2)
    assert sorted(run.rounds[2].jobs) == ["client-01", "client-02"]


@pytest.mark.parametrize("method", METHODS)
def test_clients_can_score_the_global_network_themselves(method):
    federation = FederationOptions(evaluate_on="clients", wait=1.0)
    run = Federation(method, federation=federation)
    run.run(rounds=2)
    assert int(run.rounds[2].scores.total.sum()) == 4 * 6
    server = Federation(method)
    server.run(rounds=2)
    assert run.rounds[2].bytes_down["client-00"] > server.rounds[2].bytes_down["client-00"]
    assert server.rounds[2].scores is None


def test_rounds_between_evaluations_carry_no_scores_but_the_last_does():
    run = Federation(federation=FederationOptions(evaluate_every=2, wait=1.0))
    run.run(rounds=3)
    assert [r.updates[0].scores is not None for r in run.rounds[1:]] == [False, True, True]


@pytest.mark.parametrize("method", METHODS)
def test_a_strategy_can_be_dropped_into_another_flower_app(method):
    run = Federation(method)
    seen = []
    result = run.server.start(
        run.grid,
        ArrayRecord(run.model.state_dict()),
        num_rounds=2,
        timeout=5.0,
        evaluate_fn=lambda number, arrays: seen.append(number) or MetricRecord({"a": 1.0}),
    )
    assert seen == [0, 1, 2]
    assert equal(result.arrays.to_torch_state_dict(), run.server.state)
    assert set(result.evaluate_metrics_serverapp) == {0, 1, 2}
    assert result.train_metrics_clientapp[2]["replies"] == 4


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_model_and_another_seed_another(method):
    assert equal(Federation(method, seed=3).run(), Federation(method, seed=3).run())
    assert not equal(Federation(method, seed=3).run(), Federation(method, seed=4).run())


@pytest.mark.parametrize("method", METHODS)
def test_training_helps(method):
    run = Federation(method)
    run.run(rounds=8)
    losses = [r.updates[0].loss for r in run.rounds[1:]]
    assert losses[-1] < 0.7 * losses[0]


def test_scores_of_another_task_are_refused_with_the_reason():
    from strategies.records import encode_scores
    from task.train import Scores

    def other(content):
        if "scores" in content and "numbers" not in content:
            scores = Scores(torch.ones(1, 2).long(), torch.ones(1, 2).long(), torch.zeros(1))
            return encode_scores(scores)
        return content

    federation = FederationOptions(evaluate_on="clients", wait=1.0)
    run = Federation(tamper={"client-02": other}, federation=federation)
    run.run(rounds=1)
    assert "scores: shape (1, 2)" in run.rounds[1].failures["client-02"]
    assert int(run.rounds[1].scores.total.sum()) == 3 * 6


def test_a_resumed_run_begins_after_the_last_round_and_its_patience_goes_on():
    toy = Federation(tamper=dict.fromkeys(("client-00", "client-01", "client-02"), None))
    hellos = [Hello(f"client-0{i}", {"0": 26}) for i in range(4)]
    toy.server.resume(5, {}, hellos, starved=1)
    with pytest.raises(RuntimeError, match="3 rounds in a row"):
        toy.run(rounds=9)
    assert [round.number for round in toy.rounds] == [6]  # no initial model; the 7th was too much


def test_a_resumed_run_that_has_no_rounds_left_asks_nobody():
    toy = Federation()
    toy.server.resume(2, {}, [Hello("client-99", {"0": 26})], starved=0)
    state = toy.run(rounds=2)
    assert toy.rounds == []
    assert torch.equal(state["0.weight"], toy.model.state_dict()["0.weight"])


def test_a_resumed_run_goes_on_without_clients_that_are_gone():
    toy = Federation()
    known = [Hello(f"client-0{i}", {"0": 26}) for i in range(5)]
    toy.server.resume(3, {}, known, starved=0)
    toy.run(rounds=4)
    assert sorted(toy.rounds[0].jobs) == [f"client-0{i}" for i in range(4)]
    assert toy.server.exchange.clients["client-04"] == known[4]


def test_a_resumed_run_waits_for_enough_clients():
    toy = Federation(clients=1)
    federation = FederationOptions(clients=3, min_replies=2, wait=1.0)
    toy.server.exchange.federation = federation
    toy.server.resume(3, {}, [Hello(f"client-0{i}", {"0": 26}) for i in range(3)], starved=0)
    with pytest.raises(RuntimeError, match="1 of 3 clients after 1 s"):
        toy.run(rounds=4)


def test_a_resumed_run_waits_for_all_clients_that_were_met(monkeypatch):
    toy = Federation(clients=5)
    nodes, calls = toy.grid.get_node_ids(), iter(range(9))
    monkeypatch.setattr(toy.grid, "get_node_ids", lambda: nodes[: 4 if next(calls) == 0 else 5])
    toy.server.exchange.federation = FederationOptions(clients=4, wait=30.0)
    toy.server.resume(3, {}, [Hello(f"client-0{i}", {"0": 26}) for i in range(5)], starved=0)
    toy.server.exchange.await_clients(toy.grid)
    assert len(toy.server.exchange.sample(4, toy.grid)) == 5
