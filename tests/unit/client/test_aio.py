"""What only the asynchronous client can do: be cancelled by tasks, timeouts and its own loop."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from tritonstream import (
    AsyncClient,
    Cancelled,
    InvalidRequest,
    Request,
    Retries,
    Sampling,
    ServerError,
    ServerUnavailable,
)

from tests.unit.client.scripted import Call, ScriptedTriton, hangs, refuses, says


@pytest.fixture
async def client(triton: ScriptedTriton) -> AsyncIterator[AsyncClient]:
    """A client of the scripted server."""
    async with AsyncClient(triton.url) as made:
        yield made


async def test_leaving_the_block_cancels_at_once(triton: ScriptedTriton, client: AsyncClient) -> None:
    """A reader who walks away is noticed by the server while the client is still in use."""
    triton.script(hangs("Once"))
    took = []
    for _ in range(5):
        async with client.stream("Hi", model="tiny") as deltas:
            assert (await anext(deltas)).text == "Once"
            start = time.monotonic()
        took.append(time.monotonic() - start)
        assert await asyncio.to_thread(triton.calls[-1].left.wait, 5)
    assert statistics.median(took) < 0.2, took


async def test_an_error_in_the_block_cancels_too(triton: ScriptedTriton, client: AsyncClient) -> None:
    """The reader's own failure passes through, and the server is told."""
    triton.script(hangs("Once"))
    with pytest.raises(KeyError):
        async with client.stream("Hi", model="tiny") as deltas:
            await anext(deltas)
            raise KeyError("reader")
    assert await asyncio.to_thread(triton.calls[0].left.wait, 5)


async def test_a_cancelled_task_leaves_nothing_running(triton: ScriptedTriton, client: AsyncClient) -> None:
    """Cancelling the task that waits raises CancelledError in it, as asyncio wants, and frees the server."""
    triton.script(hangs())

    async def read() -> None:
        async with client.stream("Hi", model="tiny") as deltas:
            await anext(deltas)

    task = asyncio.create_task(read())
    assert await asyncio.to_thread(triton.came.acquire, timeout=5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(triton.calls[0].left.wait, 5)


async def test_a_timeout_around_the_iteration_works(triton: ScriptedTriton, client: AsyncClient) -> None:
    """`asyncio.timeout` is not mistaken for a cancelled call."""
    triton.script(hangs("Once"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), client.stream("Hi", model="tiny") as deltas:
            async for _ in deltas:
                pass
    assert await asyncio.to_thread(triton.calls[0].left.wait, 5)


async def test_cancel_from_another_task(triton: ScriptedTriton, client: AsyncClient) -> None:
    """The reader gets Cancelled, not a CancelledError that would look like its own end."""
    triton.script(hangs("Once"))
    async with client.stream("Hi", model="tiny") as deltas:
        await anext(deltas)
        asyncio.get_running_loop().call_later(0.05, deltas.cancel)
        with pytest.raises(Cancelled) as caught:
            await anext(deltas)
        assert caught.value.blame == "caller"
        assert [delta async for delta in deltas] == []
    assert await asyncio.to_thread(triton.calls[0].left.wait, 5)


async def test_cancel_while_waiting_to_try_again(triton: ScriptedTriton) -> None:
    """Nothing more is sent for a stream that was given up between two attempts."""
    triton.script(refuses(grpc.StatusCode.UNAVAILABLE, "not yet"))
    retries = Retries(initial=0.2, longest=0.2, jitter=0)
    async with AsyncClient(triton.url, retries=retries) as client, client.stream("Hi", model="tiny") as deltas:
        asyncio.get_running_loop().call_later(0.1, deltas.cancel)
        with pytest.raises((Cancelled, ServerUnavailable)):
            await anext(deltas)
    assert len(triton.calls) == 1


async def test_closing_the_client_ends_its_streams(triton: ScriptedTriton, client: AsyncClient) -> None:
    """A stream of a closed client ends with Cancelled, and the client opens anew when asked again."""
    triton.script(hangs("Once"), says("again"))
    async with client.stream("Hi", model="tiny") as deltas:
        await anext(deltas)
        await client.close()
        with pytest.raises(Cancelled):
            await anext(deltas)
    assert (await client.generate("Hi", model="tiny")).text == "again"


async def test_streams_run_side_by_side(triton: ScriptedTriton) -> None:
    """Ten answers that wait for each other all come, over two connections."""
    peers = set()

    def script(call: Call) -> Iterator[Any]:
        peers.add(call.context.peer())
        yield call.reply("Once")
        yield call.reply(" more", final=True)

    triton.script(script)
    async with AsyncClient(triton.url, channels=2) as client:
        streams = [client.stream("Hi", model="tiny") for _ in range(10)]
        for stream in streams:
            await stream.__aenter__()
        firsts = [(await anext(stream)).text for stream in streams]
        rests = [[delta.text async for delta in stream] for stream in streams]
        for stream in streams:
            await stream.__aexit__(None, None, None)
    assert firsts == ["Once"] * 10
    assert rests == [[" more"]] * 10
    assert len(peers) == 2


async def test_a_request_can_be_used_again_with_other_fields(triton: ScriptedTriton, client: AsyncClient) -> None:
    """Arguments beside a Request replace its own."""
    request = Request(prompt="Hi", model="other", sampling=Sampling(seed=1))
    await client.generate(request, model="tiny")
    assert triton.calls[0].message.model_name == "tiny"
    assert triton.calls[0].request.sampling == {"seed": 1}


async def test_a_stream_must_be_entered_and_only_once(triton: ScriptedTriton, client: AsyncClient) -> None:
    """Misuse is told, not guessed at."""
    stream = client.stream("Hi", model="tiny")
    with pytest.raises(RuntimeError, match="async with"):
        await anext(stream)
    async with stream:
        with pytest.raises(RuntimeError, match="once"):
            await stream.__aenter__()
    assert [delta async for delta in stream] == []


async def test_what_cannot_be_sent_is_refused_before_anything_is_sent(client: AsyncClient) -> None:
    """Broken Unicode and values that are no JSON are the caller's, by name."""
    with pytest.raises(InvalidRequest, match="text_input is not valid Unicode"):
        client.stream("\ud800", model="tiny")
    with pytest.raises(InvalidRequest, match="sampling_parameters cannot be written as JSON"):
        client.stream("Hi", model="tiny", sampling=Sampling(extra={"x": object()}))
    with pytest.raises(InvalidRequest, match="model is missing"):
        client.stream("Hi")


async def test_nothing_waits_for_the_garbage_collector(triton: ScriptedTriton, client: AsyncClient) -> None:
    """After a block was left, collecting what remains raises no warning."""
    triton.script(hangs("Once"))
    for _ in range(3):
        async with client.stream("Hi", model="tiny") as deltas:
            await anext(deltas)
    del deltas
    await asyncio.sleep(0.05)
    gc.collect()


async def test_no_channel_stays_loaded(triton: ScriptedTriton, client: AsyncClient) -> None:
    """However a stream ends, its place is free again: else the spreading would forget a channel."""
    triton.script(says("whole"), refuses(grpc.StatusCode.INTERNAL, "broken"), hangs("left"))
    await client.generate("Hi", model="tiny")
    with pytest.raises(ServerError):
        await client.generate("Hi", model="tiny")
    async with client.stream("Hi", model="tiny") as deltas:
        await anext(deltas)
    assert await client.server_live()
    assert [lane.load for lane in client._pool._lanes] == [0]
