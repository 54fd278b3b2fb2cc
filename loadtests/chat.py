"""Conversations of eight turns that all begin with the same long system prompt: what a prefix cache is for."""

import random
from typing import cast

import gevent

from loadtests.kit import settings
from loadtests.kit.prompts import Conversation, Jsonl
from loadtests.kit.talk import Seen
from loadtests.kit.users import ClosedUser

settings.defaults(num_users=32, spawn_rate=8, run_time="120s")


class Chatter(ClosedUser):
    """Reads each answer, thinks for a moment, and goes on. Each turn has rows of its own."""

    def source(self, dice: random.Random) -> Conversation:
        """A shared system prompt of 512 words, 32 words in a turn."""
        return Conversation(dice, shared=512, tokens_in=32, tokens_out=96, turns=8)

    def converse(self) -> Seen:
        """One turn."""
        question = self.questions.next()
        if isinstance(self.questions, Jsonl):  # conversations of one's own are asked as they are
            return self.ask(question)
        chat = cast(Conversation, self.questions)
        seen = self.ask(question, keep_text=True, name=f"turn {chat.turn}")
        if seen.outcome == "complete":
            chat.answered(seen.text)
            gevent.sleep(self.dice.uniform(0.5, 2.0))
        return seen
