"""Rates over time for open loops: a ramp of steps, and bursts.

Read by the scenarios. Locust runs a shape where the test is led, and asks it once a second for the number of users,
each of which stands for `--rate-per-user` requests/s.
"""

from __future__ import annotations

import time
from typing import Any

from locust import LoadTestShape

from loadtests.kit import report
from loadtests.kit.session import Session

Tick = tuple[int, float] | None


class OpenShape(LoadTestShape):
    """A shape of rates instead of users: override `rate`."""

    abstract = True

    def tick(self) -> Tick:
        """What locust asks once a second: users, and how many of them to start in a second."""
        rate = self.rate(self.get_run_time())
        if rate is None:
            return None
        users = max(1, round(rate / self.options.rate_per_user))
        return users, float(users)

    def rate(self, seconds: float) -> float | None:
        """Requests/s, this long after the beginning; None ends the test."""
        raise NotImplementedError

    @property
    def session(self) -> Session:
        """The test's session."""
        assert self.runner is not None
        return Session.of(self.runner.environment)

    @property
    def options(self) -> Any:
        """What locust parsed."""
        assert self.runner is not None
        return self.runner.environment.parsed_options


class Ramp(OpenShape):
    """Steps from `--from-rate` to `--to-rate`, evenly spaced by ratio; over once two were not carried."""

    abstract = True

    def reset_time(self) -> None:
        """A test begins."""
        super().reset_time()
        self._held: list[report.Held] = []
        self._began = time.time()
        self._step = 0

    def rate(self, seconds: float) -> float | None:
        """Requests/s of the step that is due."""
        step = int(seconds // self.options.step_seconds)
        if step > self._step:
            now = time.time()
            self._held.append(report.Held(rate=self._of(self._step), begin=self._began, end=now))
            self.session.steps = self._held
            self._began, self._step = now, step
            if step >= self.options.steps or self._saturated():
                return None
        return self._of(step)

    def _of(self, step: int) -> float:
        low, high, steps = self.options.from_rate, self.options.to_rate, self.options.steps
        return float(low * (high / low) ** (step / max(1, steps - 1)))

    def _saturated(self) -> bool:
        last = [report.step(self.session.ledger, held) for held in self._held[-2:]]
        return len(last) == 2 and not any(step.carried for step in last)


class Burst(OpenShape):
    """`--base-rate`, and every `--period` seconds `--burst-rate` for `--burst-seconds`; `--bursts` of them."""

    abstract = True

    def rate(self, seconds: float) -> float | None:
        """Requests/s of the moment: each period ends with its burst, and the last one with quiet after it."""
        period, within = divmod(seconds, self.options.period)
        if period >= self.options.bursts:
            return (
                float(self.options.base_rate)
                if within < self.options.period / 2 and period == self.options.bursts
                else None
            )
        burst = within >= self.options.period - self.options.burst_seconds
        return float(self.options.burst_rate if burst else self.options.base_rate)
