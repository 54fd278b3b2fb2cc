"""Triton as the gateway calls it: the client's own protocol modules over a connection that costs next to nothing.

Read by the routes. What a request, a response or an error means is in `tritonstream`, which its two clients share; here
is only the waiting, as in them. Nothing is sent again: callers of an HTTP API do that, told by Retry-After.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import unquote

import grpc
from tritonclient.grpc import service_pb2
from tritonstream import Delta, Request, Retries, ServerUnavailable, TritonstreamError
from tritonstream.exchange import Exchange
from tritonstream.question import Question
from tritonstream.status import from_status

from tritonstream_gateway.http2 import Call, Connection, Refused

_SERVICE = "/inference.GRPCInferenceService/"
_STREAM_INFER = "ModelStreamInfer"
_CODES = {str(code.value[0]): code for code in grpc.StatusCode}
_ONCE = Retries(attempts=1)
_RESPONSE = service_pb2.ModelStreamInferResponse
DIAL_SECONDS = 3.0
CONNECTIONS = 2  # while none is full: what Triton writes to one connection, one of its threads writes at a time

ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where Triton's gRPC service is: "host:port", and with which certificates (paths of PEM files) it is spoken to."""

    url: str
    tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext | None:
        """Make the TLS context; None for a connection that is not encrypted."""
        if not self.tls:
            return None
        context = ssl.create_default_context(cafile=self.ca)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        context.set_alpn_protocols(["h2"])
        return context


class Upstream:
    """Triton's gRPC service, over a few connections; made anew when they break. For one event loop."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._context = address.context()
        self._connections: list[Connection] = []
        self._dialing: asyncio.Task[Connection] | None = None

    async def close(self) -> None:
        """Close the connections; open answers end with ServerUnavailable."""
        if self._dialing is not None:
            self._dialing.cancel()
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def answer(self, request: Request, *, stream: bool) -> Answer:
        """Make an answer, to be entered; raises InvalidRequest for what cannot be spelled."""
        return Answer(self, Exchange(request, _ONCE, stream=stream))

    async def ask(self, asked: Question[ReplyT], deadline: float) -> ReplyT:
        """Ask a question. Raises a TritonstreamError, DeadlineExceeded after so many seconds."""
        call = await self.call(asked.method, asked.message, deadline)
        try:
            async with asyncio.timeout(deadline):
                found = await call.read()
                while not call.closed:
                    found += await call.read()
        except TimeoutError as error:
            raise from_status(grpc.StatusCode.DEADLINE_EXCEEDED, f"no reply within {deadline:g} s") from error
        finally:
            call.cancel()
        code, details = outcome(call)
        if code is not grpc.StatusCode.OK or not found:
            raise from_status(code, details)
        return asked.read(getattr(service_pb2, f"{asked.method}Response").FromString(found[0]))

    async def call(
        self, method: str, message: Any, seconds: float | None, metadata: tuple[tuple[str, str], ...] = ()
    ) -> Call:
        """Begin a call that may take so long. Raises ServerUnavailable when nobody can be reached."""
        body = message.SerializeToString()
        headers = [
            (":method", "POST"),
            (":scheme", "https" if self._context else "http"),
            (":path", _SERVICE + method),
            (":authority", self._address.url),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
        if seconds is not None:
            headers.append(("grpc-timeout", f"{min(max(1, round(seconds * 1_000)), 99_999_999)}m"))
        for _ in range(CONNECTIONS + 1):
            connection = await self._connection()
            with contextlib.suppress(Refused):  # full: the next is another
                return connection.call(tuple(headers), body, metadata)
        raise ServerUnavailable("Triton takes no further calls", blame="server")

    async def _connection(self) -> Connection:
        """Return the connection with the fewest calls, or make another."""
        self._connections = [one for one in self._connections if one.closing is None]
        free = [one for one in self._connections if one.has_room]
        if len(free) < CONNECTIONS and all(one.calls for one in free):
            if self._dialing is None:
                self._dialing = asyncio.create_task(self._dial())
                self._dialing.add_done_callback(self._dialed)
            try:
                await asyncio.shield(self._dialing)  # one for all who wait, whoever of them leaves
            except ServerUnavailable:
                if not free:
                    raise
            free = [one for one in self._connections if one.closing is None and one.has_room]
        if not free:
            raise ServerUnavailable("the connection to Triton was lost", blame="network")
        return min(free, key=_load)

    def _dialed(self, dialing: asyncio.Task[Connection]) -> None:
        self._dialing = None
        if not dialing.cancelled() and dialing.exception() is None:
            self._connections.append(dialing.result())

    async def _dial(self) -> Connection:
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                connection, transport = await self._connect()
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no connection within {DIAL_SECONDS:g} s"
            raise ServerUnavailable(
                f"Triton cannot be reached at {self._address.url}: {reason}", blame="network"
            ) from error
        found = transport.get_extra_info("socket")
        if found is not None:  # a Triton whose machine went away without a word is noticed within half a minute
            for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
                found.setsockopt(socket.IPPROTO_TCP, option, value)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    async def _connect(self) -> tuple[Connection, asyncio.Transport]:
        """Connect to the first of the host's addresses that takes us. Raises OSError."""
        loop = asyncio.get_running_loop()
        host, _, port = self._address.url.rpartition(":")
        host = host.strip("[]")
        # Asked apart: of a question for a name that is given up within create_connection, uvloop logs the late answer.
        addresses = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        failed: OSError | None = None
        for *_, (address, number, *_) in addresses:
            try:
                transport, connection = await loop.create_connection(
                    lambda: Connection(loop),
                    *(str(address), int(number)),
                    ssl=self._context,
                    server_hostname=host if self._context else None,
                )
            except OSError as error:
                failed = error
            else:
                return connection, transport
        raise failed or OSError(f"{host} has no address")


