"""What is refused: by the right code, in words that name field, value and bound, and at nobody else's cost."""

from __future__ import annotations

import asyncio
import json
import statistics
import struct
from itertools import pairwise
from typing import Any

import grpc
import pytest

from tests.support import tiny_qwen3
from tests.support.servers import Triton
from tests.support.tiny_qwen3 import CONTEXT, case
from tests.support.wire import RETURN_ALL, Wire, pack

CAPITAL = case("capital")
CHAT: dict[str, Any] = {"messages": list(CAPITAL.messages), "chat_template_kwargs": CAPITAL.template_kwargs}
TEXT = tiny_qwen3.prompt(CAPITAL.messages, enable_thinking=False)


def sampling(words: str, **values: Any) -> Any:
    """A request whose sampling is at fault."""
    name, value = next(iter(values.items()))
    return given(f"{name}={str(value)[:20]}", words, {"text_input": TEXT, "sampling": values})


def given(name: str, words: str, request: dict[str, Any]) -> Any:
    """A request that is at fault, and the words that the refusal must hold."""
    return pytest.param(request, words, id=name)


def chat(name: str, words: str, value: Any) -> Any:
    """A request whose chat is at fault."""
    return given(f"chat-{name}", words, {"chat": value})


def message(**fields: Any) -> dict[str, Any]:
    """A chat of one message."""
    return {"messages": [fields]}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    """A tool of a chat."""
    return {"type": "function", "function": {"name": name, **fields}}


OBJEKT = {"type": "objekt"}  # no JSON type
PNG = ("BYTES", [1], pack([b"png"]))


def broken(name: str, words: str, sampling: str) -> Any:
    """A request whose sampling_parameters are no JSON object."""
    return given(name, words, {"text_input": TEXT, "sampling": sampling})


def own(name: str, words: str, **parameters: Any) -> Any:
    """A request whose Triton request parameters are at fault."""
    return given(name, words, {"text_input": TEXT, "parameters": parameters})


