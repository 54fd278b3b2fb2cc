"""What locust's process and the driver say to each other: a line of JSON for each question, answer and pulse.

Read by pump.py (gevent) and driver.py (asyncio). No I/O. Times are CLOCK_MONOTONIC in seconds, which both share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from loadtests.kit.histogram import Histogram

Api = Literal["grpc", "openai"]
Outcome = Literal["complete", "left", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server that is asked; `model` "" is the first one it says is ready. `deadline` is of one request."""

    api: Api
    url: str
    model: str = ""
    deadline: float = 120.0
    channels: int = 4
    key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be asked."""
        if not self.url:
            raise ValueError("--host must name the server: host:port for gRPC, http://… for an OpenAI-compatible one")
        if self.deadline <= 0:
            raise ValueError(f"--deadline must be above 0 seconds, got {self.deadline:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `due` is when it should be sent, from which its latencies count.

    `exact` makes the answer `max_tokens` long whatever the model says. A reader leaves after `leave_after` messages,
    and waits `pause` seconds after each; `keep_text` brings the answer back.
    """

    prompt: str | list[dict[str, str]]
    max_tokens: int
    due: float
    exact: bool = False
    leave_after: int | None = None
    pause: float = 0.0
    keep_text: bool = False


@dataclass(slots=True, kw_only=True)
class Seen:
    """What became of a request: seconds from `due` on, None for what did not come to be.

    `gaps` are those between tokens: a token that came along with another one had none. `kind` names a failure's class
    and `said` what it said.
    """

    outcome: Outcome
    late: float = 0.0
    first: float | None = None
    total: float = 0.0
    messages: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    size: int = 0
    gaps: Histogram = field(default_factory=Histogram)
    kind: str = ""
    said: str = ""
    text: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first one, by the time they took; None where all came at once."""
        if self.first is None or self.messages < 2 or self.tokens < 2 or self.total <= self.first:
            return None
        return (self.tokens - 1) / (self.total - self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What the driver did in the last `seconds`: messages received, CPU seconds spent, requests open at the end."""

    seconds: float
    messages: int
    cpu: float
    open: int


def write(kind: str, number: int, body: Mapping[str, Any]) -> bytes:
    """Spell one line."""
    return json.dumps([kind, number, body], separators=(",", ":")).encode() + b"\n"


def read(line: bytes) -> tuple[str, int, dict[str, Any]]:
    """Read one line: its kind, the number of the request it belongs to, and what it holds."""
    kind, number, body = json.loads(line)
    return kind, number, body


def seen_plain(seen: Seen) -> dict[str, Any]:
    """Return what was seen as a line may hold it."""
    return {name: getattr(seen, name) for name in _SEEN if name != "gaps"} | {"gaps": seen.gaps.plain()}


def seen_read(body: dict[str, Any]) -> Seen:
    """Make of a line's body what was seen."""
    return Seen(**body | {"gaps": Histogram.read(body["gaps"])})


def plain(value: Target | Ask | Pulse) -> dict[str, Any]:
    """Return one of these as a line may hold it."""
    return asdict(value)


_SEEN = tuple(Seen.__dataclass_fields__)
