"""How to reach a server: address, encryption, keepalive, number of connections, and when to try again.

Values only, checked when they are made; rpc.py turns them into channels. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tritonstream.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TLS:
    """Encryption. Each certificate is the path of a PEM file, or its content as bytes.

    Without `root_certificates` those that come with gRPC are trusted. `client_certificate` and `client_key` go
    together and prove who we are (mutual TLS). `authority` is the name to expect in the server's certificate where it
    is not the host of the URL. Raises InvalidRequest for a file that cannot be read, or half a pair.
    """

    root_certificates: Path | str | bytes | None = None
    client_certificate: Path | str | bytes | None = None
    client_key: Path | str | bytes | None = field(default=None, repr=False)
    authority: str | None = None

    def __post_init__(self) -> None:
        """Read the files now, so that a wrong path is told here and not by the first call."""
        if (self.client_certificate is None) != (self.client_key is None):
            raise InvalidRequest("client_certificate and client_key go together: give both or none")
        for name in ("root_certificates", "client_certificate", "client_key"):
            object.__setattr__(self, name, _pem(name, getattr(self, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """Pings on a connection that is silent while a stream waits, to notice a peer that is gone.

    `interval` 310 s is what a Triton with its own defaults bears: it takes pings closer than 300 s apart
    (`--grpc-http2-min-recv-ping-interval-without-data`) for an attack, and answers by closing the connection with all
    its streams. Lower both together. `timeout` is the wait for the answer to a ping.
    """

    interval: float = 310.0
    timeout: float = 20.0

    def __post_init__(self) -> None:
        """Refuse times that are none."""
        for name in ("interval", "timeout"):
            _seconds(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """When to send a request again: only on ServerUnavailable, and never once a first delta was seen.

    `attempts` counts the first one too; 1 never tries again. The wait before another starts at `initial` seconds and
    doubles up to `longest`, with up to `jitter` seconds added at random so that many clients do not return at once.
    """

    attempts: int = 4
    initial: float = 0.1
    longest: float = 2.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        """Refuse nonsense."""
        if not isinstance(self.attempts, int) or self.attempts < 1:
            raise InvalidRequest(f"attempts must be a whole number of at least 1, got {self.attempts!r}")
        for name in ("initial", "longest", "jitter"):
            _seconds(name, getattr(self, name), zero=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """All that a client knows of its server. `channels` is the number of HTTP/2 connections.

    `metadata` goes with every call (an API key, for one). `options` are gRPC's own channel arguments, and win over
    those made here; {"grpc.lb_policy_name": "round_robin"} spreads the calls over all addresses of a name.
    """

    url: str
    tls: TLS | None = None
    channels: int = 2
    keepalive: Keepalive | None = field(default_factory=Keepalive)
    metadata: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an address that cannot be one of gRPC, and metadata that cannot be sent."""
        if not isinstance(self.url, str) or not self.url.strip():
            raise InvalidRequest(f"url must be host:port, got {self.url!r}")
        if self.url.startswith(("http://", "https://", "grpc://", "grpcs://")):
            bare = self.url.partition("://")[2].rstrip("/")
            raise InvalidRequest(
                f"url must be host:port of Triton's gRPC service, without a scheme: try {bare!r} instead of "
                f"{self.url!r} (gRPC is on port 8001 unless told otherwise; encryption is asked for with tls=TLS())"
            )
        if not isinstance(self.channels, int) or not 1 <= self.channels <= 1_024:
            raise InvalidRequest(f"channels must be a whole number from 1 to 1024, got {self.channels!r}")
        for name, value in self.metadata.items():
            if name != name.lower() or not name.isascii() or not value.isascii() or not value.isprintable():
                raise InvalidRequest(f"metadata {name!r} must have a lower-case name and a printable ASCII value")

    def arguments(self) -> list[tuple[str, int | str]]:
        """Return the channel arguments of gRPC that say all this."""
        arguments: dict[str, int | str] = {
            # gRPC's own limit is 4 MB, less than a long answer with its probabilities.
            "grpc.max_receive_message_length": -1,
            "grpc.max_send_message_length": -1,
            # Without it all channels to one address share a connection, and a pool of them is none.
            "grpc.use_local_subchannel_pool": 1,
            # gRPC's own waits grow to 120 s: a server that came back would be taken for gone.
            "grpc.initial_reconnect_backoff_ms": 100,
            "grpc.min_reconnect_backoff_ms": 1_000,
            "grpc.max_reconnect_backoff_ms": 3_000,
        }
        if self.keepalive is not None:
            arguments |= {
                "grpc.keepalive_time_ms": round(self.keepalive.interval * 1_000),
                "grpc.keepalive_timeout_ms": round(self.keepalive.timeout * 1_000),
                "grpc.keepalive_permit_without_calls": 0,
                "grpc.http2.max_pings_without_data": 0,  # else gRPC stops after two, and a long wait goes unwatched
            }
        if self.tls is not None and self.tls.authority is not None:
            arguments |= {
                "grpc.ssl_target_name_override": self.tls.authority,
                "grpc.default_authority": self.tls.authority,
            }
        return list((arguments | dict(self.options)).items())

    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what goes with every call.

        Not among it is `triton_grpc_error`, which would make Triton end a failed stream with a real gRPC status: its
        server (2.51) has crashed after some dozens of such streams, and its own errors have no status all the same.
        """
        return tuple(self.metadata.items())


def _pem(name: str, given: Path | str | bytes | None) -> bytes | None:
    if given is None or isinstance(given, bytes):
        return given
    try:
        return Path(given).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{name}: {given} cannot be read: {error.strerror}") from error


def _seconds(name: str, value: object, *, zero: bool = False) -> None:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value < 0
        or (value == 0 and not zero)
    ):
        raise InvalidRequest(f"{name} must be a number of seconds {'from' if zero else 'above'} 0, got {value!r}")
