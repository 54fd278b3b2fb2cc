"""The books: what is counted where, that workers add up, and what the report makes of it."""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from loadtests.kit import report, slo
from loadtests.kit.histogram import Histogram
from loadtests.kit.ledger import Ledger
from loadtests.kit.talk import Outcome, Pulse, Seen, Target

SETTINGS: Any = SimpleNamespace(target=Target(api="grpc", url="here:1"), seed=0, objectives=slo.parse("error_rate<1%"))


def seen(outcome: Outcome = "complete", total: float = 1.0, tokens: int = 10) -> Seen:
    """A request that gave a token every 0.1 s, the first after 0.2 s."""
    gaps = Histogram.of([0.1] * (tokens - 1))
    kind = "ServerError (server)" if outcome == "failed" else ""
    return Seen(
        outcome=outcome, first=0.2, total=total, messages=tokens, tokens=tokens, gaps=gaps, kind=kind, said="bang"
    )


def noted(ledger: Ledger, one: Seen, due: float) -> None:
    """Count a request from its asking to its end."""
    ledger.ask(due)
    ledger.note(one, due)


def test_two_workers_are_one() -> None:
    """Whatever was counted where, and through a message: the sums are those of a single process."""
    dice, together, workers = random.Random(5), Ledger(), (Ledger(), Ledger())
    outcomes: tuple[Outcome, ...] = ("complete", "left", "failed")
    for _ in range(300):
        one, due = seen(dice.choice(outcomes), dice.uniform(0.5, 9)), dice.uniform(1_000, 1_060)
        for ledger in (together, dice.choice(workers)):
            noted(ledger, one, due)
    master = Ledger()
    for worker in workers:
        master.merge(Ledger.read(json.loads(json.dumps(worker.plain()))))
    alone, added = report.make(together, SETTINGS, [], []), report.make(master, SETTINGS, [], [])
    assert added["requests"] == alone["requests"]
    assert added["errors"] == alone["errors"]
    assert added["timeline"] == alone["timeline"]
    for measure, summary in alone["measures"].items():
        assert added["measures"][measure] == pytest.approx(summary), measure


def test_a_failure_has_no_latency() -> None:
    """It counts as a request and as an error by its kind; a fast refusal must not make the server look fast."""
    ledger = Ledger()
    noted(ledger, seen(), 1_000.0)
    noted(ledger, seen("failed", total=0.001), 1_000.0)
    whole = ledger.whole
    assert (whole.requests, whole.complete, whole.failed) == (2, 1, 1)
    assert whole.of("ttft").count == whole.of("total").count == 1
    assert ledger.errors == {"ServerError (server)": 1}
    assert whole.error_rate == 0.5


def test_who_left_has_a_first_token_and_no_end() -> None:
    """The time until somebody left says nothing of the server."""
    ledger = Ledger()
    noted(ledger, seen("left"), 1_000.0)
    assert ledger.whole.of("ttft").count == 1
    assert ledger.whole.of("total").count == ledger.whole.answered == 0


def test_a_growing_queue_shows_in_its_step() -> None:
    """Ten requests are due every second, five are answered: the step says so, though in the end all were answered."""
    ledger = Ledger()
    for number in range(200):
        due = 1_000.0 + number / 10
        noted(ledger, seen(total=(1_000.0 + number / 5) - due + 0.1), due)
    step = report.step(ledger, report.Held(rate=10, begin=1_000, end=1_020))
    assert step.offered == pytest.approx(10)
    assert step.completed == pytest.approx(5, rel=0.1)
    assert not step.carried


def test_what_never_ends_is_offered_all_the_same() -> None:
    """A server that answers half of what it is asked carries half of it, though the other half is in no latency."""
    ledger = Ledger()
    for number in range(200):
        due = 1_000.0 + number / 10
        ledger.ask(due)
        if number % 2:
            ledger.note(seen(total=0.1), due)
    step = report.step(ledger, report.Held(rate=10, begin=1_000, end=1_020))
    assert step.offered == pytest.approx(10)
    assert step.completed == pytest.approx(5)
    assert not step.carried


def test_objectives_are_judged() -> None:
    """Kept or broken, one by one and in all."""
    ledger = Ledger()
    noted(ledger, seen(), 1_000.0)
    assert report.make(ledger, SETTINGS, [], [])["slo"]["kept"] is True
    noted(ledger, seen("failed"), 1_000.0)
    found = report.make(ledger, SETTINGS, [], [])
    assert found["slo"]["kept"] is False
    assert "BROKEN  error_rate<1%  (50.000%)" in report.lines(found)


def test_every_metric_of_an_objective_can_be_measured() -> None:
    """What `--slo` takes, a full test has; and none that it does not take would be of use."""
    ledger = Ledger()
    noted(ledger, seen(), 1_000.0)
    noted(ledger, seen(), 1_005.0)
    ledger.cell(1_000).prompt_tokens = 5
    ledger.cell(1_000).of("queue").add(0.1)
    assert set(report.metrics(ledger, [100] * 8)) == set(slo.METRICS)


def test_a_busy_generator_says_so() -> None:
    """Above 90% of a core, or late, it measured itself; else not."""
    ledger = Ledger()
    noted(ledger, seen(), 1_000.0)
    ledger.generator.note(Pulse(seconds=1.0, messages=5_000, cpu=0.5, open=3))
    assert report.limits(ledger) == []
    ledger.generator.note(Pulse(seconds=1.0, messages=20_000, cpu=0.97, open=3))
    assert "20,000 messages/s" in report.limits(ledger)[0]
    late = seen()
    late.late = 0.5
    noted(ledger, late, 1_000.0)
    assert "late" in report.limits(ledger)[1]
    assert any(
        line.startswith("GENERATOR AT ITS LIMIT") for line in report.lines(report.make(ledger, SETTINGS, [], []))
    )


def test_locust_is_not_here() -> None:
    """Importing it patches sockets and threads of the whole process, this one's other tests among them."""
    assert "locust" not in sys.modules
    assert "gevent" not in sys.modules
