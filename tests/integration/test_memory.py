"""Memory over many requests, and callers who do not read what they asked for.

Triton 2.51 keeps some 1 kB for each response of a stream until the stream ends, and neither makes the sender wait nor
tells it of a caller who does not read. What such a caller costs is bounded by the tokens asked for, and by that alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from tests.support import tiny_qwen3
from tests.support.metrics import eventually
from tests.support.processes import SHARED_MEMORY
from tests.support.servers import Triton
from tests.support.tiny_qwen3 import case
from tests.support.wire import Call, Wire, connect
from tools.server import KEEPALIVE_PATIENCE_SECONDS, KEEPALIVE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
# TRITONSTREAM_TEST_STREAMS=20000 pytest tests/integration/test_memory.py -k flat: the long run, some four minutes.
STREAMS = int(os.environ.get("TRITONSTREAM_TEST_STREAMS", "1000"))
WARM_UP = 500
AT_ONCE = 32
# Measured over 20,000 streams: two stubs gained 192 kB, tritonserver 204 kB, and up to 800 kB that came and went. A
# mailbox that stayed behind for each of 2,000 streams was 2,144 bytes of the stub each.
PER_STREAM, COME_AND_GO = 128, 1_500_000  # bytes
PER_RESPONSE = 2_000  # bytes; measured: 1,030 with 125,000 of them, 80 bytes each on the wire
ROUNDS = 3  # of callers who leave without reading
CAPITAL = case("capital")
WHEEL = {
    "messages": [{"role": "user", "content": tiny_qwen3.WHEEL_QUESTION}],
    "chat_template_kwargs": {"enable_thinking": False},
}
ENOUGH, ATTEMPTS = 3, 9  # comparisons of speeds, of which the median counts, on a machine that has other things to do
PATIENCE = 120.0  # seconds
FROZEN_CALLER = """
import asyncio, sys
from tests.support.wire import connect

