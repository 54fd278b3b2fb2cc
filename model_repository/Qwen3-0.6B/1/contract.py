"""The wire contract: what crosses Triton, spelled as tensors.

Read by model.py and by `tools.configs`, which writes config.pbtxt from these tables; the client is tested against it.
No I/O; standard library and numpy only. It is a superset of the contract of NVIDIA's vllm_backend, whose clients
(perf_analyzer and genai-perf among them) work unchanged.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .conversation import CHAT, CHAT_FIELDS, check_structured_outputs, read_chat
from .errors import Cancelled, DeadlineExceeded, InvalidRequest, ServingError, Unavailable, shown

__all__ = [
    "CHAT",
    "CHAT_FIELDS",
    "Cancelled",
    "DeadlineExceeded",
    "Delta",
    "InvalidRequest",
    "Request",
    "ServingError",
    "Unavailable",
    "parse",
    "reply",
    "shown",
]

# Bounds of one request. They keep one caller from costing the others: a stop string is searched for after every token
# and a choice (`n`) is a sequence of its own, so both are paid by everybody who shares the engine.
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1_024
MAX_CHOICES = 128
MAX_LIST_ITEMS = 4_096
MAX_JSON_DEPTH = 64
MAX_DEADLINE_MS = 24 * 3_600_000
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1  # vLLM keeps numbers in 32 bits, the seed in 64: more kills its engine


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model's configuration: its name, Triton's data type, and its only dimension (-1: any)."""

    name: str
    data_type: str
    dim: int = 1
    optional: bool = True


TEXT_INPUT, STREAM, SAMPLING, IMAGE = "text_input", "stream", "sampling_parameters", "image"
EXCLUDE_INPUT = "exclude_input_in_output"
RETURN_FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_prompt_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_num_cached_tokens",
    "return_summary",
)
INPUTS = (
    TensorSpec(TEXT_INPUT, "BYTES"),
    TensorSpec(CHAT, "BYTES"),
    TensorSpec(STREAM, "BOOL"),
    TensorSpec(SAMPLING, "BYTES"),
    TensorSpec(EXCLUDE_INPUT, "BOOL"),
    *(TensorSpec(name, "BOOL") for name in RETURN_FLAGS),
    TensorSpec(IMAGE, "BYTES", dim=-1),
)
OUTPUTS = (
    TensorSpec("text_output", "BYTES", dim=-1),
    TensorSpec("reasoning_output", "BYTES", dim=-1),
    TensorSpec("tool_calls", "BYTES", dim=-1),
    TensorSpec("index", "UINT32", dim=-1),
    TensorSpec("finish_reason", "BYTES", dim=-1),
    TensorSpec("cumulative_logprob", "FP32", dim=-1),
    TensorSpec("logprobs", "BYTES", dim=-1),
    TensorSpec("prompt_logprobs", "BYTES", dim=-1),
    TensorSpec("num_input_tokens", "UINT32", dim=-1),
    TensorSpec("num_output_tokens", "UINT32", dim=-1),
    TensorSpec("num_cached_tokens", "UINT32", dim=-1),
    TensorSpec("summary", "BYTES", dim=-1),
)
UNFINISHED = "None"  # `finish_reason` of a choice that goes on, as vllm_backend spells it
SAMPLING_FIELDS = frozenset(
    {
        *("n", "seed", "temperature", "top_p", "top_k", "min_p"),
        *(
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "allowed_token_ids",
            "bad_words",
        ),
        *("max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output"),
        *("logprobs", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens"),
        *("truncate_prompt_tokens", "truncation_side", "thinking_token_budget", "stream_interval"),
    }
)  # vLLM's names; those of its fields that change what a reply means to its reader are not offered
TEXT_FIELDS = frozenset({"stop", "bad_words", "truncation_side"})
STRUCTURED_OUTPUTS = "structured_outputs"  # a field of a chat; beside a text, a sampling value, as vLLM has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, checked as far as the wire alone allows; what only the engine knows is checked by the engine.

    `prompt` is a text, or the messages of a chat; `chat` holds the other fields of a chat that were given.
    `sampling` holds the caller's values under vLLM's names, unchecked. `deadline_ms` counts from the moment the server
    reads the request.
    """

    prompt: str | list[dict[str, Any]]
    chat: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    echo: bool = False
    returns: frozenset[str] = frozenset()
    deadline_ms: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None

    @property
    def choices(self) -> int:
        """How many answers are asked for (`n`); what is not a number is refused by the engine's own check."""
        value = self.sampling.get("n", 1)
        return value if isinstance(value, int) else 1


@dataclass(slots=True)
class Delta:
    """What one choice gained since its previous delta: text, tokens, and at the end the reason it stopped.

    `reasoning` is what the model thought, `tool_calls` what it called, as OpenAI's API streams it: a list of
    {"index", "id", "type", "function": {"name", "arguments"}}, where what follows a call's beginning has only its index
    and more of its arguments. `prompt_logprobs` come once, with None for the prompt's first token.
    `logprobs` is one entry per token: {token id: {"logprob", "rank", "decoded_token"}}, the chosen token first.
    `num_output_tokens` counts the tokens of this delta, `total_output_tokens` those of the choice so far,
    `num_input_tokens` the whole prompt.
    """

    index: int
    text: str
    num_output_tokens: int
    num_input_tokens: int
    total_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, dict[str, Any]]] | None = None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] | None = None
    num_reasoning_tokens: int = 0
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None = None

    @property
    def says_something(self) -> bool:
        """Whether there is anything in it that a reader waits for."""
        return bool(self.text or self.reasoning or self.tool_calls)

    def absorb(self, later: Delta) -> None:
        """Take over what `later`, the next delta of the same choice, gained: the two cross the wire as one."""
        self.text += later.text
        self.num_output_tokens += later.num_output_tokens
        self.total_output_tokens = later.total_output_tokens
        self.finish_reason = later.finish_reason
        self.cumulative_logprob = later.cumulative_logprob
        self.reasoning += later.reasoning
        self.num_reasoning_tokens = later.num_reasoning_tokens
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        if later.tool_calls is not None:
            self.tool_calls = _joined(self.tool_calls or [], later.tool_calls)
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs


