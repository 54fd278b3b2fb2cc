"""Objectives: what they may say, and when they are kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.kit import slo


def test_times_shares_and_rates() -> None:
    """Each has its own units, and all are compared in seconds, shares of 1, and numbers per second."""
    found = slo.parse("ttft_p95<800ms, itl_p99 <= 0.05s,error_rate<1%, output_tokens_per_s>1000, queue_mean<500us")
    assert [(one.metric, one.compare) for one in found] == [
        ("ttft_p95", "<"),
        ("itl_p99", "<="),
        ("error_rate", "<"),
        ("output_tokens_per_s", ">"),
        ("queue_mean", "<"),
    ]
    assert [one.bound for one in found] == pytest.approx([0.8, 0.05, 0.01, 1000, 0.0005])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft_p95", "is like"),
        ("ttft_p42<1s", "ttft_p42"),
        ("ttft_p95<800", "in us, ms, s or m"),
        ("ttft_p95<8%", "in us, ms, s or m"),
        ("error_rate<1ms", "in %"),
        ("requests_per_s>1.2.3", "not a number"),
        ("error_rate=1%", "is like"),
    ],
)
def test_nonsense_is_named(text: str, said: str) -> None:
    """Whatever cannot be meant is refused, with what was said and what may be."""
    with pytest.raises(ValueError, match=said):
        slo.parse(text)


@given(st.sampled_from(["<", "<=", ">", ">="]), st.floats(0.001, 100), st.floats(0.001, 100))
def test_kept_is_what_the_comparison_says(compare: str, bound: float, value: float) -> None:
    """For every comparison, bound and value."""
    bound = round(bound, 6)
    (one,) = slo.parse(f"ttft_p95{compare}{bound:.6f}s")
    kept = {"<": value < bound, "<=": value <= bound, ">": value > bound, ">=": value >= bound}[compare]
    assert one.judge({"ttft_p95": value}).kept == kept or math.isclose(value, bound)


def test_what_was_not_measured_is_not_kept() -> None:
    """A test without an answer proves nothing of its latency."""
    (one,) = slo.parse("ttft_p95<800ms")
    verdict = one.judge({"error_rate": 0.0})
    assert not verdict.kept
    assert "not measured" in verdict.told


def test_a_verdict_shows_both_figures() -> None:
    """The bound as it was given, and what was measured."""
    (one,) = slo.parse("error_rate<1%")
    assert one.judge({"error_rate": 0.034}).told == "BROKEN  error_rate<1%  (3.400%)"
