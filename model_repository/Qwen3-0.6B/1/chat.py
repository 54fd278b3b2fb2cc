"""Prompts: a text or the messages of a chat becomes what the engine reads, by vLLM's own renderer and chat template.

Read by engine.py. Tokenizing runs in the renderer's threads, so that a long prompt does not hold up the others.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from .contract import STRUCTURED_OUTPUTS, TEXT_INPUT, Request
from .conversation import CHAT
from .errors import InvalidRequest
from .parsing import Parsers, Reader

# What vLLM raises for a request it will not take; its own class was a ValueError once and is not any more.
REFUSALS = (VLLMValidationError, ValueError, TypeError)
TRUNCATION = ("truncate_prompt_tokens", "truncation_side")  # how a prompt is read, not how tokens are chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the engine reads, how its answer is read, and the form that the answer is held to.

    A form holds for what comes after the reasoning; one whose reasoning is hidden has none, as vLLM has it.
    """

    engine_input: dict[str, Any]
    reader: Reader | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool | None = None  # as the caller has it
    hides_reasoning: bool = False
    template_kwargs: dict[str, Any] | None = None  # where the engine has to know when the reasoning ends

    @property
    def reasoning_ended(self) -> bool:
        """Whether the answer begins without reasoning."""
        return self.hides_reasoning or self.reader is None or not self.reader.starts_thinking


async def render(renderer: Any, parsers: Parsers, request: Request) -> Prompt:
    """Turn the prompt of `request` into vLLM's engine input: token ids, and the text they came from.

    Raises InvalidRequest for what the template refuses and for a prompt that cannot fit the context.
    """
    extras = {"cache_salt": request.cache_salt} if request.cache_salt else None
    if isinstance(request.prompt, str):
        structured = request.chat.get(STRUCTURED_OUTPUTS)
        _check_schemas({STRUCTURED_OUTPUTS: structured or {}}, "")
        try:
            params = _truncating(renderer.default_cmpl_tok_params, request.sampling)
            (engine_input,) = await renderer.render_cmpl_async(
                [{"prompt": request.prompt}], params, prompt_extras=extras
            )
        except REFUSALS as error:
            raise InvalidRequest(f"{TEXT_INPUT}: {error}") from error
        return Prompt(
            engine_input=dict(engine_input),
            structured_outputs=StructuredOutputsParams(**structured) if structured else None,
        )
    if "truncate_prompt_tokens" not in request.sampling:
        _check_size(renderer, request.prompt)
    _check_schemas(request.chat, f"{CHAT}.")
    asked = _asked(request, request.prompt)
    chat = asked.build_chat_params(None, "auto")
    template_kwargs = chat.chat_template_kwargs
    if asked.tools is not None:
        chat = chat.with_defaults({"tools": [tool.model_dump() for tool in asked.tools]})
    try:
        tokens = _truncating(renderer.default_chat_tok_params, request.sampling)
        _, (engine_input,) = await renderer.render_chat_async([asked.messages], chat, tokens, prompt_extras=extras)
    except Exception as error:  # a template is a program: it raises what it likes
        raise InvalidRequest(f"{CHAT}: {type(error).__name__}: {error}") from error
    reader = parsers.reader(asked, template_kwargs, engine_input["prompt_token_ids"])
    return Prompt(
        engine_input=dict(engine_input),
        reader=reader,
        structured_outputs=asked.extract_structured_outputs(),
        skip_special_tokens=None if reader is None else asked.skip_special_tokens,
        hides_reasoning=parsers.reads_reasoning and not asked.include_reasoning,
        template_kwargs=template_kwargs if parsers.reads_reasoning else None,
    )


def _asked(request: Request, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
    """Make the request one to vLLM's own server, which its parsers and its chat template read."""
    fields = dict(request.chat)
    if fields.get("continue_final_message"):
        fields["add_generation_prompt"] = False
    try:
        return ChatCompletionRequest(
            messages=[dict(message) for message in messages],  # vLLM changes them
            stream=request.stream,
            skip_special_tokens=request.sampling.get("skip_special_tokens", True) not in (False, "false", 0),
            **fields,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"{CHAT}{_path(first['loc'])}: {first['msg']}") from error
    except REFUSALS as error:
        where = getattr(error, "parameter", None)
        raise InvalidRequest(f"{CHAT}.{where}: {error}" if where else f"{CHAT}: {error}") from error


def _path(place: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)


def _check_schemas(chat: dict[str, Any], where: str) -> None:
    """Refuse what is no JSON schema, naming the place: vLLM looks at a tool's only where it forces a call."""
    for position, tool in enumerate(chat.get("tools", ())):
        _check_schema(f"{where}tools[{position}].function.parameters", tool["function"].get("parameters"))
    if chat.get("response_format", {}).get("type") == "json_schema":
        _check_schema(f"{where}response_format.json_schema.schema", chat["response_format"]["json_schema"]["schema"])
    _check_schema(f"{where}{STRUCTURED_OUTPUTS}.json", chat.get(STRUCTURED_OUTPUTS, {}).get("json"))


def _check_schema(where: str, schema: Any) -> None:
    fault = None if schema is None else _fault(json.dumps(schema))
    if fault is not None:
        place, message = fault
        raise InvalidRequest(f"{where}{place}: {message}")


@functools.lru_cache(maxsize=1_024)  # an agent sends the same tools with every turn, and a check takes a millisecond
def _fault(schema: str) -> tuple[str, str] | None:
    """Say what is wrong with a schema and where; None if nothing is."""
    read = json.loads(schema)
    try:
        validator_for(read, default=Draft202012Validator).check_schema(read)
    except SchemaError as error:
        return error.json_path.removeprefix("$"), error.message
    return None


def _truncating(params: Any, sampling: dict[str, Any]) -> Any:
    """How a prompt is tokenized, with the caller's truncation. -1 leaves room for one token of an answer."""
    given = {name: sampling[name] for name in TRUNCATION if sampling.get(name) is not None}
    if not given:
        return params
    if (kept := given.get("truncate_prompt_tokens")) is not None:
        most = params.max_total_tokens - 1
        try:
            kept = int(kept)
        except (TypeError, ValueError):
            kept = None
        if kept is None or not -1 <= kept <= most or kept == 0:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be a whole number from 1 to {most}, or -1 for {most}, got "
                f"{sampling['truncate_prompt_tokens']!r}"
            )
        given["truncate_prompt_tokens"] = most if kept == -1 else kept
    return params.with_kwargs(**given)


def _check_size(renderer: Any, messages: list[dict[str, Any]]) -> None:
    """Refuse a chat that no template could fit into the context, before a second is spent on rendering it."""
    tokens = renderer.default_chat_tok_params.max_input_tokens
    bound = tokens * renderer.get_tokenizer().max_chars_per_token  # vLLM holds a text to the same
    characters = sum(len(text) for message in messages for text in _texts(message.get("content")))
    if characters > bound:
        raise InvalidRequest(
            f"{CHAT}.messages hold {characters} characters: at most {bound} can fit the context of {tokens} tokens"
        )
    if len(messages) > tokens:
        raise InvalidRequest(f"{CHAT}.messages are {len(messages)}: the context is {tokens} tokens")


def _texts(content: str | list[dict[str, Any]] | None) -> list[str]:
    if content is None:
        return []
    return [content] if isinstance(content, str) else [part["text"] for part in content]
