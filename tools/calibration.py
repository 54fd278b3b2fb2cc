"""What a model reads while it is quantized: a file's texts, a few of our own in many languages, or its own answers.

Read by `tools.quantize` and, in the environment that quantizes, by `tools.quantizer`. Standard library only.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

TEXTS = Path(__file__).parent / "texts" / "calibration.txt"
BUILT_IN, GENERATED = "built-in", "generated"
# Texts, where nothing is said: 128 that the model wrote brought GPTQ's perplexity of SmolLM2 down most. AWQ rounds to 8
# bits, which loses little, and reads each text twenty times for each layer: with 32 it takes SmolLM2 six minutes.
SAMPLES = {"awq": 32, "gptq": 128}

# What the model is asked when it writes its own calibration: every form with every topic, in turn.
_FORMS = (
    "Explain {} to a curious child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Write a polite email that asks about {}.",
    "What are common mistakes with {}?",
    "Write a small Python program about {}.",
    "请用中文介绍一下{}。",
    "Escribe un párrafo sobre {}.",
)
_TOPICS = (
    *("bicycles", "rivers", "fractions", "bread", "the moon", "chess", "electric cars", "winter", "honey bees"),
    *("maps", "old trains", "a lost key", "sorting numbers", "the human heart", "volcanoes", "a birthday party"),
)


class BadCalibration(Exception):
    """Calibration texts that cannot be used; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Which texts, and how many at most. `source` is "built-in", "generated" or a file."""

    source: str
    samples: int

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.samples < 1:
            raise BadCalibration(f"--samples must be at least 1, got {self.samples}")

    def texts(self) -> list[str]:
        """Read the texts; empty where the model is to write them. Raises BadCalibration."""
        if self.source == GENERATED:
            return []
        return read(TEXTS if self.source == BUILT_IN else Path(self.source))[: self.samples]


def read(file: Path) -> list[str]:
    """Read a file's texts: of a .jsonl each line's "text", of another its paragraphs. Raises BadCalibration."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadCalibration(f"--calibration {file} cannot be read ({error}): give a text or .jsonl file") from error
    if file.suffix == ".jsonl":
        lines = [line for line in content.splitlines() if line.strip()]
        try:
            texts = [str(json.loads(line)["text"]) for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            raise BadCalibration(
                f'--calibration {file}: each line must be an object with a "text" ({error})'
            ) from error
    else:
        texts = content.split("\n\n")
    texts = [text.strip() for text in texts if text.strip()]
    if not texts:
        raise BadCalibration(f"--calibration {file} holds no text: give one with paragraphs, the more the better")
    return texts


def questions(count: int) -> list[str]:
    """What the model is asked for `count` texts of its own, always the same; all differ up to 128."""
    pairs = itertools.cycle((form, topic) for topic in _TOPICS for form in _FORMS)
    return [form.format(topic) for form, topic in itertools.islice(pairs, count)]
