"""Sixteen users, each asking again as soon as it has its answer: 64 tokens in, 128 out."""

import random

from loadtests.kit import settings
from loadtests.kit.prompts import Fixed
from loadtests.kit.users import ClosedUser

settings.defaults(num_users=16, spawn_rate=16, run_time="60s")


class Steady(ClosedUser):
    """One of the sixteen."""

    def source(self, dice: random.Random) -> Fixed:
        """Prompts that no cache can serve."""
        return Fixed(dice, tokens_in=64, tokens_out=128)
