"""Users of whom a share leaves in the middle of the answer: those who stay must not pay for those who left."""

import random
from collections.abc import Callable
from typing import Any

from loadtests.kit import settings
from loadtests.kit.prompts import Fixed
from loadtests.kit.talk import Seen
from loadtests.kit.users import ClosedUser


def _arguments(add: Callable[..., Any]) -> None:
    add("--leave-share", type=float, default=0.3, help="share of answers that are left, 0 to 1")


settings.arguments(_arguments)
settings.defaults(num_users=32, spawn_rate=32, run_time="60s")


class Fickle(ClosedUser):
    """Leaves after any number of messages; those answers have a row of their own."""

    def source(self, dice: random.Random) -> Fixed:
        """Long answers, so that there is something to leave."""
        return Fixed(dice, tokens_in=64, tokens_out=256)

    def converse(self) -> Seen:
        """One question; its answer is read to the end, or not."""
        leaves = self.dice.random() < self.settings.options.leave_share
        return self.ask(self.questions.next(), leave_after=self.dice.randint(1, 100) if leaves else None)
