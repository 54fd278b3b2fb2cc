"""A quiet rate with bursts of many times as much: how high the queue rises, and how soon it is gone."""

import random
from collections.abc import Callable
from typing import Any

from loadtests.kit import settings, shapes
from loadtests.kit.prompts import Fixed
from loadtests.kit.users import OpenUser


def _arguments(add: Callable[..., Any]) -> None:
    add("--base-rate", type=float, default=10.0, help="requests/s between bursts")
    add("--burst-rate", type=float, default=100.0, help="requests/s in a burst")
    add("--burst-seconds", type=float, default=5.0, help="how long a burst is")
    add("--period", type=float, default=30.0, help="seconds from one burst to the next")
    add("--bursts", type=int, default=3, help="how many there are")


settings.arguments(_arguments)


class Burst(shapes.Burst):
    """The rates over time."""


class Arrivals(OpenUser):
    """64 tokens in, 128 out."""

    def source(self, dice: random.Random) -> Fixed:
        """Prompts that no cache can serve."""
        return Fixed(dice, tokens_in=64, tokens_out=128)
