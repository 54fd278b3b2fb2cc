"""Two hundred at once: short, long, several choices, cancelled, invalid, and to each what is due to it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from tests.support import tiny_qwen3
from tests.support.metrics import eventually
from tests.support.servers import Triton
from tests.support.tiny_qwen3 import Case, case, cases
from tests.support.wire import Wire, connect

CROWD = 200
CHANNELS = 8
PATIENCE = 120.0  # seconds


def chat(one: Case) -> dict[str, Any]:
    """The `chat` input that asks for the case."""
    return {"messages": list(one.messages), "chat_template_kwargs": one.template_kwargs}


async def whole_answer(wire: Wire, one: Case, *, stream: bool) -> str:
    """A known answer, to the character."""
    answer = (await wire.ask(chat=chat(one), stream=stream, within=PATIENCE)).ok()
    assert answer.text() == one.answer
    return "answered"


async def several(wire: Wire) -> str:
    """Three known answers to one request."""
    one = case("emoji")
    answer = (await wire.ask(chat=chat(one), sampling={"n": 3}, within=PATIENCE)).ok()
    assert [answer.text(index) for index in answer.indexes] == [one.answer] * 3
    return "answered thrice"


async def leave(wire: Wire, characters: int) -> str:
    """Read a part of the story and go."""
    one = case("story")
    async with wire.open(chat=chat(one)) as call:
        text = await call.until(characters, within=PATIENCE)
        call.cancel()
    assert one.answer.startswith(text)
    return "left"


async def refused(wire: Wire) -> str:
    """Ask for what cannot be had."""
    answer = await wire.refused(chat=chat(case("sum")), sampling={"top_p": 3}, within=PATIENCE)
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "top_p" in answer.details
    return "refused"


async def late(wire: Wire) -> str:
    """Have no time for an endless answer."""
    question = {"messages": [{"role": "user", "content": tiny_qwen3.WHEEL_QUESTION}]}
    sampling = {"ignore_eos": True}
    answer = await wire.ask(chat=question, sampling=sampling, parameters={"deadline_ms": 500}, within=PATIENCE)
    assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert answer.finals == 1
    return "late"


@pytest.mark.timeout(400)
async def test_two_hundred_at_once(triton: Triton) -> None:
    """Every stream ends once and with what is exactly right, and nothing goes on running afterwards."""
    dice = random.Random(7)
    known = list(cases())
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connect(triton.grpc, triton.model)) for _ in range(CHANNELS)]
        crowd = []
        for number in range(CROWD):
            wire = wires[number % CHANNELS]
            match number % 10:
                case 0:
                    crowd.append(several(wire))
                case 1 | 2:
                    crowd.append(leave(wire, dice.randrange(1, 300)))
                case 3:
                    crowd.append(refused(wire))
                case 4:
                    crowd.append(late(wire))
                case _:
                    crowd.append(whole_answer(wire, dice.choice(known), stream=number % 3 > 0))
        dice.shuffle(crowd)
        outcomes = await asyncio.gather(*crowd, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert not failures, f"{len(failures)} of {CROWD}, the first: {failures[0]!r}"
    assert Counter(outcomes) == {"answered": 100, "left": 40, "answered thrice": 20, "refused": 20, "late": 20}
    await eventually(lambda: triton.load() == 0, "nothing runs")
