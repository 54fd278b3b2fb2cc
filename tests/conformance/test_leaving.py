"""Callers who leave, gateways that are told to end, and processes that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import time
from collections.abc import Callable

import httpx
import openai
import psutil
import pytest

from tests.conformance.conftest import Start
from tests.conformance.test_http import BODY, curl
from tests.conformance.test_limits import ENDLESS, WITHIN, streaming
from tests.support import processes, servers
from tests.support.metrics import eventually
from tests.support.servers import TINY
from tools.gateway import GatewayProcess

FREED_WITHIN, TIMES = 0.25, 5  # seconds, as the median of so many


def workers(front: GatewayProcess) -> list[psutil.Process]:
    """The workers of a gateway."""
    return psutil.Process(front.pid).children()


@pytest.mark.parametrize("stream", [True, False])
async def test_who_leaves_frees_the_engine(front: GatewayProcess, triton: servers.Triton, stream: bool) -> None:
    """Whether in the middle of a stream or waiting for a whole answer: nothing of it runs after 250 ms."""
    freed = []
    for _ in range(TIMES):
        async with httpx.AsyncClient(base_url=front.url, timeout=WITHIN) as http:
            request = http.build_request("POST", "/v1/chat/completions", json=ENDLESS | {"stream": stream})
            asking = asyncio.create_task(http.send(request, stream=True))
            await eventually(lambda: triton.load() == 1, "it runs")
            if stream:
                answer = await asking
                await anext(answer.aiter_lines())
                left = time.monotonic()
                await answer.aclose()
            else:
                left = time.monotonic()
                asking.cancel()
            await eventually(lambda: triton.load() == 0, "it is free")
            freed.append(time.monotonic() - left)
            await asyncio.gather(asking, return_exceptions=True)
    assert statistics.median(freed) < FREED_WITHIN, freed


async def test_a_client_that_breaks_off_its_loop(aclient: openai.AsyncOpenAI, triton: servers.Triton) -> None:
    """Closing OpenAI's stream is leaving."""
    body = {name: value for name, value in ENDLESS.items() if name not in ("ignore_eos", "enable_thinking")}
    stream = await aclient.chat.completions.create(**body, extra_body={"ignore_eos": True, "enable_thinking": False})
    async for _ in stream:
        break
    await stream.close()
    await eventually(lambda: triton.load() == 0, "the engine is free")


async def test_a_drain_finishes_what_is_open_and_refuses_what_is_new(start: Start, triton: servers.Triton) -> None:
    """On SIGTERM a stream goes on to its [DONE], new requests get 503 in every worker, and then all are gone."""
    front = start("--workers", "2", "--keep-alive", "0.05", grace=60)
    family = workers(front)
    async with httpx.AsyncClient(timeout=WITHIN) as http:

        async def status(path: str) -> int:
            async with httpx.AsyncClient(timeout=WITHIN) as fresh:  # a connection of its own: any worker
                asked = (
                    fresh.post(front.url + path, json=BODY) if path.startswith("/v1") else fresh.get(front.url + path)
                )
                return (await asked).status_code

        async with contextlib.AsyncExitStack() as opened:
            with triton.engine_paused(TINY):  # so that it is still open when the drain begins
                body = ENDLESS | {"max_tokens": 200}
                asked = http.stream("POST", f"{front.url}/v1/chat/completions", json=body)
                lines = (await opened.enter_async_context(asked)).aiter_lines()
                assert (await anext(lines)).startswith(":")
                front.terminate()
                await eventually(lambda: curl(f"{front.url}/health/ready")[0] == 503, "it drains")
                for _ in range(8):
                    assert await status("/v1/chat/completions") == 503
                assert await status("/health") == 200
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
    await asyncio.to_thread(
        processes.gone, [*family, psutil.Process(front.pid)] if front.exit_code is None else family, 20
    )
    front.stop()
    assert front.exit_code == 0


async def test_the_end_of_the_grace_period(start: Start, triton: servers.Triton) -> None:
    """What is not done by then is cut with an error event, and the gateway ends."""
    front = start(grace=0.5)
    family = workers(front)
    async with streaming(front.url) as lines:
        front.terminate()
        rest = [line async for line in lines if line]
    assert rest[-2] == "event: error"
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "overloaded"
    await asyncio.to_thread(processes.gone, family, 20)
    await eventually(lambda: triton.load() == 0, "the engine is free")


async def test_a_killed_worker_is_replaced(start: Start, triton: servers.Triton) -> None:
    """Its streams are lost, what it had open is not counted any more, and another takes its place."""
    front = start("--max-open", "1")
    (worker,) = workers(front)
    with pytest.raises(httpx.HTTPError):
        async with streaming(front.url) as lines:
            worker.kill()
            async for _ in lines:
                pass
    await eventually(lambda: curl(f"{front.url}/v1/chat/completions", body=BODY)[0] == 200, "another answers")
    assert workers(front) != [worker]
    assert "worker 0 died" in front.log.read_text()


def _kill(front: GatewayProcess) -> None:
    os.kill(front.pid, signal.SIGKILL)


@pytest.mark.parametrize("end", [GatewayProcess.kill, _kill], ids=["two signals", "SIGKILL of the supervisor"])
async def test_nothing_is_left(start: Start, triton: servers.Triton, end: Callable[[GatewayProcess], None]) -> None:
    """However it ends, no worker lives on, and the engine is free."""
    front = start("--workers", "2", grace=1 if end is _kill else 60)
    family = workers(front)
    with pytest.raises(httpx.HTTPError):
        async with streaming(front.url) as lines:
            end(front)
            rest = [line async for line in lines if line]
            assert "event: error" in rest  # cut in good order, for the workers outlive their supervisor by their grace
            raise httpx.HTTPError("cut")
    await asyncio.to_thread(processes.gone, family, 20)
    await eventually(lambda: triton.load() == 0, "the engine is free")
