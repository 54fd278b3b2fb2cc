"""API keys: who may ask, and for how much. Read from a TOML file that holds hashes only.

A key is 256 random bits, so one round of SHA-256 is enough to hide it: there is nothing to guess. A presented key is
compared to every hash in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tritonstream_gateway.errors import unauthorized
from tritonstream_gateway.settings import BadSettings

PREFIX = "ts-"
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key: its name in logs and metrics, the SHA-256 of its secret, and its limits (None: no limit).

    `max_concurrency` bounds its open requests, `tokens_per_minute` its tokens of prompts and answers together.
    """

    name: str
    sha256: str
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise BadSettings(f"key {self.name!r}: sha256 must be 64 hexadecimal digits, got {len(self.sha256)}")
        for name in ("max_concurrency", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise BadSettings(f"key {self.name!r}: {name} must be a whole number of at least 1, got {value!r}")


class Keys:
    """All keys; with none, everybody may ask."""

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        self.keys = tuple(keys)

    @classmethod
    def read(cls, path: Path | None) -> Keys:
        """Read a keys file. Raises BadSettings."""
        if path is None:
            return cls()
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8")).get("key", [])
            keys = [Key(**table) for table in tables]
        except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
            raise BadSettings(f"keys: {path} cannot be read: {error}") from error
        if not keys or len({key.name for key in keys}) < len(keys):
            raise BadSettings(f"keys: {path} must hold at least one [[key]], each with a name of its own")
        return cls(keys)

    def find(self, authorization: str | None) -> int | None:
        """Return the number of the key in an Authorization header, None where none is needed. Raises Failure (401)."""
        if not self.keys:
            return None
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise unauthorized("no API key: send the header `Authorization: Bearer KEY`")
        digest = hash_of(authorization[len(_SCHEME) :].strip())
        matches = [hmac.compare_digest(digest, key.sha256) for key in self.keys]  # all of them, whichever it is
        if True not in matches:
            raise unauthorized("the API key is not known here")
        return matches.index(True)


def hash_of(secret: str) -> str:
    """Hash a secret as the keys file has it."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()


def make(name: str, **limits: int | None) -> tuple[str, str]:
    """Make a key: its secret, to be handed over once, and the table that goes into the keys file."""
    secret = PREFIX + secrets.token_urlsafe(32)
    lines = ["[[key]]", f'name = "{name}"', f'sha256 = "{hash_of(secret)}"']
    lines += [f"{limit} = {value}" for limit, value in limits.items() if value is not None]
    return secret, "\n".join(lines) + "\n"
