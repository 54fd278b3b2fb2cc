"""An open loop whose rate rises until the server no longer carries it; the report names the knee."""

import random
from collections.abc import Callable
from typing import Any

from loadtests.kit import settings, shapes
from loadtests.kit.prompts import Fixed
from loadtests.kit.users import OpenUser


def _arguments(add: Callable[..., Any]) -> None:
    add("--from-rate", type=float, default=5.0, help="requests/s of the first step")
    add("--to-rate", type=float, default=200.0, help="requests/s of the last step")
    add("--steps", type=int, default=12, help="at most: two in a row that the server does not carry end it")
    add("--step-seconds", type=float, default=20.0, help="how long each is held")


settings.arguments(_arguments)


class Ramp(shapes.Ramp):
    """Steps evenly spaced by ratio."""


class Arrivals(OpenUser):
    """64 tokens in, 128 out."""

    def source(self, dice: random.Random) -> Fixed:
        """Prompts that no cache can serve."""
        return Fixed(dice, tokens_in=64, tokens_out=128)
