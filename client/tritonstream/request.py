"""One request: what is asked, of which model, and how long the answer may take.

Built by the caller, or by the clients from their arguments; spelled for the wire by wire.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, Unpack

from tritonstream.delta import ToolCall
from tritonstream.errors import InvalidRequest
from tritonstream.sampling import INT32_MAX, Sampling

MAX_DEADLINE_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat. `content` is a text, or OpenAI's list of text parts.

    An assistant's may hold `tool_calls`; the tool's answer to one has the role "tool" and that call's id as its
    `tool_call_id`. What else a chat template may read (a name, say) is given as a plain mapping instead of a Message.
    """

    role: str
    content: str | Sequence[Mapping[str, Any]] | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        """Refuse a message without a role or anything to say."""
        _check_message("Message", self.spelled())

    def spelled(self) -> dict[str, Any]:
        """Return the message as OpenAI's API has it, without what it lacks."""
        spelled: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            spelled["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            spelled["tool_call_id"] = self.tool_call_id
        return spelled


Prompt = str | Sequence[Message | Mapping[str, Any]]


class RequestFields(TypedDict, total=False):
    """The fields of a Request but its prompt, as the clients' methods take them."""

    model: str
    model_version: str
    sampling: Sampling
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    include_reasoning: bool
    reasoning_effort: str | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]
    deadline: float | None
    priority: int
    cache_salt: str | None
    lora_name: str | None
    count_tokens: bool
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. `prompt` is a text that the model goes on with, or the messages of a chat.

    `deadline` is in seconds, counted from the moment the stream is opened, over every retry; None waits for as long as
    it takes. The lower `priority`, the sooner (where the server schedules by it). Only requests of the same
    `cache_salt` share the server's prefix cache. `lora_name` names one of the model's LoRA adapters.

    For the messages of a chat, as in OpenAI's API and vLLM's: `tools` with `tool_choice` ("none", "auto", "required",
    or a mapping that names one) and `parallel_tool_calls`; `response_format`; `chat_template_kwargs` for the model's
    chat template and `reasoning_effort`, which reaches it too. `include_reasoning` false leaves the reasoning out of
    the answer. `continue_final_message` has the model go on with the last message, `add_generation_prompt` false leaves
    out what begins the assistant's. `structured_outputs` is vLLM's: one of `json`, `json_object`, `regex`, `choice` and
    `grammar`, for a chat or a text.

    `count_tokens` has every delta of a stream count its own tokens and the prompt's, and not only the last all of them.

    `request_id` is free text that comes back in the server's logs. `model_version` "" is the server's choice.

    Raises InvalidRequest naming the field, its value and its bound.
    """

    prompt: Prompt
    model: str
    model_version: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    deadline: float | None = None
    priority: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None
    count_tokens: bool = False
    request_id: str = ""

    def __post_init__(self) -> None:
        """Refuse what no server could mean."""
        if not isinstance(self.model, str) or not self.model:
            raise InvalidRequest(f"model must be the name of a model, got {self.model!r}")
        if self.deadline is not None and not _is_within(self.deadline, MAX_DEADLINE_S):
            raise InvalidRequest(
                f"deadline must be above 0 and at most {MAX_DEADLINE_S:g} seconds, got {self.deadline!r}"
            )
        if not isinstance(self.priority, int) or abs(self.priority) > INT32_MAX:
            raise InvalidRequest(f"priority must be a whole number within ±{INT32_MAX}, got {self.priority!r}")
        if self.cache_salt == "":
            raise InvalidRequest("cache_salt must not be empty: leave it out to share the cache with everybody")
        if self.lora_name == "":
            raise InvalidRequest("lora_name must not be empty: leave it out to ask the model itself")
        if not isinstance(self.prompt, str):
            self._check_chat()
        else:
            for name in self.chat_fields():
                if name != "structured_outputs":
                    raise InvalidRequest(f"{name} is for the messages of a chat; the prompt is a text")

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of a chat that were given, but its messages, under the server's names."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name in _CHAT_DEFAULTS}
        return {name: value for name, value in values.items() if value != _CHAT_DEFAULTS[name]}

    def _check_chat(self) -> None:
        if not isinstance(self.prompt, Sequence) or isinstance(self.prompt, bytes) or not self.prompt:
            raise InvalidRequest(f"prompt must be a text or a list of at least one message, got {self.prompt!r:.80}")
        for position, message in enumerate(self.prompt):
            if isinstance(message, Mapping):
                _check_message(f"prompt[{position}]", message)
            elif not isinstance(message, Message):
                raise InvalidRequest(f"prompt[{position}] must be a Message or a mapping, got {message!r:.80}")
        object.__setattr__(self, "prompt", tuple(self.prompt))


_CHAT_DEFAULTS: Mapping[str, Any] = {
    "tools": (),
    "tool_choice": None,
    "parallel_tool_calls": None,
    "response_format": None,
    "structured_outputs": None,
    "include_reasoning": True,
    "reasoning_effort": None,
    "add_generation_prompt": None,
    "continue_final_message": False,
    "chat_template_kwargs": {},
}


def as_request(asked: Request | Prompt, **given: Unpack[RequestFields]) -> Request:
    """Make a prompt a request; the fields of one that already is a request are replaced by those given."""
    if isinstance(asked, Request):
        return replace(asked, **given) if given else asked
    if "model" not in given:
        raise InvalidRequest("model is missing: name the model, as in stream(prompt, model=...)")
    return Request(prompt=asked, **given)


def _is_within(value: object, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 < value <= most


def _check_message(where: str, message: Mapping[str, Any]) -> None:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}: role must be a text, got {role!r:.80}")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise InvalidRequest(f"{where}: content must be a text or a list of text parts, got {content!r:.80}")
