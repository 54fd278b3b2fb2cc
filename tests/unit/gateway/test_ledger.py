"""What is open, counted over processes; and the limits of keys."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tritonstream_gateway.errors import Failure
from tritonstream_gateway.keys import Key, hash_of
from tritonstream_gateway.ledger import Ledger

KEYS = (
    Key(name="free", sha256=hash_of("a")),
    Key(name="two", sha256=hash_of("b"), max_concurrency=2),
    Key(name="slow", sha256=hash_of("c"), tokens_per_minute=600),
)
HAMMER = """
import sys
from tritonstream_gateway.ledger import Ledger
ledger = Ledger(int(sys.argv[1]), 4, (), int(sys.argv[2]), 10**6, 10**6)
for _ in range(500):
    ticket = ledger.admit(None); ticket.start(); ticket.close(1)
ledger.admit(None)
"""


@pytest.fixture
def descriptor() -> Iterator[int]:
    """The shared memory of four workers."""
    made = Ledger.create(4, len(KEYS))
    yield made
    os.close(made)


def ledger(descriptor: int, worker: int, max_open: int = 10, max_waiting: int = 10) -> Ledger:
    """The ledger as a worker sees it."""
    return Ledger(descriptor, 4, KEYS, worker, max_open, max_waiting)


def refused(of: Ledger, key: int | None = None) -> tuple[int, str]:
    """The status and the reason with which a request is turned away."""
    with pytest.raises(Failure) as failure:
        of.admit(key)
    assert int(failure.value.headers["retry-after"]) >= 1
    return failure.value.status, failure.value.reason


def test_sums_are_over_all_workers(descriptor: int) -> None:
    """What one has open the other counts; a first token ends the waiting, a close frees both."""
    one, two = (ledger(descriptor, worker, max_open=3, max_waiting=2) for worker in range(2))
    first, _ = one.admit(None), two.admit(None)
    assert refused(one) == refused(two) == (503, "waiting")
    first.start()
    second = two.admit(None)
    second.start()
    assert (two.open_requests(), two.waiting()) == (3, 1)
    assert refused(one) == (503, "full")
    second.close(5)
    assert one.open_requests() == 2


def test_a_key_has_its_own_limit(descriptor: int) -> None:
    """Beyond its concurrency a key gets 429, and others do not."""
    one, two = (ledger(descriptor, worker) for worker in range(2))
    ticket = one.admit(1)
    two.admit(1)
    assert refused(one, 1) == refused(two, 1) == (429, "key")
    one.admit(0)
    ticket.close(0)
    two.admit(1)


def test_tokens_are_paid_afterwards(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key may go into debt once; it is served again when its share has paid it off, and never saves up more."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    one = ledger(descriptor, 0)
    one.admit(2).close(700)
    with pytest.raises(Failure) as failure:
        one.admit(2)
    assert (failure.value.reason, failure.value.headers["retry-after"]) == ("tokens", "10")
    now[0] += 10.5
    one.admit(2).close(0)
    now[0] += 3_600
    one.admit(2).close(601)
    assert refused(one, 2) == (429, "tokens")


def test_a_dead_workers_row_is_struck_out(descriptor: int) -> None:
    """What it had open is not counted any more."""
    one, two = (ledger(descriptor, worker) for worker in range(2))
    one.admit(1)
    two.admit(1)
    two.strike(0)
    assert (two.open_requests(), two.waiting()) == (1, 1)
    two.admit(1)


def test_counts_are_exact_under_load() -> None:
    """Four processes at once: at the end one request each is open, no more and no less."""
    descriptor = Ledger.create(4, 0)
    processes = [
        subprocess.Popen([sys.executable, "-c", HAMMER, str(descriptor), str(worker)], pass_fds=[descriptor])
        for worker in range(4)
    ]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert Ledger(descriptor, 4, (), 0, 1, 1).open_requests() == 4
    os.close(descriptor)


def test_a_key_with_nonsense_is_refused() -> None:
    """A limit must be a whole number of at least 1, a hash 64 digits."""
    for wrong in ({"max_concurrency": 0}, {"tokens_per_minute": -1}, {"sha256": "secret"}):
        with pytest.raises(Exception, match="key 'free'"):
            replace(KEYS[0], **wrong)
