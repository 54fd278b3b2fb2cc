"""What is open, counted over all workers: the ground on which a request is let in or turned away.

A small shared memory that every worker maps. Each writes a row of its own, so that the row of one that was killed can
be struck out; sums and limits are exact, for they are read and written under a lock that the kernel frees with its
holder. It is taken twice or three times a request (some µs), never for a token.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Iterator, Sequence

from tritonstream_gateway.errors import overloaded, too_many
from tritonstream_gateway.keys import Key

_OPEN, _WAITING, _KEYS = 0, 1, 2  # columns of a row; one for each key from the third on
_WORD = 8


class Ledger:
    """The counters. `worker` is the row that is written; `max_open` and `max_waiting` bound the sums of all rows."""

    def __init__(
        self, descriptor: int, workers: int, keys: Sequence[Key], worker: int, max_open: int, max_waiting: int
    ) -> None:
        self._descriptor = descriptor
        self._workers = workers
        self._keys = keys
        self._worker = worker
        self._max_open, self._max_waiting = max_open, max_waiting
        self._width = _KEYS + len(keys)
        memory = memoryview(mmap.mmap(descriptor, size(workers, len(keys))))
        rows = workers * self._width * _WORD
        self._counts = memory[:rows].cast("q")
        self._buckets = memory[rows:].cast("d")  # two for each key: tokens left, and when that was so

    @staticmethod
    def create(workers: int, keys: int) -> int:
        """Make the shared memory, for workers to inherit; returns its file descriptor."""
        descriptor = os.memfd_create("tritonstream-gateway-ledger")
        os.ftruncate(descriptor, size(workers, keys))
        return descriptor

    def admit(self, key: int | None) -> Ticket:
        """Let a request in, or raise Failure: 503 when the server is full, 429 when its key is."""
        with self._locked():
            if self._sum(_OPEN) >= self._max_open:
                raise overloaded(f"{self._max_open} requests are open, as many as this gateway takes", "full")
            if self._sum(_WAITING) >= self._max_waiting:
                raise overloaded(f"{self._max_waiting} requests wait for their first token, as many as may", "waiting")
            if key is not None:
                self._check(key)
                self._add(_KEYS + key, 1)
            self._add(_OPEN, 1)
            self._add(_WAITING, 1)
        return Ticket(self, key)

    def open_requests(self) -> int:
        """How many requests are open in all workers."""
        with self._locked():
            return self._sum(_OPEN)

    def waiting(self) -> int:
        """How many of them have no first token yet."""
        with self._locked():
            return self._sum(_WAITING)

    def strike(self, worker: int) -> None:
        """Forget what a worker had open that is dead."""
        with self._locked():
            for column in range(self._width):
                self._counts[worker * self._width + column] = 0

    def settle(self, columns: Sequence[int], key: int | None, tokens: int) -> None:
        """Count down `columns`, and charge a key for what its request took."""
        with self._locked():
            for column in columns:
                self._add(column, -1)
            if key is not None and self._keys[key].tokens_per_minute is not None:
                self._buckets[2 * key] -= tokens

    def _check(self, key: int) -> None:
        limits = self._keys[key]
        if limits.max_concurrency is not None and self._sum(_KEYS + key) >= limits.max_concurrency:
            raise too_many(f"key {limits.name!r} has {limits.max_concurrency} requests open, as many as it may", "key")
        if limits.tokens_per_minute is not None:
            left = self._refill(key, limits.tokens_per_minute)
            if left <= 0:
                wait = -left * 60 / limits.tokens_per_minute
                text = f"key {limits.name!r} has used up its {limits.tokens_per_minute} tokens a minute"
                raise too_many(text, "tokens", wait)

    def _refill(self, key: int, rate: int) -> float:
        """Bring a key's bucket up to date: it holds a minute's tokens, and what a request took may leave it in debt."""
        now = time.monotonic()
        left, since = self._buckets[2 * key], self._buckets[2 * key + 1]
        left = float(rate) if since == 0 else min(float(rate), left + (now - since) * rate / 60)
        self._buckets[2 * key], self._buckets[2 * key + 1] = left, now
        return left

    def _sum(self, column: int) -> int:
        return sum(self._counts[row * self._width + column] for row in range(self._workers))

    def _add(self, column: int, amount: int) -> None:
        self._counts[self._worker * self._width + column] += amount

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)  # a lock of the process: a worker has one thread
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


class Ticket:
    """One request that was let in: `start` it with its first token, `close` it in any case."""

    def __init__(self, ledger: Ledger, key: int | None) -> None:
        self._ledger = ledger
        self._key = key
        self._waiting = True

    def start(self) -> None:
        """Say that it has its first token."""
        if self._waiting:
            self._waiting = False
            self._ledger.settle((_WAITING,), None, 0)

    def close(self, tokens: int) -> None:
        """Say that it is over, and what it took."""
        columns = [_OPEN] + ([_WAITING] if self._waiting else []) + ([] if self._key is None else [_KEYS + self._key])
        self._ledger.settle(columns, self._key, tokens)


def size(workers: int, keys: int) -> int:
    """The bytes that the counters take."""
    return (workers * (_KEYS + keys) + 2 * keys) * _WORD
