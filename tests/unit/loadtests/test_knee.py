"""The knee of a ramp, on curves whose knee is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.kit import knee
from loadtests.kit.knee import Step


def step(offered: float, latency: float, completed: float | None = None, errors: float = 0.0) -> Step:
    """A step of a ramp."""
    return Step(
        offered=offered,
        completed=offered if completed is None else completed,
        ttft_p50=latency / 2,
        ttft_p95=latency,
        total_p95=latency,
        tokens_per_s=offered * 100,
        error_rate=errors,
    )


def queue(rates: list[float], capacity: float) -> list[Step]:
    """A server as queueing theory has it (M/M/1): its latency is 1 / (capacity - rate) until it carries no more."""
    return [
        step(rate, 1 / (capacity - rate)) if rate < capacity else step(rate, 30.0, completed=capacity) for rate in rates
    ]


@given(st.floats(20, 500))
def test_a_queue_has_its_knee_below_its_capacity(capacity: float) -> None:
    """Whatever the capacity: above half of it, and not at a step that was not carried."""
    rates = [capacity * share for share in (0.1, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 1.1, 1.3)]
    steps = queue(rates, capacity)
    found = knee.find(steps)
    assert found is not None
    assert 0.5 * capacity <= steps[found].offered < capacity
    assert steps[found].carried


@given(st.floats(0.001, 10), st.lists(st.floats(-0.1, 0.1), min_size=6, max_size=6))
def test_a_flat_line_has_none(latency: float, noise: list[float]) -> None:
    """A server that is not loaded has no knee, noise or not."""
    assert knee.find([step(10.0 * (n + 1), latency * (1 + off)) for n, off in enumerate(noise)]) is None


def test_a_wall_is_a_knee() -> None:
    """A server that refuses at once past its limit, without slowing down before, has it at the last step before."""
    steps = [step(rate, 0.05) for rate in (10, 20, 40)] + [step(80, 0.05, completed=45, errors=0.4)]
    assert knee.find(steps) == 2


def test_too_much_from_the_beginning() -> None:
    """The knee is below the ramp: none of its steps is it."""
    assert knee.find([step(10, 5.0, completed=3), step(20, 9.0, completed=3)]) is None


@pytest.mark.parametrize(("completed", "errors", "carried"), [(95, 0, True), (85, 0, False), (100, 0.2, False)])
def test_a_step_is_carried_when_what_was_asked_was_answered(completed: float, errors: float, *, carried: bool) -> None:
    """Less than 90% answered, or more than 10% failed, is not."""
    assert step(100, 1.0, completed, errors).carried is carried
