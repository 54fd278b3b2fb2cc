"""The users that scenarios are made of: one that waits for its answer, and one that is a stream of arrivals.

Read by the scenarios. A user is a greenlet that hands its questions to the pump, and waits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import ClassVar

import gevent
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser

from loadtests.kit import arrivals, prompts
from loadtests.kit.prompts import Question, Source
from loadtests.kit.session import Session
from loadtests.kit.settings import DEFAULT_TOKENS, Settings
from loadtests.kit.talk import Ask, Seen


class StreamUser(User):
    """What both kinds share. A scenario says what is asked: override `source`."""

    abstract = True
    answer: ClassVar[str] = "answer"  # what its rows are called

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.session = Session.of(environment)
        assert self.session.settings is not None
        self.settings: Settings = self.session.settings
        self.dice = self.session.dice()
        given = self.settings.prompts
        tokens = self.settings.max_tokens or DEFAULT_TOKENS
        self.questions = (
            prompts.Jsonl(self.dice, given, max_tokens=tokens) if given is not None else self.source(self.dice)
        )

    def source(self, dice: random.Random) -> Source:
        """What this user asks, unless a file of questions was given."""
        raise NotImplementedError(f"{type(self).__name__} must say what it asks: def source(self, dice)")

    def ask(
        self,
        question: Question,
        *,
        due: float | None = None,
        leave_after: int | None = None,
        pause: float = 0.0,
        keep_text: bool = False,
        name: str = "",
    ) -> Seen:
        """Ask, wait, and enter what was seen into all statistics; `due` is now, unless it was earlier."""
        return self.session.ask(
            name or self.answer,
            Ask(
                prompt=question.prompt,
                max_tokens=self.settings.max_tokens or question.max_tokens,
                exact=question.exact,
                due=time.monotonic() if due is None else due,
                leave_after=leave_after,
                pause=pause,
                keep_text=keep_text,
            ),
        )


FAILED_SECONDS = 0.1  # a server that refuses at once would be asked thousands of times a second by who waits for it


class ClosedUser(StreamUser):
    """Asks, waits for the whole answer, asks again. A server that slows down is asked less."""

    abstract = True

    @task
    def turn(self) -> None:
        """One question and its answer; none when the test ends, for locust cuts off whoever waited for a turn then."""
        if self.session.ending:
            raise StopUser
        self.after(self.converse())

    def converse(self) -> Seen:
        """Ask once; what a scenario overrides to behave otherwise."""
        return self.ask(self.questions.next())

    def after(self, seen: Seen) -> None:
        """Wait a moment after a failure."""
        if seen.outcome == "failed":
            gevent.sleep(FAILED_SECONDS)


class OpenUser(StreamUser):
    """A stream of arrivals, `--rate-per-user` a second: asks when it is due, whatever became of what it asked before.

    Its latencies count from when a request was due, so a server, or a generator, that falls behind shows.
    """

    abstract = True

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._arrivals: Iterator[float] | None = None
        self._due = 0.0

    def on_start(self) -> None:
        """Begin the stream of arrivals."""
        rate = self.settings.rate_per_user
        self._arrivals = arrivals.arrivals(self.settings.arrivals, rate, self.dice, time.monotonic())
        self._due = next(self._arrivals)
        gevent.sleep(max(0.0, self._due - time.monotonic()))

    def on_stop(self) -> None:
        """Wait for what was asked if the test ends; a rate that falls waits for no answer, and cuts none off."""
        if self.session.ending:
            self.session.drain()

    @task
    def arrive(self) -> None:
        """Ask what is due now, without waiting for the answer."""
        self.session.spawn(self.ask, self.questions.next(), due=self._due)

    def wait_time(self) -> float:
        """The time until the next one is due; none when that has passed already."""
        assert self._arrivals is not None
        self._due = next(self._arrivals)
        return max(0.0, self._due - time.monotonic())
