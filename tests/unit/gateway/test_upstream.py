"""The gateway's connections to Triton, when none can be made, and what its readiness says meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonstream import ServerUnavailable, question
from tritonstream_gateway import health, upstream
from tritonstream_gateway.settings import Settings
from tritonstream_gateway.upstream import Address, Upstream

from tests.support.identity import Identity
from tests.unit.client.scripted import ScriptedTriton
from tools.health import GATEWAY_SECONDS
from tools.server import LOOPBACK, free_port


@pytest.fixture
def deaf() -> Iterator[str]:
    """The address of a server whose queue of connections is full: the next is neither taken nor refused."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=0))
        address = listener.getsockname()[:2]
        while True:
            caller = stack.enter_context(socket.socket())
            caller.settimeout(0.5)
            try:
                caller.connect(address)
            except TimeoutError:
                break
        yield f"{LOOPBACK}:{address[1]}"


async def test_all_who_wait_for_a_connection_wait_once(deaf: str) -> None:
    """They share one attempt, and one that leaves takes it from nobody."""
    triton = Upstream(Address(url=deaf))
    began = time.monotonic()
    asking = [asyncio.create_task(triton.ask(question.server_ready(), 60)) for _ in range(6)]
    await asyncio.sleep(0)
    asking[0].cancel()
    said = await asyncio.gather(*asking, return_exceptions=True)
    assert time.monotonic() - began < 2 * upstream.DIAL_SECONDS
    assert isinstance(said[0], asyncio.CancelledError)
    assert {type(one) for one in said[1:]} == {ServerUnavailable}
    assert f"{deaf}: no connection within 3 s" in str(said[1])


async def test_readiness_is_told_before_whoever_asks_gives_up(deaf: str) -> None:
    """All that is asked of Triton has one bound, and the container's health check waits for longer."""
    began = time.monotonic()
    reason = await health.Health(Settings(triton=deaf), Upstream(Address(url=deaf))).failing()
    assert reason is not None
    assert time.monotonic() - began < GATEWAY_SECONDS


async def test_a_name_that_leads_nowhere_is_said() -> None:
    """By its own words, with the address."""
    with pytest.raises(ServerUnavailable, match=r"cannot be reached at nowhere\.invalid:8001"):
        await Upstream(Address(url="nowhere.invalid:8001")).ask(question.server_ready(), 60)


async def test_a_closed_upstream_dials_no_more(deaf: str) -> None:
    """What still waits for its connection ends at once."""
    triton = Upstream(Address(url=deaf))
    asking = asyncio.create_task(triton.ask(question.server_ready(), 60))
    await asyncio.sleep(0)
    began = time.monotonic()
    await triton.close()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert time.monotonic() - began < upstream.DIAL_SECONDS


async def test_each_address_of_a_name_is_tried() -> None:
    """localhost is ::1 and 127.0.0.1 on many machines: whoever listens on one is found."""
    port = free_port()
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.read(24)).startswith(b"PRI * HTTP/2.0")
        writer.close()
        ended.set()

    async with await asyncio.start_server(serve, LOOPBACK, port):
        with pytest.raises(ServerUnavailable):
            await Upstream(Address(url=f"localhost:{port}")).ask(question.server_ready(), 30)
        await asyncio.wait_for(ended.wait(), 30)


async def test_an_encrypted_server(tmp_path: Path) -> None:
    """Its certificate is looked at, with the name by which the server was called."""
    identity = Identity.make("localhost")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(identity.certificate)
    credentials = grpc.ssl_server_credentials([(identity.key, identity.certificate)])
    with ScriptedTriton(credentials=credentials) as server:
        named = Address(url=f"localhost:{server.port}", tls=True, ca=ca)
        assert await Upstream(named).ask(question.server_ready(), 30)
        with pytest.raises(ServerUnavailable, match="certificate"):
            await Upstream(Address(url=server.url, tls=True, ca=ca)).ask(question.server_ready(), 30)