def _joined(calls: list[dict[str, Any]], later: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let `calls` go on with what `later` adds to each of them."""
    joined = list(calls)
    for more in later:
        position = next((place for place, call in enumerate(joined) if call["index"] == more["index"]), None)
        if position is None:
            joined.append(more)
            continue
        begun = joined[position]
        function = {**begun.get("function", {})}
        added = more.get("function", {})
        for name in ("name", "arguments"):
            if added.get(name) is not None:
                function[name] = function.get(name, "") + added[name]
        joined[position] = {**more, **begun, "function": function}
    return joined


def parse(tensors: Mapping[str, npt.NDArray[Any]], parameters: str | None) -> Request:
    """Read one request from its input tensors (each of shape [1], `image` of any) and its parameters as JSON.

    Raises InvalidRequest, naming the field, the value and the bound.
    """
    if IMAGE in tensors and tensors[IMAGE].size:
        raise InvalidRequest(f"{IMAGE}: this model reads text only, got {tensors[IMAGE].size} image(s)")
    given = [name for name in (TEXT_INPUT, CHAT) if name in tensors]
    if len(given) != 1:
        raise InvalidRequest(
            f"exactly one of {TEXT_INPUT} and {CHAT} must be given, got {' and '.join(given) or 'none'}"
        )
    own, sampling = _split_parameters(_json_object("parameters", parameters) if parameters else {})
    stream = _boolean(tensors, STREAM, default=False)
    for name, value in (_json_object(SAMPLING, _text(tensors, SAMPLING)) if SAMPLING in tensors else {}).items():
        if name in sampling or name in own:
            raise InvalidRequest(f"{name} is given twice: in {SAMPLING} and as a request parameter")
        if name == LORA_NAME:  # where vllm_backend's clients put it
            own[name] = _OWN_PARAMETERS[name](name, value)
        else:
            sampling[name] = value
    returns = frozenset(name for name in RETURN_FLAGS if _boolean(tensors, name, default=False))
    if CHAT in tensors:
        messages, chat = read_chat(_json_object(CHAT, _text(tensors, CHAT)))
        _check_sampling(sampling)
        echo = not _boolean(tensors, EXCLUDE_INPUT, default=True)
        if echo:
            raise InvalidRequest(f"{EXCLUDE_INPUT}=false is for {TEXT_INPUT}: the messages of a {CHAT} are not echoed")
        return Request(prompt=messages, chat=chat, sampling=sampling, stream=stream, returns=returns, **own)
    chat = {}
    if sampling.get(STRUCTURED_OUTPUTS) is not None:
        chat[STRUCTURED_OUTPUTS] = sampling.pop(STRUCTURED_OUTPUTS)
        check_structured_outputs(STRUCTURED_OUTPUTS, chat[STRUCTURED_OUTPUTS])
    _check_sampling(sampling)
    echo = not _boolean(tensors, EXCLUDE_INPUT, default=stream)  # without it vllm_backend echoes, except when streaming
    if echo and stream:
        raise InvalidRequest(f"{EXCLUDE_INPUT}=false cannot be had with {STREAM}=true")
    return Request(
        prompt=_text(tensors, TEXT_INPUT),
        chat=chat,
        sampling=sampling,
        stream=stream,
        echo=echo,
        returns=returns,
        **own,
    )


def reply(deltas: Iterable[Delta], request: Request, echo: str = "") -> list[tuple[str, npt.NDArray[Any]]]:
    """Spell deltas of different choices, in order, as the output tensors (shape [choices]) that `request` asked for.

    `echo` is put before every text: the prompt, in the one reply of a request that wants it back. Every tensor costs
    the server some 25 µs. So there is no text in a reply that holds only thoughts or calls of tools and ends no
    choice; and what is known only at the end, or never changes, can be asked for as a `summary`, which is sent when a
    choice ends and holds "null" for those that go on.
    """
    found = list(deltas)
    asked = request.returns
    tensors: list[tuple[str, npt.NDArray[Any]]] = []
    thoughts = any(delta.reasoning for delta in found)
    calls = any(delta.tool_calls for delta in found)
    if not (thoughts or calls) or any(delta.text or delta.finish_reason for delta in found):
        tensors.append(("text_output", _bytes(echo + delta.text for delta in found)))
    if thoughts:
        tensors.append(("reasoning_output", _bytes(delta.reasoning for delta in found)))
    if calls:
        tensors.append(
            ("tool_calls", _bytes(json.dumps(delta.tool_calls or [], ensure_ascii=False) for delta in found))
        )
    if request.choices > 1:
        tensors.append(("index", np.array([delta.index for delta in found], np.uint32)))
    if "return_finish_reason" in asked:
        tensors.append(("finish_reason", _bytes(delta.finish_reason or UNFINISHED for delta in found)))
    if "return_cumulative_logprob" in asked:
        values = [math.nan if delta.cumulative_logprob is None else delta.cumulative_logprob for delta in found]
        tensors.append(("cumulative_logprob", np.array(values, np.float32)))
    if "return_logprobs" in asked:
        tensors.append(("logprobs", _bytes(json.dumps(delta.logprobs) for delta in found)))
    if any(delta.prompt_logprobs is not None for delta in found) and "return_prompt_logprobs" in asked:
        tensors.append(("prompt_logprobs", _bytes(json.dumps(delta.prompt_logprobs) for delta in found)))
    for name in ("num_input_tokens", "num_output_tokens", "num_cached_tokens"):
        if "return_" + name in asked:
            tensors.append((name, np.array([getattr(delta, name) for delta in found], np.uint32)))
    if "return_summary" in asked and any(delta.finish_reason for delta in found):
        tensors.append(("summary", _bytes(json.dumps(_summary(delta)) for delta in found)))
    return tensors


def _summary(delta: Delta) -> dict[str, Any] | None:
    if delta.finish_reason is None:
        return None
    return {
        "finish_reason": delta.finish_reason,
        "num_input_tokens": delta.num_input_tokens,
        "num_output_tokens": delta.total_output_tokens,
        "num_cached_tokens": delta.num_cached_tokens,
        "num_reasoning_tokens": delta.num_reasoning_tokens,
    }


def _bytes(texts: Iterable[str]) -> npt.NDArray[Any]:
    return np.array([text.encode() for text in texts], np.object_)


def _text(tensors: Mapping[str, npt.NDArray[Any]], name: str) -> str:
    value = _single(tensors, name)
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not valid UTF-8: byte {error.start} is {value[error.start]:#04x}") from error


def _boolean(tensors: Mapping[str, npt.NDArray[Any]], name: str, *, default: bool) -> bool:
    return bool(_single(tensors, name)) if name in tensors else default


def _single(tensors: Mapping[str, npt.NDArray[Any]], name: str) -> Any:
    tensor = tensors[name]
    if tensor.size != 1:
        raise InvalidRequest(f"{name} must hold one element, got shape {list(tensor.shape)}")
    return tensor.reshape(-1)[0]


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        _check_json(value, MAX_JSON_DEPTH)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not valid JSON ({error or 'nested too deeply'}): {shown(text)}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a JSON object, got {shown(text)}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _check_json(value: Any, depth: int) -> None:
    """Refuse what JSON's grammar lets through and UTF-8 or the engine does not: lone surrogates, endless nesting."""
    if depth == 0:
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"unpaired surrogate at character {error.start}") from error
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_json(key, depth - 1)
            _check_json(item, depth - 1)
    elif isinstance(value, list):
        for item in value:
            _check_json(item, depth - 1)
    elif isinstance(value, float) and math.isinf(value):
        raise ValueError("a number is too large")


