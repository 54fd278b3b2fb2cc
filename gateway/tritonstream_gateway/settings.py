"""What an operator can set, as one value that refuses nonsense. Made by cli.py, handed to each worker as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from tritonstream_gateway.upstream import Address


class BadSettings(Exception):
    """The gateway cannot be run like this; the message names the setting, its value and its bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings; times in seconds, sizes in bytes. Each has its meaning in `tritonstream-gateway serve --help`."""

    host: str = "127.0.0.1"
    port: int = 9000
    workers: int = 2
    triton: str = "127.0.0.1:8001"
    triton_tls: bool = False
    triton_ca: Path | None = None
    triton_certificate: Path | None = None
    triton_key: Path | None = None
    triton_metrics: str = "http://127.0.0.1:8002/metrics"
    aliases: dict[str, str] = field(default_factory=lambda: {"Qwen-0.6B": "Qwen3-0.6B"})
    keys: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    max_body: int = 4 * 2**20
    body_timeout: float = 30.0
    max_open: int = 1_024
    max_waiting: int = 256
    request_timeout: float = 600.0
    keep_alive: float = 10.0
    stall: float = 30.0
    grace: float = 30.0
    cors_origins: tuple[str, ...] = ()
    log_requests: bool = False
    log_prompts: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, least, most in (
            ("workers", 1, 256),
            ("port", 0, 65_535),
            ("max_body", 1, 2**30),
            ("max_open", 1, 10**6),
            ("max_waiting", 1, 10**6),
            ("request_timeout", 0.001, 86_400),
            ("body_timeout", 0.001, 86_400),
            ("keep_alive", 0.01, 86_400),
            ("stall", 0.01, 86_400),
            ("grace", 0, 86_400),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise BadSettings(f"{name} must be from {least} to {most}, got {value}")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise BadSettings("tls_certificate and tls_key go together: give both or none")
        if (self.triton_certificate is None) != (self.triton_key is None):
            raise BadSettings("triton_certificate and triton_key go together: give both or none")
        if ":" not in self.triton or not self.triton.rpartition(":")[2].isdecimal():
            raise BadSettings(f"triton must be host:port of Triton's gRPC service, got {self.triton!r}")
        for name in ("keys", "tls_certificate", "tls_key", "triton_ca", "triton_certificate", "triton_key"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise BadSettings(f"{name}: there is no file {path}")

    @property
    def address(self) -> Address:
        """Where Triton is."""
        return Address(
            url=self.triton,
            tls=self.triton_tls or self.triton_ca is not None,
            ca=self.triton_ca,
            certificate=self.triton_certificate,
            key=self.triton_key,
        )

    def dump(self) -> str:
        """Spell the settings as JSON, for a worker."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def load(cls, text: str) -> Self:
        """Read what `dump` wrote."""
        values: dict[str, Any] = json.loads(text)
        paths = {item.name for item in fields(cls) if "Path" in str(item.type)}
        values = {name: Path(value) if name in paths and value else value for name, value in values.items()}
        return cls(**values | {"cors_origins": tuple(values["cors_origins"])})
