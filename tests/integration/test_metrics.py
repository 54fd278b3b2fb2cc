"""Triton's metrics port: vLLM's own names and values, with the model's labels, and ours."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import pytest

from tests.integration.conftest import NARROW
from tests.support import tiny_qwen3
from tests.support.metrics import Page, eventually
from tests.support.servers import TINY, Triton
from tests.support.tiny_qwen3 import case
from tests.support.wire import RETURN_ALL, Wire

LABELS = {"model": TINY, "version": "1"}
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "tritonstream:engine_alive",
    "tritonstream:engine_stalled_seconds",
    "tritonstream:metrics_timestamp_seconds",
)
COUNTERS = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "tritonstream:requests_cancelled_total",
    "tritonstream:requests_expired_total",
    "tritonstream:tokens_wasted_total",
)
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
)
WHEEL: dict[str, Any] = {
    "messages": [{"role": "user", "content": tiny_qwen3.WHEEL_QUESTION}],
    "chat_template_kwargs": {"enable_thinking": False},
}


def grown(before: Page, after: Page, name: str, **labels: str) -> float:
    """By how much a counter of the model grew."""
    return after.value(name, **LABELS, **labels) - before.value(name, **LABELS, **labels)


@pytest.mark.parametrize("name", [*GAUGES, *COUNTERS, *(f"{name}_count" for name in HISTOGRAMS)])
def test_every_name_is_there_for_each_model(triton: Triton, name: str) -> None:
    """With Triton's labels, from the first scrape on."""
    page = triton.scrape()
    for model in (TINY, NARROW):
        assert page.find(name, model=model, version="1"), f"{name} is missing for {model}"


def test_types_are_declared(triton: Triton) -> None:
    """Gauges are gauges, counters counters."""
    types = triton.scrape().types
    assert {name: types.get(name) for name in GAUGES} == dict.fromkeys(GAUGES, "gauge")
    assert {name: types.get(name) for name in COUNTERS} == dict.fromkeys(COUNTERS, "counter")


async def test_a_known_request_is_counted_exactly(triton: Triton, wire: Wire) -> None:
    """Tokens, the reason it ended, and one observation in each histogram."""
    one = case("greeting-zh")
    await triton.settled()
    before = triton.scrape()
    chat = {"messages": list(one.messages), "chat_template_kwargs": one.template_kwargs}
    answer = (await wire.ask(chat=chat, flags=RETURN_ALL)).ok()
    cut = (await wire.ask(chat=chat, flags=RETURN_ALL, sampling={"max_tokens": 4})).ok()
    await triton.settled()
    after = triton.scrape()
    prompt, made = answer.last("num_input_tokens"), answer.total("num_output_tokens")
    assert grown(before, after, "vllm:prompt_tokens_total") == 2 * prompt
    assert grown(before, after, "vllm:generation_tokens_total") == made + cut.total("num_output_tokens")
    assert grown(before, after, "vllm:request_success_total", finished_reason="stop") == 1
    assert grown(before, after, "vllm:request_success_total", finished_reason="length") == 1
    assert grown(before, after, "vllm:prefix_cache_queries_total") == 2 * prompt
    for name in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"):
        assert grown(before, after, f"{name}_count") == 2
        seconds = grown(before, after, f"{name}_sum")
        assert 0 < seconds < (answer.ended - answer.began) + (cut.ended - cut.began)
    # A gap is what lies between two outputs that were read: tokens that the stub read together have none between them,
    # and what came as several responses was read as several.
    responses = [len(one.every("num_output_tokens")) for one in (answer, cut)]
    gaps = grown(before, after, "vllm:inter_token_latency_seconds_count")
    assert sum(responses) - 2 <= gaps <= made - 1 + 4 - 1
    assert grown(before, after, "vllm:request_generation_tokens_sum") == made + 4


async def test_the_prefix_cache_is_seen(triton: Triton, wire: Wire) -> None:
    """A prompt asked twice hits."""
    await triton.settled()
    before = triton.scrape()
    for _ in range(2):
        (await wire.ask(text_input="counted the boats: one, two, three " * 30, sampling={"max_tokens": 1})).ok()
    await triton.settled()
    assert grown(before, triton.scrape(), "vllm:prefix_cache_hits_total") > 50


def test_histograms_are_cumulative(triton: Triton) -> None:
    """Each bucket holds the smaller ones, the last is +Inf and equals the count."""
    page = triton.scrape()
    for name in HISTOGRAMS:
        buckets = page.find(f"{name}_bucket", **LABELS)
        ordered = sorted(buckets, key=lambda sample: float(sample.labels["le"]))
        assert len(ordered) > 5
        assert all(smaller.value <= larger.value for smaller, larger in pairwise(ordered)), name
        assert ordered[-1].labels["le"] == "+Inf"
        assert ordered[-1].value == page.value(f"{name}_count", **LABELS)


async def test_the_load_is_seen_while_it_lasts(triton: Triton, wire: Wire, narrow: Wire) -> None:
    """Running, waiting and the KV cache's use go up with requests and back to nothing after them."""
    async with wire.open(chat=WHEEL) as first, wire.open(chat=WHEEL) as second:
        await first.until(20)
        await second.until(20)
        with triton.engine_paused(TINY):  # they cannot end while the gauges are waited for
            await eventually(lambda: triton.gauge("vllm:num_requests_running") == 2, "two run")
            await eventually(lambda: triton.gauge("vllm:kv_cache_usage_perc") > 0, "they use the KV cache")
    async with AsyncExitStack() as opened:
        for _ in range(4):  # one after the other: with seconds of work for each, some wait for long
            await opened.enter_async_context(narrow.open(chat=WHEEL))
        await eventually(lambda: triton.gauge("vllm:num_requests_waiting", NARROW) >= 1, "some wait")
        assert triton.gauge("vllm:num_requests_running", NARROW) == 1
    await eventually(
        lambda: all(triton.gauge(name, model) == 0 for name in GAUGES[:3] for model in (TINY, NARROW)), "nothing is"
    )


async def test_an_engine_that_hangs_is_seen(triton: Triton, wire: Wire) -> None:
    """While the engine is stopped with work to do, the seconds since its last step grow; they go with the work."""
    name = "tritonstream:engine_stalled_seconds"
    assert triton.gauge(name) == 0
    async with wire.open(chat=WHEEL, sampling={"max_tokens": tiny_qwen3.LEARNED - 100}) as call:
        await call.until(20)
        with triton.engine_paused(TINY):
            await eventually(lambda: triton.gauge(name) > 1, "it is seen to hang")
            assert triton.gauge("tritonstream:engine_alive") == 1
        text = (await call.rest()).ok().text().rstrip("\N{REPLACEMENT CHARACTER}")
    assert text == tiny_qwen3.wheel(len(text))
    await eventually(lambda: triton.gauge(name) == 0, "it has nothing to do")


async def test_scraping_does_not_wait_for_the_engine(triton: Triton, wire: Wire) -> None:
    """A page comes at once, also while the engine works."""
    async with wire.open(chat=WHEEL) as call:
        await call.until(20)
        reading = asyncio.create_task(call.rest())
        took = []
        for _ in range(9):
            began = time.monotonic()
            await asyncio.to_thread(triton.scrape)
            took.append(time.monotonic() - began)
        assert statistics.median(took) < 1, took
        assert not reading.done()
        reading.cancel()
