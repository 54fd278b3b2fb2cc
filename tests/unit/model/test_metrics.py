"""metrics.py: prometheus_client's samples, brought to Triton's metrics port."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.support import served

metrics = served.module("metrics")
LABELS = {"model": "m", "version": "1"}


class Metric:
    """One of Triton's metrics: it notes its value and how often it was changed."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.value = 0.0
        self.changes = 0

    def increment(self, value: float) -> None:
        """Add to a counter, as Triton does: it refuses to go down."""
        assert self.kind == "counter"
        assert value >= 0
        self.value += value
        self.changes += 1

    def set(self, value: float) -> None:
        """Set a gauge."""
        assert self.kind == "gauge"
        self.value = value
        self.changes += 1


class Port:
    """Triton's side."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, frozenset[tuple[str, str]]], Metric] = {}

    def __call__(self, name: str, description: str, kind: str, labels: dict[str, str]) -> Metric:
        """Make a metric; a second one of the same name and labels would be an error in Triton."""
        key = (name, frozenset(labels.items()))
        assert key not in self.made
        assert description
        self.made[key] = Metric(kind)
        return self.made[key]

    def __getitem__(self, name: str) -> Metric:
        """The only metric of that name."""
        (found,) = [metric for (made, _), metric in self.made.items() if made == name]
        return found


class Engine:
    """What the gauges read: the engine, and what its stubs noted of it."""

    alive, idle, stalled_seconds, speaks, index = True, False, 0.0, True, 0


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """A registry of its own in the place of the process's."""
    own = CollectorRegistry()
    monkeypatch.setattr(metrics, "REGISTRY", own)
    monkeypatch.setattr(metrics, "Gauge", functools.partial(Gauge, registry=own))
    monkeypatch.setattr(metrics, "Counter", functools.partial(Counter, registry=own))
    return own


@pytest.fixture
def port() -> Port:
    """Where the metrics arrive."""
    return Port()


@pytest.fixture
def engine() -> Engine:
    """An engine that works."""
    return Engine()


@pytest.fixture
def mirror(registry: CollectorRegistry, port: Port, engine: Engine) -> Any:
    """A mirror that copies when it is told."""
    return metrics.Mirror(port, lambda: engine.alive, engine, LABELS)


def test_a_counter_grows_by_what_it_grew(registry: CollectorRegistry, port: Port, mirror: Any) -> None:
    """Not by its value again; and under the name that prometheus_client shows."""
    tokens = Counter("vllm:prompt_tokens", "Prompt tokens.", ["engine"], registry=registry).labels(engine="0")
    tokens.inc(5)
    mirror.copy(registry.collect())
    tokens.inc(2)
    mirror.copy(registry.collect())
    assert port["vllm:prompt_tokens_total"].value == 7
    assert ("vllm:prompt_tokens_total", frozenset((LABELS | {"engine": "0"}).items())) in port.made


def test_what_did_not_change_is_not_sent(registry: CollectorRegistry, port: Port, mirror: Any) -> None:
    """Each change is a round trip."""
    gauge = Gauge("vllm:num_preemptions", "Preemptions.", registry=registry)
    gauge.set(3)
    for _ in range(5):
        mirror.copy(registry.collect())
    assert port["vllm:num_preemptions"].changes == 1


def test_a_histogram_keeps_its_buckets(registry: CollectorRegistry, port: Port, mirror: Any) -> None:
    """Buckets, sum and count, cumulative as they were."""
    seconds = Histogram("vllm:ttft_seconds", "TTFT.", buckets=(0.1, 1.0), registry=registry)
    for value in (0.05, 0.5, 0.5, 7.0):
        seconds.observe(value)
    mirror.copy(registry.collect())
    found = {
        dict(labels).get("le", ""): metric.value
        for (name, labels), metric in port.made.items()
        if "ttft" in name and "_sum" not in name
    }
    assert found == {"0.1": 1, "1.0": 3, "+Inf": 4, "": 4}
    assert port["vllm:ttft_seconds_sum"].value == pytest.approx(8.05)


def test_what_is_not_ours_stays_here(registry: CollectorRegistry, port: Port, mirror: Any) -> None:
    """The process's own metrics, and the moments at which counters were made."""
    Counter("python_gc", "Something else.", registry=registry).inc()
    Counter("vllm:ours", "Ours.", registry=registry).inc()
    mirror.copy(registry.collect())
    names = {name for name, _ in port.made}
    assert "vllm:ours_total" in names
    assert all(name.startswith(("vllm:", "tritonstream:")) and not name.endswith("_created") for name in names)


