"""Several stub processes on one engine: callers see one model, whichever stub has their request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import psutil
import pytest

from tests.integration.test_death import ENDLESS, KNOWN, MARK, WITHIN
from tests.support import processes, servers
from tests.support.metrics import eventually
from tests.support.servers import TINY, Triton
from tests.support.tiny_qwen3 import case
from tests.support.wire import RETURN_ALL, Wire, connect

INSTANCES = 2
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, nothing_left: set[Path]) -> Iterator[Triton]:
    """A server of its own: two stubs, one engine. The last test kills it."""
    mark = uuid.uuid4().hex
    engine = servers.ENGINE | {"model": str(tiny_model)}
    scratch = tmp_path_factory.mktemp("sharing")
    env = {MARK: mark, "TMPDIR": str(scratch)}
    with servers.serving(scratch / "repository", {TINY: engine}, env=env, instances=INSTANCES) as running:
        nothing_left |= processes.shared_memory(processes.marked(mark, MARK))
        yield running
    assert not list(scratch.glob("tritonstream-*")), "the folder in which the stubs met was left behind"


@pytest.fixture
async def wire(shared: Triton) -> AsyncIterator[Wire]:
    """A channel to the shared engine's model."""
    async with connect(shared.grpc, TINY) as opened:
        yield opened


def test_there_is_one_engine(shared: Triton) -> None:
    """Two stubs, and one process with weights: the engine's own, for a worker beside it would spin against it."""
    assert len(shared.stubs(TINY)) == INSTANCES
    core = shared.engine_core(TINY)
    assert core.is_running()
    beside = core.children(recursive=True)
    assert not [one for one in beside if "Worker" in "".join(one.cmdline())], processes.described(beside)


def test_the_engine_goes_first(shared: Triton) -> None:
    """On a CPU no thread of stub or server stops one of the engine's just because it woke."""
    front = [shared.server.pid, *shared.stubs(TINY)]
    assert {policy for pid in front for policy in policies(pid)} == {os.SCHED_BATCH}
    assert set(policies(shared.engine_core(TINY).pid)) == {os.SCHED_OTHER}


def policies(pid: int) -> list[int]:
    """The scheduling policy of each thread of a process."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            found.append(os.sched_getscheduler(int(thread.name)))
    return found


async def test_both_stubs_serve_and_agree(shared: Triton, wire: Wire) -> None:
    """Sixty-four callers at once get the very text, and each stub had part of the work."""
    before = [psutil.Process(pid).cpu_times().user for pid in shared.stubs(TINY)]
    one = case("story")
    chat = {"messages": list(one.messages), "chat_template_kwargs": one.template_kwargs}
    answers = await asyncio.gather(*(wire.ask(chat=chat, flags=RETURN_ALL) for _ in range(64)))
    assert {answer.ok().text() for answer in answers} == {one.expected}
    after = [psutil.Process(pid).cpu_times().user for pid in shared.stubs(TINY)]
    spent = [end - start for start, end in zip(before, after, strict=True)]
    assert min(spent) > max(spent) / 10, f"CPU seconds of the stubs: {spent}"


async def test_the_counters_are_sums(shared: Triton, wire: Wire) -> None:
    """Triton shows one model: what both stubs counted, exactly."""
    await shared.settled()
    names = ("vllm:generation_tokens_total", "vllm:request_success_total", "vllm:e2e_request_latency_seconds_count")
    before = shared.scrape(*names)
    await asyncio.gather(*(wire.ask(chat=ENDLESS["chat"], sampling={"max_tokens": 5}) for _ in range(20)))
    await shared.settled()
    after = shared.scrape(*names)
    grown = [after.value(name, model=TINY) - before.value(name, model=TINY) for name in names]
    assert grown == [100, 20, 20]


async def test_the_gauges_are_the_engines(shared: Triton, wire: Wire) -> None:
    """Not one stub's share: eight run, whichever stubs have them, and nothing when they left."""
    async with AsyncExitStack() as opened:
        for _ in range(8):
            call = await opened.enter_async_context(wire.open(**ENDLESS))
            await call.until(1)
        with shared.engine_paused(TINY):
            await eventually(lambda: shared.gauge("vllm:num_requests_running") == 8, "all run")
            await eventually(lambda: shared.gauge("tritonstream:engine_stalled_seconds") > 1, "it hangs")
            assert shared.gauge("tritonstream:engine_alive") == 1
    await eventually(lambda: shared.load() == 0, "nothing runs")
    assert shared.gauge("tritonstream:engine_stalled_seconds") == 0


async def test_leaving_frees_the_engine_at_either_stub(shared: Triton, wire: Wire) -> None:
    """Callers of both leave in the midst of it: nothing runs any more, and each is counted."""
    await shared.settled()
    cancelled = "tritonstream:requests_cancelled_total"
    before = shared.gauge(cancelled)
    async with AsyncExitStack() as opened:
        for _ in range(8):
            call = await opened.enter_async_context(wire.open(**ENDLESS))
            await call.until(1)
        with shared.engine_paused(TINY):
            await eventually(lambda: shared.gauge("vllm:num_requests_running") == 8, "all run")
            await opened.aclose()
            await eventually(lambda: shared.gauge(cancelled) == before + 8, "each is counted")
    await eventually(lambda: shared.load() == 0, "nothing runs")


async def test_a_killed_engine_ends_the_requests_of_both(shared: Triton, wire: Wire) -> None:
    """The stub that did not start it hears of its death as well: open and new requests end with UNAVAILABLE."""
    core = shared.engine_core(TINY)
    async with AsyncExitStack() as opened:
        calls = [await opened.enter_async_context(wire.open(**ENDLESS)) for _ in range(8)]
        for call in calls:
            await call.until(1)
        core.suspend()  # so that none of them ends by itself
        killed = time.monotonic()
        core.kill()
        answers = await asyncio.gather(*(call.rest(WITHIN + 5) for call in calls))
    for answer in answers:
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert answer.finals == 1
        assert answer.ended - killed < WITHIN
    for _ in range(4):
        new = await wire.refused(**KNOWN)
        assert new.code is grpc.StatusCode.UNAVAILABLE
    await eventually(lambda: shared.gauge("tritonstream:engine_alive") == 0, "it is seen to be dead")


async def test_a_killed_stub_takes_the_server_with_it(shared: Triton) -> None:
    """Also the one that did not start the engine: its callers would wait for ever."""
    second = shared.stubs(TINY)[1]
    psutil.Process(second).kill()
    await eventually(lambda: shared.server.exit_code is not None, "the server is gone", WITHIN)
