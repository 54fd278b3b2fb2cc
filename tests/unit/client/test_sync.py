"""What only the blocking client can do: be used by several threads, and be stopped from another."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonstream import Cancelled, Client, ServerError

from tests.unit.client.scripted import ScriptedTriton, hangs, refuses, says


@pytest.fixture
def client(triton: ScriptedTriton) -> Iterator[Client]:
    """A client of the scripted server."""
    with Client(triton.url) as made:
        yield made


def test_leaving_the_block_cancels_at_once(triton: ScriptedTriton, client: Client) -> None:
    """A reader who walks away is noticed by the server while the client is still in use."""
    triton.script(hangs("Once"))
    took = []
    for _ in range(5):
        with client.stream("Hi", model="tiny") as deltas:
            assert next(deltas).text == "Once"
            held = deltas._call  # else gRPC ends it when the last reference goes, and leaving the block proves nothing
            start = time.monotonic()
        took.append(time.monotonic() - start)
        assert triton.calls[-1].left.wait(5)
        assert held.cancelled()
    assert statistics.median(took) < 0.2, took


def test_an_error_in_the_block_cancels_too(triton: ScriptedTriton, client: Client) -> None:
    """The reader's own failure passes through, and the server is told."""
    triton.script(hangs("Once"))
    with pytest.raises(KeyError), client.stream("Hi", model="tiny") as deltas:
        next(deltas)
        raise KeyError("reader")
    assert triton.calls[0].left.wait(5)


def test_cancel_from_another_thread(triton: ScriptedTriton, client: Client) -> None:
    """The reader that waits gets Cancelled."""
    triton.script(hangs("Once"))
    with client.stream("Hi", model="tiny") as deltas:
        next(deltas)
        timer = threading.Timer(0.05, deltas.cancel)
        timer.start()
        with pytest.raises(Cancelled) as caught:
            next(deltas)
        timer.join()
        assert caught.value.blame == "caller"
        assert list(deltas) == []
    assert triton.calls[0].left.wait(5)


def test_closing_the_client_ends_its_streams(triton: ScriptedTriton, client: Client) -> None:
    """A stream of a closed client ends with Cancelled, and the client opens anew when asked again."""
    triton.script(hangs("Once"), says("again"))
    with client.stream("Hi", model="tiny") as deltas:
        next(deltas)
        client.close()
        with pytest.raises(Cancelled):
            next(deltas)
    assert client.generate("Hi", model="tiny").text == "again"


def test_threads_share_a_client(triton: ScriptedTriton, client: Client) -> None:
    """Many threads, one client, every answer whole."""
    triton.script(says("Once", " upon", " a time"))

    def read(_: int) -> str:
        with client.stream("Hi", model="tiny") as deltas:
            return "".join(delta.text for delta in deltas)

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(read, range(40))) == {"Once upon a time"}


def test_a_stream_must_be_entered_and_only_once(client: Client) -> None:
    """Misuse is told, not guessed at."""
    stream = client.stream("Hi", model="tiny")
    with pytest.raises(RuntimeError, match="with client"):
        next(stream)
    with stream, pytest.raises(RuntimeError, match="once"):
        stream.__enter__()
    assert list(stream) == []


def test_no_channel_stays_loaded(triton: ScriptedTriton, client: Client) -> None:
    """However a stream ends, its place is free again: else the spreading would forget a channel."""
    triton.script(says("whole"), refuses(grpc.StatusCode.INTERNAL, "broken"), hangs("left"))
    client.generate("Hi", model="tiny")
    with pytest.raises(ServerError):
        client.generate("Hi", model="tiny")
    with client.stream("Hi", model="tiny") as deltas:
        next(deltas)
    assert client.server_live()
    assert [lane.load for lane in client._pool._lanes] == [0]
