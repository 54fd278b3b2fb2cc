"""What a chat may hold: OpenAI's messages, tools and formats, checked as far as can be without vLLM.

Read by contract.py. No I/O; standard library only. chat.py makes a prompt of what passes here; what only vLLM knows
(whether a schema can be compiled, what the chat template takes) is checked there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from .errors import InvalidRequest, shown

CHAT = "chat"
MAX_TOOLS = 128  # OpenAI's own bound
MAX_CONSTRAINT_CHARS = 65_536  # a regex or grammar, or all the choices together: compiling it holds up the others
SERVER_SIDE_KWARGS = (
    "chat_template",
    "messages",
    "tokenizer",
    "tokenize",
    "tools",
)  # a template is a program: the model's own only
TOOL_CHOICES = ("none", "auto", "required")
FORMATS = ("text", "json_object", "json_schema")
CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar")
EFFORTS = ("none", "minimal", "low", "medium", "high")


def read_chat(chat: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Part a chat into its messages and its other fields, both checked. Raises InvalidRequest with the field's path."""
    for name in chat:
        if name not in CHAT_FIELDS:
            raise InvalidRequest(f"{CHAT}.{name} is not a field; the fields are {', '.join(CHAT_FIELDS)}")
    fields = {name: value for name, value in chat.items() if value is not None and name != "messages"}
    messages = chat.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(f"{CHAT}.messages must be a list with at least one message, got {shown(messages)}")
    for position, message in enumerate(messages):
        _check_message(f"{CHAT}.messages[{position}]", message)
    for name, value in fields.items():
        _CHECKS[name](f"{CHAT}.{name}", value)
    _check_tool_choice(fields)
    _check_ending(fields, messages)
    if "response_format" in fields and "structured_outputs" in fields:
        raise InvalidRequest(f"{CHAT}.response_format and {CHAT}.structured_outputs cannot both be given")
    return messages, fields


def check_structured_outputs(where: str, value: Any) -> None:
    """Hold what vLLM calls structured outputs to one constraint of a known kind."""
    given = _object(where, value, f"an object with one of {', '.join(CONSTRAINTS)}")
    for name in given:
        if name not in CONSTRAINTS:
            raise InvalidRequest(f"{where}.{name} is not a constraint; the constraints are {', '.join(CONSTRAINTS)}")
    if len(given) != 1:
        raise InvalidRequest(f"{where} must hold exactly one of {', '.join(CONSTRAINTS)}, got {shown(sorted(given))}")
    ((kind, constraint),) = given.items()
    where = f"{where}.{kind}"
    if kind == "json":
        _object(where, constraint, "a JSON schema, which is an object")
    elif kind == "json_object":
        if constraint is not True:
            raise InvalidRequest(f"{where} must be true, got {shown(constraint)}")
    elif kind == "choice":
        if not isinstance(constraint, list) or not constraint:
            raise InvalidRequest(f"{where} must be a list with at least one text, got {shown(constraint)}")
        for position, text in enumerate(constraint):
            _text(f"{where}[{position}]", text)
        _bounded(where, sum(map(len, constraint)))
    else:
        _bounded(where, len(_text(where, constraint)))


def _bounded(where: str, characters: int) -> None:
    if characters > MAX_CONSTRAINT_CHARS:
        raise InvalidRequest(f"{where} must hold at most {MAX_CONSTRAINT_CHARS} characters, got {characters}")


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object with role and content, got {shown(message)}")
    role, calls = message.get("role"), message.get("tool_calls")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role must be a text, got {shown(role)}")
    if calls is not None:
        if role != "assistant":
            raise InvalidRequest(f"{where}.tool_calls belong to an assistant's message, not to one of {shown(role)}")
        if not isinstance(calls, list):
            raise InvalidRequest(f"{where}.tool_calls must be a list, got {shown(calls)}")
        for position, call in enumerate(calls):
            _check_call(f"{where}.tool_calls[{position}]", call)
    if message.get("tool_call_id") is not None:
        _text(f"{where}.tool_call_id", message["tool_call_id"])
    for name in ("reasoning", "reasoning_content"):
        if message.get(name) is not None and not isinstance(message[name], str):
            raise InvalidRequest(f"{where}.{name} must be a text, got {shown(message[name])}")
    if message.get("content") is None and (calls or (role == "assistant" and message.get("reasoning"))):
        return
    _check_content(f"{where}.content", message.get("content"))


def _check_content(where: str, content: Any) -> None:
    """A message's content is a text or OpenAI's list of text parts."""
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where} must be a text or a list of text parts, got {shown(content)}")
    for position, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"{where}[{position}] must be a text part, for this model reads text only; got {shown(part)}"
            )


