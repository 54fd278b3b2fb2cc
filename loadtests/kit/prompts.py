"""What is asked: seeded generators of prompts, and a file of one's own.

Read by users.py. A source makes questions one after the other; equal dice make equal questions. Without the model's
tokenizer a token is taken for one common English word, which it is for most models; the report says what it was.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

WORDS = """
    river stone light paper window garden silver morning cloud table story number signal forest engine bridge letter
    market color winter summer ocean mountain city village music school doctor teacher camera pencil orange yellow
    purple thunder island valley desert planet rocket circle square shadow mirror candle copper basket hammer ladder
    needle pocket ribbon saddle temple tunnel velvet wallet anchor beacon cactus dragon falcon
""".split()  # noqa: SIM905 - sixty quoted words would be harder to read

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked next, and how long its answer may be; it is just so long when `exact`."""

    prompt: str | Messages
    max_tokens: int
    exact: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be asked."""
        if not self.prompt:
            raise ValueError("prompt must not be empty")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


class Source(Protocol):
    """Where questions come from."""

    def next(self) -> Question:
        """The next question."""


def words(count: int, dice: random.Random) -> str:
    """So many common words: no two draws share a prefix that a cache could serve."""
    return " ".join(dice.choices(WORDS, k=count))


def user(content: str) -> Messages:
    """A chat of one message."""
    return [{"role": "user", "content": content}]


class Fixed:
    """Prompts of one length, answers of one length: `tokens_in` words, exactly `tokens_out` tokens."""

    def __init__(self, dice: random.Random, *, tokens_in: int, tokens_out: int) -> None:
        self._dice, self._in, self._out = dice, tokens_in, tokens_out

    def next(self) -> Question:
        """The next question."""
        return Question(prompt=words(self._in, self._dice), max_tokens=self._out, exact=True)


class Mixed:
    """Lengths as they come together: (weight, words in, tokens out) of each kind."""

    def __init__(self, dice: random.Random, kinds: Sequence[tuple[float, int, int]]) -> None:
        self._dice, self._kinds = dice, kinds

    def next(self) -> Question:
        """The next question."""
        (kind,) = self._dice.choices(self._kinds, weights=[weight for weight, _, _ in self._kinds])
        return Fixed(self._dice, tokens_in=kind[1], tokens_out=kind[2]).next()


class Faq:
    """A few questions that many ask: the n-th most frequent of `count` by a share that falls as 1 / n ** `skew`."""

    def __init__(self, dice: random.Random, *, count: int, skew: float, tokens_in: int, tokens_out: int) -> None:
        self._dice, self._out = dice, tokens_out
        common = random.Random(0)  # the questions are the same for every user, or nobody would share them
        self._questions = [user(f"Question {n}: {words(tokens_in, common)}?") for n in range(1, count + 1)]
        self._shares = list(accumulate(1.0 / n**skew for n in range(1, count + 1)))

    def next(self) -> Question:
        """The next question."""
        (prompt,) = self._dice.choices(self._questions, cum_weights=self._shares)
        return Question(prompt=prompt, max_tokens=self._out)


class Conversation:
    """A chat that goes on for `turns`, then begins anew; all of them share a system prompt of `shared` words.

    The model's answers become part of it: tell `answered` what it said.
    """

    def __init__(self, dice: random.Random, *, shared: int, tokens_in: int, tokens_out: int, turns: int) -> None:
        self._dice, self._in, self._out, self._turns = dice, tokens_in, tokens_out, turns
        self._system = {"role": "system", "content": words(shared, random.Random(0))}
        self._history: Messages = []
        self.turn = 0

    def next(self) -> Question:
        """The next question, with all that was said before it."""
        if self.turn == self._turns or (self._history and self._history[-1]["role"] == "user"):  # over, or unanswered
            self._history, self.turn = [], 0
        self.turn += 1
        self._history += user(words(self._in, self._dice))
        return Question(prompt=[self._system, *self._history], max_tokens=self._out)

    def answered(self, text: str) -> None:
        """Go on from this answer."""
        self._history.append({"role": "assistant", "content": text})


class Jsonl:
    """Questions of a file: a JSON object in each line, with `prompt` or OpenAI's `messages`, and maybe `max_tokens`.

    They are taken in the file's order from a place that the dice choose, around and around. Raises ValueError naming
    the line.
    """

    def __init__(self, dice: random.Random, path: Path, *, max_tokens: int) -> None:
        self._questions = read(path, max_tokens=max_tokens)
        self._place = dice.randrange(len(self._questions))

    def next(self) -> Question:
        """The next question."""
        self._place = (self._place + 1) % len(self._questions)
        return self._questions[self._place]


_read: dict[tuple[Path, int], list[Question]] = {}


def read(path: Path, *, max_tokens: int) -> list[Question]:
    """Read a file of questions, once for all users. Raises ValueError naming the line and what is wrong there."""
    known = (path, max_tokens)
    if known not in _read:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompts {path} cannot be read: {error}") from error
        found = [_question(line, f"{path}:{n}", max_tokens) for n, line in enumerate(lines, 1) if line.strip()]
        if not found:
            raise ValueError(f"--prompts {path} holds no question")
        _read[known] = found
    return _read[known]


def _question(line: str, where: str, max_tokens: int) -> Question:
    try:
        found: Any = json.loads(line)
        if not isinstance(found, dict) or ("prompt" in found) == ("messages" in found):
            raise ValueError('an object with either "prompt" or "messages" is wanted')
        prompt: Any = found.get("prompt", found.get("messages"))
        most = found.get("max_tokens", max_tokens)
        if not isinstance(prompt, str) and not _is_chat(prompt):
            raise ValueError('"prompt" must be a text, "messages" a list of objects with role and content')
        if not isinstance(most, int) or isinstance(most, bool):
            raise ValueError(f"max_tokens must be a whole number, got {most!r}")
        return Question(prompt=prompt, max_tokens=most)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in prompt
    )
