"""Where a server stops keeping up: the steps of a ramp, and the knee among them.

Read by report.py and plot.py. No I/O. The knee is the last step that the server still carried, and past which latency
rises faster than the load: "kneedle" (Satopää et al., 2011) for a curve that is convex and rises, over the steps up to
the first that was not carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CARRIED = 0.9  # of what was offered must be answered, or the queue grows without end
BEND = 0.2  # of the diagonal: less is a line, not a knee; M/M/1 up to 90% of its capacity bends by 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rate that was held for a while: requests/s offered and completed, and the latency then, in seconds."""

    offered: float
    completed: float
    ttft_p50: float
    ttft_p95: float
    total_p95: float
    tokens_per_s: float
    error_rate: float

    @property
    def carried(self) -> bool:
        """Whether the server answered what was asked."""
        return self.completed >= CARRIED * self.offered and self.error_rate <= 1 - CARRIED


def find(steps: Sequence[Step]) -> int | None:
    """The index of the knee's step, None where every step was carried and latency never bent."""
    broken = next((index for index, step in enumerate(steps) if not step.carried), None)
    curve = steps if broken is None else steps[: broken + 1]
    bend = _bend([(step.offered, step.ttft_p95) for step in curve])
    if broken is None:
        return bend
    if broken == 0:
        return None  # even the least was too much: the knee lies below the ramp
    return broken - 1 if bend is None else min(bend, broken - 1)


def _bend(curve: Sequence[tuple[float, float]]) -> int | None:
    """The point farthest below the line from the first to the last one, where that is far enough."""
    if len(curve) < 3:
        return None
    (x0, _), (x1, y1) = curve[0], curve[-1]
    y0 = min(y for _, y in curve)
    if x1 <= x0 or y1 <= y0 or y1 < 1.5 * y0:
        return None
    below = [(x - x0) / (x1 - x0) - (y - y0) / (y1 - y0) for x, y in curve]
    best = max(range(len(curve)), key=below.__getitem__)
    return best if below[best] >= BEND else None
