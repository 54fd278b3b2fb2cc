"""Replies that do not stream: completions of the client library become OpenAI's objects. Read by routes.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tritonstream import Choice, Completion, Usage

from tritonstream_gateway.events import chat_logprobs, text_logprobs, usage_object


def chat_completion(ident: str, created: int, model: str, completion: Completion, top: int) -> dict[str, Any]:
    """Spell the reply to a chat, with the `top` likeliest tokens where probabilities were asked for."""
    return {
        "id": ident,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [_chat_choice(choice, top) for choice in completion.choices],
        "usage": usage_object(completion.usage),
    }


def text_completion(
    ident: str, created: int, model: str, completions: Sequence[Completion], echoes: Sequence[str]
) -> dict[str, Any]:
    """Spell the reply to the completions of several prompts, each with what is put before its answers."""
    choices: list[dict[str, Any]] = []
    for completion, echo in zip(completions, echoes, strict=True):
        choices += [_text_choice(len(choices) + place, one, echo) for place, one in enumerate(completion.choices)]
    usages = [completion.usage for completion in completions]
    usage = Usage(
        prompt_tokens=sum(one.prompt_tokens for one in usages),
        completion_tokens=sum(one.completion_tokens for one in usages),
        cached_tokens=sum(one.cached_tokens for one in usages),
    )
    return {
        "id": ident,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage_object(usage),
    }


def _chat_choice(choice: Choice, top: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message |= {"reasoning": choice.reasoning, "reasoning_content": choice.reasoning}
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs, top),
        "finish_reason": choice.finish_reason,
    }


def _text_choice(index: int, choice: Choice, echo: str) -> dict[str, Any]:
    return {
        "index": index,
        "text": echo + choice.text,
        "logprobs": None if choice.logprobs is None else text_logprobs(choice.logprobs, len(echo)),
        "finish_reason": choice.finish_reason,
    }
