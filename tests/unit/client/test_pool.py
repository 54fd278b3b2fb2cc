"""Streams are spread over a few channels."""

from __future__ import annotations

from collections.abc import Callable

from tritonstream.pool import Pool


def _numbers() -> Callable[[], int]:
    numbers = iter(range(100))
    return lambda: next(numbers)


def test_the_least_loaded_channel_is_taken() -> None:
    """Load is evened out, and what is given back counts."""
    pool = Pool(_numbers(), 3)
    lanes = [pool.take() for _ in range(7)]
    assert [lane.channel for lane in lanes] == [0, 1, 2, 0, 1, 2, 0]
    for lane in lanes:
        if lane.channel == 1:
            pool.give(lane)
    assert [pool.take().channel for _ in range(2)] == [1, 1]  # 3, 2 and 2 streams now


def test_one_stream_at_a_time_needs_one_channel() -> None:
    """A channel is opened only when all others are in use."""
    pool = Pool(_numbers(), 3)
    for _ in range(5):
        with pool.lane() as lane:
            assert lane.channel == 0
    assert pool.drain() == [0]


def test_a_drained_pool_opens_anew() -> None:
    """What was taken before can still be given back."""
    pool = Pool(_numbers(), 1)
    old = pool.take()
    assert pool.drain() == [0]
    assert pool.take().channel == 1
    pool.give(old)
    assert pool.drain() == [1]
