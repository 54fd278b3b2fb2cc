"""contract.py: what crosses the wire, and what does not get across it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import served

contract = served.module("contract")


def one(value: object) -> Any:
    """A tensor of shape [1]: texts and bytes as Triton hands them over, flags as BOOL."""
    if isinstance(value, bool):
        return np.array([value], np.bool_)
    return np.array([value.encode() if isinstance(value, str) else value], np.object_)


def parse(parameters: Any = None, **tensors: Any) -> Any:
    """Parse a request whose tensors all have one element; a dict is sent as its JSON."""
    arrays = {name: one(json.dumps(value) if isinstance(value, dict) else value) for name, value in tensors.items()}
    return contract.parse(arrays, json.dumps(parameters) if isinstance(parameters, dict) else parameters)


def refusal(parameters: Any = None, **tensors: Any) -> str:
    """The message of the InvalidRequest that the request must meet."""
    with pytest.raises(contract.InvalidRequest) as refused:
        parse(parameters, **tensors)
    return str(refused.value)


HELLO = {"messages": [{"role": "user", "content": "hello"}]}


class TestPrompt:
    """text_input or chat, and nothing else."""

    def test_a_text_is_taken_as_it_is(self) -> None:
        """Whatever the characters, the prompt is what was sent."""
        text = "é 👨‍👩‍👧‍👦\0\r\n नमस्ते"
        assert parse(text_input=text).prompt == text

    def test_a_text_that_arrives_decoded_is_taken_too(self) -> None:
        """Text that is no longer bytes comes from clients that skip the bytes."""
        assert contract.parse({"text_input": np.array(["ü"], np.object_)}, None).prompt == "ü"

    def test_messages_are_taken_as_they_are(self) -> None:
        """A chat keeps its messages and the template's arguments."""
        chat = {
            "messages": [
                {"role": "system", "content": "short"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
            "chat_template_kwargs": {"enable_thinking": False},
        }
        request = parse(chat=chat)
        assert request.prompt == chat["messages"]
        assert request.chat == {"chat_template_kwargs": {"enable_thinking": False}}
        assert not request.echo

    def test_without_a_prompt(self) -> None:
        """The message says what may be given."""
        assert refusal() == "exactly one of text_input and chat must be given, got none"

    def test_with_two_prompts(self) -> None:
        """The message says what was given."""
        assert refusal(text_input="a", chat=HELLO).endswith("got text_input and chat")

    def test_bytes_that_are_not_utf8(self) -> None:
        """The message names the first bad byte."""
        assert refusal(text_input=b"ab\xff") == "text_input is not valid UTF-8: byte 2 is 0xff"
        assert refusal(chat=b"\xf0\x9f").startswith("chat is not valid UTF-8: byte 0 is 0xf0")

    @pytest.mark.parametrize("shape", [(0,), (2,), (1, 2)])
    def test_more_or_less_than_one_element(self, shape: tuple[int, ...]) -> None:
        """A batch is not a prompt."""
        with pytest.raises(contract.InvalidRequest, match="text_input must hold one element, got shape"):
            contract.parse({"text_input": np.full(shape, b"a", np.object_)}, None)

    def test_an_image(self) -> None:
        """An image is refused, an empty image tensor is no image."""
        images = {"text_input": one("a"), "image": np.array([b"x", b"y"], np.object_)}
        with pytest.raises(contract.InvalidRequest, match=r"image: this model reads text only, got 2 image\(s\)"):
            contract.parse(images, None)
        assert contract.parse(images | {"image": np.array([], np.object_)}, None).prompt == "a"


class TestChat:
    """The shape of `chat`, position by position."""

    @pytest.mark.parametrize(
        ("chat", "words"),
        [
            ({}, "chat.messages must be a list with at least one message, got None"),
            ({"messages": []}, "chat.messages must be a list with at least one message, got []"),
            ({"messages": {"role": "user"}}, "chat.messages must be a list"),
            ({"messages": "hello"}, "chat.messages must be a list with at least one message, got 'hello'"),
            ({"messages": ["hello"]}, "chat.messages[0] must be an object with role and content, got 'hello'"),
            ({"messages": [None]}, "chat.messages[0] must be an object"),
            ({"messages": [{"content": "a"}]}, "chat.messages[0].role must be a text, got None"),
            ({"messages": [{"role": "", "content": "a"}]}, "chat.messages[0].role must be a text, got ''"),
            ({"messages": [{"role": 7, "content": "a"}]}, "chat.messages[0].role must be a text, got 7"),
            ({"messages": [{"role": "user"}]}, "chat.messages[0].content must be a text or a list of text parts"),
            ({"messages": [{"role": "user", "content": 5}]}, "chat.messages[0].content must be a text"),
            ({"messages": [{"role": "user", "content": []}]}, "chat.messages[0].content must be a text"),
            (
                {"messages": [HELLO["messages"][0], {"role": "user", "content": [{"type": "text"}]}]},
                "chat.messages[1].content[0] must be a text part",
            ),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
                "chat.messages[0].content[0] must be a text part, for this model reads text only",
            ),
            (HELLO | {"chat_template_kwargs": []}, "chat.chat_template_kwargs must be an object, got []"),
            (
                HELLO | {"temperature": 1},
                "chat.temperature is not a field; the fields are messages, tools, tool_choice",
            ),
        ],
    )
    def test_a_wrong_shape_is_named_by_its_place(self, chat: dict[str, Any], words: str) -> None:
        """The message leads to the very element."""
        assert words in refusal(chat=chat)

    def test_messages_cannot_be_echoed(self) -> None:
        """There is no text to put before the answer."""
        assert "exclude_input_in_output=false is for text_input" in refusal(chat=HELLO, exclude_input_in_output=False)


class TestEcho:
    """vllm_backend puts the prompt before the answer unless told not to."""

    @pytest.mark.parametrize(
        ("flags", "echo"),
        [
            ({}, True),
            ({"stream": False}, True),
            ({"stream": True}, False),
            ({"exclude_input_in_output": True}, False),
            ({"exclude_input_in_output": False}, True),
            ({"stream": True, "exclude_input_in_output": True}, False),
        ],
    )
    def test_the_default_follows_vllm_backend(self, flags: dict[str, bool], *, echo: bool) -> None:
        """Echoed when nothing streams and nobody objects."""
        assert parse(text_input="a", **flags).echo is echo

    def test_a_stream_cannot_echo(self) -> None:
        """Asking for both is refused, not guessed at."""
        message = refusal(text_input="a", stream=True, exclude_input_in_output=False)
        assert message == "exclude_input_in_output=false cannot be had with stream=true"


class TestSampling:
    """sampling_parameters and request parameters: two ways to the same values."""

    def test_values_are_kept_as_given(self) -> None:
        """What they mean is vLLM's to say."""
        sampling = {"temperature": "0.5", "max_tokens": 12, "stop": ["a", "b"], "logit_bias": {"5": "1.5"}}
        assert parse(text_input="a", sampling_parameters=sampling).sampling == sampling

    def test_request_parameters_are_sampling_values_too(self) -> None:
        """The generate endpoint sends them so; Triton's own are not ours."""
        parameters = {
            "max_tokens": 3,
            "triton_enable_empty_final_response": True,
            "sequence_id": 0,
            "binary_data_output": True,
        }
        request = parse(parameters, text_input="a", sampling_parameters={"temperature": 0})
        assert request.sampling == {"max_tokens": 3, "temperature": 0}

    def test_a_value_given_twice(self) -> None:
        """Neither place wins."""
        message = refusal({"max_tokens": 3}, text_input="a", sampling_parameters={"max_tokens": 3})
        assert message == "max_tokens is given twice: in sampling_parameters and as a request parameter"

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[1]", "sampling_parameters must be a JSON object, got '[1]'"),
            ("3", "sampling_parameters must be a JSON object, got '3'"),
            ("null", "sampling_parameters must be a JSON object, got 'null'"),
            ("", "sampling_parameters is not valid JSON"),
            ("{", "sampling_parameters is not valid JSON"),
            ("{'a': 1}", "sampling_parameters is not valid JSON"),
            ('{"temperature": NaN}', "NaN is not a JSON number"),
            ('{"temperature": -Infinity}', "-Infinity is not a JSON number"),
            ('{"temperature": 1e999}', "a number is too large"),
            ('{"stop": "\\ud800"}', "unpaired surrogate at character 0"),
            ('{"\\udc00": 1}', "unpaired surrogate at character 0"),
            ('{"a": ' * 65 + "1" + "}" * 65, "nested deeper than 64 levels"),
            ("[" * 100_000, "sampling_parameters is not valid JSON"),
            ('{"max_tokens": ' + "9" * 5_000 + "}", "sampling_parameters is not valid JSON"),
        ],
    )
    def test_what_is_not_a_json_object(self, text: str, words: str) -> None:
        """Each way of not being one has its sentence, and none of them is long."""
        message = refusal(text_input="a", sampling_parameters=text)
        assert words in message
        assert len(message) < 400

    def test_nesting_as_deep_as_allowed(self) -> None:
        """The bound itself is inside."""
        text = '{"bad_words": ' + "[" * 62 + '"a"' + "]" * 62 + "}"
        assert parse(text_input="a", sampling_parameters=text).sampling == json.loads(text)

    def test_null_is_the_default(self) -> None:
        """As in OpenAI's API, null asks for what the server likes."""
        assert parse(text_input="a", sampling_parameters={"seed": None, "stop": None}).sampling == {}

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("temprature", "temprature is not a sampling field; did you mean temperature?"),
            ("max_new_tokens", "max_new_tokens is not a sampling field"),
            ("zzz", "zzz is not a sampling field; the fields are "),
            # vLLM's own fields, which would change what a reply means to its reader
            ("output_kind", "output_kind is not a sampling field"),
            ("detokenize", "detokenize is not a sampling field"),
        ],
    )
    def test_an_unknown_field(self, name: str, words: str) -> None:
        """A typo is not dropped in silence, wherever it comes from."""
        assert words in refusal(text_input="a", sampling_parameters={name: 1})
        assert words in refusal({name: 1}, text_input="a")

    @pytest.mark.parametrize(
        ("sampling", "words"),
        [
            ({"top_k": 2**31}, "top_k must be within ±2147483647, got 2147483648"),
            ({"max_tokens": 10**30}, "max_tokens must be within ±2147483647, got 1"),
            ({"max_tokens": "99999999999"}, "max_tokens must be within ±2147483647, got '99999999999'"),
            ({"temperature": 1e300}, "temperature must be within ±2147483647, got 1e+300"),
            ({"seed": 2**63}, "seed must be within ±9223372036854775807, got 9223372036854775808"),
            ({"stop_token_ids": [1, 2**40]}, "stop_token_ids must be within ±2147483647, got 1099511627776"),
            ({"logit_bias": {str(2**40): 1}}, "logit_bias must be within ±2147483647, got '1099511627776'"),
            ({"logit_bias": {"1": "1e99"}}, "logit_bias must be within ±2147483647, got '1e99'"),
        ],
    )
    def test_numbers_that_no_engine_can_hold(self, sampling: dict[str, Any], words: str) -> None:
        """What would overflow inside the engine, and take everybody down with it, does not reach it."""
        assert words in refusal(text_input="a", sampling_parameters=sampling)

    @pytest.mark.parametrize("value", ["nan", "inf", "-Infinity", "NaN"])
    def test_numbers_that_are_none(self, value: str) -> None:
        """A number may come as a string; JSON's grammar does not keep these out there."""
        assert refusal(text_input="a", sampling_parameters={"temperature": value}).startswith("temperature")

    @pytest.mark.parametrize("value", [0, -1, 129, 1.5, "two", "", True, [1], {}])
    def test_n_out_of_range(self, value: object) -> None:
        """The message names field, bound and value."""
        message = refusal(text_input="a", sampling_parameters={"n": value})
        assert message.startswith("n must be a whole number from 1 to 128, got ")

    @pytest.mark.parametrize(("value", "choices"), [(1, 1), ("3", 3), (128, 128), (None, 1)])
    def test_n_in_range(self, value: object, choices: int) -> None:
        """A number may come as a string, as genai-perf sends it; none is one."""
        assert parse(text_input="a", sampling_parameters={"n": value}).choices == choices

    @pytest.mark.parametrize(
        ("stop", "words"),
        [
            (["x"] * 65, "stop must hold at most 64 strings, got 65"),
            (["x"] * 10_000, "stop must hold at most 64 strings, got 10000"),
            ([""], "stop must hold strings of 1 to 1024 characters, got '' of 0 characters"),
            ("", "stop must hold strings of 1 to 1024 characters"),
            ("x" * 1_025, "of 1025 characters"),
            (["a", 5], "stop must hold strings of 1 to 1024 characters, got 5"),
        ],
    )
    def test_stop_strings_out_of_bounds(self, stop: object, words: str) -> None:
        """Every stop string is searched for after every token, so there are not many and they are not long."""
        assert words in refusal(text_input="a", sampling_parameters={"stop": stop})

    def test_stop_strings_at_the_bounds(self) -> None:
        """The bounds themselves are inside."""
        stop = ["x" * 1_024] * 64
        assert parse(text_input="a", sampling_parameters={"stop": stop}).sampling["stop"] == stop

    @pytest.mark.parametrize("name", ["logit_bias", "bad_words", "stop_token_ids", "allowed_token_ids"])
    def test_long_lists(self, name: str) -> None:
        """A list that costs every step is bounded."""
        value = {str(token): 1 for token in range(4_097)} if name == "logit_bias" else list(range(4_097))
        message = refusal(text_input="a", sampling_parameters={name: value})
        assert message == f"{name} must hold at most 4096 items, got 4097"


