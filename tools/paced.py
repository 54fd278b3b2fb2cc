"""A scheduler for vLLM that takes a step at a fixed pace, however fast the model is: the engine of `tools.gate`.

Named to vLLM by the engine argument `scheduler_cls`, imported in the engine's process; it imports nothing of ours.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

STEP_S = 0.06  # at 64 streams senders and client need about 15 ms of two cores for what one step makes


class Paced(Scheduler):  # type: ignore[misc]
    """vLLM's own scheduler, each step of which begins at least STEP_S after the one before."""

    _due = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the step's time, then decide what it runs."""
        now = time.monotonic()
        if now < self._due:
            time.sleep(self._due - now)
        self._due = max(now, self._due) + STEP_S
        return super().schedule(*args, **kwargs)
