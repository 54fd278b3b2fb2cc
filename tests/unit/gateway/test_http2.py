"""The HTTP/2 connection, against a peer that is scripted frame by frame: what a real gRPC server seldom does."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import hpack
import pytest
from tritonstream_gateway import http2
from tritonstream_gateway.http2 import Call, Connection, Refused, frame

WITHIN = 30.0
HEADERS = ((":method", "POST"), (":path", "/x"))


def message(text: bytes) -> bytes:
    """A gRPC message."""
    return b"\0" + len(text).to_bytes(4, "big") + text


class Peer:
    """The other end: reads frames, writes bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.encode = hpack.Encoder().encode

    async def frame(self) -> tuple[int, int, int, bytes]:
        """Read a frame: its type, flags, stream and content."""
        head = await self._reader.readexactly(9)
        content = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        return head[3], head[4], int.from_bytes(head[5:], "big"), content

    async def until(self, kind: int) -> tuple[int, int, int, bytes]:
        """Read frames up to the first of a type."""
        while (found := await self.frame())[0] != kind:
            pass
        return found

    async def begin(self, *settings: tuple[int, int]) -> None:
        """Shake hands."""
        assert await self._reader.readexactly(len(http2.PREFACE)) == http2.PREFACE
        self.send(frame(http2.SETTINGS, 0, 0, b"".join(struct.pack(">HI", *one) for one in settings)))

    def send(self, *frames: bytes) -> None:
        """Write frames in one piece."""
        self.writer.write(b"".join(frames))

    def end(self, stream: int, status: str = "0") -> bytes:
        """Spell the trailers that end a stream."""
        flags = http2.END_HEADERS | http2.END_STREAM
        return frame(http2.HEADERS, flags, stream, self.encode([("grpc-status", status)]))


@asynccontextmanager
async def connected(script: Callable[[Peer], Awaitable[None]]) -> AsyncIterator[Connection]:
    """A connection to a peer that does as the script says; what fails there fails the test."""
    outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(Peer(reader, writer))
            outcome.set_result(None)
        except Exception as error:
            outcome.set_exception(error)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(loop), "127.0.0.1", port)
    try:
        async with asyncio.timeout(WITHIN):
            yield connection
            await outcome
    finally:
        connection.close()
        server.close()


async def everything(call: Call) -> list[bytes]:
    """Read a call to its end."""
    found: list[bytes] = []
    while more := await call.read():
        found += more
    return found


async def test_messages_however_they_are_cut() -> None:
    """Several in a frame, one over several frames, padded, and all of it in pieces of a byte: the same messages."""
    sent = [b"one", b"", b"x" * 300, b"last"]

    async def script(peer: Peer) -> None:
        await peer.begin()
        _, _, stream, _ = await peer.until(http2.HEADERS)
        data = b"".join(message(one) for one in sent)
        frames = frame(http2.DATA, 0, stream, data[:10])
        frames += frame(http2.DATA, http2.PADDED, stream, b"\x03" + data[10:200] + b"\0\0\0")
        frames += frame(http2.DATA, 0, stream, data[200:]) + peer.end(stream)
        for place in range(len(frames)):
            peer.send(frames[place : place + 1])
            await peer.writer.drain()

    async with connected(script) as connection:
        call = connection.call(HEADERS, b"")
        assert await everything(call) == sent
        assert (call.headers["grpc-status"], call.error) == ("0", None)


async def test_what_only_one_call_has_follows_what_all_have() -> None:
    """A peer reads the headers of call after call, each with metadata of its own, and remembers none of them."""
    metadata = [(("x-conversation", str(number)),) for number in range(3)]
    seen: list[list[tuple[str, str]]] = []

    async def script(peer: Peer) -> None:
        decoder = hpack.Decoder()
        await peer.begin()
        while len(seen) < len(metadata):
            _, _, stream, block = await peer.until(http2.HEADERS)
            seen.append([(str(name), str(value)) for name, value in decoder.decode(block)])
            peer.send(peer.end(stream))

    async with connected(script) as connection:
        for one in metadata:
            call = connection.call(HEADERS, b"", one)
            while not call.closed:
                await call.read()
    assert seen == [[*HEADERS, *one] for one in metadata]


async def test_a_header_block_in_fragments() -> None:
    """HEADERS and its CONTINUATIONs are one block."""

    async def script(peer: Peer) -> None:
        await peer.begin()
        _, _, stream, _ = await peer.until(http2.HEADERS)
        block = peer.encode([("grpc-status", "3"), ("grpc-message", "why not")])
        peer.send(
            frame(http2.HEADERS, http2.END_STREAM, stream, block[:2]),
            frame(http2.CONTINUATION, 0, stream, block[2:4]),
            frame(http2.CONTINUATION, http2.END_HEADERS, stream, block[4:]),
        )

    async with connected(script) as connection:
        call = connection.call(HEADERS, b"")
        assert await everything(call) == []
        assert call.headers == {"grpc-status": "3", "grpc-message": "why not"}


