"""The wire: a request as the tensors of Triton's gRPC protocol, and its responses as deltas.

Read by exchange.py. No I/O. The generated protobuf classes carry no types, so `Any` stands for their messages here and
in rpc.py, and goes no further. The names are those of the server's contract; a test holds the two together.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from tritonstream.delta import Delta, TokenLogprob, TokenLogprobs, ToolCallDelta
from tritonstream.errors import InvalidRequest, ServerError
from tritonstream.request import Message, Request

TEXT_INPUT, CHAT, STREAM, SAMPLING = "text_input", "chat", "stream", "sampling_parameters"
EXCLUDE_INPUT = "exclude_input_in_output"
RETURN_ALWAYS = ("return_summary",)
RETURN_LOGPROBS = ("return_logprobs", "return_cumulative_logprob")
RETURN_PROMPT_LOGPROBS = "return_prompt_logprobs"
RETURN_COUNTS = ("return_num_input_tokens", "return_num_output_tokens")
MESSAGES = "messages"
DEADLINE_MS, PRIORITY, CACHE_SALT, LORA_NAME = "deadline_ms", "request_priority", "cache_salt", "lora_name"
TEXT, REASONING, TOOL_CALLS, INDEX, SUMMARY = "text_output", "reasoning_output", "tool_calls", "index", "summary"
CUMULATIVE_LOGPROB, LOGPROBS, PROMPT_LOGPROBS = "cumulative_logprob", "logprobs", "prompt_logprobs"
NUM_INPUT, NUM_OUTPUT = "num_input_tokens", "num_output_tokens"

# Triton marks the last response of a request with the first, and with the second set also sends it when the model
# closes without data: so every stream that ends well ends with the mark, and one without it was cut.
_FINAL = "triton_final_response"
_WANT_FINAL = "triton_enable_empty_final_response"


def encode(request: Request, *, stream: bool) -> Any:
    """Spell a request as a ModelInferRequest; its deadline is not in it, see `set_deadline`.

    Raises InvalidRequest where a value cannot be JSON or UTF-8.
    """
    message = service_pb2.ModelInferRequest(
        model_name=request.model, model_version=request.model_version, id=request.request_id
    )
    sampling = request.sampling.given()
    if isinstance(request.prompt, str):
        _add_text(message, TEXT_INPUT, request.prompt)
        sampling |= request.chat_fields()  # beside a text, vLLM's structured outputs are a sampling value
    else:
        chat = {MESSAGES: [_plain(turn) for turn in request.prompt]} | request.chat_fields()
        _add_text(message, CHAT, _json(CHAT, chat))
    if sampling:
        _add_text(message, SAMPLING, _json(SAMPLING, sampling))
    returns: tuple[str, ...] = RETURN_ALWAYS + RETURN_LOGPROBS if request.sampling.wants_logprobs else RETURN_ALWAYS
    if request.sampling.prompt_logprobs is not None:
        returns += (RETURN_PROMPT_LOGPROBS,)
    if request.count_tokens and stream:
        returns += RETURN_COUNTS
    for name in (*((STREAM,) if stream else ()), EXCLUDE_INPUT, *returns):
        _add(message, name, "BOOL", b"\1")
    message.parameters[_WANT_FINAL].bool_param = True
    if request.priority:
        message.parameters[PRIORITY].int64_param = request.priority
    if request.cache_salt is not None:
        message.parameters[CACHE_SALT].string_param = request.cache_salt
    if request.lora_name is not None:
        message.parameters[LORA_NAME].string_param = request.lora_name
    return message


def set_deadline(message: Any, seconds: float) -> None:
    """Tell the server how long the answer to `message` may take, from the moment it reads it."""
    message.parameters[DEADLINE_MS].int64_param = max(1, round(seconds * 1_000))


def is_final(response: Any) -> bool:
    """Whether this ModelStreamInferResponse is the last of its request."""
    mark = response.infer_response.parameters.get(_FINAL)
    return mark is not None and bool(mark.bool_param)


def decode(response: Any) -> list[Delta]:
    """Read the deltas in a ModelStreamInferResponse, one per choice; none in a response without tensors.

    Raises ServerError where the tensors contradict their own description.
    """
    infer = response.infer_response
    outputs, raws = infer.outputs, infer.raw_output_contents
    columns: dict[str, Any] = {}
    try:
        # Straight from the bytes: no array and no object per tensor, for this runs once for every token.
        if len(outputs) == len(raws) == 1 and outputs[0].name == TEXT:  # nearly every response
            return [Delta(index=index, text=text) for index, text in enumerate(_read_texts(raws[0]))]
        for output, raw in zip(outputs, raws, strict=True):
            reader = _READERS.get(output.name)
            if reader is not None:
                columns[output.name] = reader(raw)
        if not columns:
            return []
        texts, thoughts, calls = (columns.get(name) for name in (TEXT, REASONING, TOOL_CALLS))
        size = len(next(one for one in (texts, thoughts, calls) if one is not None))
        nothing, silence = (None,) * size, ("",) * size
        return [
            Delta(
                index=index,
                text=text,
                reasoning=reasoning,
                tool_calls=_read_calls(called) if called else (),
                cumulative_logprob=cumulative,
                logprobs=None if logprobs is None else _read_logprobs(logprobs),
                prompt_logprobs=None if asked is None else _read_logprobs(asked),
                **({} if summary is None else _read_summary(summary)) | counts,
            )
            for index, text, reasoning, called, summary, cumulative, logprobs, asked, counts in zip(
                columns.get(INDEX, range(size)),
                silence if texts is None else texts,
                silence if thoughts is None else thoughts,
                nothing if calls is None else calls,
                columns.get(SUMMARY, nothing),
                columns.get(CUMULATIVE_LOGPROB, nothing),
                columns.get(LOGPROBS, nothing),
                columns.get(PROMPT_LOGPROBS, nothing),
                _counts(columns, size),
                strict=True,
            )
        ]
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, struct.error) as error:
        raise ServerError(f"the server's response cannot be read ({error!r}); is its model a text model?") from error


def _counts(columns: Mapping[str, Any], size: int) -> Sequence[dict[str, int]]:
    """What each delta counts itself, where that was asked for: it takes the place of the summary's totals."""
    if NUM_OUTPUT not in columns:
        return ({},) * size
    both = zip(columns[NUM_INPUT], columns[NUM_OUTPUT], strict=True)
    return [{NUM_INPUT: prompt, NUM_OUTPUT: gained} for prompt, gained in both]


