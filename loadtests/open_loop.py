"""A hundred requests/s that wait for nobody: 64 tokens in, 128 out; -u is the rate, a user for each request/s."""

import random

from loadtests.kit import settings
from loadtests.kit.prompts import Fixed
from loadtests.kit.users import OpenUser

settings.defaults(num_users=100, spawn_rate=100, run_time="60s")


class Arrivals(OpenUser):
    """One request/s, on average."""

    def source(self, dice: random.Random) -> Fixed:
        """Prompts that no cache can serve."""
        return Fixed(dice, tokens_in=64, tokens_out=128)
