"""When requests are due, whatever becomes of those before: the arrivals of an open loop.

Read by users.py. No I/O. One user is one arrival process of a small rate, so a test of N users has N times that rate,
however locust spreads them over workers: Poisson processes add up to one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Literal

Kind = Literal["poisson", "constant"]


def arrivals(kind: Kind, rate: float, dice: random.Random, begin: float) -> Iterator[float]:
    """Times from `begin` on at which requests are due, `rate` a second; equal dice make equal times.

    Raises ValueError for a rate that is none.
    """
    if not rate > 0:
        raise ValueError(f"a rate must be above 0 requests/s, got {rate:g}")
    # A user's first one comes anywhere in its interval: users that start together must not ask together.
    gap: Callable[[], float] = (lambda: dice.expovariate(rate)) if kind == "poisson" else (lambda: 1.0 / rate)
    due = begin + (gap() if kind == "poisson" else dice.random() / rate)
    while True:
        yield due
        due += gap()
