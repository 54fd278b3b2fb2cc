"""What both clients do with an answer, told once for the two of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tritonstream import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Message,
    ModelNotFound,
    Retries,
    Sampling,
    ServerError,
    ServerUnavailable,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)

from tests.unit.client.contract import contract
from tests.unit.client.reader import Reader
from tests.unit.client.scripted import Call, ScriptedTriton, empty, error, hangs, refuses, says

QUICK = {"retries": Retries(attempts=3, initial=0.01, longest=0.02, jitter=0.01)}


async def test_deltas_arrive_in_order_and_typed(triton: ScriptedTriton, reader: Reader) -> None:
    """Each delta carries its text, its tokens and, at the end, the reason."""
    assert await reader.stream(triton.url) == "Hello world"
    assert [delta.finish_reason for delta in reader.seen] == [None, "stop"]
    assert [(d.index, d.num_output_tokens, d.num_input_tokens, d.num_cached_tokens) for d in reader.seen] == [
        (0, 0, 0, 0),
        (0, 2, 7, 4),
    ]


async def test_the_server_reads_what_was_asked(triton: ScriptedTriton, reader: Reader) -> None:
    """Every field of a request reaches the server's own parser."""
    await reader.stream(
        triton.url,
        [Message(role="system", content="Be brief"), {"role": "user", "content": "你好", "name": "Ann"}],
        sampling=Sampling(max_tokens=5, stop="X", logit_bias={3: 1.5}),
        chat_template_kwargs={"enable_thinking": False},
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="required",
        response_format={"type": "text"},
        include_reasoning=False,
        add_generation_prompt=False,
        continue_final_message=True,
        parallel_tool_calls=False,
        reasoning_effort="low",
        lora_name="tuned",
        deadline=30,
        priority=2,
        cache_salt="mine",
        request_id="r-1",
        model_version="3",
        settings={"metadata": {"x-api-key": "secret"}},
    )
    call = triton.calls[0]
    assert call.request.prompt == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "你好", "name": "Ann"},
    ]
    assert call.request.chat == {
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {"type": "text"},
        "include_reasoning": False,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
    }
    assert call.request.sampling == {"max_tokens": 5, "stop": ["X"], "logit_bias": {"3": 1.5}}
    assert 29_000 < call.request.deadline_ms <= 30_000
    assert (call.request.priority, call.request.cache_salt, call.request.stream) == (2, "mine", True)
    assert call.request.lora_name == "tuned"
    assert (call.message.model_name, call.message.model_version, call.message.id) == ("tiny", "3", "r-1")
    assert "triton_grpc_error" not in call.metadata
    assert call.metadata["x-api-key"] == "secret"


async def test_generate_asks_for_one_response_and_no_echo(triton: ScriptedTriton, reader: Reader) -> None:
    """A complete answer is one response without the prompt in it, and says what it cost."""
    done = await reader.generate(triton.url)
    assert (done.text, done.choices[0].finish_reason) == ("Hello world", "stop")
    assert done.usage == Usage(prompt_tokens=7, completion_tokens=1, cached_tokens=4)
    assert not triton.calls[0].request.stream
    assert not triton.calls[0].request.echo


async def test_one_response_may_hold_several_choices(triton: ScriptedTriton, reader: Reader) -> None:
    """Choices that cross the wire together come out as deltas of their own index."""

    def script(call: Call) -> Iterator[Any]:
        yield call.reply("a", "b", "c")
        yield call.reply("A", "B", "C", final=True)

    triton.script(script)
    await reader.stream(triton.url, sampling=Sampling(n=3))
    assert [(delta.index, delta.text) for delta in reader.seen] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (0, "A"),
        (1, "B"),
        (2, "C"),
    ]
    done = await reader.generate(triton.url, sampling=Sampling(n=3))
    assert [choice.text for choice in done.choices] == ["aA", "bB", "cC"]
    assert done.usage.completion_tokens == 6


async def test_logprobs_are_typed(triton: ScriptedTriton, reader: Reader) -> None:
    """The chosen token comes first, the alternatives behind it."""
    place = {
        5: {"logprob": -0.5, "rank": 2, "decoded_token": "é"},
        9: {"logprob": -0.1, "rank": 1, "decoded_token": None},
    }

    def script(call: Call) -> Iterator[Any]:
        yield call.reply("é", final=True, logprobs=[place])

    triton.script(script)
    await reader.stream(triton.url, sampling=Sampling(logprobs=1))
    assert reader.seen[0].logprobs == (TokenLogprobs(TokenLogprob(5, "é", -0.5, 2), (TokenLogprob(9, "", -0.1, 1),)),)
    assert reader.seen[0].cumulative_logprob == -0.5


