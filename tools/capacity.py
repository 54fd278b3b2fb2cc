"""Replicas, GPUs and gateways for a rate of requests, out of what was measured on one GPU.

    python -m tools.capacity --rate 1000 --prompt-tokens 64 --max-tokens 128

`tools.tables` writes the table of deploy/capacity.md with it. Nothing is measured here: the figures are a report's of
`tools.bench paths`, and what they do not say is not known.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.environment import ROOT

REPORT = ROOT / "docs" / "benchmarks" / "h200.json"
# The report's prompts are 60 words; with the few tokens of the chat's template that is what a tokenizer makes of them.
MEASURED_PROMPT = 64
PATH, GATEWAY = "triton", "gateway-4"
# Of what a replica can do when nothing ever comes in bursts. What is above is for those, and for the seconds until
# another replica's share has been taken over.
HEADROOM = 0.7
GPUS_PER_NODE = 8
RATES, STREAMS = (1_000, 10_000, 100_000), (64, 256)


class NotMeasured(Exception):
    """The report does not hold what is asked of it; the message says what it does hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured load of one replica: so many streams at once, begun together, each of so many tokens."""

    streams: int
    max_tokens: int
    seconds: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gateway_cpu_s_per_1k_tokens: float

    @classmethod
    def read(cls, report: dict[str, Any], streams: int) -> Point:
        """Find the load in a report. Raises NotMeasured."""
        level, gateway = _level(report, PATH, streams), _level(report, GATEWAY, streams)
        return cls(
            streams=streams,
            max_tokens=level["max_tokens"],
            seconds=level["seconds"],
            tokens_per_s=level["tokens_per_s"],
            ttft_p50_ms=level["ttft_p50"],
            ttft_p99_ms=level["ttft_p99"],
            gateway_cpu_s_per_1k_tokens=gateway["front_cpu_s_per_1k_tokens"],
        )


def _level(report: dict[str, Any], path: str, streams: int) -> dict[str, Any]:
    levels = {level["streams"]: level for one in report["results"] if one["path"] == path for level in one["levels"]}
    if streams not in levels:
        raise NotMeasured(
            f"{path} was not measured at {streams} streams, but at {', '.join(map(str, levels)) or 'none'}"
        )
    found: dict[str, Any] = levels[streams]
    if found["errors"]:
        raise NotMeasured(f"{path} at {streams} streams had {found['errors']} errors: that is no load to plan with")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What comes: requests a second, each of so many tokens in and out."""

    rate: float
    prompt_tokens: int = MEASURED_PROMPT
    max_tokens: int = 128

    def __post_init__(self) -> None:
        """Refuse what is no demand."""
        for name in ("rate", "prompt_tokens", "max_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")

    def cost(self, point: Point) -> float:
        """How many of the measured requests one of these is worth, at least.

        Tokens of answers cost in proportion. Longer prompts were not measured: a token of a prompt is counted like one
        of an answer, which is more than it costs.
        """
        answer = self.max_tokens / point.max_tokens
        return max(answer, (self.prompt_tokens + self.max_tokens) / (MEASURED_PROMPT + point.max_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a demand takes at a point; made by `plan`."""

    point: Point
    demand: Demand
    cost: float
    needed: int
    open_requests: float
    gateway_cores: int

    @property
    def replicas(self) -> int:
        """Replicas, a GPU each, of which one may fail or be restarted: N+1."""
        return self.needed + 1

    @property
    def machines(self) -> int:
        """Machines of GPUS_PER_NODE, of which one may fail with all its GPUs."""
        return math.ceil(self.needed / GPUS_PER_NODE) + 1


def plan(demand: Demand, point: Point, headroom: float = HEADROOM) -> Plan:
    """Say what a demand takes when every replica is loaded to `headroom` of a measured point.

    A replica answers streams / seconds requests a second there (Little's law: as many are open as come in the time that
    one takes).
    """
    if not 0 < headroom <= 1:
        raise ValueError(f"headroom must be above 0 and at most 1, got {headroom}")
    cost = demand.cost(point)
    needed = math.ceil(demand.rate * cost * point.seconds / (point.streams * headroom))
    tokens_per_s = demand.rate * demand.max_tokens
    return Plan(
        point=point,
        demand=demand,
        cost=cost,
        needed=needed,
        open_requests=demand.rate * cost * point.seconds,
        gateway_cores=math.ceil(tokens_per_s / 1_000 * point.gateway_cpu_s_per_1k_tokens / headroom),
    )


HEAD = (
    "| requests/s | tokens/s | at most, each replica | TTFT p50 (p99) then, ms | open requests | GPUs "
    "| N+1 | machines of 8, N+1 | gateway cores |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
)


def row(found: Plan) -> str:
    """Write a plan as a row of the table."""
    point, demand = found.point, found.demand
    cells = (
        f"{demand.rate:,.0f}",
        f"{demand.rate * demand.max_tokens:,.0f}",
        f"{point.streams} streams",
        f"{point.ttft_p50_ms:,.0f} ({point.ttft_p99_ms:,.0f})",
        f"{found.open_requests:,.0f}",
        f"{found.needed:,}",
        f"{found.replicas:,}",
        f"{found.machines:,}",
        f"{found.gateway_cores:,}",
    )
    return f"| {' | '.join(cells)} |\n"


def table(report: dict[str, Any]) -> str:
    """Write the table of deploy/capacity.md: the rates at the two loads, each request of the measured size."""
    machine = report["machine"]
    rows = [row(plan(Demand(rate=rate), Point.read(report, streams))) for rate in RATES for streams in STREAMS]
    return (
        f"From {machine['gpu']}, {machine['cores']} cores, {machine['date']}: {MEASURED_PROMPT} tokens in, 128 out, "
        f"headroom {HEADROOM:g}.\n\n{HEAD}{''.join(rows)}"
    )


def main(
    rate: Annotated[float, typer.Option(min=0.001, help="requests a second")],
    prompt_tokens: Annotated[int, typer.Option(min=1, help="tokens of a prompt, in the mean")] = MEASURED_PROMPT,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens of an answer, in the mean")] = 128,
    headroom: Annotated[float, typer.Option(min=0.05, max=1.0, help="of the measured load, at most")] = HEADROOM,
    streams: Annotated[
        list[int] | None, typer.Option(help="a measured load of each replica; may be given several times")
    ] = None,
    report: Annotated[Path, typer.Option(help="a report of `tools.bench paths`")] = REPORT,
) -> None:
    """Print what a rate takes, at several loads of each replica."""
    read = json.loads(report.read_text(encoding="utf-8"))
    demand = Demand(rate=rate, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    try:
        plans = [plan(demand, Point.read(read, count), headroom) for count in streams or STREAMS]
    except NotMeasured as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(HEAD + "".join(map(row, plans)), nl=False)
    if plans[0].cost != 1:
        typer.echo(
            f"One such request is counted as {plans[0].cost:.2f} of those measured "
            f"({MEASURED_PROMPT} tokens in, {plans[0].point.max_tokens} out): measure your own before you buy."
        )


if __name__ == "__main__":
    typer.run(main)