def _split_parameters(parameters: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part Triton's request parameters into our own fields of Request and sampling values."""
    own: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in _OWN_PARAMETERS:
            own[name.removeprefix("request_")] = _OWN_PARAMETERS[name](name, value)
        elif not name.startswith(("triton_", "sequence_", "binary_data")):  # those are Triton's own
            sampling[name] = value
    return own, sampling


def integer(name: str, value: Any, low: int, high: int) -> int:
    """Read a whole number that may have come as a string; raises InvalidRequest outside `low` to `high`."""
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None or not low <= number <= high:
        raise InvalidRequest(f"{name} must be a whole number from {low} to {high}, got {shown(value)}")
    return number


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} must be a text that is not empty, got {shown(value)}")
    return value


LORA_NAME = "lora_name"
# Triton request parameters that are ours, not sampling values. Triton keeps one named "priority" for its own queues.
_OWN_PARAMETERS: Mapping[str, Callable[[str, Any], Any]] = {
    "deadline_ms": lambda name, value: integer(name, value, 1, MAX_DEADLINE_MS),
    "request_priority": lambda name, value: integer(name, value, -INT32_MAX, INT32_MAX),
    "cache_salt": _name,
    LORA_NAME: _name,
}
PARAMETERS = tuple(_OWN_PARAMETERS)


