"""What a deployment must keep, spelled as `ttft_p95<800ms, error_rate<1%`, and whether it did.

Read by settings.py and report.py. No I/O.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_OBJECTIVE = re.compile(r"(?P<metric>[a-z_0-9]+)\s*(?P<compare><=|>=|<|>)\s*(?P<bound>[0-9.]+)\s*(?P<unit>[a-zµ%/]*)")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "p999", "max")
_OF_TIME = tuple(f"{measure}_{s}" for measure in ("ttft", "itl", "total", "queue", "lateness") for s in _STATISTICS)
_OF_SHARE = ("error_rate", "memory_growth", "cache_hit_rate")
_OF_RATE = ("requests_per_s", "output_tokens_per_s", *(f"tokens_per_s_{s}" for s in (*_STATISTICS, "min")))
METRICS = (*_OF_TIME, *_OF_SHARE, *_OF_RATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One metric, the comparison it must stand, and its bound: seconds, a share of 1, or a number per second."""

    metric: str
    compare: str
    bound: float
    spelled: str

    def judge(self, found: Mapping[str, float]) -> Verdict:
        """Say whether it was kept; what was not measured was not."""
        value = found.get(self.metric)
        return Verdict(objective=self, value=value, kept=value is not None and self._holds(value))

    def _holds(self, value: float) -> bool:
        return _COMPARE[self.compare](value, self.bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was measured of an objective, None where nothing was, and whether that kept it."""

    objective: Objective
    value: float | None
    kept: bool

    @property
    def told(self) -> str:
        """One line for a reader."""
        value = "not measured" if self.value is None else _spell(self.objective.metric, self.value)
        return f"{'kept  ' if self.kept else 'BROKEN'}  {self.objective.spelled}  ({value})"


def parse(text: str) -> tuple[Objective, ...]:
    """Read objectives, separated by commas. Raises ValueError naming the one that cannot be read, and why."""
    return tuple(_one(part.strip()) for part in text.split(",") if part.strip())


def _one(text: str) -> Objective:
    found = _OBJECTIVE.fullmatch(text)
    if found is None:
        raise ValueError(f"an objective is like ttft_p95<800ms, got {text!r}")
    metric, unit = found["metric"], found["unit"]
    if metric not in METRICS:
        raise ValueError(f"{metric!r} in {text!r} is not measured; there are {', '.join(METRICS)}")
    try:
        bound = float(found["bound"])
    except ValueError:
        raise ValueError(f"{found['bound']!r} in {text!r} is not a number") from None
    units, wanted = _units(metric)
    if unit not in units:
        raise ValueError(f"{metric} is given {wanted}, got {unit or 'no unit'!r} in {text!r}")
    return Objective(metric=metric, compare=found["compare"], bound=bound * units[unit], spelled=text)


def _units(metric: str) -> tuple[Mapping[str, float], str]:
    if metric in _OF_TIME:
        return _TIMES, "in us, ms, s or m"
    if metric in _OF_SHARE:
        return {"%": 0.01, "": 1.0}, "in % or as a share of 1"
    return {"": 1.0, "/s": 1.0}, "per second"


def _spell(metric: str, value: float) -> str:
    if metric in _OF_TIME:
        return f"{value * 1e3:,.4g} ms"
    return f"{value:.3%}" if metric in _OF_SHARE else f"{value:,.4g}/s"
