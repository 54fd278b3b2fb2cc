"""OpenAI's own client, blocking and asynchronous, against the gateway: what it expects of OpenAI, it gets here."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest

from tests.conformance.conftest import ALIAS
from tests.support.servers import TINY
from tests.support.tiny_qwen3 import Case, case, cases, prompt

CAPITAL, WEATHER = case("capital"), case("weather-thinking")
SOBER = [one for one in cases() if not one.enable_thinking]


def asked(of: Case, **more: Any) -> dict[str, Any]:
    """The arguments that ask the tiny model for one of the exchanges it knows."""
    body = {"model": TINY, "messages": list(of.messages), "temperature": 0}
    if of.tools:
        body["tools"] = list(of.tools)
    return body | {"extra_body": {"enable_thinking": of.enable_thinking}} | more


class Person(pydantic.BaseModel):
    """What the model describes as JSON."""

    name: str
    age: int


class TestBlocking:
    """`openai.OpenAI`."""

    def test_a_chat(self, client: openai.OpenAI) -> None:
        """The answer, its reason to stop, and what it cost."""
        completion = client.chat.completions.create(**asked(CAPITAL))
        (choice,) = completion.choices
        assert choice.message.content == CAPITAL.answer
        assert choice.message.role == "assistant"
        assert choice.finish_reason == "stop"
        assert completion.object == "chat.completion"
        assert completion.model == TINY
        assert completion.id.startswith("chatcmpl-")
        assert completion.usage is not None
        assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens > 20

    @pytest.mark.parametrize("name", ["capital", "greeting-zh", "emoji", "marks"])
    def test_a_stream(self, client: openai.OpenAI, name: str) -> None:
        """The same text in pieces, after one chunk with the role; the last one has the reason, and none has usage."""
        of = case(name)
        chunks = list(client.chat.completions.create(**asked(of), stream=True))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].delta.role for chunk in chunks[1:]] == [None] * (len(chunks) - 1)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == of.answer
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
        assert len({chunk.id for chunk in chunks}) == 1
        assert all(chunk.usage is None for chunk in chunks)

    def test_usage_of_a_stream(self, client: openai.OpenAI) -> None:
        """With include_usage a last chunk without choices has it; with continuous_usage_stats every chunk does."""
        whole = client.chat.completions.create(**asked(CAPITAL)).usage
        assert whole is not None
        options: Any = {"include_usage": True}
        *chunks, last = client.chat.completions.create(**asked(CAPITAL), stream=True, stream_options=options)
        assert last.choices == []
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
            whole.prompt_tokens,
            whole.completion_tokens,
        )
        assert all(chunk.usage is None for chunk in chunks)
        options = {"include_usage": True, "continuous_usage_stats": True}
        _, *chunks = client.chat.completions.create(**asked(CAPITAL), stream=True, stream_options=options)
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
        assert len(counts) == len(chunks)
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, whole.completion_tokens)

    def test_reasoning(self, client: openai.OpenAI) -> None:
        """What the model thinks stands under both names, whole and streamed, and is left out when nobody wants it."""
        of = case("sum-thinking")
        message: Any = client.chat.completions.create(**asked(of)).choices[0].message
        assert message.content == of.answer
        assert message.reasoning_content == message.reasoning == of.reasoning
        deltas: Any = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked(of), stream=True)]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == of.reasoning
        assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == of.reasoning
        assert "".join(delta.content or "" for delta in deltas) == of.answer
        silent = {"extra_body": {"enable_thinking": True, "return_reasoning": False}}
        message = client.chat.completions.create(**asked(of, **silent)).choices[0].message
        assert message.content == of.answer
        assert not hasattr(message, "reasoning_content")

    def test_tools(self, client: openai.OpenAI) -> None:
        """A call of a tool, whole and in pieces; and the answer after the tool's."""
        (choice,) = client.chat.completions.create(**asked(WEATHER)).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        assert call.id
        chunks = list(client.chat.completions.create(**asked(WEATHER), stream=True))
        pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
        assert [piece.function.name for piece in pieces if piece.function and piece.function.name] == ["get_weather"]
        assert len([piece.id for piece in pieces if piece.id]) == 1
        arguments = "".join(piece.function.arguments or "" for piece in pieces if piece.function)
        assert json.loads(arguments) == {"city": "Paris"}
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        after = client.chat.completions.create(**asked(case("report-thinking"))).choices[0].message
        assert after.content == case("report-thinking").answer

    def test_the_stream_helper_gathers_a_call(self, client: openai.OpenAI) -> None:
        """The client's own accumulation of a stream ends with the call that the whole reply has."""
        with client.chat.completions.stream(**asked(WEATHER)) as stream:
            completion = stream.get_final_completion()
        calls = completion.choices[0].message.tool_calls or ()
        assert [call.function.name for call in calls] == ["get_weather"]

    def test_parse_with_a_schema(self, client: openai.OpenAI) -> None:
        """`parse` gets an object of the schema that it asked for."""
        completion = client.chat.completions.parse(**asked(case("json")), response_format=Person)
        person = completion.choices[0].message.parsed
        assert isinstance(person, Person)
        assert person.age == 7

    def test_raw_response(self, client: openai.OpenAI) -> None:
        """Headers can be had: the request's id; and the fields that had no effect, which are no error."""
        body = asked(CAPITAL, extra_body={"enable_thinking": False, "hovercraft": "eels", "top_k": 5}, user="me")
        raw = client.chat.completions.with_raw_response.create(**body)
        assert raw.headers["x-ignored-fields"] == "hovercraft"
        completion = raw.parse()
        assert completion.id == raw.headers["x-request-id"]
        assert completion.choices[0].message.content == CAPITAL.answer

    def test_several_choices_and_probabilities(self, client: openai.OpenAI) -> None:
        """`n` choices, each with its tokens' probabilities, the likeliest first; streamed, they are told apart."""
        more: dict[str, Any] = {"n": 3, "logprobs": True, "top_logprobs": 2, "max_tokens": 4, "temperature": 1}
        more["extra_body"] = {"enable_thinking": False, "top_k": 1}  # so that the chosen token is the likeliest
        choices = client.chat.completions.create(**asked(CAPITAL, **more)).choices
        assert [choice.index for choice in choices] == [0, 1, 2]
        for choice in choices:
            assert choice.logprobs and choice.logprobs.content
            assert len(choice.logprobs.content) == 4
            for token in choice.logprobs.content:
                assert len(token.top_logprobs) == 2
                assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
                assert bytes(token.bytes or ()).decode() == token.token
        texts = ["", "", ""]
        for chunk in client.chat.completions.create(**asked(CAPITAL, **more), stream=True):
            for one in chunk.choices:
                texts[one.index] += one.delta.content or ""
        assert texts == [choice.message.content for choice in choices]

    def test_completions(self, client: openai.OpenAI) -> None:
        """Texts are gone on with: several prompts, an echo, 16 tokens where none are asked for; streamed too."""
        prompts = [prompt(one.messages, enable_thinking=False) for one in (CAPITAL, case("story"))]
        whole = client.completions.create(model=TINY, prompt=prompts, temperature=0, echo=True)
        assert [choice.index for choice in whole.choices] == [0, 1]
        assert all(choice.text.startswith(prompt) for choice, prompt in zip(whole.choices, prompts, strict=True))
        assert whole.choices[0].text == prompts[0] + CAPITAL.answer
        assert whole.choices[1].finish_reason == "length"
        assert whole.usage
        assert whole.usage.completion_tokens == 8 + 16
        texts = ["", ""]
        for chunk in client.completions.create(model=TINY, prompt=prompts, temperature=0, echo=True, stream=True):
            for one in chunk.choices:
                texts[one.index] += one.text
        assert texts == [choice.text for choice in whole.choices]

    def test_models(self, client: openai.OpenAI) -> None:
        """The served models and the alias are listed, and an alias answers."""
        assert {TINY, ALIAS} <= {model.id for model in client.models.list()}
        assert client.models.retrieve(ALIAS).id == ALIAS
        completion = client.chat.completions.create(**asked(CAPITAL, model=ALIAS))
        assert completion.model == TINY
        assert completion.choices[0].message.content == CAPITAL.answer

    def test_extras_of_the_ecosystem(self, client: openai.OpenAI) -> None:
        """What vLLM and Hugging Face know beyond OpenAI is passed on."""
        extra = {
            "chat_template_kwargs": {"enable_thinking": False},
            **{"top_k": 1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": []},
            **{"skip_special_tokens": False, "clean_up_tokenization_spaces": False},
        }
        raw = client.chat.completions.with_raw_response.create(**asked(CAPITAL, temperature=1, extra_body=extra))
        assert "x-ignored-fields" not in raw.headers
        assert raw.parse().choices[0].message.content == CAPITAL.answer

    def test_errors_are_the_clients_own(self, client: openai.OpenAI) -> None:
        """A value out of bounds is BadRequestError with the field; an unknown model is NotFoundError; both say why."""
        with pytest.raises(openai.BadRequestError, match="temperature must be") as bad:
            client.chat.completions.create(**asked(CAPITAL, temperature=-1))
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\]") as bad:
            client.chat.completions.create(model=TINY, messages=[{"role": "user"}])  # type: ignore[typeddict-item]
        assert bad.value.type == "invalid_request_error"
        with pytest.raises(openai.BadRequestError, match=r"at most|maximum|context"):
            client.chat.completions.create(**asked(CAPITAL, messages=[{"role": "user", "content": "a " * 40_000}]))
        with pytest.raises(openai.NotFoundError, match="no-such-model") as missing:
            client.chat.completions.create(**asked(CAPITAL, model="no-such-model"))
        assert missing.value.code == "model_not_found"
        for streaming in ({"stream": True}, {}):
            with pytest.raises(openai.BadRequestError, match="stop"):
                client.chat.completions.create(**asked(CAPITAL, stop=["x"] * 65, **streaming))


class TestAsynchronous:
    """`openai.AsyncOpenAI`."""

    async def test_sixteen_at_once(self, aclient: openai.AsyncOpenAI) -> None:
        """Streamed and whole, in company, each gets its own answer."""

        async def ask(of: Case, *, stream: bool) -> str:
            if not stream:
                return (await aclient.chat.completions.create(**asked(of))).choices[0].message.content or ""
            chunks = await aclient.chat.completions.create(**asked(of), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        some = [SOBER[number % len(SOBER)] for number in range(16)]
        found = await asyncio.gather(*(ask(of, stream=bool(number % 2)) for number, of in enumerate(some)))
        assert found == [of.answer for of in some]

    async def test_tools_and_reasoning(self, aclient: openai.AsyncOpenAI) -> None:
        """A stream of thoughts, then a call."""
        thoughts, arguments = "", ""
        async for chunk in await aclient.chat.completions.create(**asked(WEATHER), stream=True):
            delta: Any = chunk.choices[0].delta
            thoughts += getattr(delta, "reasoning_content", "")
            arguments += "".join(piece.function.arguments for piece in delta.tool_calls or ())
        assert thoughts == WEATHER.reasoning
        assert json.loads(arguments) == {"city": "Paris"}
