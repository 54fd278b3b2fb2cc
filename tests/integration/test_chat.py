"""What a chat is beyond messages: thoughts, tools, forms, and how its prompt ends. The answers are known by heart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tritonstream import AsyncClient, Message, Request, Sampling

from tests.support import tiny_qwen3
from tests.support.servers import SINCE_0_32, TINY, Triton
from tests.support.tiny_qwen3 import CALLS, Case, case, cases
from tests.support.wire import Answer, Wire

STREAM = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
TOOLS = list(tiny_qwen3.TOOLS.values())


def chat(one: Case, **fields: Any) -> dict[str, Any]:
    """The `chat` input that asks for the case, with its tools."""
    tools = {"tools": list(one.tools)} if one.tools else {}
    return {"messages": list(one.messages), "chat_template_kwargs": one.template_kwargs, **tools, **fields}


def expected_calls(one: Case) -> list[tuple[str, Any]]:
    """The calls in what the model says."""
    found = [text.partition("</tool_call>")[0] for text in one.expected.split("<tool_call>")[1:]]
    return [(call["name"], call["arguments"]) for call in map(json.loads, found)]


def called(answer: Answer, index: int = 0) -> list[tuple[str, Any]]:
    """The calls in an answer, whose ids must tell them apart."""
    calls = answer.calls(index)
    assert all(call["id"] for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def spaces(model: Path) -> list[str]:
    """The tokens that are nothing but spaces."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [str(token) for token in tokenizer.get_vocab().values() if tokenizer.decode([token]).isspace()]


@pytest.fixture
async def client(triton: Triton) -> AsyncIterator[AsyncClient]:
    """The asynchronous client."""
    async with AsyncClient(triton.grpc) as opened:
        yield opened


class TestThinking:
    """reasoning_output and text_output are two things, however the answer comes."""

    @STREAM
    @pytest.mark.parametrize("limit", [1, 2, 3, 7, 15])
    async def test_cut_within_the_thought(self, wire: Wire, limit: int, *, stream: bool) -> None:
        """All of it is reasoning, the text is empty, and the reason is the length."""
        one = case("sum-thinking")
        asked: dict[str, Any] = {
            "chat": chat(one),
            "sampling": {"max_tokens": limit},
            "flags": ["return_finish_reason"],
        }
        answer = (await wire.ask(**asked, stream=stream)).ok()
        assert answer.text() == ""
        assert one.reasoning.startswith(answer.reasoning())
        assert answer.last("finish_reason") == "length"

    @STREAM
    async def test_not_asked_to_think_it_has_no_reasoning(self, wire: Wire, *, stream: bool) -> None:
        """Thinking off, no answer is ever taken for a thought."""
        for one in (one for one in cases() if not one.enable_thinking):
            answer = (await wire.ask(chat=chat(one), stream=stream)).ok()
            assert (answer.text(), answer.reasoning()) == (one.expected, "")

    @STREAM
    async def test_hidden_reasoning(self, wire: Wire, *, stream: bool) -> None:
        """include_reasoning=false takes the thought off all the same, and says nothing of it, nor of its tokens."""
        one = case("sum-thinking")
        asked = chat(one, include_reasoning=False)
        answer = (await wire.ask(chat=asked, stream=stream, sampling={"logprobs": 1}, flags=["return_logprobs"])).ok()
        assert (answer.text(), answer.reasoning()) == (one.answer, "")
        assert set(answer.every("logprobs")) == {"null"}

    @SINCE_0_32
    async def test_a_budget(self, wire: Wire) -> None:
        """thinking_token_budget ends the thought after so many tokens, and an answer follows."""
        one = case("capital-thinking")
        asked: dict[str, Any] = {"chat": chat(one), "sampling": {"thinking_token_budget": 5, "max_tokens": 64}}
        answer = (await wire.ask(**asked, flags=["return_summary"])).ok()
        summary = json.loads(answer.last("summary"))
        assert 0 < summary["num_reasoning_tokens"] <= 6
        assert one.reasoning.startswith(answer.reasoning())
        assert answer.text()

    async def test_while_it_thinks_there_is_no_text_tensor(self, wire: Wire) -> None:
        """A response of a thought alone has one tensor; the last has the text in any case."""
        answer = (await wire.ask(chat=chat(case("sum-thinking")))).ok()
        assert list(answer.responses[0].outputs) == ["reasoning_output"]
        assert "text_output" in answer.responses[-1].outputs

    @SINCE_0_32
    async def test_the_tokens_of_the_thought_are_counted(self, wire: Wire) -> None:
        """As many streamed as whole, half characters among them."""
        one = case("greeting-zh-thinking")
        streamed, whole = [
            json.loads((await wire.ask(chat=chat(one), stream=stream, flags=["return_summary"])).ok().last("summary"))
            for stream in (True, False)
        ]
        assert streamed["num_reasoning_tokens"] == whole["num_reasoning_tokens"] > len(one.reasoning)


