"""What gRPC and Triton report, as an error of ours: the one place where either is interpreted.

Read by exchange.py and by the two clients at the edge where they call gRPC. No I/O.
"""

from __future__ import annotations

import re

import grpc

from tritonstream.errors import (
    Blame,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    ServerError,
    ServerUnavailable,
    TritonstreamError,
)

_SPELLED = re.compile(rf"(?P<status>{'|'.join(code.name for code in grpc.StatusCode)}): ")

# gRPC's own library fails a call with the same codes a server sends, so only its wording tells the two apart.
_NETWORK_WORDS = (
    "failed to connect",
    "errors resolving",
    "dns resolution",
    "address lookup failed",
    "name resolution",
    "socket closed",
    "connection reset",
    "connection refused",
    "connection timed out",
    "broken pipe",
    "no route to host",
    "network is unreachable",
    "handshake",
    "ping timeout",
    "keepalive",
    "too many pings",
    "goaway",
    "recvmsg",
    "endpoint closing",
    "stream removed",
    "rst_stream",
    "transport closed",
)
# What gRPC makes of a stream that was reset and has no status: so a proxy (Envoy) ends one whose server it lost.
_UNTOLD = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
# Triton (seen in 2.51) checks names, types and shapes before the model and reports them as text within the stream,
# without a code.
_NOT_FOUND_WORDS = ("is not found", "unknown model")
_UNAVAILABLE_WORDS = (
    "no available versions",
    "not at ready state",
    "not ready",
    "server is stopping",
    "stopped accepting",
    "maximum queue size",
    "is not healthy",
)
_INVALID_WORDS = (
    "unexpected shape for input",
    "unexpected inference input",
    "inference input",
    "input byte size mismatch",
    "inputs but got",
    "invalid value",
    "invalid argument",
    "batch size",
)


def from_status(code: grpc.StatusCode, details: str | None) -> TritonstreamError:
    """Map the status of a call that failed."""
    said = details or code.name
    if _SPELLED.match(said):
        return from_message(said)
    network = any(word in said.lower() for word in _NETWORK_WORDS)
    if code in _UNTOLD and "rst_stream" in said.lower():
        return ServerUnavailable(said, blame="network")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"nothing was heard of the server until the deadline ({said})", blame="network")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in said:  # either side's limit on one message
        return InvalidRequest(f"{said}: make the prompt shorter, or ask for less at once")
    return _error(code, said, "network" if network else "server")


def from_message(said: str) -> TritonstreamError:
    """Map an error that came inside a response of the stream.

    The model's own begin with their gRPC status; of Triton's only the wording tells what they are.
    """
    spelled = _SPELLED.match(said)
    if spelled is not None:
        return _error(grpc.StatusCode[spelled["status"]], said[spelled.end() :], "server")
    lower = said.lower()
    if any(word in lower for word in _UNAVAILABLE_WORDS):
        return ServerUnavailable(said, blame="server")
    if any(word in lower for word in _NOT_FOUND_WORDS):
        return ModelNotFound(said)
    if any(word in lower for word in _INVALID_WORDS):
        return InvalidRequest(said)
    return ServerError(said)


def _error(code: grpc.StatusCode, said: str, blame: Blame) -> TritonstreamError:
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return ServerUnavailable(said, blame=blame)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(said, blame=blame)
    if code is grpc.StatusCode.CANCELLED:
        return Cancelled(said, blame="server")
    if code is grpc.StatusCode.NOT_FOUND:
        return ModelNotFound(said)
    if code in _CALLERS:
        return InvalidRequest(said)
    return ServerError(said, blame=blame)


_CALLERS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)
