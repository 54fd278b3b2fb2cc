"""What was seen of a request, in locust's own statistics: rows for its console, web UI, CSV files and HTML report.

Read by session.py. A request is a request to locust; its measures are rows beside it, not counted in "Aggregated".
Times there are in milliseconds; `tokens/s` is a number that locust shows in the columns of a time.
"""

from __future__ import annotations

import time

from locust.env import Environment
from locust.stats import RequestStats, StatsEntry, bucket_response_time

from loadtests.kit.histogram import Histogram
from loadtests.kit.talk import Seen

MILLI = 1e3


class RequestFailed(Exception):
    """A request failed; its text is the kind of failure, so that locust counts by kind."""

    def __repr__(self) -> str:
        """What locust shows and groups by."""
        return str(self)


def note(environment: Environment, api: str, name: str, seen: Seen) -> None:
    """Enter a request into locust's statistics."""
    environment.events.request.fire(
        request_type=api,
        name=name if seen.outcome != "left" else f"{name} (left)",
        response_time=seen.total * MILLI,
        response_length=seen.size,
        exception=RequestFailed(seen.kind) if seen.outcome == "failed" else None,
        context={},
    )
    stats = environment.stats
    add(stats, api, f"{name}: lateness ms", Histogram.of([seen.late * MILLI]))
    if seen.outcome == "failed":
        return
    if seen.first is not None:
        add(stats, api, f"{name}: TTFT ms", Histogram.of([seen.first * MILLI]))
    if seen.gaps.count:
        add(stats, api, f"{name}: ITL ms", scaled(seen.gaps, MILLI))
    if (rate := seen.tokens_per_s) is not None and seen.outcome == "complete":
        add(stats, api, f"{name}: tokens/s", Histogram.of([rate]))


def scaled(histogram: Histogram, factor: float) -> Histogram:
    """The same values in another unit, within the histogram's own 1%."""
    made = Histogram()
    for value, times in histogram.values():
        made.add(value * factor, times)
    if histogram.count:
        made.total = histogram.total * factor
        made.least, made.most = histogram.least * factor, histogram.most * factor
    return made


def add(stats: RequestStats, api: str, name: str, values: Histogram) -> None:
    """Add values to a row of their own: as locust merges a worker's row, so one call takes any number of them."""
    now = time.time()
    entry = StatsEntry(stats, name, api)
    entry.start_time = stats.start_time
    entry.last_request_timestamp = now
    entry.num_requests = values.count
    entry.num_reqs_per_sec = {int(now): values.count}
    # Locust declares whole milliseconds and adds up whatever it is given, as its own requests do with fractions.
    entry.total_response_time = values.total  # type: ignore[assignment]
    entry.min_response_time, entry.max_response_time = values.least, values.most  # type: ignore[assignment]
    for value, times in values.values():
        bucket = bucket_response_time(value)
        entry.response_times[bucket] = entry.response_times.get(bucket, 0) + times
    stats.get(name, api).extend(entry)
