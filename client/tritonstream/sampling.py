"""How tokens are chosen: vLLM's sampling parameters as one value that refuses nonsense.

Read by request.py. The bounds are vLLM's own (`vllm.SamplingParams`), except those named MAX_, which are the server's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tritonstream.errors import InvalidRequest

MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1_024
MAX_LIST_ITEMS = 4_096
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters under vLLM's names; None leaves a value to the server, which follows the model's own.

    `max_tokens` and `min_tokens` count tokens of one choice; without `max_tokens` an answer may fill the model's
    context. `logprobs` is how many alternatives to report for every token (0: the chosen one alone, -1: the whole
    vocabulary), `prompt_logprobs` the same for the prompt's. `thinking_token_budget` ends the reasoning after so many
    tokens. `truncate_prompt_tokens` keeps so many of a prompt's tokens (-1: as many as fit), at its `truncation_side`
    "left" the last ones. `stream_interval` sends a delta for every so many tokens. `n` is the number of choices. `stop`
    may be one text or several. `extra` passes on, unchecked, what this client does not know by name.

    Raises InvalidRequest naming the field, its value and its bound.
    """

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    stream_interval: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no server could mean, and freeze the lists."""
        _whole("n", self.n, 1, MAX_CHOICES)
        _whole("max_tokens", self.max_tokens, 1, INT32_MAX)
        _whole("min_tokens", self.min_tokens, 0, INT32_MAX)
        if self.max_tokens is not None and self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _whole("top_k", self.top_k, -1, INT32_MAX)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True)
        _whole("seed", self.seed, -INT64_MAX, INT64_MAX)
        _whole("logprobs", self.logprobs, -1, INT32_MAX)
        _whole("prompt_logprobs", self.prompt_logprobs, -1, INT32_MAX)
        _whole("thinking_token_budget", self.thinking_token_budget, -1, INT32_MAX)
        _whole("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, INT32_MAX)
        _whole("stream_interval", self.stream_interval, 1, INT32_MAX)
        if self.truncation_side not in (None, "left", "right"):
            raise InvalidRequest(f"truncation_side must be 'left' or 'right', got {self.truncation_side!r}")
        for name in _SWITCHES:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise InvalidRequest(f"{name} must be True or False, got {value!r}")
        self._freeze_texts()
        self._freeze_token_ids()
        named = {item.name for item in fields(self)}
        for name in self.extra:
            if name in named:
                raise InvalidRequest(f"extra[{name!r}] has a field of its own: give it as Sampling({name}=...)")

    def given(self) -> dict[str, Any]:
        """Return the values that were given, `extra` among them, as the server reads them."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "extra"}
        return {name: value for name, value in values.items() if value is not None} | dict(self.extra)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the probabilities of the tokens are asked for."""
        return self.logprobs is not None

    def _freeze_texts(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, most in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_LIST_ITEMS)):
            texts = _frozen(self, name, most)
            for text in texts:
                if not isinstance(text, str) or not text:
                    raise InvalidRequest(f"{name} must hold texts that are not empty, got {text!r}")
                if name == "stop" and len(text) > MAX_STOP_STRING_CHARS:
                    raise InvalidRequest(
                        f"stop must hold texts of at most {MAX_STOP_STRING_CHARS} characters, got one of {len(text)}"
                    )

    def _freeze_token_ids(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in _frozen(self, name, MAX_LIST_ITEMS):
                _whole(f"an item of {name}", token, 0, INT32_MAX)
        if self.logit_bias is not None:
            if len(self.logit_bias) > MAX_LIST_ITEMS:
                raise InvalidRequest(f"logit_bias must hold at most {MAX_LIST_ITEMS} items, got {len(self.logit_bias)}")
            for token, bias in self.logit_bias.items():
                _whole("a token of logit_bias", token, 0, INT32_MAX)
                _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))


_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens")


def _frozen(sampling: Sampling, name: str, most: int) -> tuple[Any, ...]:
    """Make a list of `sampling` a tuple that nobody can change behind the check, and return it."""
    value = getattr(sampling, name)
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequest(f"{name} must be a list, got {value!r}")
    if len(value) > most:
        raise InvalidRequest(f"{name} must hold at most {most} items, got {len(value)}")
    object.__setattr__(sampling, name, tuple(value))
    return tuple(value)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a whole number from {low} to {high}, got {value!r}")


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Hold a number between bounds; `above` leaves the lower one out. NaN and infinity are never within them."""
    if value is None:
        return
    sound = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not sound or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        least = f"above {low:g}" if above else f"at least {low:g}"
        most = "" if math.isinf(high) else f" and at most {high:g}"
        raise InvalidRequest(f"{name} must be a number {least}{most}, got {value!r}")
