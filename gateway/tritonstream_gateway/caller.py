"""One HTTP exchange, as ASGI's messages: who asks, what is said back, and whether anybody is still there.

Read by routes.py and app.py. The server (uvicorn) spells HTTP; a reader who is slow holds `more` back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from tritonstream_gateway.errors import Failure

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_JSON = "application/json"
_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_CLOSE = {"connection": "close"}


class Left(Exception):
    """The caller went away before the answer was complete."""


class Caller:
    """One request and its reply. `begun` says that the reply's status is sent, `status` which one it was."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.reply_headers: dict[str, str] = {}
        self.begun = False
        self.complete = False
        self.status = 0
        self.key: str | None = None
        self.tokens = 0
        self.began = time.monotonic()
        self.first_token_after: float | None = None
        self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self._receive = receive
        self._send = send

    def header(self, name: str) -> str | None:
        """Return a header of the request, by its name in lower case."""
        return self._headers.get(name)

    async def body(self, most: int, seconds: float) -> bytes:
        """Read the body. Raises Failure: 413 when it is over `most` bytes, 408 when it takes too long; or Left."""
        length = self._headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise _too_large(most)
        parts, size = [], 0
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Left
                    part = message.get("body", b"")
                    size += len(part)
                    if size > most:
                        raise _too_large(most)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            raise Failure(
                status=408,
                message=f"the body was not complete within {seconds:g} s",
                kind="timeout_error",
                code="timeout",
                reason="timeout",
                headers=_CLOSE,
            ) from error

    @contextlib.asynccontextmanager
    async def present(self) -> AsyncIterator[None]:
        """Cancel the block, which then raises Left, when the caller goes away meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        left, inside = False, True

        def leave(_: object) -> None:
            nonlocal left
            if inside and not self.complete:
                left = True
                task.cancel()

        watch = asyncio.ensure_future(self._until_left())
        watch.add_done_callback(leave)
        try:
            yield
        except asyncio.CancelledError:
            if left and task.uncancel() == 0:
                raise Left from None
            raise
        finally:
            inside = False
            watch.cancel()

    async def _until_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def first_token(self) -> None:
        """Note the time that the caller waited."""
        self.first_token_after = time.monotonic() - self.began

    async def begin_events(self) -> None:
        """Begin a stream of events, unless it has begun."""
        if not self.begun:
            await self._begin(200, _EVENTS)

    async def more(self, data: bytes) -> None:
        """Send a part of the stream; waits while the caller does not read."""
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """Send the stream's last part."""
        self.complete = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def reply(self, status: int, body: bytes, content_type: str = _JSON) -> None:
        """Send a whole reply."""
        await self._begin(status, {"content-type": content_type, "content-length": str(len(body))})
        await self.end(body)

    async def fail(self, failure: Failure) -> None:
        """Send an error as the whole reply."""
        self.reply_headers |= failure.headers
        await self.reply(failure.status, failure.body())

    async def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.begun, self.status = True, status
        spelled = [(name.encode(), value.encode("latin-1")) for name, value in (self.reply_headers | headers).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": spelled})


def _too_large(most: int) -> Failure:
    return Failure(
        status=413,
        message=f"the body must be at most {most} bytes",
        code="request_too_large",
        reason="too_large",
        headers=_CLOSE,
    )
