"""vLLM's statistics, and our own, on Triton's metrics port.

Read by model.py. vLLM writes into prometheus_client's registry inside this process, under its own names and buckets; a
thread copies what changed to Triton. Each change of a Triton metric is a round trip to the server of about 100 µs, so
nothing here runs per token: gauges that a load balancer looks at go every 50 ms, the rest every second.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from .stubs import Stubs

log = logging.getLogger(__name__)

FAST_SECONDS, FULL_SECONDS = 0.05, 1.0
PREFIXES = ("vllm:", "tritonstream:")
# vLLM reports its load only with a step's outputs: after the last request was aborted these stand still, and lie.
LOAD_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
)
OWN = "stub"  # the label of what each stub says for itself
FAST = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("tritonstream:engine_alive", "tritonstream:engine_stalled_seconds"),
)


class Port(Protocol):
    """Triton's side: makes a counter or gauge of a family, with labels."""

    def __call__(self, name: str, description: str, kind: str, labels: dict[str, str]) -> Any:
        """Return an object with `increment(value)` (counters) and `set(value)` (gauges)."""


class Counts:
    """Our own counters; vLLM knows nothing of these."""

    def __init__(self) -> None:
        """Register them with prometheus_client."""
        self.cancelled = Counter("tritonstream:requests_cancelled", "Requests whose caller left before the end.")
        self.wasted = Counter(
            "tritonstream:tokens_wasted", "Tokens generated after the caller of a request was last known to be there."
        )
        self.expired = Counter("tritonstream:requests_expired", "Requests ended by their own deadline_ms.")


class Mirror:
    """Copies the registry's samples to Triton's metrics port, changes only."""

    def __init__(self, port: Port, alive: Callable[[], bool], stubs: Stubs, labels: dict[str, str]) -> None:
        """`alive` says whether the engine can answer; `labels` (Triton's model and version) are put on every metric."""
        self._port = port
        self._stubs = stubs
        self._labels = labels
        self._mirrored: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[Any, float]] = {}
        self._stop = threading.Event()
        # Two threads: beside a busy engine each change waits for the interpreter's lock, and a full copy takes seconds.
        self._threads = [
            threading.Thread(target=self._repeat, args=args, name=name, daemon=True)
            for name, args in (("load-metrics", (FAST_SECONDS, _load)), ("metrics", (FULL_SECONDS, self._rest)))
        ]
        gauge = Gauge("tritonstream:engine_alive", "1 while the engine can answer, else 0.")
        gauge.set_function(lambda: float(alive()))
        gauge = Gauge(
            "tritonstream:engine_stalled_seconds",
            "Whole seconds since the engine's last step while it has work, else 0.",
        )
        gauge.set_function(lambda: math.floor(stubs.stalled_seconds))  # else it would change, and cost, all the time
        self._began = time.time()
        gauge = Gauge("tritonstream:metrics_timestamp_seconds", "Unix time that a stub's metrics tell of.", [OWN])
        gauge.labels(str(stubs.index)).set_function(lambda: self._began)

    def start(self) -> None:
        """Copy everything once, so that every metric is there from the first scrape on, then keep copying."""
        self.copy(REGISTRY.collect())
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop, and copy a last time."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.copy(REGISTRY.collect())
        self._mirrored.clear()

    def _repeat(self, seconds: float, collect: Callable[[], Iterable[Metric]]) -> None:
        while not self._stop.wait(seconds):
            try:
                self.copy(collect())
            except Exception:
                log.exception("metrics could not be copied")

    def _rest(self) -> Iterable[Metric]:
        self._began = time.time()  # what is read from here on has at least all that was so far
        return (family for family in REGISTRY.collect() if family.name not in FAST)

    def copy(self, families: Iterable[Metric]) -> None:
        """Bring Triton's metrics to the values of these families.

        Triton adds up what the stubs of a model count. Of a gauge it keeps what was set last, so one stub speaks.
        """
        speaks, idle = self._stubs.speaks, self._stubs.idle
        for family in families:
            if family.name.startswith(PREFIXES):
                for sample in family.samples:
                    if not sample.name.endswith("_created"):  # a time of day, which Prometheus has no use for
                        self._copy(family, sample, speaks=speaks, idle=idle)

    def _copy(self, family: Metric, sample: Sample, *, speaks: bool, idle: bool) -> None:
        value = 0.0 if idle and sample.name in LOAD_GAUGES else sample.value
        key = (sample.name, tuple(sorted(sample.labels.items())))
        known = self._mirrored.get(key)
        # A histogram's _bucket, _sum and _count only grow: they go as counters, whose text format is the same, because
        # Triton's own histogram takes one round trip for each observation, which would be one for each token.
        kind = "gauge" if family.type in ("gauge", "info", "unknown") else "counter"
        if known is None:
            known = (self._port(sample.name, family.documentation, kind, self._labels | sample.labels), 0.0)
        metric, old = known
        if kind == "gauge" and not speaks and OWN not in sample.labels:
            value = math.nan  # equal to nothing: it is set again when this stub speaks again
        elif value != old:
            if kind == "counter":
                metric.increment(value - old)
            else:
                metric.set(value)
        self._mirrored[key] = (metric, value)


def _load() -> Iterable[Metric]:
    return REGISTRY.restricted_registry(FAST).collect()
