"""How responses come: each token by itself when nobody is behind, joined when the server stands still; many at once."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from itertools import cycle, islice
from typing import Any

import psutil
import pytest

from tests.support import tiny_qwen3
from tests.support.metrics import eventually
from tests.support.servers import Triton
from tests.support.tiny_qwen3 import LEARNED, Case, case, cases
from tests.support.wire import Answer, Wire, connect

WHEEL = {
    "messages": [{"role": "user", "content": tiny_qwen3.WHEEL_QUESTION}],
    "chat_template_kwargs": {"enable_thinking": False},
}
COUNT = "return_num_output_tokens"
ATTEMPTS = 5  # a machine that stands still for a moment joins tokens too; what always does is a defect
CHANNELS = 8
PATIENCE = 120.0  # seconds


def chat(one: Case) -> dict[str, Any]:
    """The `chat` input that asks for the case."""
    return {"messages": list(one.messages), "chat_template_kwargs": one.template_kwargs}


async def test_alone_every_token_is_a_response(wire: Wire) -> None:
    """Nothing is held back for what comes after it."""
    one = case("sum-thinking")  # every token of it is whole characters
    for _ in range(ATTEMPTS):
        prompt = tiny_qwen3.prompt(one.messages, enable_thinking=True)
        answer = (await wire.ask(text_input=prompt, flags=[COUNT])).ok()
        assert answer.text() == one.expected
        counts = answer.every("num_output_tokens")
        assert len(counts) > 20
        if set(counts) == {1}:
            return
    pytest.fail(f"tokens came joined {ATTEMPTS} times, the last time {counts}")


async def test_what_gathers_while_the_server_stands_still_comes_as_one(triton: Triton, wire: Wire) -> None:
    """The engine goes on meanwhile; of what it made then nothing is lost, doubled or out of order."""
    server, core = psutil.Process(triton.server.pid), triton.engine_core(triton.model)
    tokens = LEARNED - 100
    async with wire.open(chat=WHEEL, sampling={"max_tokens": tokens}, flags=[COUNT]) as call:
        await call.until(20)
        server.suspend()
        try:
            begun = sum(core.cpu_times()[:2])
            # The engine's own time, not the clock's: on a busy machine it stands still too.
            await eventually(lambda: sum(core.cpu_times()[:2]) > begun + 0.3, "the engine went on", 60)
        finally:
            server.resume()
        answer = (await call.rest()).ok()
    counts = answer.every("num_output_tokens")
    assert sum(counts) == tokens
    assert max(counts) > 20, counts
    text = answer.text().rstrip("\N{REPLACEMENT CHARACTER}")  # the last token may be half a character
    assert text == tiny_qwen3.wheel(len(text))


@pytest.mark.parametrize(
    "sampling",
    [{}, {"stop": ["summer"], "min_tokens": 500}, {"logprobs": 0}, {"stop_token_ids": [0], "n": 2}],
    ids=["tokens", "a stop string", "logprobs", "choices"],
)
async def test_what_gathers_while_the_stub_stands_still_is_as_ever(
    triton: Triton, wire: Wire, sampling: dict[str, Any]
) -> None:
    """The engine's steps wait for the stub then, and are read together: tokens by their number, all else one by one."""
    (stub,), core = triton.stubs(triton.model), triton.engine_core(triton.model)
    sampling |= {"max_tokens": 600}
    request: dict[str, Any] = {"chat": WHEEL, "sampling": sampling}
    request["flags"] = [COUNT, "return_summary", "return_finish_reason"]
    request["flags"] += ["return_logprobs"] if "logprobs" in sampling else []
    undisturbed = (await wire.ask(**request)).ok()
    await triton.settled()
    made = triton.gauge("vllm:generation_tokens_total")
    gaps = triton.gauge("vllm:inter_token_latency_seconds_count")
    async with wire.open(**request) as call:
        await call.until(20)
        psutil.Process(stub).suspend()
        try:
            begun = sum(core.cpu_times()[:2])
            await eventually(lambda: sum(core.cpu_times()[:2]) > begun + 0.3, "the engine went on", 60)
        finally:
            psutil.Process(stub).resume()
        answer = (await call.rest()).ok()
    for choice in range(sampling.get("n", 1)):
        assert answer.text(choice) == undisturbed.text(choice)
        assert answer.total("num_output_tokens", choice) == undisturbed.total("num_output_tokens", choice)
        assert _logprobs(answer, choice) == _logprobs(undisturbed, choice)
        for name in ("summary", "finish_reason"):
            assert answer.last(name, choice) == undisturbed.last(name, choice)
    tokens = sum(answer.total("num_output_tokens", choice) for choice in range(sampling.get("n", 1)))
    await triton.settled()
    assert triton.gauge("vllm:generation_tokens_total") - made == tokens
    if "logprobs" in sampling or "stop" in sampling:
        assert triton.gauge("vllm:inter_token_latency_seconds_count") - gaps == tokens - 1
    else:
        # In 0.3 s of its CPU the engine makes 30 steps and more; they have one arrival.
        assert triton.gauge("vllm:inter_token_latency_seconds_count") - gaps < tokens - 20


def _logprobs(answer: Answer, choice: int) -> list[Any]:
    """Those of every token of a choice."""
    return [token for several in answer.every("logprobs", choice) for token in json.loads(several)]


@pytest.mark.parametrize("streams", [64, 256])
async def test_many_streams_at_once(triton: Triton, streams: int) -> None:
    """Each has the exact text in order and one final response, which is the last."""
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connect(triton.grpc, triton.model)) for _ in range(CHANNELS)]
        asked = list(islice(cycle([one for one in cases() if len(one.expected) < 300]), streams))

        async def ask(wire: Wire, one: Case) -> Answer:
            return (await wire.ask(chat=chat(one), within=PATIENCE)).ok()

        answers = await asyncio.gather(*(ask(wire, one) for wire, one in zip(cycle(wires), asked, strict=False)))
    assert [answer.text() for answer in answers] == [one.answer for one in asked]
