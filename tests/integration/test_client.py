"""The project's own client against the real server: what it promises holds there too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tritonstream import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Request,
    Sampling,
    ServerUnavailable,
)

from tests.integration.conftest import NARROW
from tests.support import tiny_qwen3
from tests.support.metrics import eventually
from tests.support.servers import TINY, Triton
from tests.support.tiny_qwen3 import Case, case, cases

NAMES = ("capital-thinking", "emoji", "marks", "poem-zh", "spaces", "story")


def asking(one: Case, **fields: Any) -> Request:
    """The request for a case."""
    kwargs = one.template_kwargs
    return Request(prompt=list(one.messages), model=TINY, chat_template_kwargs=kwargs, **fields)


def endless(model: str = TINY, **fields: Any) -> Request:
    """The request that turns the wheel."""
    messages = [{"role": "user", "content": tiny_qwen3.WHEEL_QUESTION}]
    kwargs = {"enable_thinking": False}
    sampling = Sampling(ignore_eos=True)
    return Request(prompt=messages, model=model, chat_template_kwargs=kwargs, sampling=sampling, **fields)


@pytest.fixture
async def client(triton: Triton) -> AsyncIterator[AsyncClient]:
    """The asynchronous client."""
    async with AsyncClient(triton.grpc) as opened:
        yield opened


@pytest.fixture
def blocking(triton: Triton) -> Iterator[Client]:
    """Its twin for threads."""
    with Client(triton.grpc) as opened:
        yield opened


@pytest.mark.parametrize("name", NAMES)
async def test_stream_and_generate(client: AsyncClient, name: str) -> None:
    """Both give the exact answer, the reason and the usage."""
    one = case(name)
    async with client.stream(asking(one)) as deltas:
        found = [delta async for delta in deltas]
    completion = await client.generate(asking(one))
    assert "".join(delta.text for delta in found) == one.answer == completion.text
    assert "".join(delta.reasoning for delta in found) == one.reasoning == completion.choices[0].reasoning
    assert found[-1].finish_reason == completion.choices[0].finish_reason == "stop"
    assert found[-1].num_output_tokens == completion.usage.completion_tokens > 5
    assert found[-1].num_input_tokens == completion.usage.prompt_tokens > 5


@pytest.mark.parametrize("name", NAMES)
def test_the_blocking_twin(blocking: Client, name: str) -> None:
    """The same for threads."""
    one = case(name)
    with blocking.stream(asking(one)) as deltas:
        assert "".join(delta.text for delta in deltas) == one.answer
    assert blocking.generate(asking(one)).text == one.answer


async def test_a_text_is_not_echoed(client: AsyncClient) -> None:
    """The client's answers are answers alone."""
    one = case("capital")
    text = tiny_qwen3.prompt(one.messages, enable_thinking=False)
    assert (await client.generate(text, model=TINY)).text == one.expected


async def test_several_choices(client: AsyncClient) -> None:
    """Each under its own index."""
    completion = await client.generate(asking(case("emoji"), sampling=Sampling(n=3, seed=1)))
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert {choice.text for choice in completion.choices} == {case("emoji").expected}


async def test_logprobs(client: AsyncClient) -> None:
    """One entry per token, and their sum."""
    completion = await client.generate(asking(case("sum"), sampling=Sampling(logprobs=2)))
    (choice,) = completion.choices
    assert choice.logprobs is not None
    assert len(choice.logprobs) == completion.usage.completion_tokens
    assert choice.cumulative_logprob == pytest.approx(sum(one.chosen.logprob for one in choice.logprobs), abs=1e-3)


async def test_leaving_the_stream_frees_the_engine(triton: Triton, client: AsyncClient) -> None:
    """A reader who walks away leaves no running request behind."""
    async with client.stream(endless()) as deltas:
        async for delta in deltas:
            if delta.text:
                break
    await eventually(lambda: triton.load() == 0, "nothing runs")


async def test_cancelling_the_task_frees_the_engine(triton: Triton, client: AsyncClient) -> None:
    """So does a task that is cancelled while it waits for a whole answer."""
    task = asyncio.create_task(client.generate(endless()))
    await eventually(lambda: triton.load() == 1, "it runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: triton.load() == 0, "nothing runs")


async def test_a_deadline(triton: Triton, client: AsyncClient) -> None:
    """It is kept, by either side, and the engine is free afterwards."""
    with pytest.raises(DeadlineExceeded):
        await client.generate(endless(deadline=0.4))
    await eventually(lambda: triton.load() == 0, "nothing runs")


async def test_errors_say_whose_they_are(triton: Triton, client: AsyncClient) -> None:
    """The caller's, with the server's words; and nobody there."""
    with pytest.raises(InvalidRequest, match=str(tiny_qwen3.CONTEXT)) as refused:
        await client.generate("a" * 2 * tiny_qwen3.CONTEXT, model=TINY)
    assert refused.value.blame == "caller"
    with pytest.raises(ModelNotFound, match="Nobody"):
        await client.generate("a", model="Nobody")
    async with AsyncClient("127.0.0.1:9") as lonely:
        with pytest.raises(ServerUnavailable):
            await lonely.generate("a", model=TINY, deadline=2)
        assert not await lonely.server_ready(deadline=1)


async def test_readiness(client: AsyncClient) -> None:
    """The server, its models and their names."""
    assert await client.server_live()
    assert await client.server_ready()
    assert await client.model_ready(TINY)
    assert not await client.model_ready("Nobody")
    assert {model.name for model in await client.models()} == {TINY, NARROW}


async def test_many_streams_over_few_channels(client: AsyncClient) -> None:
    """A hundred at once, each exact."""
    known = [one for one in cases() if len(one.expected) < 300]
    asked = [known[number % len(known)] for number in range(100)]
    answers = await asyncio.gather(*(client.generate(asking(one)) for one in asked))
    assert [answer.text for answer in answers] == [one.answer for one in asked]
