"""What `generate` returns: an answer that is complete.

Gathered from deltas, so that it is equal to what the same request streams.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from tritonstream.delta import Delta, TokenLogprobs, ToolCall, ToolCallDelta
from tritonstream.request import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the answers, with what the model thought before it and the tools that it calls.

    `finish_reason` is "stop" (the model's own end, or a stop text), "length" (cut) or "tool_calls".
    """

    index: int
    text: str
    finish_reason: str | None
    completion_tokens: int
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def message(self) -> Message:
        """The answer as a message, for the next turn of the conversation."""
        return Message(role="assistant", content=self.text, tool_calls=self.tool_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens spent: those of the prompt and of all choices.

    Among them those of the prompt that the prefix cache held, and those of the choices' reasoning.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """The prompt's and the choices' tokens together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A complete answer: its choices in the order of their index, and what they cost."""

    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text if self.choices else ""

    @classmethod
    def gather(cls, deltas: Iterable[Delta]) -> Self:
        """Join the deltas of an answer, each choice's in their order."""
        drafts: dict[int, _Draft] = {}
        prompt = cached = 0
        asked: tuple[TokenLogprobs | None, ...] | None = None
        for delta in deltas:
            asked = asked or delta.prompt_logprobs
            drafts.setdefault(delta.index, _Draft()).add(delta)
            prompt, cached = max(prompt, delta.num_input_tokens), max(cached, delta.num_cached_tokens)
        choices = tuple(drafts[index].choice(index) for index in sorted(drafts))
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=sum(choice.completion_tokens for choice in choices),
            cached_tokens=cached,
            reasoning_tokens=sum(draft.reasoning_tokens for draft in drafts.values()),
        )
        return cls(choices=choices, usage=usage, prompt_logprobs=asked)


class _Draft:
    """A choice that is still growing."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, list[ToolCallDelta]] = {}
        self._logprobs: list[TokenLogprobs] | None = None
        self._tokens = 0
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._thoughts.append(delta.reasoning)
        for call in delta.tool_calls:
            self._calls.setdefault(call.index, []).append(call)
        self._tokens += delta.num_output_tokens
        if delta.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs.extend(delta.logprobs)
        self._last = delta

    @property
    def reasoning_tokens(self) -> int:
        return self._last.num_reasoning_tokens if self._last else 0

    def choice(self, index: int) -> Choice:
        return Choice(
            index=index,
            text="".join(self._texts),
            reasoning="".join(self._thoughts),
            tool_calls=tuple(_call(self._calls[place]) for place in sorted(self._calls)),
            finish_reason=self._last.finish_reason if self._last else None,
            completion_tokens=self._tokens,
            cumulative_logprob=self._last.cumulative_logprob if self._last else None,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )


def _call(pieces: list[ToolCallDelta]) -> ToolCall:
    return ToolCall(
        id=next((piece.id for piece in pieces if piece.id), ""),
        name="".join(piece.name or "" for piece in pieces),
        arguments="".join(piece.arguments for piece in pieces),
    )
