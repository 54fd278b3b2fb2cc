"""Triton's metrics port, read as numbers; and waiting for what they, or anything else, come to say."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.request import urlopen

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
POLL_SECONDS = 0.02
# Less than an endless answer lasts, more than a busy machine stands still. That something is fast is asserted of the
# median of several tries, never of one.
PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the metrics page."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Page:
    """One scrape."""

    samples: list[Sample]
    types: dict[str, str]

    def find(self, name: str, **labels: str) -> list[Sample]:
        """The samples of that name with at least these labels."""
        return [one for one in self.samples if one.name == name and labels.items() <= one.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        """The sum over the samples of that name with at least these labels; KeyError when there is none."""
        found = self.find(name, **labels)
        if not found:
            raise KeyError(f"no {name} with {labels}")
        return sum(sample.value for sample in found)


def parse(text: str, names: tuple[str, ...] = ("",)) -> Page:
    """Read Prometheus' text format; only metrics whose names begin so."""
    samples, types = [], {}
    for line in text.splitlines():
        if not line.startswith((*names, "# TYPE ")):
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            types[name] = kind
        elif (found := _SAMPLE.match(line)) is not None:
            name, labels, value = found.groups()
            samples.append(Sample(name, dict(_LABEL.findall(labels or "")), float(value)))
    return Page(samples, types)


def scrape(url: str, *names: str) -> Page:
    """Read the page at `url`: all of it, or the metrics whose names begin so."""
    with urlopen(url, timeout=10) as answer:
        return parse(answer.read().decode(), names or ("",))


async def eventually(condition: Callable[[], bool], what: str, within: float = PATIENCE) -> float:
    """Wait until `condition` holds, off the event loop; returns the seconds it took, and fails after `within`."""
    began = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() - began < within, f"{what}: not within {within} s"
        await asyncio.sleep(POLL_SECONDS)
    return time.monotonic() - began


async def usually_within(seconds: float, measure: Callable[[], Awaitable[float]]) -> None:
    """Assert that what `measure` returns is at most so many seconds, in the median of several tries.

    A busy machine has a bad while: it is given another two. What is slow by itself is slow in all of them.
    """
    taken = []
    for _ in range(3):
        taken.append([await measure() for _ in range(5)])
        if statistics.median(taken[-1]) < seconds:
            return
    raise AssertionError(f"more than {seconds} s, usually: {taken}")