async def test_a_request_waits_for_the_peers_room() -> None:
    """No more is sent than the peer's windows and frame size allow, and the rest when it makes room."""
    body = bytes(range(256)) * 400

    async def script(peer: Peer) -> None:
        await peer.begin((http2.INITIAL_WINDOW, 1_000))
        _, _, stream, _ = await peer.until(http2.HEADERS)
        got, room = b"", 1_000
        while len(got) < len(message(body)):
            kind, flags, _, content = await peer.frame()
            if kind == http2.DATA:
                got += content
                room -= len(content)
                assert room >= 0, "more than there was room for"
                if room == 0 and not flags & http2.END_STREAM:
                    more = struct.pack(">I", 30_000)
                    peer.send(frame(http2.WINDOW_UPDATE, 0, 0, more), frame(http2.WINDOW_UPDATE, 0, stream, more))
                    room += 30_000
        assert got == message(body)
        peer.send(peer.end(stream))

    async with connected(script) as connection:
        while connection._stream_window != 1_000:  # noqa: ASYNC110  # until the peer's settings are here
            await asyncio.sleep(0)
        call = connection.call(HEADERS, body)
        await everything(call)
        assert call.error is None


async def test_a_reader_who_waits_holds_the_peer_back() -> None:
    """Room is given back for what was read; what waits unread is bounded by the stream's window."""
    big = b"x" * 16_000

    async def script(peer: Peer) -> None:
        await peer.begin()
        _, _, stream, _ = await peer.until(http2.HEADERS)
        room, sent = http2.STREAM_WINDOW, 0
        while sent < 100:
            size = len(message(big))
            while room < size:
                kind, _, of, content = await peer.until(http2.WINDOW_UPDATE)
                if kind == http2.WINDOW_UPDATE and of == stream:
                    room += int.from_bytes(content, "big")
            peer.send(frame(http2.DATA, 0, stream, message(big)))
            await peer.writer.drain()
            room -= size
            sent += 1
        peer.send(peer.end(stream))

    async with connected(script) as connection:
        call = connection.call(HEADERS, b"")
        most = 0
        count = 0
        while not call.closed or call.messages:
            for _ in range(20):  # let come what may
                await asyncio.sleep(0)
            most = max(most, call.unread)
            count += len(await call.read())
        assert count == 100
        assert most <= 2 * http2.STREAM_WINDOW


async def test_a_server_that_goes_away() -> None:
    """GOAWAY: what it still answers goes on, what it never saw fails, nothing new is begun."""

    async def script(peer: Peer) -> None:
        await peer.begin()
        for _ in range(2):
            await peer.until(http2.HEADERS)
        peer.send(frame(http2.GOAWAY, 0, 0, struct.pack(">II", 1, 0)))
        peer.send(frame(http2.DATA, 0, 1, message(b"still")), peer.end(1))

    async with connected(script) as connection:
        first, second = connection.call(HEADERS, b""), connection.call(HEADERS, b"")
        assert await everything(first) == [b"still"]
        assert first.error is None
        assert await everything(second) == []
        assert second.error and "going away" in second.error
        with pytest.raises(Refused):
            connection.call(HEADERS, b"")


async def test_resets_limits_and_pings() -> None:
    """A stream that is reset ends with its code, one beyond the peer's limit is refused, a ping is answered."""

    async def script(peer: Peer) -> None:
        await peer.begin((http2.MAX_STREAMS, 1))
        _, _, stream, _ = await peer.until(http2.HEADERS)
        peer.send(frame(http2.PING, 0, 0, b"12345678"))
        kind, flags, _, content = await peer.until(http2.PING)
        assert (kind, flags, content) == (http2.PING, http2.ACK, b"12345678")
        peer.send(frame(http2.RST_STREAM, 0, stream, struct.pack(">I", 7)))
        _, _, stream, _ = await peer.until(http2.HEADERS)
        assert (await peer.until(http2.RST_STREAM))[2:] == (stream, struct.pack(">I", http2.CANCEL))

    async with connected(script) as connection:
        while connection._max_streams != 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        call = connection.call(HEADERS, b"")
        with pytest.raises(Refused):
            connection.call(HEADERS, b"")
        assert await everything(call) == []
        assert call.error == "stream reset by the server, code 7"
        connection.call(HEADERS, b"").cancel()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(5_000_000),
        frame(http2.PUSH_PROMISE, 0, 1, b"1234"),
        frame(http2.WINDOW_UPDATE, 0, 0, b"1"),
        frame(http2.HEADERS, http2.END_HEADERS, 1, b"\xff\xff\xff\xff"),
        frame(http2.HEADERS, 0, 1, b"") + frame(http2.PING, 0, 0, b"12345678"),
    ],
    ids=["HTTP/1", "a push", "a short frame", "bad headers", "a block cut short"],
)
async def test_nonsense_ends_the_connection(nonsense: bytes) -> None:
    """What cannot be understood is said to the calls, and is no exception in the event loop."""

    async def script(peer: Peer) -> None:
        await peer.begin()
        await peer.until(http2.HEADERS)
        peer.send(nonsense)

    async with connected(script) as connection:
        call = connection.call(HEADERS, b"")
        assert await everything(call) == []
        assert call.error
        assert connection.closing
