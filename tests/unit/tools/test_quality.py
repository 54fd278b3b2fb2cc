"""How near answers are to others, and how a text is cut."""

from __future__ import annotations

from tools.quality import TEXT, Agreement, agreement, chunks


def test_equal_answers_agree() -> None:
    """And diverge nowhere."""
    assert agreement([[1, 2], [3]], [[1, 2], [3]]) == Agreement(tokens=1.0, whole=1.0, first_divergence=None)


def test_answers_are_compared_place_by_place() -> None:
    """What one has more than the other is different; the first other token is the median's of those that differ."""
    found = agreement([[1, 2, 3, 4], [5, 6], [7]], [[1, 2, 9, 4], [5, 6, 6, 6], [7]])
    assert found.tokens == (3 + 2 + 1) / (4 + 4 + 1)
    assert found.whole == 1 / 3
    assert found.first_divergence == 2


def test_a_text_is_cut_between_paragraphs() -> None:
    """None is lost, none is cut, and few are alone."""
    text = "\n\n".join(["a" * 40, "b" * 40, "c" * 90, "d"])
    pieces = chunks(text, most=90)
    assert "\n\n".join(pieces) == text
    assert [len(piece) for piece in pieces] == [82, 90, 1]
    assert max(map(len, chunks(TEXT.read_text(encoding="utf-8")))) <= 3_000