async def main(address, model, question):
    async with connect(address, model) as wire, wire.open(chat=question) as call:
        await wire.refused(text_input="", sampling={"n": 0})  # model.py has this one now, and so the one before
        print("asked", flush=True)
        await call.rest()

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that processes have of their own, and that they share."""

    server: int
    stubs: int
    shared: int

    @classmethod
    def of(cls, triton: Triton) -> Memory:
        """Measure now."""
        regions = Path(SHARED_MEMORY).glob(f"{triton.server.shm_prefix}*")
        return cls(
            server=own(triton.server.pid),
            stubs=sum(map(own, triton.server.stub_pids())),
            shared=sum(region.stat().st_blocks * 512 for region in regions),
        )


def own(pid: int) -> int:
    """Resident bytes of a process without files and shared memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1_024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.timeout(300 + STREAMS // 20)
async def test_memory_stays_flat_over_many_short_streams(triton: Triton, wire: Wire) -> None:
    """Neither the stubs nor tritonserver nor the shared memory between them grow with the streams that were."""
    room = asyncio.Semaphore(AT_ONCE)

    async def ask(number: int) -> None:
        async with room:
            answer = await wire.ask(
                chat={"messages": list(CAPITAL.messages), "chat_template_kwargs": CAPITAL.template_kwargs},
                sampling={"max_tokens": 4 + number % 5},
                within=PATIENCE,
            )
        assert CAPITAL.expected.startswith(answer.ok().text())

    await asyncio.gather(*map(ask, range(WARM_UP)))
    before = Memory.of(triton)
    await asyncio.gather(*map(ask, range(STREAMS)))
    after = Memory.of(triton)
    print(f"{STREAMS} streams: {before} -> {after}")
    allowed = PER_STREAM * STREAMS + COME_AND_GO
    assert after.stubs - before.stubs < allowed, (before, after)
    assert after.server - before.server < allowed, (before, after)
    assert after.shared == before.shared


@asynccontextmanager
async def unread(triton: Triton, callers: int, tokens: int) -> AsyncIterator[list[Call]]:
    """Let so many callers ask for so many tokens each, and read none; they leave at the end of the block."""
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(connect(triton.grpc, triton.model))
        before = made(triton)
        opened = [wire.open(chat=WHEEL, sampling={"max_tokens": tokens}) for _ in range(callers)]
        yield [await stack.enter_async_context(call) for call in opened]
        assert made(triton) >= before + callers * tokens, "they left before all was generated"


def made(triton: Triton) -> float:
    """How many tokens the model has generated."""
    return triton.gauge("vllm:generation_tokens_total")


async def generated(triton: Triton, tokens: float) -> None:
    """Wait until the model has generated so many tokens, all in all, and has nothing left to do."""
    await eventually(lambda: made(triton) >= tokens and triton.load() == 0, "all is generated", PATIENCE)


async def test_what_is_not_read_costs_bounded_memory_and_gives_it_back(triton: Triton) -> None:
    """So much for each response; who reads late gets all of it, and what those who left held is used again."""
    callers, tokens = 32, 300
    crowd = callers * tokens
    before, begun = own(triton.server.pid), made(triton)
    async with unread(triton, callers, tokens) as calls:
        await generated(triton, begun + crowd)
        cost = own(triton.server.pid) - before
        answers = [(await call.rest()).ok() for call in calls]
    for answer in answers:
        text = answer.text().rstrip("\N{REPLACEMENT CHARACTER}")  # the last token may be half a character
        assert len(text) > 100
        assert text == tiny_qwen3.wheel(len(text))
    responses = sum(len(answer.responses) for answer in answers)
    assert cost < PER_RESPONSE * responses + COME_AND_GO, responses
    before = own(triton.server.pid)
    for _ in range(ROUNDS):
        begun = made(triton)
        async with unread(triton, callers, tokens):
            await generated(triton, begun + crowd)
    grown = own(triton.server.pid) - before
    print(f"{responses} unread responses: {cost} bytes; {ROUNDS} such crowds later: {grown} more")
    assert grown < ROUNDS * responses * PER_RESPONSE / 5, "each crowd took memory of its own"


async def test_those_who_never_read_slow_nobody(triton: Triton, wire: Wire) -> None:
    """Beside 256 callers who left all their responses unread, others read as fast as alone: within 10 %."""
    callers, tokens = 256, 50
    story = case("story")
    # A machine is now faster, now slower: each crowd is compared with what was right before and after it.
    ratios: list[float] = []
    before = await speed(wire)
    while len(ratios) < ATTEMPTS:
        begun = made(triton)
        async with unread(triton, callers, tokens):
            told = await wire.ask(
                chat={"messages": list(story.messages), "chat_template_kwargs": story.template_kwargs}, within=PATIENCE
            )
            assert told.ok().text() == story.expected
            await generated(triton, begun + callers * tokens)
            beside = await speed(wire)
        after = await speed(wire)
        print(f"characters a second: {beside:.0f} beside {callers} who do not read, {before:.0f} and {after:.0f} alone")
        ratios.append(2 * beside / (before + after))
        before = after
        if len(ratios) >= ENOUGH and median(ratios) > 0.9:
            return
    raise AssertionError(f"slower by more than a tenth: {ratios}")


async def speed(wire: Wire) -> float:
    """Characters a second that sixteen callers read together, twice."""
    began, characters = time.monotonic(), 0
    for _ in range(2):
        answers = await asyncio.gather(*(wire.ask(chat=WHEEL, sampling={"max_tokens": 150}) for _ in range(16)))
        characters += sum(len(answer.ok().text()) for answer in answers)
    return characters / (time.monotonic() - began)


async def test_a_caller_who_froze_has_left(triton: Triton, wire: Wire) -> None:
    """Its process answers no ping: it is as good as cancelled, while one that waits as long for its answer has it."""
    name = "tritonstream:requests_cancelled_total"
    before = triton.gauge(name)
    story = case("story")
    command = (sys.executable, "-c", FROZEN_CALLER, triton.grpc, triton.model, json.dumps(WHEEL))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((".", "client"))}
    frozen: asyncio.subprocess.Process | None = None
    try:
        with triton.engine_paused(triton.model):  # nothing ends meanwhile
            frozen = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
            assert frozen.stdout is not None
            assert await frozen.stdout.readline() == b"asked\n"
            frozen.send_signal(signal.SIGSTOP)
            patient = asyncio.create_task(
                wire.ask(
                    chat={"messages": list(story.messages), "chat_template_kwargs": story.template_kwargs},
                    within=PATIENCE,
                )
            )
            within = 3 * (KEEPALIVE_SECONDS + KEEPALIVE_PATIENCE_SECONDS)
            await eventually(lambda: triton.gauge(name) == before + 1, "the frozen one is counted", within)
        assert (await patient).ok().text() == story.expected
    finally:
        if frozen is not None:
            frozen.kill()
            await frozen.wait()