async def test_text_of_any_script_and_size_survives(triton: ScriptedTriton, reader: Reader) -> None:
    """Messages over gRPC's default limit of 4 MB pass both ways, and no character is changed."""
    text = "né👩‍👩‍👧‍👦漢\0\u0301" * 200_000
    triton.script(says(text))
    assert len(text.encode()) > 5_000_000
    assert await reader.stream(triton.url, text) == text
    assert triton.calls[0].request.prompt == text


async def test_an_empty_last_response_ends_a_stream_well(triton: ScriptedTriton, reader: Reader) -> None:
    """A model may send its data first and the final mark alone."""

    def script(call: Call) -> Iterator[Any]:
        yield call.reply("all")
        yield empty(final=True)

    triton.script(script)
    assert await reader.stream(triton.url) == "all"


async def test_a_stream_that_ends_early_is_the_servers_fault(triton: ScriptedTriton, reader: Reader) -> None:
    """What came is given out, and then the missing end is an error."""

    def script(call: Call) -> Iterator[Any]:
        yield call.reply("half of")

    triton.script(script)
    with pytest.raises(ServerError, match="before the answer was complete") as caught:
        await reader.stream(triton.url)
    assert caught.value.blame == "server"
    assert [delta.text for delta in reader.seen] == ["half of"]


async def test_a_stream_that_never_starts_is_the_servers_fault(triton: ScriptedTriton, reader: Reader) -> None:
    """A stream closed without any response is an error, not an empty answer."""
    triton.script(lambda call: iter(()))
    with pytest.raises(ServerError, match="before the answer was complete"):
        await reader.stream(triton.url)


async def test_unavailable_before_the_first_delta_is_tried_again(triton: ScriptedTriton, reader: Reader) -> None:
    """A server that is not ready yet costs a moment, not an error, also where it says so in words."""
    triton.script(
        refuses(grpc.StatusCode.UNAVAILABLE, "the server is stopping"),
        lambda call: iter([error("Request for unknown model: 'tiny' has no available versions")]),
        says("at last"),
    )
    assert await reader.stream(triton.url, settings=QUICK) == "at last"
    assert len(triton.calls) == 3


async def test_attempts_are_bounded(triton: ScriptedTriton, reader: Reader) -> None:
    """After the last attempt the error itself comes out, with gRPC's as its cause."""
    triton.script(refuses(grpc.StatusCode.UNAVAILABLE, "engine is dead"))
    with pytest.raises(ServerUnavailable, match="engine is dead") as caught:
        await reader.stream(triton.url, settings=QUICK)
    assert caught.value.blame == "server"
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert len(triton.calls) == 3


async def test_nothing_is_sent_again_after_a_first_delta(triton: ScriptedTriton, reader: Reader) -> None:
    """An answer that broke off is never started over behind the reader's back."""

    def script(call: Call) -> Iterator[Any]:
        yield call.reply("Once")
        call.fail(grpc.StatusCode.UNAVAILABLE, "engine died")

    triton.script(script, says("Twice"))
    with pytest.raises(ServerUnavailable, match="engine died"):
        await reader.stream(triton.url, settings=QUICK)
    assert len(triton.calls) == 1
    assert [delta.text for delta in reader.seen] == ["Once"]


async def test_the_callers_mistakes_are_not_tried_again(triton: ScriptedTriton, reader: Reader) -> None:
    """A wrong request stays wrong."""
    triton.script(refuses(grpc.StatusCode.INVALID_ARGUMENT, "temperature must be at most 2, got 9"))
    with pytest.raises(InvalidRequest, match="temperature") as caught:
        await reader.stream(triton.url, settings=QUICK)
    assert caught.value.blame == "caller"
    assert len(triton.calls) == 1


async def test_an_unknown_model_is_told_in_words(triton: ScriptedTriton, reader: Reader) -> None:
    """Triton reports it inside the stream, with a good status around it."""
    triton.script(lambda call: iter([error("Request for unknown model: 'nope' is not found")]))
    with pytest.raises(ModelNotFound, match="nope") as caught:
        await reader.stream(triton.url, model="nope")
    assert caught.value.blame == "caller"


