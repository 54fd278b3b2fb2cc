"""What quantizing costs in quality, asked of a served model: perplexity of a fixed text, and greedy answers.

Read by `tools.variants`. Everything goes through Triton: prompt logprobs and the answers' own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tritonstream import AsyncClient, Completion, Request, Sampling

TEXT = Path(__file__).parent / "texts" / "perplexity.txt"
CHUNK_CHARACTERS = 3_000  # about 700 tokens: within every context, and each begins as a text does
QUESTIONS = (
    "What is the capital of France?",
    "What is 8 plus 5?",
    "Name three animals that live in the sea.",
    "Why is the sky blue?",
    "Write one sentence about autumn.",
    "How do I boil an egg?",
    "Translate 'good morning' into Spanish.",
    "What does a compiler do?",
    "List the days of the week.",
    "Give me a tip for sleeping better.",
    "What is the largest planet in our solar system?",
    "Write a Python function that adds two numbers.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said when it always took the likeliest token."""

    question: str
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What one variant showed: perplexity over so many tokens, and its answers in the order of the questions."""

    perplexity: float
    scored_tokens: int
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How near answers are to others: share of places with the same token, share of answers that are the same.

    `first_divergence` is the median place of the first other token, of the answers that have one.
    """

    tokens: float
    whole: float
    first_divergence: float | None


def agreement(answers: Sequence[Sequence[int]], base: Sequence[Sequence[int]]) -> Agreement:
    """Compare answers, given as tokens, place by place; what one has more than the other counts as different."""
    equal = places = same = 0
    first: list[int] = []
    for mine, theirs in zip(answers, base, strict=True):
        equal += sum(a == b for a, b in zip(mine, theirs, strict=False))
        places += max(len(mine), len(theirs))
        if tuple(mine) == tuple(theirs):
            same += 1
        else:
            pairs = enumerate(zip(mine, theirs, strict=False))
            first.append(next((place for place, (a, b) in pairs if a != b), min(len(mine), len(theirs))))
    first.sort()
    return Agreement(
        tokens=equal / places if places else 1.0,
        whole=same / len(base) if base else 1.0,
        first_divergence=float(first[len(first) // 2]) if first else None,
    )


def chunks(text: str, most: int = CHUNK_CHARACTERS) -> list[str]:
    """Cut a text between paragraphs into pieces of at most so many characters, or of one paragraph."""
    found: list[str] = []
    for paragraph in filter(None, (part.strip() for part in text.split("\n\n"))):
        if found and len(found[-1]) + len(paragraph) + 2 <= most:
            found[-1] += f"\n\n{paragraph}"
        else:
            found.append(paragraph)
    return found


async def ask(
    address: str, model: str, *, text: str, questions: Sequence[str], tokens: int, tell: Callable[[str], object]
) -> Quality:
    """Score `text` and put the questions as chats, one after the other: a batch's size may change a token.

    Raises the client's errors, and ValueError when the text has nothing to score.
    """
    loss, scored = 0.0, 0
    answers = []
    async with AsyncClient(address) as client:

        async def complete(request: Request) -> Completion:
            async with client.stream(request) as deltas:
                return Completion.gather([delta async for delta in deltas])

        for number, chunk in enumerate(pieces := chunks(text), start=1):
            tell(f"perplexity: part {number} of {len(pieces)}")
            sampling = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=0)
            seen = await complete(Request(prompt=chunk, model=model, sampling=sampling))
            places = [place.chosen.logprob for place in seen.prompt_logprobs or () if place is not None]
            loss, scored = loss - sum(places), scored + len(places)
        for number, question in enumerate(questions, start=1):
            tell(f"question {number} of {len(questions)}")
            asked = Request(
                prompt=[{"role": "user", "content": question}],
                model=model,
                sampling=Sampling(max_tokens=tokens, temperature=0.0, logprobs=0),
                chat_template_kwargs={"enable_thinking": False},
            )
            choice = (await complete(asked)).choices[0]
            ids = tuple(place.chosen.token_id for place in choice.logprobs or ())
            answers.append(Answer(question=question, text=choice.text, tokens=ids))
    if not scored:
        raise ValueError("the text for the perplexity has less than two tokens: give a longer one")
    return Quality(perplexity=math.exp(loss / scored), scored_tokens=scored, answers=tuple(answers))
