"""The settings of a connection are checked where they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tritonstream import TLS, Client, InvalidRequest, Keepalive, Retries
from tritonstream.connection import Connection


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"url": ""}, "url must be host:port, got ''"),
        ({"url": "http://host:8000/"}, "try 'host:8000' instead"),
        ({"url": "grpcs://host:8001"}, "try 'host:8001' instead"),
        ({"channels": 0}, "channels must be a whole number from 1 to 1024, got 0"),
        ({"metadata": {"X-Key": "v"}}, "metadata 'X-Key' must have a lower-case name"),
        ({"metadata": {"x-key": "a\nb"}}, "metadata 'x-key'"),
    ],
)
def test_nonsense_is_refused(values: dict[str, Any], message: str) -> None:
    """The message names the setting."""
    with pytest.raises(InvalidRequest, match=message):
        Client(**{"url": "host:8001", **values})


def test_times_and_attempts_are_checked() -> None:
    """Keepalive and Retries name their field."""
    with pytest.raises(InvalidRequest, match="interval must be a number of seconds above 0, got 0"):
        Keepalive(interval=0)
    with pytest.raises(InvalidRequest, match="attempts must be a whole number of at least 1, got 0"):
        Retries(attempts=0)
    with pytest.raises(InvalidRequest, match="longest must be a number of seconds from 0, got -1"):
        Retries(longest=-1)


def test_certificates_are_read_when_they_are_named(tmp_path: Path) -> None:
    """A wrong path is told at once, and a key is not shown."""
    (tmp_path / "key.pem").write_bytes(b"key")
    tls = TLS(client_certificate=b"cert", client_key=tmp_path / "key.pem")
    assert (tls.client_certificate, tls.client_key) == (b"cert", b"key")
    assert "key.pem" not in repr(tls)
    assert "b'key'" not in repr(tls)
    with pytest.raises(InvalidRequest, match=r"root_certificates: .*none\.pem cannot be read: No such file"):
        TLS(root_certificates=tmp_path / "none.pem")
    with pytest.raises(InvalidRequest, match="go together"):
        TLS(client_key=b"key")


def test_a_connection_says_all_to_grpc() -> None:
    """Message sizes are free, channels are separate, pings follow the keepalive, and own options win."""
    arguments = dict(
        Connection(
            url="host:1",
            keepalive=Keepalive(interval=20, timeout=5),
            tls=TLS(authority="inner"),
            options={"grpc.lb_policy_name": "round_robin", "grpc.max_reconnect_backoff_ms": 9},
        ).arguments()
    )
    assert arguments["grpc.max_receive_message_length"] == arguments["grpc.max_send_message_length"] == -1
    assert arguments["grpc.use_local_subchannel_pool"] == 1
    assert (arguments["grpc.keepalive_time_ms"], arguments["grpc.keepalive_timeout_ms"]) == (20_000, 5_000)
    assert arguments["grpc.ssl_target_name_override"] == "inner"
    assert arguments["grpc.lb_policy_name"] == "round_robin"
    assert arguments["grpc.max_reconnect_backoff_ms"] == 9
    assert "grpc.keepalive_time_ms" not in dict(Connection(url="host:1", keepalive=None).arguments())


def test_the_default_keepalive_is_one_that_triton_bears() -> None:
    """Triton, with its own defaults, closes connections that are pinged more often than every 300 s."""
    assert Keepalive().interval > 300
