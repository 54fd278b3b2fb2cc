"""Steps of the engine that wait to be read: what several of them gave one request is read at once.

Read by engine.py. Reading one output of a step (statistics, detokenizing, a delta, a mailbox) takes some 40 µs under
the interpreter lock, nearly all of it whether the output holds one token or five. So where the engine's next step is
here already, what a request got from this one moves on to that one. Nothing is waited for: who keeps up with the engine
reads each step alone. A first token stays where it is, and so does all that belongs to a single token: logprobs, what
may complete a stop string, the reason why an answer ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from operator import attrgetter, is_
from typing import Any

_ENDINGS = ("finish_reason", "stop_reason")


class Backlog:
    """The steps that vLLM's output handler has still to read; `get` stands before its engine's `get_output_async`."""

    def __init__(self, core: Any, requests: Mapping[str, Any], output: Any) -> None:
        """Read the steps of `core`, vLLM's client of the engine; `output` is the type of what they give a request.

        `requests` are those that vLLM's output processor knows, by their ids.
        """
        self._get: Callable[[], Awaitable[Any]] = core.get_output_async
        self._queue = core.outputs_queue
        self._requests = requests
        self._steps: deque[Any] = deque()
        _, _, *beside = output.__struct_fields__  # the request's id and its new tokens come first
        usual = dict(zip(beside, output.__struct_defaults__, strict=True))
        self._beside, self._usual = attrgetter(*usual), tuple(usual.values())
        for name in _ENDINGS:
            del usual[name]
        self._beside_endings, self._usual_beside_endings = attrgetter(*usual), tuple(usual.values())

    async def get(self) -> Any:
        """Wait for the next step. Raises what vLLM does when the engine is dead."""
        if not self._steps:
            self._steps.append(await self._get())
            while not self._queue.empty():
                self._steps.append(await self._get())
            for step, following in pairwise(self._steps):
                self._join(step, following)
        return self._steps.popleft()

    def _join(self, step: Any, following: Any) -> None:
        """Move on to the following step what can be read with it."""
        gains = {output.request_id: output for output in following.outputs}
        staying = []
        for output in step.outputs:
            gain = gains.get(output.request_id)
            if gain is not None and self._joinable(output, gain):
                gain.new_token_ids[:0] = output.new_token_ids
            else:
                staying.append(output)
        step.outputs = staying

    def _joinable(self, output: Any, gain: Any) -> bool:
        """Whether both are tokens and nothing else, but for an end, of a request that no stop string can end."""
        if not all(map(is_, self._beside(output), self._usual)):
            return False
        if not all(map(is_, self._beside_endings(gain), self._usual_beside_endings)):
            return False
        request = self._requests.get(output.request_id)
        return request is not None and not getattr(request.detokenizer, "stop", None)