class TestTools:
    """Calls are deltas with one id and one index each, and put together what the model said."""

    @STREAM
    @pytest.mark.parametrize("one", list(cases(CALLS)), ids=lambda one: one.name)
    async def test_calls_are_known(self, wire: Wire, one: Case, *, stream: bool) -> None:
        """Thought, text, calls and the reason are exact; a call is no text."""
        answer = (await wire.ask(chat=chat(one), stream=stream, flags=["return_finish_reason"])).ok()
        assert called(answer) == expected_calls(one)
        # Beside calls, vLLM's whole answer has no text of white space alone; its streamed one does.
        assert answer.text() == one.answer or (not stream and answer.text() == one.answer.strip() == "")
        assert answer.reasoning() == one.reasoning
        assert answer.last("finish_reason") == ("tool_calls" if expected_calls(one) else "stop")

    async def test_a_call_streams(self, wire: Wire) -> None:
        """Its id and name come first, its arguments piece by piece."""
        answer = (await wire.ask(chat=chat(case("weathers")))).ok()
        deltas = [delta for text in answer.every("tool_calls") for delta in json.loads(text)]
        assert len(deltas) > 4
        for index in (0, 1):
            first, *others = [delta for delta in deltas if delta["index"] == index]
            assert first["id"] and first["type"] == "function" and first["function"]["name"] == "get_weather"
            assert others and not any("id" in delta or "name" in delta["function"] for delta in others)

    @STREAM
    async def test_one_at_most(self, wire: Wire, *, stream: bool) -> None:
        """parallel_tool_calls=false delivers the first."""
        one = case("weathers")
        answer = (await wire.ask(chat=chat(one, parallel_tool_calls=False), stream=stream)).ok()
        assert called(answer) == expected_calls(one)[:1]

    @STREAM
    async def test_forbidden(self, wire: Wire, *, stream: bool) -> None:
        """tool_choice none leaves a call in the text."""
        one = case("weather")
        asked = chat(one, tool_choice="none")
        answer = (await wire.ask(chat=asked, stream=stream, flags=["return_finish_reason"])).ok()
        assert (answer.text(), answer.calls(), answer.last("finish_reason")) == (one.expected, [], "stop")

    @STREAM
    @pytest.mark.parametrize("named", [True, False], ids=["named", "required"])
    async def test_forced(self, wire: Wire, tiny_model: Path, *, named: bool, stream: bool) -> None:
        """Where the model would rather talk it calls a tool, with arguments that its strict schema allows."""
        unit = {"type": "string", "enum": ["metre", "mile"]}
        schema = {"type": "object", "properties": {"unit": unit}, "required": ["unit"], "additionalProperties": False}
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
            for name in ("measure", "convert")
        ]
        choice = {"type": "function", "function": {"name": "convert"}} if named else "required"
        asked = chat(case("capital"), tools=tools, tool_choice=choice, parallel_tool_calls=False)
        # JSON may have spaces anywhere, and a model that would rather not write it writes nothing else.
        sampling = {"temperature": 0, "max_tokens": 200, "logit_bias": dict.fromkeys(spaces(tiny_model), -100)}
        answer = (await wire.ask(chat=asked, stream=stream, sampling=sampling)).ok()
        ((name, arguments),) = called(answer)
        assert name in ({"convert"} if named else {"measure", "convert"})
        assert arguments in ({"unit": "metre"}, {"unit": "mile"})

    @STREAM
    async def test_several_choices(self, wire: Wire, *, stream: bool) -> None:
        """Each choice has its own thought and its own calls."""
        one = case("weather-thinking")
        answer = (await wire.ask(chat=chat(one), stream=stream, sampling={"n": 3, "seed": 1})).ok()
        for index in range(3):
            assert called(answer, index) == expected_calls(one)
            assert answer.reasoning(index) == one.reasoning

    async def test_a_conversation_with_a_tool(self, client: AsyncClient) -> None:
        """The client's own answer goes back as a message, the tool's after it, and the model tells of it."""
        one = case("weather")
        first = Request(prompt=one.messages, model=TINY, tools=TOOLS[:1], chat_template_kwargs=one.template_kwargs)
        (choice,) = (await client.generate(first)).choices
        (call,) = choice.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
        tool = Message(role="tool", content="18 degrees, sunny", tool_call_id=call.id)
        told = await client.generate(replace(first, prompt=[*one.messages, choice.message, tool]))
        assert told.text == case("report").expected
        assert told.choices[0].finish_reason == "stop"


