"""A thousand questions, a few of which nearly everybody asks (Zipf): what caches are for; an open loop."""

import random

from loadtests.kit import settings
from loadtests.kit.prompts import Faq
from loadtests.kit.users import OpenUser

settings.defaults(num_users=50, spawn_rate=50, run_time="60s")


class Asker(OpenUser):
    """One question/s."""

    def source(self, dice: random.Random) -> Faq:
        """The n-th question is asked 1 / n ** 1.1 as often as the first."""
        return Faq(dice, count=1_000, skew=1.1, tokens_in=48, tokens_out=64)
