"""What goes wrong with a request, under the names that Triton and gRPC have for it.

Read by every other module of the model. No I/O; standard library only.
"""

from __future__ import annotations

from typing import ClassVar

MAX_SHOWN_CHARS = 80


class ServingError(Exception):
    """A request that cannot be answered. The server is to blame unless a subclass says otherwise.

    `triton_code` is what Triton calls it, `status` what gRPC does.
    """

    triton_code: ClassVar[str] = "INTERNAL"
    status: ClassVar[str] = "INTERNAL"

    def spelled(self) -> str:
        """Return the message as it goes over the wire, with gRPC's status before it.

        Triton drops the code of an error within a stream, unless the caller asks for real statuses, which has crashed
        its server (2.51), and it has no code of its own for a deadline.
        """
        return f"{self.status}: {self}"


class InvalidRequest(ServingError):
    """The caller must change the request."""

    triton_code, status = "INVALID_ARG", "INVALID_ARGUMENT"


class Unavailable(ServingError):
    """The engine is dead, or the server is stopping: the same request may succeed elsewhere or later."""

    triton_code = status = "UNAVAILABLE"


class Cancelled(ServingError):
    """The caller left before the answer was complete."""

    triton_code = status = "CANCELLED"


class DeadlineExceeded(Cancelled):
    """The request's own `deadline_ms` passed."""

    status = "DEADLINE_EXCEEDED"

    def __init__(self, deadline_ms: int) -> None:
        super().__init__(f"deadline_ms={deadline_ms} passed before the answer was complete")


def shown(value: object) -> str:
    """A value for an error message: short, whatever its size."""
    text = value if isinstance(value, str) else repr(value)
    text = repr(text[: MAX_SHOWN_CHARS + 1]) if isinstance(value, str) else text
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