async def test_the_server_names_a_wrong_field(triton: ScriptedTriton, reader: Reader) -> None:
    """What this client passes on unchecked is refused by the server's own parser, by name."""
    with pytest.raises(InvalidRequest, match="temprature is not a sampling field"):
        await reader.stream(triton.url, sampling=Sampling(extra={"temprature": 1}))


async def test_nobody_there_is_the_networks_fault(reader: Reader) -> None:
    """A port nobody listens on."""
    with pytest.raises(ServerUnavailable, match="failed to connect") as caught:
        await reader.stream("127.0.0.1:1", settings={"retries": Retries(attempts=1)})
    assert caught.value.blame == "network"


async def test_a_server_that_dies_is_the_networks_fault(triton: ScriptedTriton, reader: Reader) -> None:
    """A connection that breaks in the middle of an answer ends it at once."""

    def script(call: Call) -> Iterator[Any]:
        yield call.reply("Once")
        triton.__exit__()
        yield call.reply("never")

    triton.script(script)
    with pytest.raises((ServerUnavailable, Cancelled)) as caught:
        await reader.stream(triton.url)
    assert caught.value.blame in ("network", "server")


async def test_the_servers_word_on_a_deadline(triton: ScriptedTriton, reader: Reader) -> None:
    """Triton has no code of its own for it: the status is CANCELLED, and the message says which cancellation it is."""
    triton.script(refuses(grpc.StatusCode.CANCELLED, contract.DeadlineExceeded(250).spelled()))
    with pytest.raises(DeadlineExceeded, match="250") as caught:
        await reader.stream(triton.url, deadline=0.25)
    assert caught.value.blame == "server"


async def test_a_silent_server_is_bounded_by_the_deadline_too(
    triton: ScriptedTriton, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When nothing is heard, gRPC's own timeout ends the wait shortly after the deadline."""
    monkeypatch.setattr("tritonstream.exchange.DEADLINE_GRACE_S", 0.2)
    triton.script(hangs("Once"))
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        await reader.stream(triton.url, deadline=0.3)
    assert 0.45 < time.monotonic() - start < 5
    assert caught.value.blame == "network"
    assert triton.calls[0].left.wait(5)


async def test_retries_end_with_the_deadline(triton: ScriptedTriton, reader: Reader) -> None:
    """No attempt is made that could not be answered in time, and each is told only what is left."""
    triton.script(refuses(grpc.StatusCode.UNAVAILABLE, "not yet"))
    start = time.monotonic()
    with pytest.raises(ServerUnavailable, match="not yet"):
        await reader.stream(
            triton.url, deadline=0.5, settings={"retries": Retries(attempts=50, initial=0.1, longest=0.1, jitter=0)}
        )
    assert time.monotonic() - start < 3
    left = [call.request.deadline_ms for call in triton.calls]
    assert 2 <= len(left) < 8
    assert left == sorted(left, reverse=True)
    assert left[-1] < 450


async def test_readiness(triton: ScriptedTriton, reader: Reader) -> None:
    """The questions about a server have plain answers."""
    triton.models = [("tiny", "READY"), ("big", "LOADING")]
    assert await reader.ask(triton.url, "server_live") is True
    assert await reader.ask(triton.url, "server_ready") is True
    assert await reader.ask(triton.url, "model_ready", "tiny") is True
    assert await reader.ask(triton.url, "model_ready", "big") is False
    found = await reader.ask(triton.url, "models")
    assert [(model.name, model.version, model.ready, model.reason) for model in found] == [
        ("tiny", "1", True, ""),
        ("big", "1", False, "still loading"),
    ]
    triton.ready = False
    assert await reader.ask(triton.url, "server_ready") is False


async def test_nobody_is_not_ready(reader: Reader) -> None:
    """A probe of a server that is not there is false; what has no such answer raises."""
    assert await reader.ask("127.0.0.1:1", "server_live") is False
    assert await reader.ask("127.0.0.1:1", "server_ready") is False
    assert await reader.ask("127.0.0.1:1", "model_ready", "tiny") is False
    with pytest.raises(ServerUnavailable):
        await reader.ask("127.0.0.1:1", "models")
