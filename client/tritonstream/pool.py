"""A few channels for many streams: each call takes the one that carries the fewest.

Shared by both clients. One HTTP/2 connection carries as many streams as its peer allows: Triton itself sets no limit,
many proxies stop at 100, and the streams beyond wait unseen in gRPC. Behind such a proxy, keep at least one channel for
every 100 streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Generic, TypeVar

ChannelT = TypeVar("ChannelT")


class Lane(Generic[ChannelT]):
    """One channel, and how many calls it carries now."""

    __slots__ = ("channel", "load")

    def __init__(self, channel: ChannelT) -> None:
        self.channel = channel
        self.load = 0


class Pool(Generic[ChannelT]):
    """Up to `size` channels, opened when the load asks for them. Safe for threads."""

    def __init__(self, connect: Callable[[], ChannelT], size: int) -> None:
        self._connect = connect
        self._size = size
        self._lanes: list[Lane[ChannelT]] = []
        self._lock = Lock()

    def take(self) -> Lane[ChannelT]:
        """Choose the least loaded channel, or open another while all are in use; `give` it back when done."""
        with self._lock:
            lane = min(self._lanes, key=_load, default=None)
            if lane is None or (lane.load and len(self._lanes) < self._size):
                lane = Lane(self._connect())
                self._lanes.append(lane)
            lane.load += 1
            return lane

    def give(self, lane: Lane[ChannelT]) -> None:
        """Say that a call on `lane` is over."""
        with self._lock:
            lane.load -= 1

    @contextmanager
    def lane(self) -> Iterator[Lane[ChannelT]]:
        """Take a channel for as long as the block lasts."""
        lane = self.take()
        try:
            yield lane
        finally:
            self.give(lane)

    def drain(self) -> list[ChannelT]:
        """Forget all channels and return them, to be closed."""
        with self._lock:
            channels, self._lanes = [lane.channel for lane in self._lanes], []
            return channels


def _load(lane: Lane[ChannelT]) -> int:
    return lane.load
