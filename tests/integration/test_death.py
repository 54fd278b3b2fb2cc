"""What dies and what becomes of its requests and processes: the engine, the stub, the server itself."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support import processes, servers, tiny_qwen3
from tests.support.metrics import eventually
from tests.support.servers import Triton
from tests.support.tiny_qwen3 import case
from tests.support.wire import Answer, Wire, connect

FIRST, SECOND = "Tiny-First", "Tiny-Second"
WITHIN = 5.0  # seconds
MARK = "TRITONSTREAM_TEST_SERVER"
CAPITAL = case("capital")
KNOWN: dict[str, Any] = {"chat": {"messages": list(CAPITAL.messages), "chat_template_kwargs": CAPITAL.template_kwargs}}
ENDLESS: dict[str, Any] = {
    "chat": {
        "messages": [{"role": "user", "content": tiny_qwen3.WHEEL_QUESTION}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "sampling": {"ignore_eos": True},
}

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def doomed(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, nothing_left: set[Path]
) -> Iterator[tuple[Triton, str]]:
    """A server of its own with two models, each with an engine that has room for two, and the mark of its processes.

    The tests of this module kill it piece by piece, from the first to the last.
    """
    engine = servers.ENGINE | {"model": str(tiny_model), "max_num_seqs": 2}
    mark = uuid.uuid4().hex
    models = {FIRST: engine, SECOND: engine}
    with servers.serving(tmp_path_factory.mktemp("doomed"), models, env={MARK: mark}) as running:
        nothing_left |= processes.shared_memory(processes.marked(mark, MARK))
        yield running, mark


class Streams:
    """Endless streams in the midst of their answers: two that run, the rest waiting where there is room for two."""

    def __init__(self, wire: Wire, number: int) -> None:
        self._wire = wire
        self._number = number
        self._stack = AsyncExitStack()
        self.killed = 0.0

    async def __aenter__(self) -> Streams:
        self.calls = [await self._stack.enter_async_context(self._wire.open(**ENDLESS)) for _ in range(2)]
        for call in self.calls:
            await call.until(20)
        for _ in range(self._number - 2):
            self.calls.append(await self._stack.enter_async_context(self._wire.open(**ENDLESS)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def after(self, kill: Callable[[], None]) -> list[Answer]:
        """Kill, and read what comes of each stream: at most for some seconds, after which an answer has not ended."""
        await asyncio.sleep(0.1)  # the last of them are on their way to the engine
        self.killed = time.monotonic()
        kill()
        await asyncio.gather(*(call.rest(WITHIN + 1) for call in self.calls), return_exceptions=True)
        return [call.answer for call in self.calls]

    @property
    def told(self) -> str:
        """What became of each stream, with times from the killing on."""
        return "\n".join(
            f"{answer.code.name} {answer.error!r}: began {answer.began - self.killed:.2f} s, "
            f"ended {answer.ended - self.killed:.2f} s, {len(answer.responses)} responses"
            for answer in (call.answer for call in self.calls)
        )


async def test_a_killed_engine_ends_every_request(doomed: tuple[Triton, str]) -> None:
    """Open ones, running and queued, and new ones end with UNAVAILABLE and one final response; never a hang."""
    triton, _ = doomed
    core = triton.engine_core(FIRST)
    async with connect(triton.grpc, FIRST) as wire:
        async with Streams(wire, 4) as streams:
            answers = await streams.after(core.kill)
        for answer in answers:
            assert answer.code is grpc.StatusCode.UNAVAILABLE, streams.told
            assert 0 < answer.ended - streams.killed < WITHIN, streams.told
            assert answer.finals == 1
            text = answer.text()
            assert text == tiny_qwen3.wheel(len(text))
        for stream in (True, False):
            late = await wire.ask(**KNOWN, stream=stream, within=WITHIN)
            assert late.code is grpc.StatusCode.UNAVAILABLE, late.error
            assert late.finals == 1
            assert late.ended - late.began < WITHIN


async def test_it_is_seen_on_the_metrics_port(doomed: tuple[Triton, str]) -> None:
    """engine_alive is 0, and only for the model whose engine died."""
    triton, _ = doomed
    await eventually(lambda: triton.gauge("tritonstream:engine_alive", FIRST) == 0, "it is not alive", WITHIN)
    assert triton.gauge("tritonstream:engine_alive", SECOND) == 1
    await eventually(lambda: triton.load(FIRST) == 0, "nothing runs in it any more", WITHIN)


async def test_a_bad_request_to_a_dead_engine_is_still_the_callers_fault(doomed: tuple[Triton, str]) -> None:
    """What no engine would take is refused by name."""
    triton, _ = doomed
    async with connect(triton.grpc, FIRST) as wire:
        answer = await wire.refused(text_input="a", sampling={"temprature": 1}, within=WITHIN)
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_other_model_is_untouched(doomed: tuple[Triton, str]) -> None:
    """It answers as before."""
    triton, _ = doomed
    async with connect(triton.grpc, SECOND) as wire:
        assert (await wire.ask(**KNOWN)).ok().text() == CAPITAL.expected


async def test_a_killed_server_leaves_no_process(doomed: tuple[Triton, str]) -> None:
    """In the midst of work: callers hear of it, and stubs, engines and guardians are gone within 5 s of its SIGKILL."""
    triton, mark = doomed
    family = processes.marked(mark, MARK)
    async with connect(triton.grpc, SECOND) as wire, Streams(wire, 3) as streams:
        reading = asyncio.create_task(streams.after(triton.server.kill))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(processes.gone, family, WITHIN - 0.2)
        answers = await reading
    assert not processes.marked(mark, MARK)
    for answer in answers:
        assert answer.code is grpc.StatusCode.UNAVAILABLE, streams.told
        assert 0 < answer.ended - streams.killed < WITHIN, streams.told


async def test_a_killed_stub_leaves_no_process_and_no_caller(
    tiny_model: Path, tmp_path: Path, nothing_left: set[Path]
) -> None:
    """The engine goes with it within 5 s; callers, old and new, are told in that time and not left hanging."""
    mark = uuid.uuid4().hex
    models = {FIRST: servers.ENGINE | {"model": str(tiny_model), "max_num_seqs": 2}}
    with servers.serving(tmp_path / "repository", models, env={MARK: mark}) as triton:
        nothing_left |= processes.shared_memory(processes.marked(mark, MARK))
        family = triton.processes(FIRST)
        assert len(family) > 2, "a stub, an engine, a guardian at least"
        async with connect(triton.grpc, FIRST) as wire, Streams(wire, 3) as streams:
            reading = asyncio.create_task(streams.after(family[0].kill))
            await asyncio.sleep(0.2)
            await asyncio.to_thread(processes.gone, family, WITHIN - 0.2)
            answers = await reading
            late = await wire.ask(**KNOWN, within=WITHIN)
    assert late.code is not grpc.StatusCode.OK
    for answer in answers:
        assert 0 < answer.ended - streams.killed < WITHIN, streams.told
        assert answer.code is not grpc.StatusCode.OK, streams.told
