import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from task.data.dataset import Samples
from task.seeding import derive, generator, seeded
from task.train import Scores, TrainingOptions, evaluate, fit


def samples(n=33, classes=3, domains=2, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=draw)
    y = torch.randint(classes, (n,), generator=draw)
    return Samples(x, y, torch.randint(domains, (n,), generator=draw))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def test_fit_is_plain_sgd_over_shuffled_batches():
    data, options = samples(n=12), TrainingOptions(epochs=2, batch_size=4, lr=0.1, clip=0.0)
    ours, naive = network(), network()
    result = fit(ours, data, options, torch.Generator().manual_seed(3))
    order, total = torch.Generator().manual_seed(3), 0.0
    sgd = torch.optim.SGD(naive.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for _ in range(2):
        rows = torch.randperm(12, generator=order)
        for start in (0, 4, 8):
            batch = rows[start : start + 4]
            loss = cross_entropy(naive(data.x[batch]), data.y[batch])
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            total += loss.item() * 4
    for name, tensor in naive.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    assert (result.samples, result.steps) == (24, 6)
    assert result.loss == pytest.approx(total, rel=1e-6)


def test_a_last_batch_of_one_joins_its_neighbour():
    result = fit(
        network(), samples(n=9), TrainingOptions(epochs=1, batch_size=4), generator(1, "x")
    )
    assert (result.samples, result.steps) == (9, 2)


def test_training_on_one_sample_is_refused():
    with pytest.raises(ValueError, match="at least 2 samples"):
        fit(network(), samples(n=1), TrainingOptions(), generator(1, "x"))


def test_a_penalty_changes_the_weights_and_none_does_not():
    data, options = samples(), TrainingOptions(epochs=1)
    plain, same, pulled = network(), network(), network()
    fit(plain, data, options, generator(1, "x"))
    fit(same, data, options, generator(1, "x"), penalty=lambda step: None)
    fit(pulled, data, options, generator(1, "x"), penalty=lambda step: step.logits.pow(2).mean())
    assert torch.equal(plain[0].weight, same[0].weight)
    assert not torch.equal(plain[0].weight, pulled[0].weight)


def test_the_learning_rate_decays_by_round():
    data = samples()
    decayed, small = network(), network()
    fit(decayed, data, TrainingOptions(lr=0.4, lr_decay=0.5), generator(1, "x"), round=3)
    fit(small, data, TrainingOptions(lr=0.1), generator(1, "x"), round=1)
    assert torch.allclose(decayed[0].weight, small[0].weight)


def test_scores_of_parts_add_up_to_the_scores_of_the_whole():
    data, model = samples(n=50), network()
    whole = evaluate(model, data, 2, 3)
    parts = evaluate(model, data.take(range(20)), 2, 3) + evaluate(
        model, data.take(range(20, 50)), 2, 3
    )
    assert torch.equal(whole.correct, parts.correct)
    assert torch.equal(whole.total, parts.total)
    assert torch.allclose(whole.loss, parts.loss)
    assert model.training


def test_scores_count_by_domain_and_class():
    data, model = samples(n=40), network()
    scores = evaluate(model, data, 2, 3, batch_size=7)
    model.eval()
    right = (model(data.x).argmax(1) == data.y) & (data.domain == 1) & (data.y == 2)
    assert scores.correct[1, 2] == right.sum()
    assert scores.total.sum() == 40
    hits = (model(data.x).argmax(1) == data.y).float().mean().item()
    assert scores.accuracy() == pytest.approx(hits)


def test_a_domain_without_samples_has_no_accuracy():
    scores = Scores(torch.tensor([[1, 1], [0, 0]]), torch.tensor([[2, 2], [0, 0]]), torch.zeros(2))
    assert scores.per_domain() == {0: 0.5}


def test_seeds_differ_by_purpose_round_and_client():
    seeds = {
        derive(1, "a", 1, "x"),
        derive(1, "b", 1, "x"),
        derive(1, "a", 2, "x"),
        derive(2, "a", 1, "x"),
    }
    assert len(seeds) == 4
    assert derive(1, "a", 1, "x") == derive(1, "a", 1, "x")


def test_seeded_leaves_the_global_generator_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with seeded(1, "inside"):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with seeded(1, "inside"):
        assert torch.equal(torch.rand(2), inside)
