"""The end of a test: its figures as one JSON object, a few lines for the terminal, and the verdict.

Read by session.py, and the object by plot.py. Times in it are in seconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtests.kit import knee, slo, watch
from loadtests.kit.histogram import Histogram
from loadtests.kit.knee import Step
from loadtests.kit.ledger import BUSY, LATE_S, MEASURES, Cell, Generator, Ledger

if TYPE_CHECKING:  # importing it imports locust, which patches the whole process
    from loadtests.kit.settings import Settings

log = logging.getLogger(__name__)

SETTLE = 0.25  # of a step: the answers that end in it were asked for in the step before
TIMELINE_POINTS = 300
LIMIT = "GENERATOR AT ITS LIMIT:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A rate that a ramp held, requests/s, and from when to when, in Unix time."""

    rate: float
    begin: float
    end: float


def make(ledger: Ledger, settings: Settings, held: Sequence[Held], memory: list[int]) -> dict[str, Any]:
    """Put the figures of a test together."""
    whole = ledger.whole
    values = metrics(ledger, memory)
    verdicts = [objective.judge(values) for objective in settings.objectives]
    steps = [step(ledger, one) for one in held]
    bend = knee.find(steps)
    return {
        "target": {name: getattr(settings.target, name) for name in ("api", "url", "model")},
        "seed": settings.seed,
        "seconds": ledger.duration,
        "requests": {name: getattr(whole, name) for name in ("requests", "complete", "left", "failed")}
        | {"unfinished": ledger.unfinished},
        "tokens": {"prompt": whole.prompt_tokens, "cached": whole.cached_tokens, "output": whole.tokens},
        "errors": {kind: {"count": n, "first": ledger.said[kind]} for kind, n in ledger.errors.items()},
        "measures": {measure: dict(whole.of(measure).summary()) for measure in MEASURES},
        "metrics": values,
        "slo": {
            "kept": all(verdict.kept for verdict in verdicts),
            "objectives": [
                {"objective": one.objective.spelled, "value": one.value, "kept": one.kept} for one in verdicts
            ],
            "told": [verdict.told for verdict in verdicts],
        },
        "steps": [asdict(one) | {"carried": one.carried} for one in steps],
        "knee": None if bend is None else asdict(steps[bend]),
        "generator": {name: getattr(ledger.generator, name) for name in Generator.__dataclass_fields__}
        | {"limits": limits(ledger)},
        "memory": {"bytes": thinned(memory), "growth": watch.growth(memory)},
        "timeline": timeline(ledger),
    }


def metrics(ledger: Ledger, memory: list[int]) -> dict[str, float]:
    """What objectives may be about, by their names in `slo.METRICS`; only what was measured."""
    whole, found = ledger.whole, dict[str, float]()
    if whole.requests:
        found["error_rate"] = whole.error_rate
    if ledger.duration:
        found["requests_per_s"] = whole.complete / ledger.duration
        found["output_tokens_per_s"] = whole.tokens / ledger.duration
    if whole.prompt_tokens:
        found["cache_hit_rate"] = whole.cached_tokens / whole.prompt_tokens
    if (grown := watch.growth(memory)) is not None:
        found["memory_growth"] = grown
    for measure in MEASURES:
        for name, value in whole.of(measure).summary().items():
            if f"{measure}_{name}" in slo.METRICS:
                found[f"{measure}_{name}"] = value
    return found


def step(ledger: Ledger, held: Held) -> Step:
    """What was measured while a rate was held, without the beginning, in which the one before still ends."""
    begin = held.begin + SETTLE * (held.end - held.begin)
    cell = ledger.between(begin, held.end)
    # Whole seconds are counted, so it is by whole seconds that they are divided.
    seconds = sum(1 for second in range(int(begin), int(held.end) + 1) if begin <= second < held.end) or 1
    return Step(
        offered=cell.due / seconds,
        completed=cell.answered / seconds,
        ttft_p50=cell.of("ttft").quantile(0.5),
        ttft_p95=cell.of("ttft").quantile(0.95),
        total_p95=cell.of("total").quantile(0.95),
        tokens_per_s=cell.answered_tokens / seconds,
        error_rate=cell.error_rate,
    )


