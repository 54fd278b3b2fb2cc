"""Channels: encryption as it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from tritonstream import TLS, Retries, ServerUnavailable

from tests.support.identity import Identity
from tests.unit.client.reader import Reader
from tests.unit.client.scripted import ScriptedTriton


@pytest.fixture(scope="module")
def server_identity() -> Identity:
    """The server's certificate, for a name that is not its address."""
    return Identity.make("triton.example")


@pytest.fixture(scope="module")
def client_identity() -> Identity:
    """The client's certificate."""
    return Identity.make("client.example")


@pytest.fixture
def encrypted(server_identity: Identity, client_identity: Identity) -> Iterator[ScriptedTriton]:
    """A server that wants to know who calls."""
    credentials = grpc.ssl_server_credentials(
        [(server_identity.key, server_identity.certificate)],
        root_certificates=client_identity.certificate,
        require_client_auth=True,
    )
    with ScriptedTriton(credentials=credentials) as server:
        yield server


async def test_mutual_tls(
    encrypted: ScriptedTriton, reader: Reader, server_identity: Identity, client_identity: Identity
) -> None:
    """Each side proves who it is; the certificate's name is told apart from the address."""
    tls = TLS(
        root_certificates=server_identity.certificate,
        client_certificate=client_identity.certificate,
        client_key=client_identity.key,
        authority="triton.example",
    )
    assert await reader.stream(encrypted.url, settings={"tls": tls}) == "Hello world"


async def test_a_server_that_is_not_trusted_gets_no_request(encrypted: ScriptedTriton, reader: Reader) -> None:
    """Without its root certificate the connection is refused, by this side."""
    with pytest.raises(ServerUnavailable) as caught:
        await reader.stream(
            encrypted.url, settings={"tls": TLS(authority="triton.example"), "retries": Retries(attempts=1)}
        )
    assert caught.value.blame == "network"
    assert encrypted.calls == []


async def test_plain_text_to_an_encrypted_port_fails(encrypted: ScriptedTriton, reader: Reader) -> None:
    """The wrong kind of connection is an error, not a hang."""
    with pytest.raises(ServerUnavailable):
        await reader.stream(encrypted.url, settings={"retries": Retries(attempts=1)})
