"""The answers to one HTTP request: nearly always one, several where a completion has several prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tritonstream import Delta, Request

from tritonstream_gateway.upstream import Answer, Upstream


class Many:
    """Enter it, and take batches, each with the number of the prompt it belongs to, until one is empty."""

    def __init__(self, upstream: Upstream, requests: Sequence[Request], *, stream: bool) -> None:
        self._answers = [upstream.answer(request, stream=stream) for request in requests]
        self._entered = contextlib.AsyncExitStack()
        self._reading: dict[asyncio.Task[list[Delta]], int] = {}
        self._begun = False

    async def __aenter__(self) -> Self:
        """Send the requests."""
        async with contextlib.AsyncExitStack() as stack:
            for answer in self._answers:
                await stack.enter_async_context(answer)
            self._entered = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up whatever is unfinished."""
        for task in self._reading:
            task.cancel()
        await self._entered.aclose()

    async def batch(self) -> tuple[int, list[Delta]]:
        """Wait for deltas of any prompt; an empty batch when all are complete. Raises what Answer.batch does."""
        if len(self._answers) == 1:
            return 0, await self._answers[0].batch()
        if not self._begun:
            self._begun = True
            self._reading = {self._read(answer): prompt for prompt, answer in enumerate(self._answers)}
        while self._reading:
            done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
            task = done.pop()
            prompt = self._reading.pop(task)
            deltas = task.result()
            if deltas:
                self._reading[self._read(self._answers[prompt])] = prompt
                return prompt, deltas
        return 0, []

    @property
    def complete(self) -> bool:
        """Whether all is returned; the next batch would be empty."""
        return not self._reading and all(answer.complete for answer in self._answers)

    async def whole(self) -> list[list[Delta]]:
        """Wait for all answers; returns the deltas of each prompt."""
        found: list[list[Delta]] = [[] for _ in self._answers]
        while True:
            prompt, deltas = await self.batch()
            if not deltas:
                return found
            found[prompt] += deltas

    def _read(self, answer: Answer) -> asyncio.Task[list[Delta]]:
        return asyncio.ensure_future(answer.batch())