def limits(ledger: Ledger) -> list[str]:
    """Where the generator, and not the server, was what was measured; empty where it was not."""
    found, generator = [], ledger.generator
    if generator.busy_seconds:
        found.append(
            f"a process that receives was above {BUSY:.0%} of a core for {generator.busy_seconds:.0f} s, at up to "
            f"{generator.messages_per_s:,.0f} messages/s: add --processes, or workers"
        )
    late: Histogram = ledger.whole.of("lateness")
    if late.count and (worst := late.quantile(0.99)) > LATE_S:
        found.append(f"1% of the requests were sent more than {worst * 1e3:.0f} ms late: this machine is too busy")
    return found


def timeline(ledger: Ledger) -> list[dict[str, float]]:
    """The test as it went: a point for each second, or for several in a long one."""
    if not ledger.seconds:
        return []
    span = max(ledger.seconds) - min(ledger.seconds) + 1
    length = -(-span // TIMELINE_POINTS)
    first = min(ledger.seconds)
    return [_point(begin - first, cell, length) for begin, cell in ledger.windows(length)]


def _point(second: int, cell: Cell, length: int) -> dict[str, float]:
    point: dict[str, float] = {
        "second": second,
        "offered": cell.due / length,
        "completed": cell.answered / length,
        "failed": cell.failed / length,
        "tokens_per_s": cell.answered_tokens / length,
    }
    for measure in MEASURES:
        histogram = cell.of(measure)
        if histogram.count:
            point |= {f"{measure}_p50": histogram.quantile(0.5), f"{measure}_p95": histogram.quantile(0.95)}
    return point


def thinned(values: list[int]) -> list[int]:
    """At most TIMELINE_POINTS of these, evenly taken."""
    return values[:: -(-len(values) // TIMELINE_POINTS) or 1]


_UNITS: Mapping[str, tuple[float, str]] = {"tokens_per_s": (1.0, "tokens/s of a request")}


def lines(found: Mapping[str, Any]) -> list[str]:
    """Say the figures to a reader."""
    requests, tokens = found["requests"], found["tokens"]
    told = [
        f"{requests['requests']:,} requests in {found['seconds']:.1f} s: {requests['complete']:,} complete, "
        f"{requests['left']:,} left, {requests['failed']:,} failed, {requests['unfinished']:,} unfinished; "
        f"tokens: {tokens['prompt']:,} in ({tokens['cached']:,} cached), {tokens['output']:,} out"
    ]
    for measure, summary in found["measures"].items():
        if summary["count"]:
            factor, unit = _UNITS.get(measure, (1e3, "ms"))
            values = "  ".join(f"{name} {summary[name] * factor:,.4g}" for name in ("p50", "p95", "p99", "max"))
            told.append(f"{measure:>12}: {values}  {unit}")
    told += [f"{error['count']:>6} × {kind}: {error['first'][:200]}" for kind, error in found["errors"].items()]
    if found["knee"] is not None:
        told.append(
            f"knee: {found['knee']['offered']:.1f} requests/s, {found['knee']['tokens_per_s']:,.0f} tokens/s, "
            f"TTFT p95 {found['knee']['ttft_p95'] * 1e3:,.0f} ms"
        )
    elif found["steps"]:
        told.append("knee: not within this ramp")
    if (grown := found["memory"]["growth"]) is not None:
        told.append(f"memory: {found['memory']['bytes'][-1] / 1e6:,.0f} MB, {grown:+.1%} since the second quarter")
    told += [f"{LIMIT} {limit}" for limit in found["generator"]["limits"]]
    return [*told, *found["slo"]["told"]]


def tell(found: Mapping[str, Any]) -> None:
    """Say the figures in locust's log."""
    log.info("\n%s", "\n".join(["--- streaming", *lines(found), "---"]))


def write(found: Mapping[str, Any], to: Path) -> None:
    """Write the object to a file, whose folder is made."""
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
