"""Prompts: seeded, of the lengths that were asked for, and from a file of one's own."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.kit import prompts
from loadtests.kit.prompts import Conversation, Faq, Fixed, Jsonl, Mixed, Question


@given(st.integers(), st.integers(1, 500), st.integers(1, 500))
def test_fixed_lengths(seed: int, tokens_in: int, tokens_out: int) -> None:
    """As many words as were asked for, an answer of just that length, and the same again for the same seed."""
    first, second = (
        [Fixed(random.Random(seed), tokens_in=tokens_in, tokens_out=tokens_out).next() for _ in range(2)]
        for _ in range(2)
    )
    assert first == second
    assert isinstance(first[0].prompt, str)
    assert len(first[0].prompt.split()) == tokens_in
    assert (first[0].max_tokens, first[0].exact) == (tokens_out, True)


def test_no_two_prompts_share_a_beginning() -> None:
    """Or a prefix cache would serve what is to be measured: among a thousand, no two first eight words are equal."""
    source = Fixed(random.Random(7), tokens_in=64, tokens_out=1)
    begins = {tuple(str(source.next().prompt).split()[:8]) for _ in range(1_000)}
    assert len(begins) == 1_000


def test_mixed_lengths_come_in_their_shares() -> None:
    """Half of them short, half long, within a few percent of a thousand."""
    source = Mixed(random.Random(3), [(0.5, 10, 1), (0.5, 100, 2)])
    kinds = Counter(len(str(source.next().prompt).split()) for _ in range(1_000))
    assert set(kinds) == {10, 100}
    assert kinds[10] == pytest.approx(500, abs=60)


def test_the_first_question_is_the_most_frequent() -> None:
    """Zipf's shares: with a skew of 1, the first is asked twice as often as the second; users share the questions."""
    asked = [
        str(source.next().prompt)
        for source in (Faq(random.Random(seed), count=50, skew=1.0, tokens_in=8, tokens_out=4) for seed in range(10))
        for _ in range(1_000)
    ]
    counts = [count for _, count in Counter(asked).most_common(3)]
    assert counts[0] / counts[1] == pytest.approx(2.0, rel=0.15)
    assert counts[0] / counts[2] == pytest.approx(3.0, rel=0.2)


def test_a_conversation_grows_and_begins_anew() -> None:
    """Each turn has all that was said before it, behind the same system prompt; after the last turn it is over."""
    chat = Conversation(random.Random(1), shared=5, tokens_in=3, tokens_out=4, turns=2)
    first = chat.next()
    chat.answered("an answer")
    second = chat.next()
    assert isinstance(first.prompt, list) and isinstance(second.prompt, list)
    assert [message["role"] for message in second.prompt] == ["system", "user", "assistant", "user"]
    assert second.prompt[:2] == first.prompt
    assert second.prompt[2]["content"] == "an answer"
    chat.answered("another")
    third = chat.next()
    assert len(third.prompt) == 2
    assert third.prompt[0] == first.prompt[0]


def test_a_question_without_an_answer_ends_the_conversation() -> None:
    """What failed is not asked on from: two questions in a row are nothing that a chat template takes."""
    chat = Conversation(random.Random(1), shared=5, tokens_in=3, tokens_out=4, turns=8)
    chat.next()
    assert len(chat.next().prompt) == 2
    assert chat.turn == 1


def test_a_file_is_asked_around_and_around(tmp_path: Path) -> None:
    """Every line of it, texts and chats, with their own lengths where they have one."""
    lines = [{"prompt": "a"}, {"messages": prompts.user("b"), "max_tokens": 5}, {"prompt": "c"}]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    source = Jsonl(random.Random(1), file, max_tokens=9)
    asked = [source.next() for _ in range(6)]
    assert asked[:3] == asked[3:]
    assert Question(prompt=prompts.user("b"), max_tokens=5) in asked
    assert Question(prompt="a", max_tokens=9) in asked


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "2: "),
        ('{"text": "a"}', '"prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', '"prompt" or "messages"'),
        ('{"prompt": ""}', "must not be empty"),
        ('{"messages": ["a"]}', "list of objects"),
        ('{"prompt": "a", "max_tokens": 0}', "at least 1, got 0"),
        ('{"prompt": "a", "max_tokens": "5"}', "whole number, got '5'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    """By file and number, with what is wrong there."""
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=said) as raised:
        prompts.read(file, max_tokens=1)
    assert f"{file}:2" in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Is refused by its argument's name."""
    with pytest.raises(ValueError, match=r"--prompts .* cannot be read"):
        prompts.read(tmp_path / "none.jsonl", max_tokens=1)
