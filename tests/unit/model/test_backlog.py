"""backlog.py: tokens that wait are joined, and nothing else is. What vLLM gives is here by its shape alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support import served

backlog = served.module("backlog")


class Output(msgspec.Struct, gc=False):
    """As vLLM's EngineCoreOutput, the fields that play a part."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prefill_stats: Any = None
    num_nans_in_logits: int = 0


def first(request: str, token: int) -> Output:
    """What a step gives that ends a prefill."""
    return Output(request, [token], prefill_stats=object())


async def read(steps: Sequence[Sequence[Output]], stops: Sequence[str] = ()) -> list[dict[str, list[int]]]:
    """Let the steps wait together, and read them; returns what each one gives to whom."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    core = SimpleNamespace(get_output_async=queue.get, outputs_queue=queue)
    requests = {one.request_id: SimpleNamespace(detokenizer=SimpleNamespace(stop=stops)) for one in steps[-1]}
    reader = backlog.Backlog(core, requests, Output)
    for step in steps:
        queue.put_nowait(SimpleNamespace(outputs=list(step)))
    read = [await reader.get() for _ in steps]
    assert queue.empty()
    return [{output.request_id: output.new_token_ids for output in step.outputs} for step in read]


async def test_tokens_move_on_to_the_last_step_that_waits() -> None:
    """In their order; the steps themselves stay, for what else they tell."""
    steps = [[Output("a", [1]), Output("b", [7])], [Output("b", [8]), Output("a", [2])], [Output("a", [3])]]
    assert await read([*steps, [Output("a", [4], finish_reason="length"), Output("b", [9])]]) == [
        {},
        {"b": [7, 8]},
        {},
        {"a": [1, 2, 3, 4], "b": [9]},
    ]


async def test_a_first_token_does_not_wait() -> None:
    """It is read before all that came after it."""
    assert await read([[first("a", 1)], [Output("a", [2])], [Output("a", [3])]]) == [{"a": [1]}, {}, {"a": [2, 3]}]


@pytest.mark.parametrize("alone", [{"new_logprobs": object()}, {"num_nans_in_logits": 1}, {"finish_reason": "abort"}])
async def test_what_belongs_to_one_token_stays_with_it(alone: dict[str, Any]) -> None:
    """Whatever vLLM may add to an output: what is not known to be joined is not."""
    assert await read([[Output("a", [1], **alone)], [Output("a", [2])]]) == [{"a": [1]}, {"a": [2]}]
    if "finish_reason" not in alone:
        assert await read([[Output("a", [1])], [Output("a", [2], **alone)]]) == [{"a": [1]}, {"a": [2]}]


async def test_stop_strings_are_looked_for_token_by_token() -> None:
    """What came after one would be counted otherwise."""
    assert await read([[Output("a", [1])], [Output("a", [2])]], stops=["."]) == [{"a": [1]}, {"a": [2]}]


async def test_what_is_read_in_time_is_left_alone() -> None:
    """A step is handed on as it came, at once, and what comes later is not waited for."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    core = SimpleNamespace(get_output_async=queue.get, outputs_queue=queue)
    reader = backlog.Backlog(core, {}, Output)
    for token in (1, 2):
        step = SimpleNamespace(outputs=[Output("a", [token])])
        queue.put_nowait(step)
        assert await reader.get() is step
        assert step.outputs == [Output("a", [token])]


async def test_the_end_of_the_engine_is_told() -> None:
    """Whatever waited before it: all requests end with it."""

    async def dead() -> Any:
        raise RuntimeError("dead")

    reader = backlog.Backlog(SimpleNamespace(get_output_async=dead, outputs_queue=asyncio.Queue()), {}, Output)
    with pytest.raises(RuntimeError, match="dead"):
        await reader.get()
