"""Errors as OpenAI's API says them: the one place where a failure becomes an HTTP status and a body.

Read by the routes. The messages are those of the client library and the server, which name field, value and bound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tritonstream import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    ServerUnavailable,
    TritonstreamError,
)

RETRY_SECONDS = 2  # what Retry-After says where nothing better is known
_FIELD = re.compile(r"(?:chat\.)?([a-z_]+(?:\[\d+\]|\.[a-z_]+)*)\b(?:: | must| is| cannot| hold| needs)")


@dataclass(kw_only=True, eq=False)  # not frozen: a raised exception takes its traceback
class Failure(Exception):
    """A request that is answered with an error. `reason` is its label in the metrics, `param` the field at fault."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    reason: str = "invalid"
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """Spell it as OpenAI's error object."""
        return msgspec.json.encode({"error": self._object()})

    def event(self) -> bytes:
        """Spell it as an event of a stream that has begun."""
        return b"event: error\ndata: " + self.body() + b"\n\n"

    def _object(self) -> dict[str, Any]:
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code or self.status}


def invalid(message: str, param: str | None = None) -> Failure:
    """Say that the caller must change the request."""
    return Failure(status=400, message=message, param=param, code="invalid_request")


def unauthorized(message: str) -> Failure:
    """Say that the key is missing or wrong."""
    return Failure(
        status=401,
        message=message,
        kind="authentication_error",
        code="invalid_api_key",
        reason="unauthorized",
        headers={"www-authenticate": "Bearer"},
    )


def too_many(message: str, reason: str, seconds: float = RETRY_SECONDS) -> Failure:
    """Say that this key asks for more than it may; `seconds` until it may again."""
    return Failure(
        status=429,
        message=message,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        reason=reason,
        headers={"retry-after": str(max(1, round(seconds + 0.5)))},
    )


def overloaded(message: str, reason: str) -> Failure:
    """Say that the server cannot take this request now."""
    return Failure(
        status=503,
        message=message,
        kind="service_unavailable_error",
        code="overloaded" if reason != "draining" else "draining",
        reason=reason,
        headers={"retry-after": str(RETRY_SECONDS)},
    )


def failure(error: Exception) -> Failure:
    """Say what an error of the client library, or one that nobody expected, means to the caller."""
    if isinstance(error, Failure):
        return error
    message = str(error)
    if isinstance(error, ModelNotFound):
        return Failure(status=404, message=message, code="model_not_found", param="model", reason="not_found")
    if isinstance(error, InvalidRequest):
        found = _FIELD.match(message)
        return invalid(message.removeprefix("chat."), found[1] if found else None)
    if isinstance(error, DeadlineExceeded):
        return Failure(status=408, message=message, kind="timeout_error", code="timeout", reason="timeout")
    if isinstance(error, ServerUnavailable | Cancelled):
        return overloaded(message, "unavailable")
    if isinstance(error, TritonstreamError):
        return Failure(status=500, message=message, kind="server_error", code="server_error", reason="server_error")
    return Failure(
        status=500,
        message="internal error: the gateway's log has the details",
        kind="server_error",
        code="internal_error",
        reason="server_error",
    )
