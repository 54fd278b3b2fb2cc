"""Server-sent events, as OpenAI streams them: deltas of the client library become bytes.

Read by routes.py. A chunk is put together from prepared bytes around an escaped text: no object is made for a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import json
from tritonstream import Delta, TokenLogprob, TokenLogprobs, Usage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": the model reads the prompt\n\n"


class Spent:
    """The tokens of a request so far, over all its prompts and choices."""

    __slots__ = ("cached", "completion", "prompts", "reasoning")

    def __init__(self) -> None:
        self.completion = self.cached = self.reasoning = 0
        self.prompts: dict[int, int] = {}  # by prompt, for each of its choices tells the same

    def add(self, delta: Delta, prompt: int = 0) -> None:
        """Count what a delta reports."""
        self.completion += delta.num_output_tokens
        if delta.num_input_tokens:
            self.prompts[prompt] = delta.num_input_tokens
        self.cached = max(self.cached, delta.num_cached_tokens)
        if delta.finish_reason is not None:
            self.reasoning += delta.num_reasoning_tokens

    def usage(self) -> Usage:
        """Sum up."""
        return Usage(
            prompt_tokens=sum(self.prompts.values()),
            completion_tokens=self.completion,
            cached_tokens=self.cached,
            reasoning_tokens=self.reasoning,
        )


def usage_object(usage: Usage) -> dict[str, Any]:
    """Spell usage as OpenAI does."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


class Chunks:
    """The chunks of one stream. Subclasses say what a choice looks like."""

    object = ""

    def __init__(self, ident: str, created: int, model: str, *, include_usage: bool, continuous: bool) -> None:
        self.spent = Spent()
        self._include_usage, self._continuous = include_usage, continuous
        head = {"id": ident, "object": self.object, "created": created, "model": model}
        self._head = b"data: " + json.encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage or continuous else b"]}\n\n"

    def opening(self, choices: int) -> bytes:
        """What comes before the first delta."""
        return b""

    def events(self, deltas: Iterable[Delta], prompt: int = 0, offset: int = 0) -> bytes:
        """Spell deltas, those of prompt number `prompt`, whose choices count from `offset`."""
        found = []
        for delta in deltas:
            if delta.num_output_tokens or delta.num_input_tokens:
                self.spent.add(delta, prompt)
            choice = self._choice(delta, offset)
            if choice is not None:
                found.append(self._head + choice + (self._usage_tail() if self._continuous else self._tail))
        return b"".join(found)

    def ending(self) -> bytes:
        """What comes after the last delta."""
        if not self._include_usage:
            return DONE
        return self._head + self._usage_tail() + DONE

    def _usage_tail(self) -> bytes:
        return b'],"usage":' + json.encode(usage_object(self.spent.usage())) + b"}\n\n"

    def _choice(self, delta: Delta, offset: int) -> bytes | None:
        raise NotImplementedError


class ChatChunks(Chunks):
    """The chunks of a chat."""

    object = "chat.completion.chunk"

    def __init__(self, *head: Any, top: int, **options: Any) -> None:
        super().__init__(*head, **options)
        self._top = top

    def opening(self, choices: int) -> bytes:
        """The role of each choice."""
        role = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return b"".join(self._head + b'{"index":%d' % index + role + self._tail for index in range(choices))

    def _choice(self, delta: Delta, offset: int) -> bytes | None:
        gained = []
        if delta.reasoning:
            thought = json.encode(delta.reasoning)
            gained.append(b'"reasoning":' + thought + b',"reasoning_content":' + thought)
        if delta.text:
            gained.append(b'"content":' + json.encode(delta.text))
        if delta.tool_calls:
            gained.append(b'"tool_calls":' + json.encode([_call(call) for call in delta.tool_calls]))
        if not gained and delta.finish_reason is None and delta.logprobs is None:
            return None
        logprobs = b"null" if delta.logprobs is None else json.encode(chat_logprobs(delta.logprobs, self._top))
        reason = b"null" if delta.finish_reason is None else json.encode(delta.finish_reason)
        return b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b}' % (
            delta.index + offset,
            b",".join(gained),
            logprobs,
            reason,
        )


class TextChunks(Chunks):
    """The chunks of a completion."""

    object = "text_completion"

    def __init__(self, *head: Any, **options: Any) -> None:
        super().__init__(*head, **options)
        self._offsets: dict[int, int] = {}

    def echo(self, index: int, text: str) -> bytes:
        """Spell a prompt as what its choice begins with."""
        choice = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (index, json.encode(text))
        self._offsets[index] = len(text)
        return self._head + choice + self._tail

    def _choice(self, delta: Delta, offset: int) -> bytes | None:
        if not delta.text and delta.finish_reason is None and delta.logprobs is None:
            return None
        index = delta.index + offset
        logprobs = b"null"
        if delta.logprobs is not None:
            begin = self._offsets.get(index, 0)
            logprobs = json.encode(text_logprobs(delta.logprobs, begin))
            self._offsets[index] = begin + len(delta.text)
        reason = b"null" if delta.finish_reason is None else json.encode(delta.finish_reason)
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
            index,
            json.encode(delta.text),
            logprobs,
            reason,
        )


def chat_logprobs(places: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """Spell probabilities as a chat has them, each with the `top` likeliest tokens (-1: all that came)."""
    content = []
    for place in places:
        likeliest = sorted((place.chosen, *place.others), key=_rank)[: None if top < 0 else top]
        content.append({**_token(place.chosen), "top_logprobs": [_token(one) for one in likeliest]})
    return {"content": content}


def text_logprobs(places: Sequence[TokenLogprobs], begin: int) -> dict[str, Any]:
    """Spell probabilities as a completion has them; `begin` is where the first token's text begins."""
    offsets = []
    for place in places:
        offsets.append(begin)
        begin += len(place.chosen.token)
    return {
        "tokens": [place.chosen.token for place in places],
        "token_logprobs": [place.chosen.logprob for place in places],
        "top_logprobs": [{one.token: one.logprob for one in (place.chosen, *place.others)} for place in places],
        "text_offset": offsets,
    }


def _call(call: Any) -> dict[str, Any]:
    function = {} if call.name is None else {"name": call.name}
    head = {"index": call.index} if call.id is None else {"index": call.index, "id": call.id, "type": "function"}
    return {**head, "function": {**function, "arguments": call.arguments}}


def _token(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.token.encode())}


def _rank(one: TokenLogprob) -> int:
    return one.rank
