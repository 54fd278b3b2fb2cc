"""What gRPC and Triton report becomes one error that says whose fault it is."""

from __future__ import annotations

import grpc
import pytest
from tritonstream import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    ServerError,
    ServerUnavailable,
    status,
)

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "details", "kind", "blame"),
    [
        (Code.INVALID_ARGUMENT, "n must be at least 1", InvalidRequest, "caller"),
        (Code.UNAUTHENTICATED, "no key", InvalidRequest, "caller"),
        (Code.UNIMPLEMENTED, "Method not found!", InvalidRequest, "caller"),
        (Code.NOT_FOUND, "no such model", ModelNotFound, "caller"),
        (Code.UNAVAILABLE, "the engine is dead", ServerUnavailable, "server"),
        (Code.UNAVAILABLE, "failed to connect to all addresses; last error: …", ServerUnavailable, "network"),
        (Code.UNAVAILABLE, "errors resolving nohost:1: [field:hostname …", ServerUnavailable, "network"),
        (Code.UNAVAILABLE, "Socket closed", ServerUnavailable, "network"),
        (Code.UNAVAILABLE, "Too many pings", ServerUnavailable, "network"),
        (Code.INTERNAL, "Received RST_STREAM with error code 2", ServerUnavailable, "network"),
        (Code.UNKNOWN, "Stream removed (RST_STREAM (Received RST_STREAM…", ServerUnavailable, "network"),
        (Code.RESOURCE_EXHAUSTED, "Exceeds maximum queue size", ServerUnavailable, "server"),
        (Code.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (9 vs. 4)", InvalidRequest, "caller"),
        (Code.CANCELLED, "the server is stopping", Cancelled, "server"),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", DeadlineExceeded, "network"),
        (Code.INTERNAL, "internal error", ServerError, "server"),
        (Code.UNKNOWN, None, ServerError, "server"),
    ],
)
def test_a_status_is_mapped(code: grpc.StatusCode, details: str | None, kind: type[Exception], blame: str) -> None:
    """Wordings of gRPC are as of 1.85."""
    error = status.from_status(code, details)
    assert type(error) is kind
    assert error.blame == blame
    assert (details or code.name) in str(error)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Request for unknown model: 'nope' is not found", ModelNotFound),
        ("Request for unknown model: 'm' version 7 is not found", ModelNotFound),
        ("Request for unknown model: 'm' has no available versions", ServerUnavailable),
        ("[request id: r] unexpected shape for input 'stream' for model 'm'. Expected [1], got [2]. ", InvalidRequest),
        ("inference input 'stream' data-type is 'INT32', but model 'm' expects 'BOOL'", InvalidRequest),
        (
            "input byte size mismatch for input 'stream' for model 'm'. Expected 1, got 4",
            InvalidRequest,
        ),
        ("unexpected inference input 'foo' for model 'm'", InvalidRequest),
        ("invalid value for 'priority', expected value >= 0.", InvalidRequest),
        ("Stub process 'm_0_0' is not healthy.", ServerUnavailable),
        ("Failed to process the request(s), message: nobody knows.", ServerError),
    ],
)
def test_an_error_in_words_is_mapped(said: str, kind: type[Exception]) -> None:
    """Triton's own checks answer inside the stream, without a code; these are its words in 2.51."""
    assert type(status.from_message(said)) is kind


@pytest.mark.parametrize(
    ("said", "kind", "blame"),
    [
        ("INVALID_ARGUMENT: n must be at least 1", InvalidRequest, "caller"),
        ("UNAVAILABLE: the engine is dead", ServerUnavailable, "server"),
        ("CANCELLED: the caller left", Cancelled, "server"),
        ("DEADLINE_EXCEEDED: deadline_ms=5 passed", DeadlineExceeded, "server"),
        ("INTERNAL: internal error", ServerError, "server"),
    ],
)
def test_the_models_own_errors_begin_with_their_status(said: str, kind: type[Exception], blame: str) -> None:
    """They mean the same inside the stream and as its status, and are told without the prefix."""
    for error in (status.from_message(said), status.from_status(Code.INTERNAL, said)):
        assert type(error) is kind
        assert error.blame == blame
        assert str(error) == said.partition(": ")[2]