@pytest.mark.parametrize("name", metrics.LOAD_GAUGES)
def test_an_idle_engine_has_no_load(
    registry: CollectorRegistry, port: Port, mirror: Any, engine: Engine, name: str
) -> None:
    """VLLM's load gauges stand still after the last request was aborted: they are not believed then."""
    gauge = Gauge(name, "Load.", registry=registry)
    gauge.set(3)
    mirror.copy(registry.collect())
    assert port[name].value == 3
    engine.idle = True
    mirror.copy(registry.collect())
    assert port[name].value == 0
    engine.idle = False
    mirror.copy(registry.collect())
    assert port[name].value == 3


def test_a_gauge_is_left_to_the_stub_that_speaks(
    registry: CollectorRegistry, port: Port, mirror: Any, engine: Engine
) -> None:
    """Of several stubs one sets it, and sets it again when its turn comes back; counters are added by all."""
    gauge = Gauge("vllm:kv_cache_usage_perc", "Load.", registry=registry)
    counter = Counter("vllm:tokens", "Tokens.", registry=registry)
    engine.speaks = False
    gauge.set(0.5)
    counter.inc()
    mirror.copy(registry.collect())
    found = port["vllm:kv_cache_usage_perc"]
    assert found.changes == 0
    assert port["vllm:tokens_total"].value == 1
    engine.speaks = True
    mirror.copy(registry.collect())
    assert found.value == 0.5
    engine.speaks = False
    mirror.copy(registry.collect())
    found.value = 0.25  # another stub's
    engine.speaks = True
    mirror.copy(registry.collect())
    assert found.value == 0.5


def test_the_engines_own_gauges(registry: CollectorRegistry, port: Port, mirror: Any, engine: Engine) -> None:
    """Alive or not, and for how long it has given nothing."""
    engine.stalled_seconds = 2.5
    mirror.copy(registry.collect())
    assert port["tritonstream:engine_alive"].value == 1
    assert port["tritonstream:engine_stalled_seconds"].value == 2  # whole ones
    engine.alive = False
    mirror.copy(registry.collect())
    assert port["tritonstream:engine_alive"].value == 0


def test_each_stub_says_of_when_it_tells(registry: CollectorRegistry, port: Port, mirror: Any, engine: Engine) -> None:
    """Before the first value is read, and also while another stub speaks for the engine."""
    engine.speaks = False
    before = time.time()
    counter = Counter("vllm:tokens", "Tokens.", registry=registry)
    families = mirror._rest()
    counter.inc()
    after = time.time()
    mirror.copy(families)
    assert before <= port["tritonstream:metrics_timestamp_seconds"].value <= after
    assert port["vllm:tokens_total"].value == 1


def test_our_own_counters(registry: CollectorRegistry, port: Port, mirror: Any) -> None:
    """They are there before the first event."""
    counts = metrics.Counts()
    mirror.copy(registry.collect())
    names = {"tritonstream:requests_cancelled_total", "tritonstream:tokens_wasted_total"}
    names |= {"tritonstream:requests_expired_total"}
    assert all(port[name].value == 0 for name in names)
    counts.wasted.inc(4)
    mirror.copy(registry.collect())
    assert port["tritonstream:tokens_wasted_total"].value == 4


class TestThread:
    """The copying threads."""

    @pytest.fixture
    def running(self, registry: CollectorRegistry, mirror: Any) -> Iterator[Any]:
        """A mirror that copies by itself."""
        self.gauge = Gauge("vllm:num_requests_running", "Running.", registry=registry)
        self.counter = Counter("vllm:generation_tokens", "Tokens.", registry=registry)
        mirror.start()
        yield mirror
        if any(thread.is_alive() for thread in mirror._threads):
            mirror.stop()

    def test_everything_is_there_from_the_start(self, running: Any, port: Port) -> None:
        """The first scrape finds it."""
        assert port["vllm:num_requests_running"].value == 0
        assert port["vllm:generation_tokens_total"].value == 0

    def test_the_load_comes_quickly(self, running: Any, port: Port) -> None:
        """A load balancer looks at it: it does not wait for the full copy."""
        took = []
        for value in range(1, 6):
            began = time.monotonic()
            self.gauge.set(value)
            while port["vllm:num_requests_running"].value != value:
                assert time.monotonic() < began + 10
                time.sleep(0.005)
            took.append(time.monotonic() - began)
        assert statistics.median(took) < metrics.FULL_SECONDS / 2, took

    def test_stopping_copies_a_last_time(self, running: Any, port: Port) -> None:
        """Nothing that was counted is missing at the end."""
        self.counter.inc(9)
        counted = port["vllm:generation_tokens_total"]
        running.stop()
        assert counted.value == 9
