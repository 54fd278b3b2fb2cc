"""The histogram: within 1%, and the same whether counted together or apart."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from loadtests.kit.histogram import Histogram

values = st.lists(st.floats(min_value=1e-5, max_value=1e4), min_size=1, max_size=200)


@given(values, st.sampled_from([0.5, 0.9, 0.95, 0.99, 1.0]))
def test_quantiles_are_within_one_percent(numbers: list[float], share: float) -> None:
    """Of the value that so many are not above."""
    exact = sorted(numbers)[max(1, math.ceil(share * len(numbers))) - 1]
    assert math.isclose(Histogram.of(numbers).quantile(share), exact, rel_tol=0.0101)


@given(values, values)
def test_merging_is_counting_together(some: list[float], others: list[float]) -> None:
    """Two workers' histograms are one worker's."""
    merged, together = Histogram.of(some), Histogram.of(some + others)
    merged.merge(Histogram.of(others))
    assert merged.buckets == together.buckets
    assert (merged.count, merged.least, merged.most) == (together.count, together.least, together.most)
    assert math.isclose(merged.total, together.total)


@given(values)
def test_it_survives_a_message(numbers: list[float]) -> None:
    """What is read from JSON is what was written."""
    made = Histogram.of(numbers)
    assert Histogram.read(json.loads(json.dumps(made.plain()))) == made


def test_nothing_counted_is_zero() -> None:
    """An empty one has no quantiles, and says so in a message too."""
    empty = Histogram.read(Histogram().plain())
    assert (empty.count, empty.mean, empty.quantile(0.99)) == (0, 0.0, 0.0)


def test_no_gap_is_a_gap() -> None:
    """Zeros are counted, though a logarithm has none."""
    made = Histogram.of([0.0, 0.0, 0.0, 1.0])
    assert made.quantile(0.5) < 1e-5
    assert math.isclose(made.quantile(1.0), 1.0)