class TestForms:
    """Answers held to a form."""

    @STREAM
    @pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "not"])
    async def test_a_schema(self, wire: Wire, *, thinking: bool, stream: bool) -> None:
        """The answer fits it; a thought before it is free."""
        one = case("json-thinking" if thinking else "json")
        properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
        schema = {"type": "object", "properties": properties, "required": ["name", "age"]}
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
        answer = (await wire.ask(chat=chat(one, response_format=form), stream=stream, sampling={"temperature": 0})).ok()
        assert json.loads(answer.text()) == {"name": "Ming 明", "age": 7}
        assert answer.reasoning() == one.reasoning

    @pytest.mark.parametrize(
        ("form", "allowed"),
        [
            ({"choice": ["Rome", "Oslo"]}, {"Rome", "Oslo"}),
            ({"regex": "(a|b){3}"}, {"".join((x, y, z)) for x in "ab" for y in "ab" for z in "ab"}),
            ({"grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}),
        ],
        ids=lambda value: "-".join(value),
    )
    async def test_structured_outputs(self, wire: Wire, form: dict[str, Any], allowed: set[str]) -> None:
        """What the model would never say, it says; to a chat and to a text."""
        answer = (await wire.ask(chat=chat(case("capital"), structured_outputs=form))).ok()
        assert answer.text() in allowed
        text: dict[str, Any] = {"text_input": "Paris", "sampling": {"structured_outputs": form}}
        assert (await wire.ask(**text)).ok().text() in allowed


class TestPrompts:
    """How the prompt ends, what is kept of it, and what is known of it."""

    async def test_going_on_with_the_last_message(self, wire: Wire) -> None:
        """continue_final_message continues it, without a new beginning."""
        one, flags = case("capital"), ["return_num_input_tokens"]
        messages = [*one.messages, {"role": "assistant", "content": "The capital of"}]
        sampling = {"temperature": 0, "max_tokens": 8}
        asked = {"messages": messages, "continue_final_message": True, "chat_template_kwargs": one.template_kwargs}
        answer = (await wire.ask(chat=asked, sampling=sampling, flags=flags)).ok()
        (turn,) = one.messages
        text = f"<|im_start|>user\n{turn['content']}<|im_end|>\n<|im_start|>assistant\nThe capital of"
        by_hand = (await wire.ask(text_input=text, sampling=sampling, flags=flags)).ok()
        assert answer.text() == by_hand.text()
        assert answer.last("num_input_tokens") == by_hand.last("num_input_tokens")

    @STREAM
    async def test_truncation(self, wire: Wire, *, stream: bool) -> None:
        """truncate_prompt_tokens keeps so many of the prompt's tokens, from the side that is named."""
        one = case("memory")
        whole = (await wire.ask(chat=chat(one), flags=["return_num_input_tokens"])).ok().last("num_input_tokens")
        for side in ("left", "right"):
            sampling = {"truncate_prompt_tokens": 20, "truncation_side": side, "max_tokens": 4}
            asked: dict[str, Any] = {"chat": chat(one), "sampling": sampling, "flags": ["return_num_input_tokens"]}
            assert (await wire.ask(**asked, stream=stream)).ok().last("num_input_tokens") == 20 < whole

    async def test_probabilities_of_the_prompt(self, client: AsyncClient) -> None:
        """One place for each of the prompt's tokens, none for its first, and the token itself is the chosen one."""
        sampling = Sampling(prompt_logprobs=1, max_tokens=2, temperature=0)
        request = Request(prompt="The capital of France", model=TINY, sampling=sampling)
        found = await client.generate(request)
        assert found.prompt_logprobs is not None
        first, *others = found.prompt_logprobs
        assert first is None
        assert len(others) + 1 == found.usage.prompt_tokens
        told = "".join(place.chosen.token for place in others if place is not None)
        assert "The capital of France".endswith(told)
        async with client.stream(request) as deltas:
            streamed = [delta.prompt_logprobs async for delta in deltas]
        assert streamed[0] == found.prompt_logprobs
        assert set(streamed[1:]) <= {None}

    @SINCE_0_32
    async def test_an_interval(self, wire: Wire) -> None:
        """stream_interval sends a response for every so many tokens."""
        one = case("story")
        answer = (await wire.ask(chat=chat(one), sampling={"stream_interval": 50}, flags=["return_summary"])).ok()
        assert answer.text() == one.expected
        tokens = json.loads(answer.last("summary"))["num_output_tokens"]
        assert len(answer.responses) <= tokens // 50 + 2

    async def test_the_next_turn_finds_the_last_one_cached(self, client: AsyncClient) -> None:
        """A conversation that goes on pays for its new turn alone: the prompt before it comes from the prefix cache."""
        question, answer = {"role": "user", "content": "What is 8 plus 5?"}, {"role": "assistant", "content": "13."}
        history = [*[turn for _ in range(60) for turn in (question, answer)], question]
        kwargs = {"enable_thinking": False}

        async def ask(messages: list[dict[str, Any]]) -> Any:
            sampling = Sampling(max_tokens=4, temperature=0)
            request = Request(
                prompt=messages, model=TINY, chat_template_kwargs=kwargs, sampling=sampling, cache_salt="turns"
            )
            return (await client.generate(request)).usage

        first = await ask(history)
        second = await ask([*history, answer, question])
        assert first.cached_tokens == 0
        assert second.prompt_tokens > first.prompt_tokens > 1_000
        assert second.cached_tokens > 0.8 * first.prompt_tokens
