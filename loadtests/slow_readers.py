"""Users who read slowly beside users who do not: what a server keeps for the slow must not slow the quick."""

import random

from loadtests.kit import settings
from loadtests.kit.prompts import Fixed
from loadtests.kit.talk import Seen
from loadtests.kit.users import ClosedUser

settings.defaults(num_users=32, spawn_rate=32, run_time="60s")

PAUSE_S = 0.2


class Quick(ClosedUser):
    """Reads as fast as it comes."""

    answer = "quick"

    def source(self, dice: random.Random) -> Fixed:
        """64 tokens in, 128 out."""
        return Fixed(dice, tokens_in=64, tokens_out=128)


class Slow(Quick):
    """Takes one message every 0.2 s."""

    answer = "slow"

    def converse(self) -> Seen:
        """One answer, read slowly."""
        return self.ask(self.questions.next(), pause=PAUSE_S)
