"""The two ways to ask: Triton over gRPC with our own client, and any OpenAI-compatible server over SSE.

Read by driver.py. Each reads one answer and tells a `Reading` of every message; what goes wrong becomes a `Failure`,
of the same kinds in both.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
from tritonstream import AsyncClient, Retries, Sampling, TritonstreamError

from loadtests.kit.histogram import Histogram
from loadtests.kit.talk import Ask, Seen, Target

GRACE_S = 5.0  # beyond the deadline, which the client or the server should have kept


class Failure(Exception):
    """A request failed; `kind` is the class of the failure, the same for both ways."""

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(said)
        self.kind = kind


@dataclass(slots=True)
class Meter:
    """How many messages all readings of a process have seen."""

    messages: int = 0


class Reading:
    """One answer as it is read: when each message came, and what the last one said of tokens."""

    def __init__(self, ask: Ask, meter: Meter) -> None:
        self._ask = ask
        self._meter = meter
        self._sent = time.monotonic()
        self._times: list[float] = []
        self._texts: list[str] = []
        self.size = self.tokens = self.prompt_tokens = self.cached_tokens = 0

    def message(self, text: str) -> bool:
        """Take note of a message; false when the reader now leaves."""
        self._times.append(time.monotonic())
        self._meter.messages += 1
        self.size += len(text)
        if self._ask.keep_text:
            self._texts.append(text)
        return self._ask.leave_after is None or len(self._times) < self._ask.leave_after

    async def rest(self) -> None:
        """Wait as long as a slow reader does."""
        if self._ask.pause:
            await asyncio.sleep(self._ask.pause)

    def seen(self, failure: Failure | None, *, left: bool) -> Seen:
        """Sum it up, now that it is over."""
        now, due, gaps = time.monotonic(), self._ask.due, Histogram()
        for before, after in zip(self._times, self._times[1:], strict=False):
            gaps.add(after - before)
        together = self.tokens - len(self._times)
        if together > 0:
            gaps.add(0.0, together)
        return Seen(
            outcome="failed" if failure else "left" if left else "complete",
            late=max(0.0, self._sent - due),
            first=self._times[0] - due if self._times else None,
            total=now - due,
            messages=len(self._times),
            tokens=self.tokens or len(self._times),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            size=self.size,
            gaps=gaps,
            kind=failure.kind if failure else "",
            said=str(failure) if failure else "",
            text="".join(self._texts),
        )


class Way(Protocol):
    """How a server is asked."""

    async def read(self, ask: Ask, reading: Reading) -> bool:
        """Ask, and read the answer to its end; false where the reader left before. Raises Failure."""

    async def greet(self) -> None:
        """Connect, and learn what model to ask. Raises Failure."""

    async def close(self) -> None:
        """Close the connections."""


def way(target: Target) -> Way:
    """Choose by the target."""
    return Grpc(target) if target.api == "grpc" else OpenAI(target)


class _Model:
    """The model to ask: the one that was named, or the first of those that `ready` finds to be."""

    def __init__(self, named: str, ready: Callable[[], Awaitable[list[str]]]) -> None:
        self._name = named
        self._ready = ready
        self._lock = asyncio.Lock()

    async def name(self) -> str:
        if not self._name:
            async with self._lock:
                if not self._name:
                    names = await self._ready()
                    if not names:
                        raise Failure("ModelNotFound (caller)", "the server has no model that is ready")
                    self._name = names[0]
        return self._name


class Grpc:
    """Triton, over our client. Nothing is sent again: a retry would hide the failure that is measured."""

    def __init__(self, target: Target) -> None:
        self._target = target
        metadata = {"authorization": f"Bearer {target.key}"} if target.key else {}
        self._client = AsyncClient(
            target.url.rpartition("://")[2].rstrip("/"),
            channels=target.channels,
            retries=Retries(attempts=1),
            metadata=metadata,
        )
        self._model = _Model(target.model, self._ready)

    async def read(self, ask: Ask, reading: Reading) -> bool:
        """Ask, and read the answer to its end; false where the reader left before. Raises Failure."""
        sampling = Sampling(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True if ask.exact else None)
        try:
            model, deadline = await self._model.name(), self._target.deadline
            async with self._client.stream(ask.prompt, model=model, sampling=sampling, deadline=deadline) as deltas:
                async for delta in deltas:
                    if delta.finish_reason is not None:
                        reading.tokens = delta.num_output_tokens
                        reading.prompt_tokens, reading.cached_tokens = delta.num_input_tokens, delta.num_cached_tokens
                    if delta.text and not reading.message(delta.text):
                        return False
                    await reading.rest()
        except TritonstreamError as error:
            raise Failure(f"{type(error).__name__} ({error.blame})", str(error)) from error
        return True

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def greet(self) -> None:
        """Connect, and learn what model to ask. Raises Failure."""
        try:
            await self._ready()
            await self._model.name()
        except TritonstreamError as error:
            raise Failure(f"{type(error).__name__} ({error.blame})", str(error)) from error

    async def _ready(self) -> list[str]:
        return [model.name for model in await self._client.models(deadline=30) if model.ready]


_KINDS = {
    400: "InvalidRequest (caller)",
    401: "InvalidRequest (caller)",
    403: "InvalidRequest (caller)",
    404: "ModelNotFound (caller)",
    408: "DeadlineExceeded (server)",
    422: "InvalidRequest (caller)",
    429: "ServerUnavailable (server)",
    503: "ServerUnavailable (server)",
    504: "DeadlineExceeded (server)",
}


class OpenAI:
    """An OpenAI-compatible server: chat completions for messages, completions for a text, both over SSE."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._session = aiohttp.ClientSession(
            target.url.rstrip("/").removesuffix("/v1") + "/",
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=target.deadline),
            headers={"Authorization": f"Bearer {target.key}"} if target.key else None,
            read_bufsize=2**22,
        )
        self._model = _Model(target.model, self._served)

    async def read(self, ask: Ask, reading: Reading) -> bool:
        """Ask, and read the answer to its end; false where the reader left before. Raises Failure."""
        try:
            body: dict[str, Any] = {"model": await self._model.name()}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            body |= {"max_tokens": ask.max_tokens, "temperature": 0}
            if ask.exact:
                body["ignore_eos"] = True
            text = isinstance(ask.prompt, str)
            body |= {"prompt": ask.prompt} if text else {"messages": ask.prompt}
            async with self._session.post("v1/completions" if text else "v1/chat/completions", json=body) as response:
                await _check(response)
                async for event in _events(response):
                    if not _take(event, reading):
                        return False
                    await reading.rest()
        except TimeoutError as error:
            raise Failure("DeadlineExceeded (network)", f"no answer within {self._target.deadline:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Failure("ServerUnavailable (network)", f"{type(error).__name__}: {error}") from error
        return True

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def greet(self) -> None:
        """Connect, and learn what model to ask. Raises Failure."""
        try:
            await self._served()
            await self._model.name()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Failure("ServerUnavailable (network)", f"{type(error).__name__}: {error}") from error

    async def _served(self) -> list[str]:
        async with self._session.get("v1/models") as response:
            await _check(response)
            return [model["id"] for model in (await response.json())["data"]]


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status >= 400:
        said = (await response.text())[:500]
        raise Failure(_KINDS.get(response.status, "ServerError (server)"), f"HTTP {response.status}: {said}")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Read the events of the stream, up to its "[DONE]", without which it was cut."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise Failure("ServerError (server)", f"an event is not JSON: {data[:200]!r}") from error
        if "error" in event:
            raise Failure("ServerError (server)", json.dumps(event["error"])[:500])
        yield event
    raise Failure("ServerError (server)", "the server ended the stream before the answer was complete")


def _take(event: dict[str, Any], reading: Reading) -> bool:
    """Take note of one event; false when the reader now leaves."""
    usage = event.get("usage")
    if usage:
        reading.tokens, reading.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        reading.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if text:
            return reading.message(text)
    return True


async def read(asked: Way, ask: Ask, target: Target, meter: Meter) -> Seen:
    """Ask, and return what was seen, whatever it was. The deadline holds even where the server does not keep it."""
    reading, failure, left = Reading(ask, meter), None, False
    try:
        async with asyncio.timeout(target.deadline + GRACE_S):
            left = not await asked.read(ask, reading)
    except Failure as found:
        failure = found
    except TimeoutError:
        failure = Failure("DeadlineExceeded (network)", f"no end within {target.deadline:g} s")
    except Exception as error:  # one broken stream is a figure in the report, not the end of the run
        failure = Failure(type(error).__name__, str(error))
    return reading.seen(failure, left=left)
