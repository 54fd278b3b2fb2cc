"""A histogram that keeps 1% of a value, costs a few hundred numbers at most, and adds up over processes and seconds.

Read by ledger.py, driver.py and rows.py. No I/O. Buckets are powers of GROWTH, so a microsecond and an hour are kept
equally well; locust's own rows round below 100 ms to whole milliseconds, which is more than an inter-token latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

GROWTH = 1.02  # a bucket's middle is within 1% of every value in it
SMALLEST = 1e-6
_SCALE = 1.0 / math.log(GROWTH)


@dataclass(slots=True)
class Histogram:
    """Counts of values by size, with their exact number, sum, smallest and largest."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    buckets: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Count these values."""
        made = cls()
        for value in values:
            made.add(value)
        return made

    def add(self, value: float, times: int = 1) -> None:
        """Count a value; what is below a microsecond, zero among it, is kept as that."""
        bucket = math.floor(math.log(max(value, SMALLEST)) * _SCALE)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + times
        self.count += times
        self.total += value * times
        self.least, self.most = min(self.least, value), max(self.most, value)

    def merge(self, other: Histogram) -> None:
        """Count all that another one counted."""
        for bucket, times in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + times
        self.count += other.count
        self.total += other.total
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)

    @property
    def mean(self) -> float:
        """The exact mean; 0 where nothing was counted."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The value that `share` (0 to 1) of all are not above, within 1%; 0 where nothing was counted."""
        if not self.count:
            return 0.0
        rank, seen = max(1, math.ceil(share * self.count)), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                return min(max(_middle(bucket), self.least), self.most)
        return self.most

    def values(self) -> Iterable[tuple[float, int]]:
        """Each bucket's middle, and how often it was met."""
        for bucket, times in self.buckets.items():
            yield min(max(_middle(bucket), self.least), self.most), times

    def plain(self) -> list[Any]:
        """Return it as lists and numbers, for a message to another process."""
        return [self.count, self.total, self.least, self.most, list(self.buckets.items())] if self.count else []

    @classmethod
    def read(cls, plain: list[Any]) -> Self:
        """Make one of what `plain` returned."""
        if not plain:
            return cls()
        count, total, least, most, buckets = plain
        return cls(count, total, least, most, {int(bucket): int(times) for bucket, times in buckets})

    def summary(self) -> Mapping[str, float]:
        """The figures that a report shows."""
        if not self.count:
            return {"count": 0}
        quantiles = {name: self.quantile(share) for name, share in QUANTILES.items()}
        return {"count": self.count, "mean": self.mean, **quantiles, "min": self.least, "max": self.most}


def _middle(bucket: int) -> float:
    return float(GROWTH ** (bucket + 0.5))


QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "p999": 0.999}
