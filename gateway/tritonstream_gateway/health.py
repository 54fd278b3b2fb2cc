"""Whether the model behind the gateway can answer, and what models there are. Read by routes.py.

Triton goes on to call itself ready when an engine has died or hangs; the served model's own metrics know better.
"""

from __future__ import annotations

import asyncio
import re
import time
from urllib.parse import urlsplit

from tritonstream import Model, TritonstreamError, question

from tritonstream_gateway.settings import Settings
from tritonstream_gateway.upstream import Upstream

PROBE_SECONDS = 3.0  # for all that a probe asks: whoever probes us waits for longer
MODELS_SECONDS = 1.0  # for so long the list of models is taken to be what it was
_SAMPLE = re.compile(rb"^tritonstream:(engine_alive|engine_stalled_seconds)\{(.*)\} (\S+)$", re.MULTILINE)


class Health:
    """The probes of one worker."""

    def __init__(self, settings: Settings, upstream: Upstream) -> None:
        self._settings = settings
        self._upstream = upstream
        self._models: tuple[Model, ...] = ()
        self._read_at = -MODELS_SECONDS

    async def models(self) -> tuple[Model, ...]:
        """Return the models that are ready. Raises a TritonstreamError when Triton does not answer."""
        if time.monotonic() - self._read_at > MODELS_SECONDS:
            found = await self._upstream.ask(question.models(), PROBE_SECONDS)
            self._models = tuple(model for model in found if model.ready)
            self._read_at = time.monotonic()
        return self._models

    async def failing(self) -> str | None:
        """Say why no request could be answered now; None when one could."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                if not await self._upstream.ask(question.server_ready(), PROBE_SECONDS):
                    return "Triton is not ready"
                page = await _get(self._settings.triton_metrics) if self._settings.triton_metrics else b""
        except TritonstreamError as error:
            return str(error)
        except TimeoutError:
            return f"Triton does not answer within {PROBE_SECONDS:g} s"
        except (OSError, ValueError) as error:
            return f"Triton's metrics cannot be read: {error}"
        for name, labels, value in _SAMPLE.findall(page):
            if name == b"engine_alive" and float(value) == 0:
                return f"the engine is dead: {labels.decode(errors='replace')}"
            if name == b"engine_stalled_seconds" and float(value) > self._settings.stall:
                return f"the engine has made no progress for {float(value):.0f} s: {labels.decode(errors='replace')}"
        return None


async def _get(url: str) -> bytes:
    """Fetch a page over plain HTTP. Raises OSError or ValueError."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        host = parts.netloc
        writer.write(f"GET {parts.path or '/'} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read(-1)
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ValueError(head.partition(b"\r\n")[0].decode(errors="replace"))
    return body