def _check_sampling(sampling: dict[str, Any]) -> None:
    """Bound what costs the other requests; every other value is checked by vLLM, which knows its own fields."""
    for name, value in list(sampling.items()):
        if name not in SAMPLING_FIELDS:
            raise InvalidRequest(f"{name} is not a sampling field{_nearest(name)}")
        if value is None:
            del sampling[name]  # null means "as the server likes", as it does in OpenAI's API
        else:
            _check_numbers(name, value, INT64_MAX if name == "seed" else INT32_MAX)
    if "n" in sampling:
        sampling["n"] = integer("n", sampling["n"], 1, MAX_CHOICES)
    stop = sampling.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list):
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
        for text in stops:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                size = f" of {len(text)} characters" if isinstance(text, str) else ""
                raise InvalidRequest(
                    f"stop must hold strings of 1 to {MAX_STOP_STRING_CHARS} characters, got {shown(text)}{size}"
                )
    for name, value in sampling.items():
        if isinstance(value, list | dict) and name != "stop" and len(value) > MAX_LIST_ITEMS:
            raise InvalidRequest(f"{name} must hold at most {MAX_LIST_ITEMS} items, got {len(value)}")


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, SAMPLING_FIELDS, n=1)
    return f"; did you mean {near[0]}?" if near else f"; the fields are {', '.join(sorted(SAMPLING_FIELDS))}"


def _check_numbers(name: str, value: Any, bound: int) -> None:
    """Hold every whole number in a value, spelled as a number or as a string, within -`bound` to `bound`."""
    if isinstance(value, list):
        for item in value:
            _check_numbers(name, item, bound)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_numbers(name, key, bound)
            _check_numbers(name, item, bound)
    elif isinstance(value, str) and name not in TEXT_FIELDS:
        try:
            if not abs(float(value)) <= bound:  # so that NaN does not pass
                raise InvalidRequest(f"{name} must be within ±{bound}, got {shown(value)}")
        except ValueError:
            return  # not a number: vLLM's own check of the type says so
    elif isinstance(value, int | float) and not abs(value) <= bound:
        raise InvalidRequest(f"{name} must be within ±{bound}, got {shown(value)}")
