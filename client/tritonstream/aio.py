"""The asynchronous client, on grpc.aio. Its blocking twin, sync.py, has the same methods with the same arguments.

What a request, a response or an error means is in the modules both share; here is only the waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio
import tenacity

from tritonstream import question, rpc, status
from tritonstream.completion import Completion
from tritonstream.connection import TLS, Connection, Keepalive, Retries
from tritonstream.delta import Delta
from tritonstream.errors import DeadlineExceeded, ServerUnavailable
from tritonstream.exchange import Exchange
from tritonstream.model import Model
from tritonstream.pool import Lane, Pool
from tritonstream.question import Question
from tritonstream.request import Prompt, Request, RequestFields, as_request

ReplyT = TypeVar("ReplyT")


class AsyncStream:
    """One answer while it streams: enter it, iterate over its deltas, and leave it whenever you like.

    Made by `AsyncClient.stream`. Leaving the block cancels what is unfinished at once, here and on the server. Meant
    for one task; only `cancel` may be called from another.
    """

    def __init__(self, pool: Pool[rpc.Link], exchange: Exchange) -> None:
        self._pool = pool
        self._exchange = exchange
        self._waiting: deque[Delta] = deque()
        self._lane: Lane[rpc.Link] | None = None
        self._call: Any = None
        self._entered = self._over = False

    async def __aenter__(self) -> Self:
        """Send the request; the first delta is waited for by the iteration."""
        if self._entered:
            raise RuntimeError("a stream can be entered once; make another with client.stream(...)")
        self._entered = True
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up whatever is unfinished."""
        self._over = True
        self._close()

    def __aiter__(self) -> Self:
        """Iterate over the deltas that are still to come."""
        return self

    async def __anext__(self) -> Delta:
        """Wait for the next delta. Raises a TritonstreamError that says whose fault it is."""
        while not self._waiting:
            if self._over:
                raise StopAsyncIteration
            if not self._entered:
                raise RuntimeError("a stream must be entered: async with client.stream(...) as deltas")
            try:
                more = await (self._read() if self._exchange.started else self._read_first())
            except BaseException:
                self._over = True
                self._close()
                raise
            if not more:
                self._over = True
                self._close()
        return self._waiting.popleft()

    def cancel(self) -> None:
        """Give up the answer, from any task of the same loop; the iteration ends with Cancelled."""
        self._exchange.cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def _read_first(self) -> bool:
        """Wait for the first response, sending the request again where that may help."""
        async for attempt in tenacity.AsyncRetrying(**self._exchange.retrying()):
            with attempt:
                if self._call is None:
                    self._open()
                try:
                    return await self._read()
                except BaseException:
                    self._close()
                    raise
        raise AssertionError("unreachable: tenacity returns or raises")  # pragma: no cover

    async def _read(self) -> bool:
        """Wait for one response and keep its deltas; false when the answer is complete."""
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._exchange.failure(error.code(), error.details()) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # grpc.aio raises it as well when only the call was cancelled, by `cancel` or by closing the client.
            self._exchange.cancelled = True
            raise self._exchange.failure(grpc.StatusCode.CANCELLED, None) from error
        if response is grpc.aio.EOF:
            self._exchange.end()
            return False
        self._waiting.extend(self._exchange.receive(response))
        return True

    def _open(self) -> None:
        message, timeout = self._exchange.send()
        self._lane = self._pool.take()
        self._call = self._lane.channel.infer(message, timeout=timeout, metadata=self._exchange.metadata)

    def _close(self) -> None:
        if self._call is not None and self._lane is not None:
            self._call.cancel()  # does nothing to a call that is over
            self._pool.give(self._lane)
        self._call = self._lane = None


class AsyncClient:
    """A client of one Triton server, for asyncio.

    `url` is host:port of the gRPC service. `channels` is the number of connections that the streams are spread over;
    `metadata` goes with every call; `options` are channel arguments of gRPC. Nothing is connected before the first
    call. Use it as a context manager, or call `close`.

    Raises InvalidRequest for settings that cannot be meant.
    """

    def __init__(
        self,
        url: str,
        *,
        tls: TLS | None = None,
        channels: int = 2,
        keepalive: Keepalive | None = Keepalive(),  # noqa: B008  # a frozen value
        retries: Retries = Retries(),  # noqa: B008
        metadata: Mapping[str, str] | None = None,
        options: Mapping[str, int | str] | None = None,
    ) -> None:
        connection = Connection(
            url=url, tls=tls, channels=channels, keepalive=keepalive, metadata=metadata or {}, options=options or {}
        )
        self._retries = retries
        self._metadata = connection.call_metadata()
        self._pool: Pool[rpc.Link] = Pool(lambda: rpc.connect_async(connection), channels)

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        await self.close()

    async def close(self) -> None:
        """Close the connections; streams that are still open end with Cancelled. The client can be used again."""
        for link in self._pool.drain():
            await link.channel.close()

    def stream(self, request: Request | Prompt, /, **fields: Unpack[RequestFields]) -> AsyncStream:
        """Stream an answer: `async with client.stream("Once", model="m") as deltas: async for delta in deltas: ...`.

        `fields` are those of Request; with a Request they replace its own. Where several choices were asked for, each
        delta belongs to the one of its `index`. Raises InvalidRequest here, and from the iteration any
        TritonstreamError; what fails before the first delta is sent again as `retries` allow.
        """
        return self._stream(as_request(request, **fields), stream=True)

    async def generate(self, request: Request | Prompt, /, **fields: Unpack[RequestFields]) -> Completion:
        """Return a complete answer. Takes, raises and retries what `stream` does."""
        async with self._stream(as_request(request, **fields), stream=False) as deltas:
            return Completion.gather([delta async for delta in deltas])

    async def server_live(self, *, deadline: float = 5.0) -> bool:
        """Whether the server's process answers; false also if nobody does within `deadline` seconds."""
        return await self._probe(question.server_live(), deadline)

    async def server_ready(self, *, deadline: float = 5.0) -> bool:
        """Whether the server and its models take requests; false also if nobody answers within `deadline` seconds."""
        return await self._probe(question.server_ready(), deadline)

    async def model_ready(self, name: str, version: str = "", *, deadline: float = 5.0) -> bool:
        """Whether a model takes requests; false also if nobody answers within `deadline` seconds."""
        return await self._probe(question.model_ready(name, version), deadline)

    async def models(self, *, deadline: float = 5.0) -> tuple[Model, ...]:
        """List the models of the repository, ready or not. Raises if there is no reply within `deadline` seconds."""
        return await self._ask(question.models(), deadline)

    def _stream(self, request: Request, *, stream: bool) -> AsyncStream:
        return AsyncStream(self._pool, Exchange(request, self._retries, stream=stream, metadata=self._metadata))

    async def _probe(self, asked: Question[bool], deadline: float) -> bool:
        try:
            return await self._ask(asked, deadline)
        except (ServerUnavailable, DeadlineExceeded):
            return False

    async def _ask(self, asked: Question[ReplyT], deadline: float) -> ReplyT:
        with self._pool.lane() as lane:
            method = getattr(lane.channel.service, asked.method)
            try:
                reply = await method(asked.message, timeout=deadline, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                raise status.from_status(error.code(), error.details()) from error
        return asked.read(reply)
