"""Lengths as they come together: chats, summaries of long texts, long answers, one-word answers; an open loop."""

import random

from loadtests.kit import settings
from loadtests.kit.prompts import Mixed
from loadtests.kit.users import OpenUser

settings.defaults(num_users=30, spawn_rate=30, run_time="120s")


class Arrivals(OpenUser):
    """One request/s of any kind."""

    def source(self, dice: random.Random) -> Mixed:
        """Each kind is its share, words in, tokens out."""
        return Mixed(dice, [(0.5, 64, 128), (0.2, 1_024, 128), (0.1, 64, 1_024), (0.2, 128, 4)])