def _check_call(where: str, call: Any) -> None:
    """One call of a tool in an assistant's earlier message."""
    function = _function(where, call)
    _text(f"{where}.function.name", function.get("name"))
    if call.get("id") is not None:
        _text(f"{where}.id", call["id"])
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"{where}.function.arguments is not valid JSON ({error}): {shown(arguments)}"
            ) from error
    if arguments and not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.function.arguments must be an object as JSON, got {shown(arguments)}")


def _check_tools(where: str, tools: Any) -> None:
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        got = f"{len(tools)}" if isinstance(tools, list) else shown(tools)
        raise InvalidRequest(f"{where} must be a list of 1 to {MAX_TOOLS} tools, got {got}")
    for position, tool in enumerate(tools):
        function = _function(f"{where}[{position}]", tool)
        here = f"{where}[{position}].function"
        _text(f"{here}.name", function.get("name"))
        if function.get("description") is not None and not isinstance(function["description"], str):
            raise InvalidRequest(f"{here}.description must be a text, got {shown(function['description'])}")
        if function.get("parameters") is not None:
            _object(f"{here}.parameters", function["parameters"], "a JSON schema, which is an object")


def _function(where: str, value: Any) -> dict[str, Any]:
    """The function of what OpenAI's API wraps as {"type": "function", "function": {...}}."""
    outer = _object(where, value, 'an object like {"type": "function", "function": {"name": …}}')
    if outer.get("type", "function") != "function":
        raise InvalidRequest(f"{where}.type must be 'function', got {shown(outer['type'])}")
    return _object(f"{where}.function", outer.get("function"), "an object with a name")


def _check_tool_choice(fields: Mapping[str, Any]) -> None:
    where, choice, tools = f"{CHAT}.tool_choice", fields.get("tool_choice"), fields.get("tools")
    if choice is None or choice == "none":
        return
    if isinstance(choice, str) and choice not in TOOL_CHOICES:
        raise InvalidRequest(
            f"{where} must be one of {', '.join(TOOL_CHOICES)} or name a function, got {shown(choice)}"
        )
    if tools is None:
        raise InvalidRequest(f"{where} needs {CHAT}.tools to choose from, got {shown(choice)}")
    if isinstance(choice, str):
        return
    name = _text(f"{where}.function.name", _function(where, choice).get("name"))
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise InvalidRequest(f"{where}.function.name is none of {CHAT}.tools ({', '.join(names)}), got {shown(name)}")


def _check_response_format(where: str, value: Any) -> None:
    kind = _object(where, value, "an object with a type").get("type")
    if kind not in FORMATS:
        raise InvalidRequest(f"{where}.type must be one of {', '.join(FORMATS)}, got {shown(kind)}")
    if kind == "json_schema":
        named = _object(f"{where}.json_schema", value.get("json_schema"), "an object with a name and a schema")
        _text(f"{where}.json_schema.name", named.get("name"))
        _object(f"{where}.json_schema.schema", named.get("schema"), "a JSON schema, which is an object")


def _check_template_kwargs(where: str, value: Any) -> None:
    for name in _object(where, value, "an object"):
        if name in SERVER_SIDE_KWARGS:
            raise InvalidRequest(f"{where}.{name} cannot be set by a request")
        if name in _ENDINGS:
            raise InvalidRequest(f"{where}.{name} has a field of its own: {CHAT}.{name}")


def _check_ending(fields: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    """How the prompt ends: with the beginning of an answer, or within the last message."""
    if not fields.get("continue_final_message"):
        return
    if fields.get("add_generation_prompt"):
        raise InvalidRequest(f"{CHAT}.continue_final_message and {CHAT}.add_generation_prompt cannot both be true")
    if not messages[-1].get("content"):
        last = f"{CHAT}.messages[{len(messages) - 1}]"
        raise InvalidRequest(f"{CHAT}.continue_final_message needs a content to go on with: {last} has none")


def _check_effort(where: str, value: Any) -> None:
    if value not in EFFORTS:
        raise InvalidRequest(f"{where} must be one of {', '.join(EFFORTS)}, got {shown(value)}")


def _check_boolean(where: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{where} must be true or false, got {shown(value)}")


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{where} must be a text that is not empty, got {shown(value)}")
    return value


def _object(where: str, value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be {what}, got {shown(value)}")
    return value


_ENDINGS = ("add_generation_prompt", "continue_final_message")
_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "tools": _check_tools,
    "tool_choice": lambda where, value: None,  # it means something only beside the tools: _check_tool_choice
    "parallel_tool_calls": _check_boolean,
    "response_format": _check_response_format,
    "structured_outputs": check_structured_outputs,
    "include_reasoning": _check_boolean,
    "reasoning_effort": _check_effort,
    "chat_template_kwargs": _check_template_kwargs,
    **dict.fromkeys(_ENDINGS, _check_boolean),
}
CHAT_FIELDS = ("messages", *_CHECKS)
