"""From OpenAI's words to the client library's: a body becomes one `tritonstream.Request`, or one for each prompt.

Read by routes.py. Values pass through as they are; who refuses them names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic
from tritonstream import InvalidRequest, Request, Sampling

from tritonstream_gateway.errors import Failure, invalid
from tritonstream_gateway.schema import Asked, ChatRequest, CompletionRequest

COMPLETION_TOKENS = 16  # of /v1/completions where none are asked for: OpenAI's and vLLM's default
_SAMPLING = (
    *("n", "min_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids", "bad_words"),
    *("allowed_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
    *("spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side", "stream_interval"),
)

_PROMPT = re.compile(r"^prompt(\[\d+\]): ")
AskedT = TypeVar("AskedT", bound=Asked)


def read(kind: type[AskedT], body: bytes) -> AskedT:
    """Read a body. Raises Failure (400), which names the first field at fault."""
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _refusal(error) from error


def chat(asked: ChatRequest, model: str, deadline: float) -> Request:
    """Spell a chat for `model`, to be answered within `deadline` seconds."""
    template = dict(asked.chat_template_kwargs or {})
    if asked.enable_thinking is not None:
        template.setdefault("enable_thinking", asked.enable_thinking)
    if asked.documents is not None:
        template.setdefault("documents", asked.documents)
    shown = asked.include_reasoning if asked.return_reasoning is None else asked.return_reasoning
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    if asked.top_logprobs and not asked.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    sampling = _sampling(asked, max_tokens=most, logprobs=logprobs, thinking_token_budget=asked.thinking_token_budget)
    try:
        return _chat(asked, model, deadline, template, sampling, shown is not False)
    except InvalidRequest as error:  # the client library calls the messages a prompt
        raise InvalidRequest(_PROMPT.sub(r"messages\1.", str(error), count=1)) from error


def _chat(
    asked: ChatRequest, model: str, deadline: float, template: dict[str, Any], sampling: Sampling, reasoning: bool
) -> Request:
    return Request(
        prompt=asked.messages,
        sampling=sampling,
        tools=asked.tools or (),
        tool_choice=asked.tool_choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        response_format=asked.response_format,
        include_reasoning=reasoning,
        reasoning_effort=asked.reasoning_effort,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=bool(asked.continue_final_message),
        chat_template_kwargs=template,
        **_common(asked, model, deadline),
    )


def completions(asked: CompletionRequest, model: str, deadline: float) -> list[Request]:
    """Spell the completion of each prompt."""
    if asked.suffix:
        raise invalid("suffix is not supported: this model only goes on with a text", "suffix")
    if asked.response_format is not None and asked.response_format.get("type") != "text":
        raise invalid("response_format is for chats: use structured_outputs", "response_format")
    most = COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
    sampling = _sampling(asked, max_tokens=most, logprobs=asked.logprobs)
    prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    return [Request(prompt=prompt, sampling=sampling, **_common(asked, model, deadline)) for prompt in prompts]


def _common(asked: Asked, model: str, deadline: float) -> Any:
    options = asked.stream_options
    return {
        "model": model,
        "deadline": deadline,
        "structured_outputs": asked.structured_outputs,
        "priority": asked.priority or 0,
        "cache_salt": asked.cache_salt,
        "count_tokens": bool(asked.stream and options and options.continuous_usage_stats),
    }


def _sampling(asked: Asked, **own: Any) -> Sampling:
    return Sampling(**{name: getattr(asked, name) for name in _SAMPLING}, logit_bias=_bias(asked.logit_bias), **own)


def _bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    try:
        return None if given is None else {int(token): bias for token, bias in given.items()}
    except ValueError as error:
        raise invalid(f"logit_bias must have token ids as its names: {error}", "logit_bias") from error


def _refusal(error: pydantic.ValidationError) -> Failure:
    first = error.errors(include_url=False)[0]
    where = ""
    for step in first["loc"]:
        where += f"[{step}]" if isinstance(step, int) else f".{step}"
    if first["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    where = where.strip(".")
    value = f", got {first['input']!r:.80}" if first["type"] != "missing" else ""
    return invalid(f"{where or 'the body'}: {first['msg'][:1].lower()}{first['msg'][1:]}{value}", where or None)
