"""One engine in several workers, or several engines behind one queue: the model answers as it does in one.

On the CPU, where a worker is a process: `pytest -m long tests/integration/test_parallel.py`. Without pipelines: vLLM
0.32 starts one on a CPU, and its second worker dies of the first request.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support import processes, servers
from tests.support.servers import TINY
from tests.support.tiny_qwen3 import cases
from tests.support.wire import connect
from tools import parallel

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
TIMES = 4


@pytest.mark.parametrize("spread", ["tensor", "data"])
async def test_every_answer_is_the_same(tiny_model: Path, tmp_path: Path, nothing_left: set[Path], spread: str) -> None:
    """All that the model knows by heart, many at once; the workers are there, and go with the server."""
    arguments = servers.ENGINE | {"model": str(tiny_model)} | parallel.arguments(**{spread: 2})
    if spread != "data":
        arguments[parallel.EXECUTOR] = "mp"
    with servers.serving(tmp_path / "repository", {TINY: arguments}) as triton:
        family = triton.processes(TINY)
        nothing_left |= processes.shared_memory(family)
        names = [process.name() for process in family]
        working = "VLLM::EngineCore" if spread == "data" else "VLLM::Worker"
        assert sum(name.startswith(working) for name in names) == 2, names
        async with connect(triton.grpc, TINY) as wire:
            asked = [one for one in cases() for _ in range(TIMES)]
            answers = await asyncio.gather(
                *(
                    wire.ask(chat={"messages": list(one.messages), "chat_template_kwargs": one.template_kwargs})
                    for one in asked
                    if not one.tools
                )
            )
        wanted = [one.answer for one in asked if not one.tools]
        assert [answer.ok().text() for answer in answers] == wanted
        assert triton.gauge("tritonstream:engine_alive") == 1
    await asyncio.to_thread(processes.gone, family, 10)
