"""One HTTP/2 connection that carries gRPC calls: as much of RFC 9113 as a gRPC client needs, and nothing per token.

Read by upstream.py. grpc.aio takes more CPU for a message than all else here that is done for a token; a message costs
little where one read of the socket brings those of many streams. Header compression is the `hpack` package's. What the
peer gets wrong ends the connection, and its calls with it.
"""

from __future__ import annotations

import asyncio
import functools
import struct
from collections import deque
from typing import cast

import hpack

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME = 1, 2, 3, 4, 5
CANCEL = 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW, LARGEST_WINDOW, LAST_STREAM = 65_535, 2**31 - 1, 2**31 - 1
# What a peer may send of a stream before it is given more room, which is when its reader has not more than half of it
# waiting: a caller who does not read has less than twice that here, and the rest in tritonserver.
STREAM_WINDOW = 256 * 1_024
REMEMBERED = 64  # header blocks whose meaning is kept

_HEADER = struct.Struct(">HBBBI")  # length (2 and 1 bytes), type, flags, stream
_UINT32 = struct.Struct(">I")


class Refused(ConnectionError):
    """The connection takes no further calls: it is closing, or full."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Spell one frame."""
    size = len(payload)
    return _HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


@functools.lru_cache(maxsize=256)
def block(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Spell headers without a table, so that the same headers are always the same bytes."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return bytes(encoder.encode(headers))


def literal(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Spell headers that come once, to follow a block: they are looked up in no table, and put into none."""
    return bytes(hpack.Encoder().encode([(name, value, True) for name, value in headers])) if headers else b""


class Call:
    """One stream: what it has received, and what is still to be sent. Made by `Connection.call`.

    Messages are gRPC's, unwrapped. `headers` and `trailers` hold what came, `closed` says that nothing more will, and
    `error` why, where the peer did not end it as it should.
    """

    __slots__ = (
        "_buffer",
        "_connection",
        "_granted",
        "_outgoing",
        "_waiter",
        "_window",
        "closed",
        "error",
        "headers",
        "messages",
        "stream",
        "unread",
    )

    def __init__(self, connection: Connection, stream: int, window: int) -> None:
        self._connection = connection
        self._buffer = bytearray()  # an unfinished message
        self._outgoing = b""  # what the peer has no room for yet
        self._window = window  # the peer's room
        self._granted = 0  # bytes received since we last gave the peer more room
        self._waiter: asyncio.Future[None] | None = None
        self.stream = stream
        self.messages: deque[bytes] = deque()
        self.unread = 0  # bytes in `messages`
        self.headers: dict[str, str] = {}
        self.closed = False
        self.error: str | None = None

    async def read(self) -> list[bytes]:
        """Wait for messages and take all that are here; none when the stream has ended."""
        while not self.messages and not self.closed:
            self._waiter = self._connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        found = list(self.messages)
        self.messages.clear()
        self.unread = 0
        self._grant()
        return found

    def cancel(self) -> None:
        """Give up the stream, if it goes on."""
        if not self.closed:
            self._connection.reset(self)

    def receive(self, data: bytes, size: int) -> None:
        """Take the content of a DATA frame, `size` bytes long on the wire."""
        self._granted += size
        buffer = self._buffer
        if not buffer and len(data) >= 5 and int.from_bytes(data[1:5], "big") == len(data) - 5:  # nearly every frame
            self._keep(data[5:], data[0])
        else:
            buffer += data
            while len(buffer) >= 5 and (end := 5 + int.from_bytes(buffer[1:5], "big")) <= len(buffer):
                self._keep(bytes(buffer[5:end]), buffer[0])
                del buffer[:end]
        if self.unread < STREAM_WINDOW // 2:
            self._grant()
        self._wake()

    def _keep(self, message: bytes, compressed: int) -> None:
        if compressed:
            raise ConnectionError("a compressed message, which was not asked for")
        self.messages.append(message)
        self.unread += len(message)

    def _grant(self) -> None:
        if self._granted > STREAM_WINDOW // 4 and not self.closed:
            self._connection.write(frame(WINDOW_UPDATE, 0, self.stream, _UINT32.pack(self._granted)))
            self._granted = 0

    def end(self, error: str | None = None) -> None:
        """Take note that nothing more comes."""
        self.closed = True
        self.error = self.error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def send(self, data: bytes) -> None:
        """Send the request's body, as fast as the peer has room for it."""
        self._outgoing += data
        self.flush()

    def flush(self) -> None:
        """Send what the peer has room for; the last frame says that it is the last."""
        while self._outgoing and not self.closed:
            size = min(len(self._outgoing), self._window, self._connection.window, self._connection.max_frame)
            if size <= 0:
                return
            part, self._outgoing = self._outgoing[:size], self._outgoing[size:]
            self._window -= size
            self._connection.window -= size
            self._connection.write(frame(DATA, 0 if self._outgoing else END_STREAM, self.stream, part))

    def widen(self, more: int) -> None:
        """Take note of more room at the peer."""
        self._window += more
        self.flush()


class Connection(asyncio.Protocol):
    """One connection, for one event loop; several calls run on it at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.window = DEFAULT_WINDOW  # the peer's room for all streams together
        self.max_frame = 16_384
        self.closing: str | None = None  # why no further call can be made here
        self._stream_window = DEFAULT_WINDOW
        self._max_streams = LARGEST_WINDOW
        self._next = 1
        self._calls: dict[int, Call] = {}
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._outgoing: list[bytes] = []
        self._received = 0  # bytes since we last gave the peer more room
        self._fragments: tuple[int, int, bytes] | None = None  # a header block whose end is still to come
        self._decoder = hpack.Decoder()
        self._decoded: dict[bytes, list[tuple[str, str]]] = {}

    # --- what upstream.py asks for ---------------------------------------------------------------------------------

    @property
    def calls(self) -> int:
        """How many calls are open."""
        return len(self._calls)

    @property
    def has_room(self) -> bool:
        """Whether another call can be made here."""
        return self.closing is None and len(self._calls) < self._max_streams and self._next <= LAST_STREAM

    def call(
        self, headers: tuple[tuple[str, str], ...], body: bytes, metadata: tuple[tuple[str, str], ...] = ()
    ) -> Call:
        """Begin a call and send its only message; `metadata` is what only this call has. Raises Refused."""
        if not self.has_room:
            raise Refused(self.closing or "the connection carries as many calls as the server allows")
        call = self._calls[self._next] = Call(self, self._next, self._stream_window)
        self._next += 2
        self.write(frame(HEADERS, END_HEADERS, call.stream, block(headers) + literal(metadata)))
        call.send(b"\0" + _UINT32.pack(len(body)) + body)
        return call

    def write(self, data: bytes) -> None:
        """Send bytes with all else that this turn of the event loop has to send: a system call costs more than both."""
        if not self._outgoing:
            self.loop.call_soon(self._flush)
        self._outgoing.append(data)

    def _flush(self) -> None:
        data, self._outgoing = b"".join(self._outgoing), []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def reset(self, call: Call) -> None:
        """Tell the peer that nobody waits for this call any more."""
        self.write(frame(RST_STREAM, 0, call.stream, _UINT32.pack(CANCEL)))
        self._forget(call.stream, "cancelled by this side")

    def close(self, why: str = "closed by this side") -> None:
        """Close the connection; open calls end."""
        self.closing = self.closing or why
        self._flush()
        if self._transport is not None:
            self._transport.close()

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open with the preface: no pushes, no table to keep for the peer's headers, and room for much."""
        transport = self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods alone
        settings = ((HEADER_TABLE_SIZE, 0), (ENABLE_PUSH, 0), (INITIAL_WINDOW, STREAM_WINDOW))
        self._decoder.max_allowed_table_size = 4_096  # the peer's default until it has read ours
        transport.write(
            PREFACE
            + frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", name, value) for name, value in settings))
            + frame(WINDOW_UPDATE, 0, 0, _UINT32.pack(LARGEST_WINDOW - DEFAULT_WINDOW))
        )

    def data_received(self, data: bytes) -> None:
        """Take whole frames out of what came; one read may bring the messages of many streams."""
        if self._buffer:
            data = self._buffer + data
        at, size = 0, len(data)
        try:
            while size - at >= 9:
                high, low, kind, flags, stream = _HEADER.unpack_from(data, at)
                end = at + 9 + (high << 8 | low)
                if end > size:
                    break
                payload = data[at + 9 : end]
                at = end
                if kind == DATA:
                    self._data(flags, stream & LARGEST_WINDOW, payload)
                else:
                    self._control(kind, flags, stream & LARGEST_WINDOW, payload)
        except (ConnectionError, struct.error, IndexError, hpack.HPACKError) as error:
            self._buffer = b""
            self.close(f"the server's HTTP/2 cannot be understood: {error!r}")
            return
        self._buffer = data[at:]

    def connection_lost(self, error: Exception | None) -> None:
        """End what is open."""
        self.closing = self.closing or f"connection reset: {error or 'closed by the server'}"
        for stream in list(self._calls):
            self._forget(stream, self.closing)

    # --- frames ----------------------------------------------------------------------------------------------------

    def _data(self, flags: int, stream: int, payload: bytes) -> None:
        size = len(payload)
        self._received += size
        if self._received > LARGEST_WINDOW // 4:
            self.write(frame(WINDOW_UPDATE, 0, 0, _UINT32.pack(self._received)))
            self._received = 0
        if flags & PADDED:
            payload = payload[1 : size - payload[0]]
        call = self._calls.get(stream)
        if call is not None:  # else it was cancelled, and this crossed the word of it
            call.receive(payload, size)
            if flags & END_STREAM:
                self._forget(stream)

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._fragments is not None and kind != CONTINUATION:
            raise ConnectionError("a header block was cut")
        if kind == HEADERS:
            start = 1 if flags & PADDED else 0
            end = len(payload) - (payload[0] if flags & PADDED else 0)
            start += 5 if flags & PRIORITY else 0
            self._block(flags, stream, flags, payload[start:end])
        elif kind == CONTINUATION and self._fragments is not None:
            of, first_flags, begun = self._fragments
            self._block(flags, of, first_flags, begun + payload)
        elif kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                self._set(name, value)
            self.write(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            (more,) = _UINT32.unpack(payload)
            if stream == 0:
                self.window += more
                for call in list(self._calls.values()):
                    call.flush()
            elif stream in self._calls:
                self._calls[stream].widen(more)
        elif kind == RST_STREAM:
            self._forget(stream, f"stream reset by the server, code {_UINT32.unpack(payload)[0]}")
        elif kind == GOAWAY:
            last, code = struct.unpack(">II", payload[:8])
            self.closing = f"the server is going away, code {code} {payload[8:].decode(errors='replace')}".rstrip()
            for number in [number for number in self._calls if number > last]:
                self._forget(number, self.closing)
            if not self._calls:
                self.close()
        elif kind == PUSH_PROMISE:
            raise ConnectionError("a push, which was not allowed")

    def _block(self, flags: int, stream: int, first_flags: int, block: bytes) -> None:
        if not flags & END_HEADERS:
            self._fragments = (stream, first_flags, block)
            return
        self._fragments = None
        headers = self._decode(block)  # also of a call that is over: the decoder's table must stay in step
        call = self._calls.get(stream)
        if call is not None:
            call.headers.update(headers)
            if first_flags & END_STREAM:
                self._forget(stream)

    def _decode(self, block: bytes) -> list[tuple[str, str]]:
        """Decode a header block; without a table, which the peer gives up as we ask, equal bytes mean the same."""
        found = self._decoded.get(block)
        if found is None:
            found = [(str(name), str(value)) for name, value in self._decoder.decode(block)]
            if self._decoder.header_table_size == 0 and len(self._decoded) < REMEMBERED:
                self._decoded[block] = found
        return found

    def _set(self, name: int, value: int) -> None:
        if name == INITIAL_WINDOW:
            more, self._stream_window = value - self._stream_window, value
            for call in list(self._calls.values()):
                call.widen(more)
        elif name == MAX_FRAME:
            self.max_frame = value
        elif name == MAX_STREAMS:
            self._max_streams = value

    def _forget(self, stream: int, error: str | None = None) -> None:
        call = self._calls.pop(stream, None)
        if call is not None:
            call.end(error)
        if self.closing is not None and not self._calls:
            self.close()
