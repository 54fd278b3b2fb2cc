"""What streams: the deltas of an answer, its calls of tools, and the probabilities of its tokens where asked for.

Made by wire.py; gathered by completion.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token as a candidate for one place: its natural-log probability and its rank there (1: the likeliest)."""

    token_id: int
    token: str
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One place of the answer: the token that was chosen, and the likeliest others, best first."""

    chosen: TokenLogprob
    others: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What a call of a tool gained: at its beginning its id and the tool's name, then more of its arguments.

    `index` tells the calls of one choice apart. `arguments` are pieces of a JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call of a tool. `arguments` is JSON as the model wrote it: check it before use."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True, kw_only=True)  # not frozen, which makes it four times as dear, and there is one for every token
class Delta:
    """What one choice gained since its previous delta.

    `text` never ends inside a character; it may be several tokens, for the server joins what its reader has no time
    for. `reasoning` is what the model thinks before it answers. `cumulative_logprob` is that of the choice so far.
    `prompt_logprobs`, where asked for, come once, with None for the prompt's first token. `finish_reason` is None while
    the choice goes on; the delta that ends it also counts its tokens: `num_output_tokens` of the choice,
    `num_reasoning_tokens` of them in its reasoning, `num_input_tokens` of the prompt, and `num_cached_tokens` of the
    prompt that came from the prefix cache. They are 0 before.
    """

    index: int
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