REFUSED = [
    # the prompt
    given("no-prompt", "exactly one of text_input and chat must be given, got none", {}),
    given("two-prompts", "got text_input and chat", {"text_input": TEXT, "chat": CHAT}),
    given("not-utf8", "text_input is not valid UTF-8: byte 2 is 0xff", {"text_input": b"ab\xff\xfe"}),
    given("chat-not-utf8", "chat is not valid UTF-8", {"chat": b'{"messages": "\xc3("}'}),
    given("image", "image: this model reads text only", {"text_input": TEXT, "raw": {"image": PNG}}),
    given("echo-of-a-stream", "exclude_input_in_output", {"text_input": TEXT, "flags": ["!exclude_input_in_output"]}),
    # JSON
    broken("sampling-list", "sampling_parameters must be a JSON object, got '[1]'", "[1]"),
    broken("sampling-number", "sampling_parameters must be a JSON object", "3"),
    broken("sampling-broken", "sampling_parameters is not valid JSON", "{"),
    broken("sampling-empty", "sampling_parameters is not valid JSON", ""),
    broken("nan", "NaN is not a JSON number", '{"temperature": NaN}'),
    broken("infinity", "Infinity is not a JSON number", '{"top_p": Infinity}'),
    broken("overflow", "too large", '{"top_p": 1e400}'),
    broken("stop-surrogate", "surrogate", '{"stop": "\\ud800"}'),
    broken("sampling-deep", "sampling_parameters is not valid JSON", "[" * 200_000),
    broken("huge-integer", "sampling_parameters is not valid JSON", '{"max_tokens": ' + "9" * 5_000 + "}"),
    given("twice", "n is given twice", {"text_input": TEXT, "sampling": {"n": 1}, "parameters": {"n": 1}}),
    # sampling values
    sampling("temprature is not a sampling field; did you mean temperature?", temprature=1),
    sampling("output_kind is not a sampling field", output_kind=1),
    sampling("guided_json is not a sampling field", guided_json={}),
    sampling("max_tokens must be at least 1, got 0", max_tokens=0),
    sampling("max_tokens", max_tokens=-5),
    sampling("max_tokens", max_tokens=1.5),
    sampling("max_tokens", max_tokens="many"),
    sampling("max_tokens", max_tokens=True),
    sampling("max_tokens", max_tokens=[1]),
    sampling("max_tokens", max_tokens=10**12),
    sampling("min_tokens", min_tokens=-1),
    sampling("min_tokens", min_tokens=9, max_tokens=3),
    sampling("temperature", temperature=-0.1),
    sampling("temperature", temperature="hot"),
    sampling("temperature", temperature="nan"),
    sampling("temperature", temperature="inf"),
    sampling("temperature", temperature={}),
    sampling("top_p", top_p=0),
    sampling("top_p", top_p=1.01),
    sampling("top_p", top_p="nan"),
    sampling("top_k", top_k=-2),
    sampling("top_k", top_k=0.5),
    sampling("top_k", top_k=2**31),
    sampling("min_p", min_p=-0.1),
    sampling("min_p", min_p=1.1),
    sampling("presence_penalty", presence_penalty=2.1),
    sampling("frequency_penalty", frequency_penalty=-2.1),
    sampling("repetition_penalty", repetition_penalty=0),
    sampling("repetition_penalty", repetition_penalty=-1),
    sampling("seed", seed="yes"),
    sampling("seed", seed=2**63),
    sampling("seed", seed=-(2**70)),
    sampling("n must be a whole number from 1 to 128, got 0", n=0),
    sampling("n must be a whole number from 1 to 128, got 129", n=129),
    sampling("n", n=10**9),
    sampling("logprobs", logprobs=-2),
    sampling("logprobs", logprobs=1_000),
    sampling("logprobs", logprobs="many"),
    sampling("stop must hold at most 64 strings, got 10000", stop=["x"] * 10_000),
    sampling("stop must hold strings of 1 to 1024 characters, got ''", stop=[""]),
    sampling("stop must hold strings", stop=["x" * 100_000]),
    sampling("stop", stop=[5]),
    sampling("stop", stop=7),
    sampling("stop_token_ids", stop_token_ids=["a"]),
    sampling("stop_token_ids", stop_token_ids=[-1]),
    sampling("stop_token_ids", stop_token_ids=[10**6]),
    sampling("stop_token_ids must hold at most 4096 items, got 5000", stop_token_ids=list(range(5_000))),
    sampling("logit_bias", logit_bias={"999999": 1}),
    sampling("logit_bias", logit_bias={"a": 1}),
    sampling("logit_bias", logit_bias=[1]),
    sampling("logit_bias", logit_bias={"5": "nan"}),
    sampling("allowed_token_ids", allowed_token_ids=[10**6]),
    sampling("allowed_token_ids", allowed_token_ids=[]),
    sampling("bad_words", bad_words=[5]),
    sampling("bad_words", bad_words=[""]),
    sampling("ignore_eos", ignore_eos="perhaps"),
    # our own request parameters
    own("deadline-0", "deadline_ms must be a whole number from 1 to 86400000, got 0", deadline_ms=0),
    own("deadline-text", "deadline_ms must be a whole number from 1", deadline_ms="soon"),
    own("priority-text", "request_priority must be a whole number from", request_priority="high"),
    own("priority-without-policy", "scheduling_policy=priority", request_priority=1),
    own("cache-salt-empty", "cache_salt must be a text that is not empty", cache_salt=""),
    own("unknown-parameter", "nonsense is not a sampling field", nonsense=1),
    # chats
    chat("list", "chat must be a JSON object", []),
    chat("null", "chat must be a JSON object", "null"),
    chat("broken", "chat is not valid JSON", '{"messages": ['),
    chat("empty", "chat.messages must be a list with at least one message", {}),
    chat("no-messages", "chat.messages must be a list with at least one message, got []", {"messages": []}),
    chat("text-messages", "chat.messages must be a list", {"messages": "hello"}),
    chat("text-message", "chat.messages[0] must be an object with role and content", {"messages": ["hello"]}),
    chat("no-role", "chat.messages[0].role must be a text, got None", message(content="a")),
    chat("number-role", "chat.messages[0].role must be a text, got 5", message(role=5, content="a")),
    chat("no-content", "chat.messages[0].content must be a text", message(role="user")),
    chat("number-content", "chat.messages[0].content must be a text", message(role="user", content=5)),
    chat("image", "content[0] must be a text part", message(role="user", content=[{"type": "image_url"}])),
    chat("kwargs", "chat.chat_template_kwargs must be an object", CHAT | {"chat_template_kwargs": 3}),
    chat("unknown-field", "chat.temperature is not a field", CHAT | {"temperature": 1}),
    chat("surrogate", "surrogate", json.dumps(message(role="user", content="\ud83d"))),
    chat("deep", "chat is not valid JSON", '{"messages": ' + "[" * 5_000 + "]" * 5_000 + "}"),
    chat("deep-kwargs", "deeper than 64", json.dumps(CHAT)[:-1] + ', "a": ' + "[" * 70 + "]" * 70 + "}"),
    chat("no-tools", "chat.tools must be a list of 1 to 128 tools, got 0", CHAT | {"tools": []}),
    chat("tool-without-name", "chat.tools[0].function.name must be a text", CHAT | {"tools": [tool(name="")]}),
    chat("tool-type", "chat.tools[0].type must be 'function'", CHAT | {"tools": [tool() | {"type": "code"}]}),
    chat("tool-schema", "chat.tools[1].function.parameters.properties.a.type: 'strin' is not valid",
         CHAT | {"tools": [tool(), tool(parameters={"properties": {"a": {"type": "strin"}}})]}),
    chat("choice-without-tools", "chat.tool_choice needs chat.tools", CHAT | {"tool_choice": "required"}),
    chat("choice-unknown", "chat.tool_choice must be one of none, auto, required",
         CHAT | {"tools": [tool()], "tool_choice": "maybe"}),
    chat("choice-of-none", "chat.tool_choice.function.name is none of chat.tools (f), got 'g'",
         CHAT | {"tools": [tool()], "tool_choice": tool(name="g")}),
    chat("format-unknown", "chat.response_format.type must be one of", CHAT | {"response_format": {"type": "yaml"}}),
    chat("format-schema", "chat.response_format.json_schema.schema.type: 'objekt' is not valid",
         CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJEKT}}}),
    chat("structured-none", "chat.structured_outputs must hold exactly one of", CHAT | {"structured_outputs": {}}),
    chat("structured-regex", "chat.structured_outputs.regex: ", CHAT | {"structured_outputs": {"regex": "[0-9"}}),
    chat("structured-grammar", "chat.structured_outputs.grammar: ",
         CHAT | {"structured_outputs": {"grammar": "root ::= ("}}),
    given("text-regex", "structured_outputs.regex: ",
          {"text_input": TEXT, "sampling": {"structured_outputs": {"regex": "[0-9"}}}),
    chat("arguments", "chat.messages[0].tool_calls[0].function.arguments is not valid JSON",
         message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])),
    chat("calls-of-a-user", "chat.messages[0].tool_calls belong to an assistant",
         message(role="user", tool_calls=[tool()])),
    chat("both-ends", "cannot both be true",
         CHAT | {"add_generation_prompt": True, "continue_final_message": True}),
    chat("effort", "chat.reasoning_effort must be one of", CHAT | {"reasoning_effort": "huge"}),
    chat("reasoning", "chat.include_reasoning must be true or false", CHAT | {"include_reasoning": "no"}),
    own("lora", "lora_name is none of this model's adapters (none), got 'mine'", lora_name="mine"),
    sampling("truncate_prompt_tokens must be a whole number from 1", truncate_prompt_tokens=10**6),
    sampling("thinking_token_budget", thinking_token_budget=-5),
    chat("template-refuses", "unexpected role: narrator", message(role="narrator", content="a")),
]  # fmt: skip

