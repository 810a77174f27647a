import math

import dp_accounting
import pytest
import torch
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.errors import ShapeError
from strategies.ops.gaussian import clip, direction, epsilon, normal

law = settings(derandomize=True, deadline=None, max_examples=40)
numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)
vectors = st.lists(numbers, min_size=1, max_size=40).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)


@law
@given(vectors, st.floats(1e-6, 1e6))
def test_nothing_that_a_client_can_have_is_longer_than_the_bound(vector, bound):
    clipped = clip(vector, bound)
    assert math.sqrt(math.fsum(x * x for x in clipped.tolist())) <= bound * (1 + 1e-15)
    if not vector.isfinite().all():
        assert not clipped.any()
    elif float(vector.norm()) <= bound:
        assert torch.equal(clipped, vector)
    else:
        assert torch.allclose(clipped / bound, vector / vector.norm(), atol=1e-9)


@law
@given(vectors)
def test_a_direction_has_norm_one_or_is_zero(vector):
    unit = direction(vector)
    assert float(unit.norm()) == pytest.approx(1.0) or not unit.any()
    assert float(unit.norm()) <= 1.0 + 1e-12
    if vector.isfinite().all() and vector.any():
        assert torch.allclose(unit, vector / vector.norm())


@pytest.mark.parametrize("generator", [torch.Generator().manual_seed(3), None], ids=["seed", "os"])
def test_noise_is_standard_normal(generator):
    drawn = normal(200_000, generator)  # the bounds are six standard errors and more
    assert drawn.dtype == torch.float64
    assert abs(float(drawn.mean())) < 0.015
    assert float(drawn.std()) == pytest.approx(1.0, abs=0.01)
    for quantile in (-2.0, -0.5, 1.0, 3.0):
        below = float((drawn < quantile).double().mean())
        assert below == pytest.approx(float(torch.special.ndtr(torch.tensor(quantile))), abs=0.008)


def test_noise_of_the_system_cannot_be_seeded():
    torch.manual_seed(1)
    first = normal(8, None)
    torch.manual_seed(1)
    assert not torch.equal(first, normal(8, None))


@pytest.mark.parametrize("z", [0.05, 1.0, 4.0])
@pytest.mark.parametrize(("rounds", "delta"), [(1, 1e-5), (20, 1e-3), (300, 1e-9)])
def test_epsilon_is_that_of_an_independent_accountant_and_below_its_renyi_bound(z, rounds, delta):
    found = epsilon(math.sqrt(rounds) / z, delta)
    exact = dp_accounting.get_epsilon_gaussian(z / math.sqrt(rounds), delta)
    assert found == pytest.approx(exact, rel=1e-9)
    renyi = rdp.RdpAccountant()
    renyi.compose(dp_accounting.GaussianDpEvent(z), rounds)
    assert found < renyi.get_epsilon(delta) < 1.6 * found + 1


def test_epsilon_of_rounds_with_different_noise_is_that_of_composed_loss_distributions():
    composed = pld.PLDAccountant()
    for z in (2.0, 3.0, 3.0):
        composed.compose(dp_accounting.GaussianDpEvent(z))
    found = epsilon(math.sqrt(1 / 4 + 2 / 9), 1e-5)
    assert found == pytest.approx(composed.get_epsilon(1e-5), rel=1e-5)


def test_epsilon_at_its_ends():
    assert epsilon(0.0, 1e-5) == 0.0
    assert epsilon(1e-6, 1e-5) == 0.0
    assert epsilon(1e4, 1e-5) == pytest.approx(5e7, rel=0.01)
    assert epsilon(1e10, 1e-5) == pytest.approx(5e19, rel=0.01)  # next to no noise at all
    for mu, delta in ((-1.0, 0.1), (math.nan, 0.1), (math.inf, 0.1), (1.0, 0.0), (1.0, 1.0)):
        with pytest.raises(ShapeError, match="delta in"):
            epsilon(mu, delta)