class TestOwnParameters:
    """deadline_ms, priority and cache_salt ride as Triton request parameters."""

    def test_they_are_read(self) -> None:
        """Numbers may come as strings."""
        request = parse({"deadline_ms": "250", "request_priority": -3, "cache_salt": "tenant"}, text_input="a")
        assert (request.deadline_ms, request.priority, request.cache_salt) == (250, -3, "tenant")
        assert request.sampling == {}

    def test_none_is_needed(self) -> None:
        """Without them nothing is limited, preferred or set apart."""
        request = parse(text_input="a")
        assert (request.deadline_ms, request.priority, request.cache_salt) == (None, 0, None)

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("deadline_ms", 0, "deadline_ms must be a whole number from 1 to 86400000, got 0"),
            ("deadline_ms", 86_400_001, "deadline_ms must be a whole number from 1 to 86400000, got 86400001"),
            ("deadline_ms", "soon", "deadline_ms must be a whole number from 1 to 86400000, got 'soon'"),
            ("deadline_ms", True, "deadline_ms must be a whole number"),
            ("deadline_ms", 1.5, "deadline_ms must be a whole number"),
            (
                "request_priority",
                2**31,
                "request_priority must be a whole number from -2147483647 to 2147483647, got 2",
            ),
            ("cache_salt", "", "cache_salt must be a text that is not empty, got ''"),
            ("cache_salt", 5, "cache_salt must be a text that is not empty, got 5"),
        ],
    )
    def test_out_of_bounds(self, name: str, value: object, words: str) -> None:
        """The message names field, bound and value."""
        assert words in refusal({name: value}, text_input="a")

    @pytest.mark.parametrize("text", ["[]", "{", "3"])
    def test_parameters_that_are_not_an_object(self, text: str) -> None:
        """Triton writes an object; anything else is refused like any other JSON."""
        assert refusal(text, text_input="a").startswith("parameters ")