# What Triton refuses by the model's configuration, before model.py sees it.
BY_TRITON = [
    given("text-of-int", "text_input", {"raw": {"text_input": ("INT32", [1], struct.pack("<i", 7))}}),
    given("two-texts", "text_input", {"raw": {"text_input": ("BYTES", [2], pack(["a", "b"]))}}),
    given("text-of-two-dimensions", "text_input", {"raw": {"text_input": ("BYTES", [1, 1], pack(["a"]))}}),
    given("text-of-no-element", "text_input", {"raw": {"text_input": ("BYTES", [0], b"")}}),
    given(
        "stream-of-text", "stream", {"text_input": TEXT, "stream": None, "raw": {"stream": ("BYTES", [1], pack(["a"]))}}
    ),
    given("two-streams", "stream", {"text_input": TEXT, "stream": None, "raw": {"stream": ("BOOL", [2], b"\1\1")}}),
    given("sampling-of-float", "sampling_parameters", {"raw": {"sampling_parameters": ("FP32", [1], bytes(4))}}),
    given("unknown-input", "nonsense", {"text_input": TEXT, "raw": {"nonsense": ("BYTES", [1], pack(["a"]))}}),
]


class TestRefusals:
    """INVALID_ARGUMENT, before the engine sees it."""

    @pytest.mark.parametrize(("request_", "words"), REFUSED)
    async def test_it_is_refused_by_name(self, wire: Wire, request_: dict[str, Any], words: str) -> None:
        """The code is the caller's fault, the message names the field; the next request is answered as ever."""
        answer = await wire.refused(**request_, within=10)
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT, answer.details
        assert words in answer.details
        assert len(answer.details) < 1_000
        assert (await wire.ask(chat=CHAT, within=10)).ok().text() == CAPITAL.expected

    @pytest.mark.parametrize(("request_", "words"), BY_TRITON)
    async def test_triton_refuses_by_the_configuration(self, wire: Wire, request_: dict[str, Any], words: str) -> None:
        """Wrong types and shapes are one error response that names the input."""
        answer = await wire.ask(**request_, within=10)
        assert len(answer.responses) == 1
        assert words in answer.responses[0].error
        assert not answer.responses[0].outputs
        assert (await wire.ask(chat=CHAT, within=10)).ok().text() == CAPITAL.expected

    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
    async def test_whoever_asks_for_a_real_status_gets_it(self, wire: Wire, *, stream: bool) -> None:
        """With Triton's metadata the stream itself ends with the error's status, and nothing else is sent."""
        request: dict[str, Any] = {"text_input": TEXT, "sampling": {"max_tokens": 0}, "stream": stream}
        answer = await wire.ask(**request, real_status=True)
        assert answer.status is grpc.StatusCode.INVALID_ARGUMENT
        assert "max_tokens" in answer.details
        assert not answer.responses

    async def test_an_unknown_model(self, wire: Wire) -> None:
        """Triton's own answer names the model."""
        answer = await wire.ask(model="Nobody", text_input=TEXT)
        assert answer.code is grpc.StatusCode.NOT_FOUND or "unknown model" in answer.details
        assert "Nobody" in answer.details
        assert len(answer.responses) <= 1

    async def test_refusals_do_not_reach_the_engine(self, triton: Triton, wire: Wire) -> None:
        """The engine's own counters do not move for them."""
        await triton.settled()
        before = triton.gauge("vllm:prompt_tokens_total")
        await asyncio.gather(*(wire.refused(text_input=TEXT, sampling={"max_tokens": 0}) for _ in range(20)))
        await triton.settled()
        assert triton.gauge("vllm:prompt_tokens_total") == before