def _add_text(message: Any, name: str, text: str) -> None:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is not valid Unicode: unpaired surrogate at character {error.start}") from error
    _add(message, name, "BYTES", len(data).to_bytes(4, "little") + data)


def _add(message: Any, name: str, data_type: str, raw: bytes) -> None:
    message.inputs.add(name=name, datatype=data_type, shape=(1,))
    message.raw_input_contents.append(raw)


def _plain(turn: Message | Mapping[str, Any]) -> dict[str, Any]:
    return turn.spelled() if isinstance(turn, Message) else dict(turn)


def _json(name: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_as_dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from error


def _as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON type")


def _read_texts(raw: bytes) -> Sequence[str]:
    """Read a BYTES tensor: each element is its length in 4 little-endian bytes, then as many bytes of UTF-8."""
    texts, start, size = [], 0, len(raw)
    while start < size:
        end = start + 4 + int.from_bytes(raw[start : start + 4], "little")
        if end > size:
            raise ValueError(f"a text of {end - start - 4} bytes where {size - start - 4} are left")
        texts.append(raw[start + 4 : end].decode())
        start = end
    return texts


def _read_uint32(raw: bytes) -> Sequence[int]:
    return _ONE_UINT32(raw) if len(raw) == 4 else struct.unpack(f"<{len(raw) // 4}I", raw)


def _read_float32(raw: bytes) -> Sequence[float]:
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def _read_summary(text: str) -> dict[str, Any]:
    """Read how a choice ended and what it cost; nothing for one that goes on. What is new there is passed over."""
    summary = json.loads(text)
    return {} if summary is None else {name: summary[name] for name in _SUMMARY if name in summary}


def _read_calls(text: str) -> tuple[ToolCallDelta, ...]:
    """Read pieces of calls in OpenAI's shape."""
    calls = []
    for call in json.loads(text):
        function = call.get("function") or {}
        calls.append(
            ToolCallDelta(call["index"], call.get("id"), function.get("name"), function.get("arguments") or "")
        )
    return tuple(calls)


def _read_logprobs(text: str) -> tuple[Any, ...] | None:
    """Read TokenLogprobs for each place; a prompt's first has none."""
    places = json.loads(text)
    return None if places is None else tuple(None if place is None else _read_place(place) for place in places)


def _read_place(place: dict[str, dict[str, Any]]) -> TokenLogprobs:
    chosen, *others = (
        TokenLogprob(int(token_id), found["decoded_token"] or "", found["logprob"], found["rank"])
        for token_id, found in place.items()
    )
    return TokenLogprobs(chosen, tuple(others))


_SUMMARY = ("finish_reason", "num_input_tokens", "num_output_tokens", "num_cached_tokens", "num_reasoning_tokens")
_ONE_UINT32 = struct.Struct("<I").unpack
_READERS: Mapping[str, Callable[[bytes], Any]] = {
    TEXT: _read_texts,
    REASONING: _read_texts,
    TOOL_CALLS: _read_texts,
    INDEX: _read_uint32,
    SUMMARY: _read_texts,
    CUMULATIVE_LOGPROB: _read_float32,
    LOGPROBS: _read_texts,
    PROMPT_LOGPROBS: _read_texts,
    NUM_INPUT: _read_uint32,
    NUM_OUTPUT: _read_uint32,
}
