"""Responses are read from their bytes, and a broken one is the server's fault."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from tritonclient.grpc import service_pb2
from tritonstream import Delta, InvalidRequest, Request, ServerError, TokenLogprob, TokenLogprobs, ToolCallDelta, wire

HELLO = b"\5\0\0\0Hello"


def _response(**tensors: bytes) -> Any:
    response = service_pb2.ModelStreamInferResponse()
    for name, raw in tensors.items():
        response.infer_response.outputs.add(name=name, shape=[1])
        response.infer_response.raw_output_contents.append(raw)
    return response


def _bytes(*texts: str) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text.encode() for text in texts)


def test_text_alone_is_a_delta() -> None:
    """A model that sends nothing else, as NVIDIA's vllm_backend by default, can be read."""
    assert wire.decode(_response(text_output=HELLO)) == [Delta(index=0, text="Hello")]


def test_outputs_of_a_later_server_are_passed_over() -> None:
    """A tensor this client does not know does it no harm."""
    assert wire.decode(_response(text_output=HELLO, new=b"\1\2\3"))[0].text == "Hello"
    summary = _bytes('{"finish_reason": "stop", "num_output_tokens": 3, "new": 1}')
    found = wire.decode(_response(text_output=HELLO, summary=summary))
    assert found == [Delta(index=0, text="Hello", finish_reason="stop", num_output_tokens=3)]


def test_numbers_of_several_choices() -> None:
    """Each choice gets its own element."""
    found = wire.decode(
        _response(
            text_output=HELLO + b"\0\0\0\0",
            index=struct.pack("<2I", 3, 1),
            cumulative_logprob=struct.pack("<2f", -0.5, -1.5),
            summary=_bytes("null", '{"finish_reason": "length", "num_output_tokens": 70000}'),
        )
    )
    assert found == [
        Delta(index=3, text="Hello", cumulative_logprob=-0.5),
        Delta(index=1, text="", num_output_tokens=70_000, cumulative_logprob=-1.5, finish_reason="length"),
    ]


def test_thoughts_and_calls_need_no_text() -> None:
    """A response may hold only them; a call's deltas have only what they add."""
    found = wire.decode(_response(reasoning_output=_bytes("Hm", ""), index=struct.pack("<2I", 1, 0)))
    assert found == [Delta(index=1, text="", reasoning="Hm"), Delta(index=0, text="")]
    calls = _bytes('[{"index": 0, "id": "a", "type": "function", "function": {"name": "f"}}, {"index": 1}]')
    (delta,) = wire.decode(_response(tool_calls=calls))
    assert delta.tool_calls == (ToolCallDelta(0, "a", "f"), ToolCallDelta(1))


def test_the_prompts_first_token_has_no_probability() -> None:
    """It is None in its place."""
    asked = _bytes('[null, {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]')
    (delta,) = wire.decode(_response(text_output=HELLO, prompt_logprobs=asked))
    assert delta.prompt_logprobs == (None, TokenLogprobs(TokenLogprob(7, "a", -0.5, 1)))


def test_structured_outputs_of_a_text_are_a_sampling_value() -> None:
    """A text has no chat to put them into."""
    request = Request(prompt="Hi", model="m", structured_outputs={"regex": "a+"})
    message = wire.encode(request, stream=True)
    names = [item.name for item in message.inputs]
    raw = message.raw_input_contents[names.index("sampling_parameters")]
    assert raw[4:] == b'{"structured_outputs":{"regex":"a+"}}'


@pytest.mark.parametrize(
    "tensors",
    [
        {"text_output": b"\6\0\0\0Hello"},
        {"text_output": b"\5\0"},
        {"text_output": b"\1\0\0\0\xff"},
        {"text_output": HELLO, "index": struct.pack("<2I", 0, 1)},
        {"text_output": HELLO, "index": b"\0\0\0\0\0"},
        {"text_output": HELLO, "logprobs": b"\1\0\0\0{"},
        {"text_output": HELLO, "logprobs": b"\4\0\0\0[{}]"},
        {"text_output": HELLO, "summary": b"\1\0\0\0{"},
        {"text_output": HELLO, "summary": b"\1\0\0\0001"},
        {"summary": HELLO},
        {"text_output": HELLO, "tool_calls": _bytes("[{}]")},
        {"text_output": HELLO, "reasoning_output": HELLO + HELLO},
    ],
)
def test_a_response_that_contradicts_itself_is_refused(tensors: dict[str, bytes]) -> None:
    """No half-read answer is given out."""
    with pytest.raises(ServerError, match="cannot be read"):
        wire.decode(_response(**tensors))


def test_a_response_with_less_data_than_tensors_is_refused() -> None:
    """A tensor that came another way than as raw bytes."""
    response = _response(text_output=HELLO)
    response.infer_response.outputs.add(name="index")
    with pytest.raises(ServerError):
        wire.decode(response)


def test_the_deadline_is_in_milliseconds_and_never_zero() -> None:
    """A deadline shorter than a millisecond is still one."""
    message = wire.encode(Request(prompt="Hi", model="m"), stream=True)
    wire.set_deadline(message, 1.2345)
    assert message.parameters["deadline_ms"].int64_param == 1_234
    wire.set_deadline(message, 0.0001)
    assert message.parameters["deadline_ms"].int64_param == 1


def test_what_is_no_json_is_refused_by_name() -> None:
    """NaN, foreign objects and broken Unicode in a chat."""
    for content, message in ((float("nan"), "JSON"), (object(), "JSON"), ("\ud800", "Unicode")):
        request = Request(prompt=[{"role": "user", "content": "x", "name": content}], model="m")
        with pytest.raises(InvalidRequest, match=f"chat .*{message}"):
            wire.encode(request, stream=True)
