"""One request and its answer as a protocol without I/O: what to send, what a response means, when to try again.

Both clients run one of these per stream and add only the waiting, so what holds for one holds for the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypedDict

import grpc
import tenacity

from tritonstream import affinity, status, wire
from tritonstream.connection import Retries
from tritonstream.delta import Delta
from tritonstream.errors import Cancelled, DeadlineExceeded, ServerError, TritonstreamError
from tritonstream.request import Request

# The server ends a request at its deadline by itself, and says so; gRPC's own timeout, this much later, is for a
# server or a network that cannot.
DEADLINE_GRACE_S = 1.0

_log = logging.getLogger("tritonstream")


class Retrying(TypedDict):
    """The arguments of tenacity's Retrying and AsyncRetrying."""

    retry: tenacity.retry_base
    stop: tenacity.stop.stop_base
    wait: tenacity.wait.wait_base
    before_sleep: Callable[[tenacity.RetryCallState], None]
    reraise: bool


class Exchange:
    """One request from its first sending to its end.

    `metadata` is what goes with the call: what the user gave, and the name of the conversation where that is not among
    it. `started` turns true with the first response, after which nothing is sent again. `cancelled` is set by the
    client when this side gives up.
    """

    __slots__ = ("_complete", "_deadline", "_ends_at", "_message", "_retries", "cancelled", "metadata", "started")

    def __init__(
        self, request: Request, retries: Retries, *, stream: bool, metadata: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._message = wire.encode(request, stream=stream)
        self._deadline = request.deadline
        self._ends_at: float | None = None
        self._retries = retries
        self._complete = False
        self.metadata = affinity.named(metadata, request)
        self.started = False
        self.cancelled = False

    def send(self) -> tuple[Any, float | None]:
        """Return the message to send now, and gRPC's timeout for it in seconds; the deadline runs from the first call.

        Raises DeadlineExceeded when no time is left, Cancelled when this side has given up.
        """
        if self.cancelled:
            raise self._given_up()
        if self._deadline is None:
            return self._message, None
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = now + self._deadline
        left = self._ends_at - now
        if left <= 0:
            raise DeadlineExceeded(f"no answer within {self._deadline:g} s", blame="network")
        wire.set_deadline(self._message, left)
        return self._message, left + DEADLINE_GRACE_S

    def receive(self, response: Any) -> list[Delta]:
        """Read the deltas in a response. Raises what the server reports instead of them."""
        if response.error_message:
            raise status.from_message(response.error_message)
        self.started = True
        if wire.is_final(response):
            self._complete = True
        return wire.decode(response)

    def end(self) -> None:
        """Take note that the server closed the stream without an error; raises ServerError if it did so too early."""
        if not self._complete:
            raise ServerError("the server ended the stream before the answer was complete")

    def failure(self, code: grpc.StatusCode, details: str | None) -> TritonstreamError:
        """Say what a failed call means to this request."""
        return self._given_up() if self.cancelled else status.from_status(code, details)

    def retrying(self) -> Retrying:
        """Say when a request that failed before its first response is sent again, and after what wait."""
        stop: tenacity.stop.stop_base = tenacity.stop_after_attempt(self._retries.attempts)
        if self._ends_at is not None:
            stop = stop | tenacity.stop_before_delay(max(0.0, self._ends_at - time.monotonic()))
        return Retrying(
            retry=tenacity.retry_if_exception(self._may_retry),
            stop=stop,
            wait=tenacity.wait_exponential(multiplier=self._retries.initial, max=self._retries.longest)
            + tenacity.wait_random(0, self._retries.jitter),
            before_sleep=_tell,
            reraise=True,
        )

    def _may_retry(self, error: BaseException) -> bool:
        return isinstance(error, TritonstreamError) and error.retryable and not self.started

    def _given_up(self) -> Cancelled:
        return Cancelled("the stream was cancelled by this side before the answer was complete")


def _tell(state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    _log.info("attempt %d failed (%s); trying again in %.2f s", state.attempt_number, error, state.upcoming_sleep)