class Answer:
    """One answer while it streams: enter it, take batches until one is empty, and leave it whenever you like."""

    def __init__(self, upstream: Upstream, exchange: Exchange) -> None:
        self._upstream = upstream
        self._exchange = exchange
        self._call: Call | None = None
        self._failed: TritonstreamError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._late = False
        self.complete = False  # whether every delta was returned, and the answer ended as it should

    async def __aenter__(self) -> Self:
        """Send the request."""
        message, timeout = self._exchange.send()
        self._call = await self._upstream.call(_STREAM_INFER, message, timeout, self._exchange.metadata)
        if timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout, self._expire)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up whatever is unfinished: the engine stops working on it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._call is not None:
            self._call.cancel()

    async def batch(self) -> list[Delta]:
        """Wait for deltas and return all that are here; none when the answer is complete.

        Raises a TritonstreamError, once what came before it was returned.
        """
        assert self._call is not None, "an answer must be entered"
        deltas: list[Delta] = []
        while not deltas and not self.complete:
            if self._failed is not None:
                raise self._failed
            try:
                for message in await self._call.read():
                    deltas += self._exchange.receive(_RESPONSE.FromString(message))
                if self._call.closed and not self._call.messages:
                    self._end(self._call)
                    self.complete = True
            except TritonstreamError as error:
                self._failed = error
        return deltas

    def _end(self, call: Call) -> None:
        code, details = outcome(call)
        if self._late:
            code, details = grpc.StatusCode.DEADLINE_EXCEEDED, None
        if code is not grpc.StatusCode.OK:
            raise self._exchange.failure(code, details)
        self._exchange.end()

    def _expire(self) -> None:
        self._late = True
        if self._call is not None:
            self._call.cancel()


def outcome(call: Call) -> tuple[grpc.StatusCode, str | None]:
    """Read how a call that is closed ended: gRPC's status and message, out of its trailers."""
    status = call.headers.get("grpc-status")
    if status is None:
        http = call.headers.get(":status", "200")
        return grpc.StatusCode.UNAVAILABLE, call.error or f"the server ended the stream without a status (HTTP {http})"
    return _CODES.get(status, grpc.StatusCode.UNKNOWN), unquote(call.headers.get("grpc-message", "")) or None


def _load(connection: Connection) -> int:
    return connection.calls
