"""`vllm serve` beside Triton: the same requests, greedy, must get the same answers, streamed and whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tritonstream import AsyncClient, InvalidRequest, Request, Sampling

from tests.support import adapter, parity, servers
from tests.support.tiny_qwen3 import case
from tools import configs, models, ways
from tools.progress import Progress
from tools.server import launch

AT_ONCE = 8
# In float32 it does not matter to a logprob how many requests ran beside it.
ENGINE: dict[str, Any] = configs.CPU_ARGUMENTS | {
    "dtype": "float32",
    "max_model_len": 1_024,
    "max_num_seqs": 16,
    "max_logprobs": 20,
}


@dataclass(frozen=True, slots=True)
class Served:
    """One model behind both servers, and its parsers by vLLM's names."""

    folder: Path
    reasoning_parser: str = ""
    tool_call_parser: str = ""
    lora_modules: dict[str, str] = field(default_factory=dict)


def both(served: Served, scratch: Path) -> Iterator[tuple[str, str]]:
    """Start both servers side by side; yields the address of Triton and the URL of vLLM."""
    engine = ENGINE | {"model": str(served.folder)}
    frontend: dict[str, Any] = {}
    if served.reasoning_parser:
        engine["reasoning_parser"] = served.reasoning_parser
    if served.tool_call_parser:
        frontend |= {"enable_auto_tool_choice": True, "tool_call_parser": served.tool_call_parser}
    if served.lora_modules:
        # Two places: on a CPU vLLM gives requests without an adapter that of the last one, which so stays empty.
        engine |= {"enable_lora": True, "max_lora_rank": adapter.RANK, "max_loras": 2}
        ((name, folder),) = served.lora_modules.items()
        frontend["lora_modules"] = f"{name}={folder}"
    setting = ways.Setting(arguments=engine | frontend, processes=1, environment=servers.ENVIRONMENT)
    repository = scratch / "repository"
    configs.export(
        configs.DEFAULT,
        ways.MODEL_NAME,
        repository,
        engine_args=engine,
        tool_call_parser=served.tool_call_parser,
        lora_modules=served.lora_modules,
    )
    with ExitStack() as stack, ThreadPoolExecutor(1) as aside:
        other = aside.submit(stack.enter_context, ways.vllm_server(setting, scratch / "vllm.log"))
        triton = stack.enter_context(launch(repository, env=dict(servers.ENVIRONMENT)))
        triton.wait_ready(servers.READY_SECONDS)
        yield triton.grpc_address, other.result()[0]


async def compared(triton: str, vllm: str, asked: list[parity.Asked]) -> list[str]:
    """Ask everything of both, streamed and whole; returns how they differ."""
    found: list[str] = []
    turn = asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(triton) as ours, httpx.AsyncClient(base_url=vllm, timeout=120) as theirs:

        async def compare(one: parity.Asked, stream: bool) -> None:
            async with turn:
                answers = await asyncio.gather(
                    parity.ask_triton(ours, one.request, stream=stream),
                    parity.ask_vllm(theirs, one.request, stream=stream),
                )
            way = "streamed" if stream else "whole"
            found.extend(
                f"{one.name}, {way}: {what}" for what in parity.differences(one.request, *answers, stream=stream)
            )

        await asyncio.gather(*(compare(one, stream) for one in asked for stream in (True, False)))
    return found


@pytest.fixture(scope="module")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The tiny Qwen3 behind both, with an adapter."""
    scratch = tmp_path_factory.mktemp("tiny")
    tuned = adapter.make(scratch / "adapter", tiny_model)
    yield from both(Served(tiny_model, "qwen3", "hermes", {parity.ADAPTER: str(tuned)}), scratch)


async def test_the_tiny_model_says_the_same(tiny: tuple[str, str]) -> None:
    """All of the requests: text, reasoning, calls, reasons, usage and logprobs are equal."""
    asked = parity.requests()
    assert len(asked) >= 60
    differences = await compared(*tiny, asked)
    assert not differences, "\n".join(differences)


async def test_an_adapter_is_asked_by_name(tiny: tuple[str, str]) -> None:
    """lora_name changes the answer; without it the model is as ever, and an unknown name is refused."""
    one = case("capital")
    request = Request(
        prompt=one.messages,
        model=ways.MODEL_NAME,
        chat_template_kwargs=one.template_kwargs,
        sampling=Sampling(temperature=0, max_tokens=32),
    )
    async with AsyncClient(tiny[0]) as client:
        tuned = await client.generate(replace(request, lora_name=parity.ADAPTER))
        assert tuned.text != one.expected
        assert (await client.generate(request)).text == one.expected
        with pytest.raises(InvalidRequest, match=f"none of this model's adapters \\({parity.ADAPTER}\\), got 'other'"):
            await client.generate(replace(request, lora_name="other"))


async def test_smollm2_says_the_same(tmp_path: Path) -> None:
    """A real model without a parser: those requests that mean something to it."""
    for addresses in both(Served(models.smollm2(Progress())), tmp_path):
        differences = await compared(*addresses, [one for one in parity.requests() if not one.tiny])
        assert not differences, "\n".join(differences)