class TestContext:
    """Prompts at and over the edge of the context."""

    async def test_a_prompt_longer_than_the_context(self, wire: Wire) -> None:
        """Refused with its length and the bound, as text and as chat."""
        text = "counted the boats: one, two, three " * (CONTEXT // 4)
        for prompt in ({"text_input": text}, {"chat": message(role="user", content=text)}):
            answer = await wire.refused(**prompt)
            assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
            assert str(CONTEXT) in answer.details

    async def test_a_prompt_that_fills_the_context(self, wire: Wire) -> None:
        """There is no room for an answer: refused, not answered with nothing."""
        answer = await wire.refused(text_input="a " * CONTEXT)
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
        assert str(CONTEXT) in answer.details

    async def test_a_prompt_that_leaves_room_for_one_token(self, wire: Wire) -> None:
        """The bound itself is inside."""
        text, flags = "a", RETURN_ALL
        one = (await wire.ask(text_input=text * 10, sampling={"max_tokens": 1}, flags=flags)).ok()
        per_ten = one.last("num_input_tokens")
        assert per_ten == 10, "the test needs one token per letter"
        answer = (await wire.ask(text_input=text * (CONTEXT - 1), sampling={"ignore_eos": True}, flags=flags)).ok()
        assert answer.total("num_output_tokens") == 1
        assert answer.last("finish_reason") == "length"

    async def test_an_empty_prompt(self, wire: Wire) -> None:
        """Nothing to go on from: refused, by the name of the field."""
        answer = await wire.refused(text_input="")
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "text_input" in answer.details or "prompt" in answer.details

    @pytest.mark.parametrize("prompt", ["text_input", "chat"])
    async def test_a_megabyte_does_no_harm(self, wire: Wire, prompt: str) -> None:
        """While prompts of 1 MB are refused, a stream beside them keeps its pace."""
        text = "counted the boats 一、二、三 👨‍👩‍👧‍👦 " * 20_000
        assert len(text.encode()) > 1_000_000
        value = text if prompt == "text_input" else message(role="user", content=text)
        request: dict[str, Any] = {prompt: value}

        async def gaps() -> list[float]:
            async with wire.open(chat=CHAT, sampling={"ignore_eos": True, "max_tokens": 500}) as call:
                answer = await call.rest()
            times = [response.at for response in answer.ok().responses]
            return [later - earlier for earlier, later in pairwise(times)]

        alone, longest, usual = await gaps(), [], []
        for _ in range(4):
            stream = asyncio.create_task(gaps())
            refused = await wire.refused(**request, within=20)
            assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
            assert str(CONTEXT) in refused.details
            assert len(refused.details) < 1_000
            beside = await stream
            longest.append(max(beside))
            usual.append(statistics.median(beside))
        # Harm is done every time; a busy machine stops one process or another for seconds, but not every time.
        assert min(longest) < 1.0, longest
        assert min(usual) < 3 * statistics.median(alone) + 0.01

    async def test_ten_thousand_messages(self, wire: Wire) -> None:
        """A chat of many messages is refused like any other that is too long."""
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}] * 5_000
        answer = await wire.refused(chat={"messages": messages}, within=20)
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
