"""What the gateway counts, in Prometheus' format, summed over its workers. Nothing here runs for a token.

The labels are few: a route, a status, a reason; never a key, a model or a path that a caller makes up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, multiprocess

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"  # where the workers' counters lie; set by supervisor.py before a worker starts
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

_PREFIX = "tritonstream_gateway_"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

requests = Counter(f"{_PREFIX}requests", "Requests that were answered.", ["route", "status"])
rejected = Counter(f"{_PREFIX}rejected", "Requests that were turned away, or failed.", ["reason"])
in_flight = Gauge(f"{_PREFIX}in_flight", "Requests being answered.", ["route"], multiprocess_mode="livesum")
first_token = Histogram(
    f"{_PREFIX}first_token_seconds", "From a request to its first token.", ["route"], buckets=_SECONDS
)
duration = Histogram(
    f"{_PREFIX}request_seconds", "From a request to the end of its answer.", ["route"], buckets=_SECONDS
)
tokens = Counter(f"{_PREFIX}tokens", "Tokens of the requests that were answered.", ["kind"])
left = Counter(f"{_PREFIX}left", "Callers who left before their answer was complete.", ["route"])


def page(more: Mapping[str, float]) -> bytes:
    """Make the page, of all workers; `more` are gauges known at the moment."""
    registry = CollectorRegistry()
    if DIRECTORY in os.environ:
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    shown = prometheus_client.generate_latest(registry)
    for name, value in more.items():
        shown += f"# TYPE {_PREFIX}{name} gauge\n{_PREFIX}{name} {value:g}\n".encode()
    return shown