class TestFlags:
    """BOOL tensors."""

    def test_they_are_off_by_default(self) -> None:
        """A plain request gets text alone."""
        request = parse(text_input="a")
        assert not request.stream
        assert request.returns == frozenset()

    @pytest.mark.parametrize("name", contract.RETURN_FLAGS)
    def test_each_return_flag_is_read(self, name: str) -> None:
        """True asks for the output, false does not."""
        assert parse(text_input="a", **{name: True}).returns == {name}
        assert parse(text_input="a", **{name: False}).returns == frozenset()

    def test_a_flag_of_two_elements(self) -> None:
        """Every input has one element."""
        with pytest.raises(contract.InvalidRequest, match=r"stream must hold one element, got shape \[2\]"):
            contract.parse({"text_input": one("a"), "stream": np.array([True, False])}, None)


class TestReply:
    """Deltas spelled as tensors."""

    def delta(self, **values: Any) -> Any:
        """A delta of one token."""
        return contract.Delta(**{"index": 0, "text": "a", "num_output_tokens": 1, "num_input_tokens": 5} | values)

    def tensors(self, deltas: list[Any], sampling: Any = None, echo: Any = "", **flags: Any) -> Any:
        """The reply's tensors by name, as lists."""
        request = parse(text_input="p", sampling_parameters=sampling or {}, **flags)
        return {name: array.tolist() for name, array in contract.reply(deltas, request, echo)}

    def test_text_alone_when_nothing_else_is_asked_for(self) -> None:
        """What was not asked for is not sent."""
        assert self.tensors([self.delta(text="é👨‍👩‍👧‍👦\0")]) == {"text_output": ["é👨‍👩‍👧‍👦\0".encode()]}

    def test_every_output_that_was_asked_for(self) -> None:
        """Each flag has its tensor, aligned with the text."""
        logprobs = [{7: {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]
        last = {"finish_reason": "stop", "cumulative_logprob": -0.5, "logprobs": logprobs, "num_cached_tokens": 4}
        last |= {"reasoning": "é", "tool_calls": [{"index": 0}], "prompt_logprobs": [None], "num_reasoning_tokens": 3}
        found = self.tensors([self.delta(**last, total_output_tokens=9)], **dict.fromkeys(contract.RETURN_FLAGS, True))
        summary = {"finish_reason": "stop", "num_input_tokens": 5, "num_output_tokens": 9, "num_cached_tokens": 4}
        summary["num_reasoning_tokens"] = 3
        assert [json.loads(text) for text in found.pop("summary")] == [summary]
        assert found == {
            "text_output": [b"a"],
            "reasoning_output": ["é".encode()],
            "tool_calls": [b'[{"index": 0}]'],
            "prompt_logprobs": [b"[null]"],
            "finish_reason": [b"stop"],
            "cumulative_logprob": [-0.5],
            "logprobs": [b'[{"7": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]'],
            "num_input_tokens": [5],
            "num_output_tokens": [1],
            "num_cached_tokens": [4],
        }

    def test_the_summary_waits_for_the_end(self) -> None:
        """It is sent when a choice ends, and holds null for those that go on."""
        going, ended = self.delta(), self.delta(index=1, finish_reason="length", total_output_tokens=3)
        assert "summary" not in self.tensors([going], return_summary=True)
        (first, second) = self.tensors([going, ended], {"n": 2}, return_summary=True)["summary"]
        assert json.loads(first) is None
        assert json.loads(second)["num_output_tokens"] == 3

    def test_an_unfinished_choice_says_none(self) -> None:
        """As vllm_backend spells it."""
        assert self.tensors([self.delta()], return_finish_reason=True)["finish_reason"] == [b"None"]

    def test_no_text_while_a_choice_only_thinks(self) -> None:
        """A tensor that would be empty is not sent, unless it is all there is, or the choice ends."""
        assert self.tensors([self.delta(text="", reasoning="hm")]) == {"reasoning_output": [b"hm"]}
        assert self.tensors([self.delta(text="")]) == {"text_output": [b""]}
        ended = self.tensors([self.delta(text="", reasoning="hm", finish_reason="length")])
        assert ended == {"text_output": [b""], "reasoning_output": [b"hm"]}
        two = [self.delta(text="", reasoning="hm"), self.delta(index=1, text="a")]
        assert self.tensors(two, {"n": 2}) == {
            "text_output": [b"", b"a"],
            "reasoning_output": [b"hm", b""],
            "index": [0, 1],
        }

    def test_a_choice_without_logprob_says_nan(self) -> None:
        """A number that is not there is not zero."""
        (value,) = self.tensors([self.delta()], return_cumulative_logprob=True)["cumulative_logprob"]
        assert math.isnan(value)

    def test_several_choices_carry_their_index(self) -> None:
        """With n>1 the reader must know whose text it is; the echo comes before each."""
        deltas = [self.delta(index=2, text="c"), self.delta(index=0, text="a")]
        found = self.tensors(deltas, {"n": 3}, echo="p", return_num_output_tokens=True)
        assert found == {"text_output": [b"pc", b"pa"], "index": [2, 0], "num_output_tokens": [1, 1]}

    def test_the_data_types_are_those_of_the_table(self) -> None:
        """What reply() makes fits what OUTPUTS promises to Triton."""
        types = {"BYTES": np.object_, "UINT32": np.uint32, "FP32": np.float32}
        promised = {spec.name: types[spec.data_type] for spec in contract.OUTPUTS}
        request = parse(text_input="p", sampling_parameters={"n": 2}, **dict.fromkeys(contract.RETURN_FLAGS, True))
        last = self.delta(
            index=1, finish_reason="stop", reasoning="r", tool_calls=[{"index": 0}], prompt_logprobs=[None]
        )
        made = contract.reply([self.delta(), last], request)
        assert {name: array.dtype.type for name, array in made} == promised

    def test_absorbing_a_later_delta(self) -> None:
        """Text, tokens and logprobs add up; the state is the later one's."""
        first = self.delta(logprobs=[{1: {}}], cumulative_logprob=-1.0)
        first.absorb(
            self.delta(
                text="b", num_output_tokens=2, finish_reason="length", cumulative_logprob=-2.0, logprobs=[{2: {}}]
            )
        )
        assert (first.text, first.num_output_tokens, first.num_input_tokens) == ("ab", 3, 5)
        assert (first.finish_reason, first.cumulative_logprob, first.logprobs) == ("length", -2.0, [{1: {}}, {2: {}}])

    def test_absorbing_thoughts_and_calls(self) -> None:
        """Thoughts are joined; a call keeps its id and name, and gains arguments; another index is another call."""
        first = self.delta(text="", reasoning="Let ")
        first.absorb(self.delta(text="", reasoning="me see."))
        first.absorb(
            self.delta(text="", tool_calls=[{"index": 0, "id": "a", "type": "function", "function": {"name": "f"}}])
        )
        first.absorb(self.delta(text="", tool_calls=[{"index": 0, "function": {"arguments": '{"x"'}}]))
        later = [{"index": 0, "function": {"arguments": ": 1}"}}, {"index": 1, "id": "b", "function": {"name": "g"}}]
        first.absorb(self.delta(text="ok", tool_calls=later))
        assert (first.reasoning, first.text) == ("Let me see.", "ok")
        assert first.tool_calls == [
            {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"index": 1, "id": "b", "function": {"name": "g"}},
        ]

    def test_absorbing_into_a_delta_without_logprobs(self) -> None:
        """None and a list make the list."""
        first = self.delta()
        first.absorb(self.delta(logprobs=[{2: {}}]))
        assert first.logprobs == [{2: {}}]


class TestErrors:
    """One error tree that both edges can say."""

    def test_each_has_tritons_code_and_grpcs_status(self) -> None:
        """Triton has no code of its own for a deadline."""
        errors = (contract.ServingError, *_subclasses(contract.ServingError))
        assert {error: (error.triton_code, error.status) for error in errors} == {
            contract.ServingError: ("INTERNAL", "INTERNAL"),
            contract.InvalidRequest: ("INVALID_ARG", "INVALID_ARGUMENT"),
            contract.Unavailable: ("UNAVAILABLE", "UNAVAILABLE"),
            contract.Cancelled: ("CANCELLED", "CANCELLED"),
            contract.DeadlineExceeded: ("CANCELLED", "DEADLINE_EXCEEDED"),
        }

    def test_the_status_goes_before_the_message(self) -> None:
        """Triton drops the code of an error within a stream: its message has to carry it."""
        assert contract.InvalidRequest("n is wrong").spelled() == "INVALID_ARGUMENT: n is wrong"
        assert contract.DeadlineExceeded(250).spelled().startswith("DEADLINE_EXCEEDED: deadline_ms=250 passed")

    @given(st.one_of(st.text(), st.integers(), st.lists(st.integers()), st.dictionaries(st.text(), st.text())))
    def test_a_shown_value_is_short(self, value: object) -> None:
        """A value of any size fits an error message."""
        assert len(contract.shown(value)) <= served.module("errors").MAX_SHOWN_CHARS + 1


def _subclasses(kind: Any) -> list[Any]:
    return [found for child in kind.__subclasses__() for found in (child, *_subclasses(child))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=[])), inner, max_size=4)
    ),
    max_leaves=20,
)
FIELDS = st.sampled_from(
    ["n", "stop", "temperature", "max_tokens", "messages", "chat_template_kwargs", "role", "content", "x"]
)
OBJECTS = st.dictionaries(FIELDS, JSON | st.lists(st.dictionaries(FIELDS, JSON), max_size=3), max_size=4)
BYTES = (
    st.binary()
    | OBJECTS.map(lambda value: json.dumps(value).encode())
    | JSON.map(lambda value: json.dumps(value).encode())
)


