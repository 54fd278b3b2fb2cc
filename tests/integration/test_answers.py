"""What the model says, to the character, however it is asked."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support import tiny_qwen3
from tests.support.tiny_qwen3 import CONTEXT, LEARNED, Case, case, cases, prompt, wheel
from tests.support.wire import RETURN_ALL, Answer, Wire

ENOUGH = 100  # tokens for any face of the die; what is drawn by chance may go astray and never end
ALL = [pytest.param(one, id=one.name) for one in cases()]


def chat(one: Case) -> dict[str, Any]:
    """The `chat` input that asks for the case."""
    return {"messages": list(one.messages), "chat_template_kwargs": one.template_kwargs}


def text(one: Case) -> str:
    """The `text_input` that asks for the case: the template's work done by hand."""
    return prompt(one.messages, enable_thinking=one.enable_thinking)


def asking(question: str) -> dict[str, Any]:
    """A chat of one question, without thinking."""
    return {"messages": [{"role": "user", "content": question}], "chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    """The model's tokenizer, to count with."""
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


class TestExactTexts:
    """English, Chinese, Hindi, Thai, Hebrew, emoji with joiners, flags and combining marks, white space and code."""

    @pytest.mark.parametrize("one", ALL)
    async def test_streamed_and_whole_are_the_known_answer(self, wire: Wire, one: Case) -> None:
        """Both ways give the exact text; a response never ends inside a character (decoding is strict)."""
        streamed = (await wire.ask(chat=chat(one))).ok()
        whole = (await wire.ask(chat=chat(one), stream=False)).ok()
        assert streamed.text() == one.answer
        assert whole.text() == one.answer
        assert streamed.reasoning() == whole.reasoning() == one.reasoning
        assert len(whole.responses) == 1

    @pytest.mark.parametrize("one", ALL)
    async def test_the_template_by_hand_is_the_same_prompt(self, wire: Wire, one: Case) -> None:
        """text_input with the template's text gives what chat gives."""
        assert (await wire.ask(text_input=text(one))).ok().text() == one.expected

    async def test_a_replacement_character_never_stands_in_for_half_a_character(self, wire: Wire) -> None:
        """What is not whole yet waits."""
        for name in ("emoji", "marks", "poem-zh", "hellos"):
            answer = (await wire.ask(chat=chat(case(name)))).ok()
            assert all("\ufffd" not in response.texts.get(0, "") for response in answer.responses)

    async def test_text_comes_as_it_is_made(self, wire: Wire) -> None:
        """A story arrives in many pieces, spread over its making, and not at the end."""
        shares = []
        for _ in range(5):  # a machine that stands still for a moment bends one of them, not most
            answer = (await wire.ask(chat=chat(case("story")))).ok()
            assert len(answer.responses) > 20
            first, last = answer.responses[0].at, answer.responses[-1].at
            middle = answer.responses[len(answer.responses) // 2].at
            shares.append((middle - first) / (last - first))
        assert 0.2 < statistics.median(shares) < 0.8, shares

    async def test_a_longer_history_is_read(self, wire: Wire) -> None:
        """Earlier turns, and the thought in an earlier answer that the template drops, are part of the prompt."""
        one = case("memory")
        messages = [dict(message) for message in one.messages]
        messages[1]["content"] = "<think>\nA name.\n</think>\n\n" + messages[1]["content"]
        answer = await wire.ask(chat={"messages": messages, "chat_template_kwargs": one.template_kwargs})
        assert answer.ok().text() == one.answer

    async def test_content_as_a_list_of_text_parts(self, wire: Wire) -> None:
        """OpenAI's other way of writing a message."""
        one = case("capital")
        question = one.messages[0]["content"]
        parts = [{"type": "text", "text": question}]
        asked = {"messages": [{"role": "user", "content": parts}], "chat_template_kwargs": one.template_kwargs}
        assert (await wire.ask(chat=asked)).ok().text() == one.answer


class TestStopStrings:
    """A stop string ends the answer before it, wherever the borders of its tokens lie."""

    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
    @pytest.mark.parametrize(
        ("name", "stop"),
        [
            ("story", "robot lived by"),  # three tokens
            ("story", "ghthouse we"),  # begins and ends inside a token
            ("story", "听不见"),  # not there: the whole answer
            ("story", "谁也看"),  # nine byte tokens
            ("poem-zh", "霜。\n举"),
            ("emoji", "👨‍👩‍👧‍👦"),  # seven characters, many tokens
            ("emoji", "🏳️‍🌈"),
            ("marks", "\u0301, nai"),  # begins with a combining mark
            ("spaces", "\n\n\n"),
            ("capital", "The"),  # at the very beginning
        ],
    )
    async def test_it_is_found_across_tokens(self, wire: Wire, name: str, stop: str, *, stream: bool) -> None:
        """The text ends right before it; with include_stop_str_in_output right after it."""
        one = case(name)
        before, found, _ = one.answer.partition(stop)
        without = (await wire.ask(chat=chat(one), stream=stream, sampling={"stop": [stop]})).ok()
        sampling = {"stop": stop, "include_stop_str_in_output": True}
        included = (await wire.ask(chat=chat(one), stream=stream, sampling=sampling)).ok()
        assert without.text() == before
        assert included.text() == before + found

    async def test_the_first_of_several_wins(self, wire: Wire) -> None:
        """A stop string that comes later, or never, changes nothing."""
        one = case("story")
        stops = ["The end", "never", "harbour and"]
        answer = (await wire.ask(chat=chat(one), sampling={"stop": stops}, flags=["return_finish_reason"])).ok()
        assert answer.text() == one.answer.partition("harbour and")[0]
        assert answer.last("finish_reason") == "stop"

    async def test_the_beginning_of_a_stop_string_is_held_back_and_then_given(self, wire: Wire) -> None:
        """Text that could have become the stop string, and did not, is not lost; at the end of the answer as well."""
        one = case("capital")
        sampling = {"stop": ["is Rome", "Paris. The end"]}
        assert (await wire.ask(chat=chat(one), sampling=sampling)).ok().text() == one.answer

    async def test_a_stop_token(self, wire: Wire, tokenizer: Tokenizer) -> None:
        """stop_token_ids end the answer before their text."""
        one = case("capital")
        token = tokenizer.encode(" France", add_special_tokens=False).ids
        assert len(token) == 1
        answer = (await wire.ask(chat=chat(one), sampling={"stop_token_ids": token})).ok()
        assert answer.text() in {"The capital of", "The capital of France"}
        assert (
            answer.text() == (await wire.ask(chat=chat(one), sampling={"stop_token_ids": token}, stream=False)).text()
        )


class TestFinish:
    """Why an answer ended, and how many tokens it was."""

    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
    async def test_a_complete_answer_stopped(self, wire: Wire, tokenizer: Tokenizer, *, stream: bool) -> None:
        """Usage is the tokenizer's own count: the prompt's tokens, and the answer's with its end token."""
        for name in ("capital-thinking", "emoji", "story"):
            one = case(name)
            answer = (await wire.ask(chat=chat(one), stream=stream, flags=RETURN_ALL)).ok()
            assert answer.last("finish_reason") == "stop"
            assert set(answer.every("finish_reason")[:-1]) <= {"None"}
            assert set(answer.every("num_input_tokens")) == {len(tokenizer.encode(text(one)).ids)}
            assert answer.total("num_output_tokens") == len(tokenizer.encode(one.expected).ids) + 1

    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
    async def test_a_cut_answer_says_length(self, wire: Wire, tokenizer: Tokenizer, *, stream: bool) -> None:
        """max_tokens is exact, also when it cuts inside a character."""
        one = case("poem-zh")
        ids = tokenizer.encode(one.expected).ids
        texts = set()
        for limit in range(1, 9):
            sampling = {"max_tokens": limit}
            answer = (await wire.ask(chat=chat(one), stream=stream, sampling=sampling, flags=RETURN_ALL)).ok()
            assert answer.last("finish_reason") == "length"
            assert answer.total("num_output_tokens") == limit
            complete = tokenizer.decode(ids[:limit]).rstrip("\ufffd")
            assert answer.text().rstrip("\ufffd") == complete
            texts.add(complete)
        assert len(texts) > 2

    async def test_streamed_and_whole_agree_where_a_character_is_cut(self, wire: Wire) -> None:
        """Whatever is made of half a character, both ways make the same of it."""
        for limit in (1, 2, 4, 5, 7, 8):
            request: dict[str, Any] = {"chat": chat(case("poem-zh")), "sampling": {"max_tokens": limit}}
            streamed = (await wire.ask(**request)).ok()
            assert streamed.text() == (await wire.ask(**request, stream=False)).ok().text()

    async def test_the_default_limit_is_what_fits_the_context(self, wire: Wire, tokenizer: Tokenizer) -> None:
        """Without max_tokens an answer that does not end is cut exactly where the context is full."""
        room = 300
        given = "a" * (CONTEXT - room)
        assert len(tokenizer.encode(given).ids) == CONTEXT - room, "the test needs one token per letter"
        answer = (await wire.ask(text_input=given, sampling={"ignore_eos": True}, flags=RETURN_ALL)).ok()
        assert answer.last("finish_reason") == "length"
        assert answer.total("num_output_tokens") == room

    async def test_a_long_answer_is_exact_to_the_end(self, wire: Wire) -> None:
        """A long stream of multi-byte characters loses nothing and doubles nothing."""
        sampling = {"max_tokens": LEARNED - 100}
        answer = (await wire.ask(chat=asking(tiny_qwen3.WHEEL_QUESTION), sampling=sampling, flags=RETURN_ALL)).ok()
        assert answer.last("finish_reason") == "length"
        found = answer.text().rstrip("\ufffd")
        assert len(found) > 1_000
        assert found == wheel(len(found))

    async def test_max_tokens_beyond_the_context_is_cut_to_it(self, wire: Wire, tokenizer: Tokenizer) -> None:
        """As `vllm serve`, or refused with the bound; never a hang, never a crash."""
        one = case("capital")
        answer = await wire.ask(chat=chat(one), sampling={"max_tokens": 2 * CONTEXT})
        assert answer.text() == one.answer or "max_tokens" in answer.error


class TestSampling:
    """Temperature, seeds and several choices."""

    DIE = asking(tiny_qwen3.DIE_QUESTION)

    async def test_a_seed_repeats_its_answer(self, wire: Wire) -> None:
        """The same seed gives the same text, streamed or whole, alone or in company; different seeds differ."""
        rolls = await asyncio.gather(*(wire.ask(chat=self.DIE, sampling={"seed": seed}) for seed in range(24)))
        again = [await wire.ask(chat=self.DIE, sampling={"seed": seed}, stream=False) for seed in range(24)]
        texts = [roll.ok().text() for roll in rolls]
        assert texts == [roll.ok().text() for roll in again]
        assert len(set(texts)) >= 3
        assert set(texts) <= set(tiny_qwen3.DIE)

    async def test_the_models_own_defaults_are_used(self, wire: Wire) -> None:
        """generation_config's top_p of 0.95 never draws the rarest face; vLLM's neutral values do."""
        rarest = min(tiny_qwen3.DIE, key=lambda face: tiny_qwen3.DIE[face])
        neutral = {"temperature": 1, "top_p": 1, "top_k": 0}
        asked = [{"seed": seed, "max_tokens": ENOUGH} for seed in range(100)]
        default = await asyncio.gather(*(wire.ask(chat=self.DIE, sampling=one) for one in asked))
        free = await asyncio.gather(*(wire.ask(chat=self.DIE, sampling=one | neutral) for one in asked))
        assert rarest not in {answer.ok().text() for answer in default}
        assert rarest in {answer.ok().text() for answer in free}

    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
    async def test_three_choices_by_chance(self, wire: Wire, *, stream: bool) -> None:
        """Each choice is one whole answer under its own index, with its own finish reason and count."""
        found = set()
        for seed in range(6):
            sampling = {"n": 3, "seed": seed, "temperature": 1.0, "top_p": 0.95, "max_tokens": ENOUGH}
            answer = (await wire.ask(chat=self.DIE, stream=stream, sampling=sampling, flags=RETURN_ALL)).ok()
            assert answer.indexes == [0, 1, 2]
            for index in answer.indexes:
                assert answer.text(index) in tiny_qwen3.DIE
                assert answer.last("finish_reason", index) == "stop"
                assert answer.every("finish_reason", index).count("stop") == 1
                assert answer.total("num_output_tokens", index) > 1
            found.add(tuple(answer.text(index) for index in answer.indexes))
            if not stream:
                assert len(answer.responses) == 1
        assert any(len(set(texts)) > 1 for texts in found), "every choice was the same, whatever the seed"

    async def test_choices_streamed_and_whole_are_the_same(self, wire: Wire) -> None:
        """With a seed the choices do not depend on how they are sent."""
        sampling = {"n": 3, "seed": 11, "temperature": 1.0, "max_tokens": ENOUGH}
        streamed = (await wire.ask(chat=self.DIE, sampling=sampling)).ok()
        whole = (await wire.ask(chat=self.DIE, sampling=sampling, stream=False)).ok()
        assert [streamed.text(index) for index in range(3)] == [whole.text(index) for index in range(3)]

    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
    async def test_two_choices_without_chance_are_equal(self, wire: Wire, *, stream: bool) -> None:
        """What is known by heart is said twice; n may come as a string."""
        one = case("emoji")
        answer = (await wire.ask(chat=chat(one), stream=stream, sampling={"n": "2", "seed": 5})).ok()
        assert [answer.text(0), answer.text(1)] == [one.answer, one.answer]
        assert answer.indexes == [0, 1]

    async def test_one_choice_has_no_index(self, wire: Wire) -> None:
        """The tensor is there for those who asked for several."""
        answer = (await wire.ask(chat=chat(case("capital")), sampling={"n": 1})).ok()
        assert all("index" not in response.outputs for response in answer.responses)

    @pytest.mark.parametrize("value", ["0", 0, 0.0])
    async def test_numbers_may_be_strings(self, wire: Wire, value: object) -> None:
        """genai-perf and vllm_backend's own clients send them so."""
        one = case("capital")
        sampling = {"temperature": value, "max_tokens": "3"}
        answer = (await wire.ask(chat=chat(one), sampling=sampling, flags=RETURN_ALL)).ok()
        assert answer.total("num_output_tokens") == 3
        assert one.expected.startswith(answer.text())

    async def test_sampling_values_as_request_parameters(self, wire: Wire) -> None:
        """They work alone and beside sampling_parameters, as numbers and as strings."""
        one = case("capital")
        asked: dict[str, Any] = {"chat": chat(one), "flags": RETURN_ALL}
        for parameters in ({"max_tokens": 3}, {"max_tokens": "3", "temperature": 0.0}):
            answer = (await wire.ask(**asked, parameters=parameters, sampling={"top_k": 5})).ok()
            assert answer.total("num_output_tokens") == 3


class TestLogprobs:
    """The logprobs of the tokens."""

    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
    async def test_they_belong_to_the_tokens(self, wire: Wire, tokenizer: Tokenizer, *, stream: bool) -> None:
        """One entry per token, the chosen one first, k more by rank; their sum is the cumulative logprob."""
        sampling = {"logprobs": 3, "seed": 4, "temperature": 1.0, "top_p": 1.0, "max_tokens": ENOUGH}
        flags = [*RETURN_ALL, "return_logprobs", "return_cumulative_logprob"]
        asked: dict[str, Any] = {"chat": asking(tiny_qwen3.DIE_QUESTION), "sampling": sampling, "flags": flags}
        answer = (await wire.ask(**asked, stream=stream)).ok()
        entries = [entry for part in answer.every("logprobs") for entry in json.loads(part) or []]
        assert len(entries) == answer.total("num_output_tokens")
        total, ids = 0.0, []
        for entry in entries:
            assert 3 <= len(entry) <= 4
            (token, chosen), *others = entry.items()
            ids.append(int(token))
            total += chosen["logprob"]
            assert sorted({chosen["rank"], *(one["rank"] for _, one in others)})[:3] == [1, 2, 3]
            assert sum(math.exp(one["logprob"]) for one in entry.values()) <= 1.001
        assert tokenizer.decode(ids) == answer.text()
        assert answer.last("cumulative_logprob") == pytest.approx(np.float32(total), rel=1e-3)
        assert total < -0.1, "an answer drawn by chance is not certain"

    async def test_they_are_the_same_streamed_and_whole(self, wire: Wire) -> None:
        """Each token's chosen entry does not depend on how the answer is sent."""
        asked: dict[str, Any] = {"chat": chat(case("emoji")), "sampling": {"logprobs": 0}, "flags": ["return_logprobs"]}
        both = [(await wire.ask(**asked, stream=stream)).ok() for stream in (True, False)]
        chosen = [[next(iter(entry)) for part in one.every("logprobs") for entry in json.loads(part)] for one in both]
        assert chosen[0] == chosen[1]

    async def test_without_a_number_the_chosen_token_alone(self, wire: Wire) -> None:
        """return_logprobs is enough to get the chosen tokens'."""
        answer = (await wire.ask(chat=chat(case("sum")), flags=["return_logprobs"])).ok()
        entries = [entry for part in answer.every("logprobs") for entry in json.loads(part)]
        assert entries
        assert {len(entry) for entry in entries} == {1}
        assert all(entry["logprob"] > math.log(0.85) for one in entries for entry in one.values())


class TestVllmBackend:
    """NVIDIA's vllm_backend and its clients: what they send and expect."""

    async def test_without_streaming_the_prompt_is_echoed(self, wire: Wire) -> None:
        """Its default: the prompt before the answer, unless it is excluded."""
        one = case("capital")
        echoed = (await wire.ask(text_input=text(one), stream=False)).ok()
        excluded = (await wire.ask(text_input=text(one), stream=False, flags=["exclude_input_in_output"])).ok()
        assert echoed.text() == text(one) + one.expected
        assert excluded.text() == one.expected

    async def test_the_echo_is_byte_for_byte_what_was_sent(self, wire: Wire) -> None:
        """Also where the tokenizer would not give it back."""
        given = "  caf\u0065\u0301 \u00a0👨‍👩‍👧‍👦\r\n\tend  "
        answer = (await wire.ask(text_input=given, stream=False, sampling={"max_tokens": 1})).ok()
        assert answer.text().startswith(given)

    async def test_streaming_does_not_echo(self, wire: Wire) -> None:
        """Nor when the flag says so."""
        one = case("capital")
        assert (await wire.ask(text_input=text(one))).ok().text() == one.expected
        assert (await wire.ask(text_input=text(one), flags=["exclude_input_in_output"])).ok().text() == one.expected

    async def test_no_optional_input_is_needed(self, wire: Wire) -> None:
        """A prompt alone is a request, answered whole."""
        one = case("capital")
        answer = (await wire.ask(text_input=text(one), stream=None)).ok()
        assert [response.final for response in answer.responses] == [True]
        assert set(answer.responses[0].outputs) == {"text_output"}

    async def test_only_what_is_asked_for_is_sent(self, wire: Wire) -> None:
        """Each flag brings its own output and no other."""
        flags = {
            "return_finish_reason": "finish_reason",
            "return_cumulative_logprob": "cumulative_logprob",
            "return_logprobs": "logprobs",
            "return_num_input_tokens": "num_input_tokens",
            "return_num_output_tokens": "num_output_tokens",
            "return_num_cached_tokens": "num_cached_tokens",
        }
        for flag, output in flags.items():
            on = (await wire.ask(chat=chat(case("sum")), flags=[flag])).ok()
            off = (await wire.ask(chat=chat(case("sum")), flags=["!" + flag])).ok()
            assert all(set(response.outputs) == {"text_output", output} for response in on.responses)
            assert all(set(response.outputs) == {"text_output"} for response in off.responses)

    async def test_an_empty_final_response_may_be_asked_for(self, wire: Wire) -> None:
        """Triton's own request parameter, which perf_analyzer sends, is no sampling value."""
        parameters = {"triton_enable_empty_final_response": True}
        one = case("capital")
        assert (await wire.ask(chat=chat(one), parameters=parameters)).ok().text() == one.answer

    async def test_the_request_id_comes_back(self, wire: Wire) -> None:
        """Triton's clients match responses to requests by it."""
        from tests.support.wire import encode

        message = encode(wire.model, chat=chat(case("sum")))
        message.id = "request-7"
        ids = [response.infer_response.id async for response in wire.stub.ModelStreamInfer(iter([message]))]
        assert set(ids) == {"request-7"}

    async def test_several_requests_on_one_stream(self, wire: Wire) -> None:
        """Triton's clients may put many requests on one stream; each has its own final response."""
        from tests.support.wire import Response, encode

        names = ("capital", "emoji", "poem-zh")
        messages = [encode(wire.model, chat=chat(case(name))) for name in names]
        for name, message in zip(names, messages, strict=True):
            message.id = name
        answers = {name: Answer() for name in names}
        async for message in wire.stub.ModelStreamInfer(iter(messages)):
            answers[message.infer_response.id].responses.append(Response.read(message))
        assert {name: answer.ok().text() for name, answer in answers.items()} == {
            name: case(name).expected for name in names
        }


class TestPrefixCache:
    """Cached prompts, and callers who keep theirs apart."""

    async def test_a_prompt_seen_before_is_cached_within_its_salt(self, wire: Wire) -> None:
        """num_cached_tokens tells; another cache_salt shares nothing."""
        prefix = f"{time.monotonic_ns()} " + "counted the boats: one, two, three " * 40
        counts = []
        for salt in ("a", "a", "b"):
            answer = await wire.ask(
                text_input=prefix,
                sampling={"max_tokens": 1},
                parameters={"cache_salt": salt},
                flags=["return_num_cached_tokens"],
            )
            counts.append(answer.ok().last("num_cached_tokens"))
        assert counts[0] == 0
        assert counts[1] > 100
        assert counts[2] == 0
