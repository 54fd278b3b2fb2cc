"""The same model folder on a GPU: Qwen3-0.6B's shapes, vLLM for CUDA. Run where there is one: pytest -m gpu."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support import processes, servers
from tests.support.metrics import eventually, usually_within
from tests.support.wire import connect
from tools import configs
from tools.shapes import write as write_shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        configs.gpu_capability() is None, reason="no NVIDIA GPU here; docs/benchmarks.md has the last run"
    ),
    pytest.mark.timeout(400),
]

NAME = "Qwen3-0.6B"
ENGINE: dict[str, Any] = {"load_format": "dummy", "gpu_memory_utilization": 0.4, "max_model_len": 4_096}
ENDLESS: dict[str, Any] = {"text_input": "river stone light", "sampling": {"temperature": 0, "ignore_eos": True}}
FREED_WITHIN = 0.25  # seconds


def _used_mb() -> float:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.check_output(command, text=True).split()[0])


@pytest.fixture(scope="module")
def shapes(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder."""
    return write_shapes(tiny_model, tmp_path_factory.mktemp("shapes") / NAME)


@pytest.fixture(scope="module")
def gpu(shapes: Path, tmp_path_factory: pytest.TempPathFactory, nothing_left: set[Path]) -> Iterator[servers.Triton]:
    """A server of the FP16 variant."""
    repository = tmp_path_factory.mktemp("repository")
    with servers.serving(repository, {NAME: ENGINE | {"model": str(shapes)}}) as running:
        yield running
        nothing_left |= processes.shared_memory(processes.marked(os.environ[processes.MARK]))


async def test_streams(gpu: servers.Triton) -> None:
    """64 streams at once, each whole, each equal to the same request without streaming."""
    async with connect(gpu.grpc, NAME) as wire:
        request: dict[str, Any] = ENDLESS | {"sampling": {"temperature": 0, "ignore_eos": True, "max_tokens": 128}}
        flags = ["return_num_output_tokens", "return_finish_reason"]
        answers = await asyncio.gather(*(wire.ask(**request, flags=flags) for _ in range(64)))
        for answer in answers:
            assert answer.ok().total("num_output_tokens") == 128
            assert answer.last("finish_reason") == "length"
        whole = await wire.ask(**request, stream=False, flags=["exclude_input_in_output"])
        alone = await wire.ask(**request)
        assert alone.ok().text() == whole.ok().text()


async def test_cancel_frees_the_engine(gpu: servers.Triton) -> None:
    """Nothing runs 250 ms after a caller left."""
    async with connect(gpu.grpc, NAME) as wire:

        async def freed() -> float:
            async with wire.open(**ENDLESS) as call:
                await call.until(200)
                await eventually(lambda: gpu.load() == 1, "it runs")
                call.cancel()
            return await eventually(lambda: gpu.load() == 0, "nothing runs")

        await usually_within(FREED_WITHIN, freed)


async def test_bad_input_is_refused(gpu: servers.Triton) -> None:
    """This vLLM's own checks arrive as the caller's fault, too."""
    async with connect(gpu.grpc, NAME) as wire:
        for sampling, name in (({"temperature": -1}, "temperature"), ({"top_p": 2}, "top_p"), ({"logprobs": 99}, "99")):
            answer = await wire.refused(text_input="x", sampling=sampling)
            assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
            assert name in answer.details


async def test_a_dead_engine_is_unavailable(shapes: Path, tmp_path: Path, nothing_left: set[Path]) -> None:
    """SIGKILL of EngineCore: open and new requests end with UNAVAILABLE within 5 s; at the end the GPU is free."""
    before = _used_mb()
    with servers.serving(tmp_path / "repository", {NAME: ENGINE | {"model": str(shapes)}}) as running:
        (stub,) = running.server.stub_pids()
        (core,) = processes.engine_cores(stub)
        async with connect(running.grpc, NAME) as wire, wire.open(**ENDLESS) as call:
            await call.until(100)
            core.kill()
            answer = await call.rest(within=5)
            assert answer.code is grpc.StatusCode.UNAVAILABLE
            assert (await wire.ask(**ENDLESS, within=5)).code is grpc.StatusCode.UNAVAILABLE
    await eventually(lambda: _used_mb() < before + 100, "its GPU memory is free")