class TestWhateverComes:
    """No input at all gets anything but a Request or an InvalidRequest out of parse()."""

    @given(
        tensors=st.dictionaries(
            st.sampled_from([spec.name for spec in contract.INPUTS if spec.data_type == "BYTES"]),
            st.lists(BYTES, max_size=2),
        ),
        flags=st.dictionaries(
            st.sampled_from([spec.name for spec in contract.INPUTS if spec.data_type == "BOOL"]),
            st.lists(st.booleans(), max_size=2),
        ),
        parameters=st.none()
        | st.text()
        | st.dictionaries(st.sampled_from([*contract.PARAMETERS, "n", "stop", "x"]), JSON).map(json.dumps),
    )
    def test_parse_raises_invalid_request_alone(
        self, tensors: dict[str, list[bytes]], flags: dict[str, list[bool]], parameters: str | None
    ) -> None:
        """Any bytes, any shapes, any JSON."""
        arrays: dict[str, Any] = {name: _object_array(values) for name, values in tensors.items()}
        arrays |= {name: np.array(values, np.bool_) for name, values in flags.items()}
        try:
            request = contract.parse(arrays, parameters)
        except contract.InvalidRequest as error:
            str(error).encode()  # it has to cross the wire itself
        else:
            assert request.prompt is not None

    @given(JSON)
    def test_any_json_as_chat(self, value: object) -> None:
        """JSON of every shape, lone surrogates and infinities among it."""
        try:
            request = parse(chat=json.dumps(value))
        except contract.InvalidRequest as error:
            str(error).encode()
        else:
            assert isinstance(request.prompt, list)

    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def test_any_text_goes_through_whole(self, text: str) -> None:
        """What is valid is not touched."""
        assert parse(text_input=text).prompt == text


def _object_array(values: list[bytes]) -> Any:
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array
