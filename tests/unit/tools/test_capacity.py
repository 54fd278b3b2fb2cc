"""The arithmetic of deploy/capacity.md, and that it rests on what was measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from tools import capacity
from tools.capacity import Demand, NotMeasured, Point, plan
from tools.environment import ROOT

# A replica that answers 100 such requests in a second.
ROUND = Point(
    streams=100,
    max_tokens=100,
    seconds=1.0,
    tokens_per_s=10_000.0,
    ttft_p50_ms=100.0,
    ttft_p99_ms=200.0,
    gateway_cpu_s_per_1k_tokens=0.01,
)


def test_a_round_example() -> None:
    """700 requests a second, at 0.7 of 100 each: ten replicas and one, 700 open, ten cores of the gateway."""
    found = plan(Demand(rate=700, max_tokens=100), ROUND, headroom=0.7)
    assert (found.needed, found.replicas, found.open_requests) == (10, 11, 700)
    assert found.machines == 2 + 1
    assert found.gateway_cores == math.ceil(70 * 0.01 / 0.7)


@pytest.mark.parametrize(
    ("prompt", "answer", "cost"),
    [(64, 100, 1.0), (1, 100, 1.0), (64, 200, 2.0), (1, 200, 2.0), (228, 100, 2.0), (1, 10, 0.1), (72, 10, 0.5)],
)
def test_what_another_request_is_worth(prompt: int, answer: int, cost: float) -> None:
    """In proportion to its answer, or to all its tokens, whichever is more; 64 and 100 are the measured ones."""
    assert Demand(rate=1, prompt_tokens=prompt, max_tokens=answer).cost(ROUND) == cost


def test_twice_the_rate_is_twice_the_replicas() -> None:
    """And a slower replica needs as many more."""
    demand = Demand(rate=70_000, max_tokens=100)
    assert plan(demand, ROUND).needed == 1_000
    assert plan(replace(demand, rate=140_000), ROUND).needed == 2_000
    assert plan(demand, replace(ROUND, seconds=2.0)).needed == 2_000


@pytest.mark.parametrize("given", [{"rate": 0}, {"rate": 1, "max_tokens": 0}, {"rate": 1, "prompt_tokens": -1}])
def test_nonsense_is_refused(given: dict[str, Any]) -> None:
    """By the name of the field and its value."""
    with pytest.raises(ValueError, match="must be above 0, got"):
        Demand(**given)


def test_what_was_not_measured_is_refused() -> None:
    """A load that the report lacks, or that failed, is named, and so is what there is."""
    report = json.loads(capacity.REPORT.read_text(encoding="utf-8"))
    with pytest.raises(NotMeasured, match="not measured at 100 streams, but at 1, 16, 64, 256, 1024"):
        Point.read(report, 100)
    with pytest.raises(NotMeasured, match="gateway-4 at 1024 streams had 1519 errors"):
        Point.read(report, 1_024)


def test_the_report_is_one_of_the_measured_size() -> None:
    """The prompt that requests are compared with is the report's, and Little's law holds for it."""
    report = json.loads(capacity.REPORT.read_text(encoding="utf-8"))
    assert "--prompt-words 60" in report["command"]
    for streams in capacity.STREAMS:
        point = Point.read(report, streams)
        assert point.tokens_per_s * point.seconds == pytest.approx(point.streams * point.max_tokens)


def test_the_command_says_what_the_page_says() -> None:
    """Its row is the table's; another request is counted, and said to be."""
    app = Typer()
    app.command()(capacity.main)
    told = CliRunner().invoke(app, ["--rate", "1000", "--prompt-tokens", "64", "--max-tokens", "128"])
    page = (ROOT / "deploy" / "capacity.md").read_text(encoding="utf-8")
    assert told.exit_code == 0
    for line in told.output.splitlines():
        assert line in page
    other = CliRunner().invoke(app, ["--rate", "1000", "--max-tokens", "256", "--streams", "64"])
    assert "counted as 2.00 of those measured" in other.output
    assert CliRunner().invoke(app, ["--rate", "1", "--streams", "3"]).exit_code == 1
