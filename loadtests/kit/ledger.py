"""The books of a test: what was seen, by second and in all, which add up over workers.

Read by session.py and report.py. No I/O. A request belongs to the second in which it was due, on the wall clock, which
a test's machines share well enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from loadtests.kit.histogram import Histogram
from loadtests.kit.talk import Pulse, Seen

BUSY = 0.9  # of a core: from here on a generator measures itself
LATE_S = 0.010  # a request sent later than this was not sent when it was due
# Seconds in all measures, but tokens_per_s, which is of one request.
MEASURES = ("ttft", "itl", "total", "tokens_per_s", "queue", "lateness")


@dataclass(slots=True, kw_only=True)
class Cell:
    """What was due in one second, or in all of them; only `answered` and its tokens are of answers that ended then.

    That is the difference between what is asked of a server and what it does: a queue that grows. `due` counts what was
    asked, `requests` what came to an end.
    """

    due: int = 0
    requests: int = 0
    complete: int = 0
    left: int = 0
    failed: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answered: int = 0
    answered_tokens: int = 0
    measures: dict[str, Histogram] = field(default_factory=dict)

    def of(self, measure: str) -> Histogram:
        """The histogram of a measure."""
        found = self.measures.get(measure)
        if found is None:
            found = self.measures[measure] = Histogram()
        return found

    def note(self, seen: Seen) -> None:
        """Count what was seen of a request. Latencies are of answers, not of failures."""
        self.requests += 1
        setattr(self, seen.outcome, getattr(self, seen.outcome) + 1)
        self.of("lateness").add(seen.late)
        if seen.outcome == "failed":
            return
        self.tokens += seen.tokens
        self.prompt_tokens += seen.prompt_tokens
        self.cached_tokens += seen.cached_tokens
        if seen.first is not None:
            self.of("ttft").add(seen.first)
        self.of("itl").merge(seen.gaps)
        if seen.outcome == "complete":
            self.of("total").add(seen.total)
            if (rate := seen.tokens_per_s) is not None:
                self.of("tokens_per_s").add(rate)

    def merge(self, other: Cell) -> None:
        """Count all that another one counted."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for measure, histogram in other.measures.items():
            self.of(measure).merge(histogram)

    @property
    def error_rate(self) -> float:
        """The share of requests that failed."""
        return self.failed / self.requests if self.requests else 0.0

    def plain(self) -> list[Any]:
        """Return it as lists and numbers, for a message to another process."""
        counts = [getattr(self, name) for name in _COUNTS]
        return [*counts, {measure: histogram.plain() for measure, histogram in self.measures.items()}]

    @classmethod
    def read(cls, plain: list[Any]) -> Self:
        """Make one of what `plain` returned."""
        *counts, measures = plain
        made = cls(**dict(zip(_COUNTS, counts, strict=True)))
        made.measures = {measure: Histogram.read(found) for measure, found in measures.items()}
        return made


_PLAIN = ("errors", "said", "unfinished", "first", "last")
_COUNTS: tuple[str, ...] = ("due", "requests", "complete", "left", "failed", "tokens", "prompt_tokens", "cached_tokens")
_COUNTS += ("answered", "answered_tokens")


@dataclass(slots=True, kw_only=True)
class Generator:
    """What generating the load took: of any one process at most, but `messages` and `cpu_seconds` of all together."""

    messages: int = 0
    cpu_seconds: float = 0.0
    messages_per_s: float = 0.0
    cpu: float = 0.0
    busy_seconds: float = 0.0
    open: int = 0

    def note(self, pulse: Pulse) -> None:
        """Take note of a driver's second."""
        share = pulse.cpu / pulse.seconds
        self.messages += pulse.messages
        self.cpu_seconds += pulse.cpu
        self.messages_per_s = max(self.messages_per_s, pulse.messages / pulse.seconds)
        self.cpu = max(self.cpu, share)
        self.open = max(self.open, pulse.open)
        if share > BUSY:
            self.busy_seconds += pulse.seconds

    def merge(self, other: Generator) -> None:
        """Keep the more of either; sums add up."""
        self.messages += other.messages
        self.cpu_seconds += other.cpu_seconds
        self.messages_per_s = max(self.messages_per_s, other.messages_per_s)
        self.cpu, self.open = max(self.cpu, other.cpu), max(self.open, other.open)
        self.busy_seconds += other.busy_seconds


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Everything a test counted. `unfinished` were open when the test ended, and are in no other figure.

    `first` is when the first request was due and `last` when the last one ended, in Unix time.
    """

    seconds: dict[int, Cell] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    unfinished: int = 0
    first: float = math.inf
    last: float = -math.inf
    generator: Generator = field(default_factory=Generator)

    def cell(self, second: int) -> Cell:
        """The cell of one second."""
        found = self.seconds.get(second)
        if found is None:
            found = self.seconds[second] = Cell()
        return found

    @property
    def duration(self) -> float:
        """Seconds from the first request to the end of the last one."""
        return max(0.0, self.last - self.first) if self.seconds else 0.0

    def ask(self, due: float) -> None:
        """Count a request that is due then, in Unix time, whatever will become of it."""
        self.first = min(self.first, due)
        self.cell(int(due)).due += 1

    def note(self, seen: Seen, due: float) -> None:
        """Count what was seen of a request that was due then."""
        ended = due + seen.total
        self.last = max(self.last, ended)
        self.cell(int(due)).note(seen)
        if seen.outcome == "complete":
            cell = self.cell(int(ended))
            cell.answered += 1
            cell.answered_tokens += seen.tokens
        if seen.outcome == "failed":
            self.errors[seen.kind] = self.errors.get(seen.kind, 0) + 1
            self.said.setdefault(seen.kind, seen.said)

    def merge(self, other: Ledger) -> None:
        """Count all that another one counted."""
        for second, cell in other.seconds.items():
            self.cell(second).merge(cell)
        for kind, times in other.errors.items():
            self.errors[kind] = self.errors.get(kind, 0) + times
        self.said = other.said | self.said
        self.unfinished += other.unfinished
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.generator.merge(other.generator)

    def between(self, begin: float, end: float) -> Cell:
        """All that was due from `begin` until before `end`."""
        whole = Cell()
        for second, cell in self.seconds.items():
            if begin <= second < end:
                whole.merge(cell)
        return whole

    @property
    def whole(self) -> Cell:
        """All there was."""
        return self.between(float("-inf"), float("inf"))

    def windows(self, length: int) -> Iterator[tuple[int, Cell]]:
        """The test in windows of `length` seconds, each with the second it begins at."""
        if self.seconds:
            first = min(self.seconds)
            for begin in range(first, max(self.seconds) + 1, length):
                yield begin, self.between(begin, begin + length)

    def plain(self) -> dict[str, Any]:
        """Return it as lists and numbers, for a message to another process."""
        generator = {name: getattr(self.generator, name) for name in Generator.__dataclass_fields__}
        seconds = {second: cell.plain() for second, cell in self.seconds.items()}
        rest = {name: getattr(self, name) for name in _PLAIN}
        return {"seconds": seconds, "generator": generator, **rest}

    @classmethod
    def read(cls, plain: dict[str, Any]) -> Self:
        """Make one of what `plain` returned."""
        return cls(
            seconds={int(second): Cell.read(cell) for second, cell in plain["seconds"].items()},
            generator=Generator(**plain["generator"]),
            **{name: plain[name] for name in _PLAIN},
        )
