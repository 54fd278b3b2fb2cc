"""The protocol of one request, without I/O."""

from __future__ import annotations

import grpc
import pytest
from tritonstream import Cancelled, DeadlineExceeded, Request, Retries, ServerError, ServerUnavailable, exchange
from tritonstream.exchange import Exchange

from tests.unit.client import scripted


class _Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """The clock that exchanges go by."""
    clock = _Clock()
    monkeypatch.setattr(exchange, "time", clock)
    return clock


def _exchange(deadline: float | None = None) -> Exchange:
    return Exchange(Request(prompt="Hi", model="m", deadline=deadline), Retries(), stream=True)


def test_without_a_deadline_there_is_no_timeout(clock: _Clock) -> None:
    """Waiting is bounded only by who asked for it."""
    message, timeout = _exchange().send()
    assert timeout is None
    assert "deadline_ms" not in message.parameters


def test_the_deadline_runs_from_the_first_sending(clock: _Clock) -> None:
    """Each attempt tells the server what is left; gRPC's timeout follows a little later."""
    made = _exchange(deadline=2)
    clock.now += 50
    message, timeout = made.send()
    assert message.parameters["deadline_ms"].int64_param == 2_000
    assert timeout == 2 + exchange.DEADLINE_GRACE_S
    clock.now += 1.5
    message, timeout = made.send()
    assert message.parameters["deadline_ms"].int64_param == 500
    clock.now += 0.5
    with pytest.raises(DeadlineExceeded, match="no answer within 2 s"):
        made.send()


def test_the_end_needs_the_final_mark(clock: _Clock) -> None:
    """A response that is not the last does not complete an answer; the last one does, also when it is empty."""
    made = _exchange()
    assert made.receive(scripted.empty(final=False)) == []
    with pytest.raises(ServerError):
        made.end()
    made.receive(scripted.empty(final=True))
    made.end()


def test_an_error_in_words_does_not_start_the_answer(clock: _Clock) -> None:
    """So the request may be sent again."""
    made = _exchange()
    with pytest.raises(ServerUnavailable):
        made.receive(scripted.error("Request for unknown model: 'm' has no available versions"))
    assert not made.started


def test_what_this_side_gave_up_is_not_the_servers_fault(clock: _Clock) -> None:
    """Whatever status the call then ends with, and nothing is sent any more."""
    made = _exchange()
    made.cancelled = True
    error = made.failure(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    assert isinstance(error, Cancelled)
    assert error.blame == "caller"
    with pytest.raises(Cancelled):
        made.send()


def test_only_an_unavailable_server_before_the_first_response_is_tried_again(clock: _Clock) -> None:
    """A response, even one without a delta, ends the time in which a request may be sent again."""
    made = _exchange()
    assert made._may_retry(ServerUnavailable("not yet"))
    assert not made._may_retry(ServerError("broken"))
    assert not made._may_retry(OSError("foreign"))
    made.receive(scripted.empty(final=False))
    assert not made._may_retry(ServerUnavailable("gone"))
