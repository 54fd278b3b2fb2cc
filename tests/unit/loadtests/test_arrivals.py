"""Arrivals of an open loop: their rate, and that they repeat."""

from __future__ import annotations

import random
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.kit.arrivals import Kind, arrivals

kinds = st.sampled_from(["poisson", "constant"])


@given(kinds, st.floats(0.01, 1000), st.integers(), st.floats(0, 1e6))
def test_times_rise_from_the_beginning(kind: Kind, rate: float, seed: int, begin: float) -> None:
    """None is before the test began, and none before the one before it."""
    due = list(islice(arrivals(kind, rate, random.Random(seed), begin), 50))
    assert due[0] >= begin
    assert all(before <= after for before, after in pairwise(due))


@given(kinds, st.integers())
def test_equal_dice_make_equal_times(kind: Kind, seed: int) -> None:
    """A test can be repeated."""
    first, second = (list(islice(arrivals(kind, 5.0, random.Random(seed), 0.0), 20)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("kind", ["poisson", "constant"])
def test_many_users_have_their_rates_together(kind: Kind) -> None:
    """A hundred users of 1 request/s make 100 requests/s, as one generator of that rate would: within 5% in 40 s."""
    due = [
        time
        for user in range(100)
        for time in islice(arrivals(kind, 1.0, random.Random(f"seed/{user}"), 0.0), 200)
        if time < 40
    ]
    assert len(due) == pytest.approx(4_000, rel=0.05)
    # Spread evenly, too: no second has more than Poisson's counts would have once in 10,000 tests.
    assert max(sum(second <= time < second + 1 for time in due) for second in range(40)) < 150


def test_constant_ones_are_evenly_spaced() -> None:
    """Each as far from the last as from the next."""
    due = list(islice(arrivals("constant", 4.0, random.Random(1), 10.0), 20))
    assert [after - before for before, after in pairwise(due)] == pytest.approx([0.25] * 19)


def test_no_rate_is_refused() -> None:
    """With the value and its bound."""
    with pytest.raises(ValueError, match="above 0 requests/s, got 0"):
        next(arrivals("poisson", 0.0, random.Random(1), 0.0))
