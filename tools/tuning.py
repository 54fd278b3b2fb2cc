"""The search for engine arguments that keep an objective: what is tried, in which order, when it ends, what is chosen.

Read by `tools.tune`, which measures. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loadtests.kit.slo import Objective


class BadSearch(Exception):
    """A search that cannot be made; the message says what to change."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Settings:
    """What is searched over; the rest of the engine arguments stays."""

    instances: int
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def cost(self) -> tuple[int, float]:
        """What it takes of the machine: stub processes, each a core under full load, and share of the GPU's memory."""
        return self.instances, self.gpu_memory_utilization

    def engine_args(self) -> dict[str, Any]:
        """Return those that are vLLM's, as `tools.configs` takes them."""
        return {
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Settings and what was measured with them: metrics under the objectives' names, in seconds and shares.

    `probed` says that the first seconds were enough to see that they miss the objectives by far. `error` says why
    nothing was measured.
    """

    settings: Settings
    found: Mapping[str, float] = field(default_factory=dict)
    probed: bool = False
    error: str | None = None

    def keeps(self, objectives: Sequence[Objective]) -> bool:
        """Whether all objectives were kept, over the whole load."""
        return self.error is None and not self.probed and all(one.judge(self.found).kept for one in objectives)

    def excess(self, objectives: Sequence[Objective]) -> float:
        """By how much the worst objective is missed, as a share of its bound; below 0: kept, with that much room."""
        return max(overshoot(one, self.found) for one in objectives)


def overshoot(objective: Objective, found: Mapping[str, float]) -> float:
    """By how much an objective is missed, as a share of its bound; infinite when it was not measured."""
    value = found.get(objective.metric)
    if value is None:
        return float("inf")
    difference = value - objective.bound if objective.compare.startswith("<") else objective.bound - value
    return difference / (objective.bound or 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The values of each setting, in the order in which they are tried; the first of each is where it starts."""

    instances: tuple[int, ...]
    gpu_memory_utilization: tuple[float, ...]
    max_num_seqs: tuple[int, ...]
    max_num_batched_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse values that vLLM or Triton could not take."""
        for name in self.names():
            values = getattr(self, name)
            if not values or min(values) <= 0:
                raise BadSearch(f"{name} needs at least one value, all above 0, got {', '.join(map(str, values))}")
        if max(self.gpu_memory_utilization) > 1:
            raise BadSearch(f"gpu_memory_utilization is a share of at most 1, got {max(self.gpu_memory_utilization)}")

    @staticmethod
    def names() -> tuple[str, ...]:
        """The settings in the order in which they are searched: what matters most to TTFT first."""
        return ("max_num_batched_tokens", "max_num_seqs", "instances", "gpu_memory_utilization")

    def start(self) -> Settings:
        """The settings that are tried first."""
        return Settings(**{name: getattr(self, name)[0] for name in self.names()})

    def neighbours(self, settings: Settings, name: str) -> Iterator[Settings]:
        """The same settings with each other value of one of them, where vLLM would take them."""
        for value in getattr(self, name):
            other = replace(settings, **{name: value})
            if other != settings and other.max_num_batched_tokens >= other.max_num_seqs:
                yield other


def search(
    space: Space, objectives: Sequence[Objective], measure: Callable[[Settings], Trial], most: int
) -> list[Trial]:
    """Go from the start along one setting after the other, and on from the best found, until nothing gets better.

    Ends early when a whole round over the settings brought nothing, or after `most` trials. Nothing is tried twice.
    """
    tried: dict[Settings, Trial] = {}

    def trial(settings: Settings) -> Trial:
        if settings not in tried:
            tried[settings] = measure(settings)
        return tried[settings]

    best = trial(space.start())
    while True:
        before = best
        for name in space.names():
            for settings in space.neighbours(best.settings, name):
                if len(tried) >= most and settings not in tried:
                    return list(tried.values())
                best = min(best, trial(settings), key=lambda one: rank(one, objectives))
        if best is before:
            return list(tried.values())


def rank(trial: Trial, objectives: Sequence[Objective]) -> tuple[Any, ...]:
    """The less, the better: what keeps the objectives with the least of the machine, else what is nearest to them."""
    if trial.error is not None:
        return (3,)
    if trial.keeps(objectives):
        return (0, *trial.settings.cost, trial.excess(objectives))
    return (2 if trial.probed else 1, trial.excess(objectives))


def chosen(trials: Sequence[Trial], objectives: Sequence[Objective]) -> Trial | None:
    """The trial that keeps the objectives with the least of the machine, or None when none keeps them."""
    keeping = [trial for trial in trials if trial.keeps(objectives)]
    return min(keeping, key=lambda trial: rank(trial, objectives)) if keeping else None


def frontier(trials: Sequence[Trial], objectives: Sequence[Objective]) -> list[Trial]:
    """The trials that no other beats, in what they take of the machine and in the room they leave objectives."""
    measured = [trial for trial in trials if trial.error is None and not trial.probed]

    def point(trial: Trial) -> tuple[float, ...]:
        return (*trial.settings.cost, trial.excess(objectives))

    def beaten(trial: Trial) -> bool:
        mine = point(trial)
        return any(
            point(other) != mine and all(a <= b for a, b in zip(point(other), mine, strict=True)) for other in measured
        )

    return sorted((trial for trial in measured if not beaten(trial)), key=point)
