"""Both clients behind one face, so that a test can be told once for the two."""

from __future__ import annotations

import asyncio
from typing import Any

from tritonstream import AsyncClient, Client, Completion, Delta


class Reader:
    """One of the twins, read to the end; `seen` keeps the deltas that came before an error."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seen: list[Delta] = []

    async def stream(
        self, url: str, prompt: Any = "Hi", *, settings: dict[str, Any] | None = None, **fields: Any
    ) -> str:
        """Stream an answer and return its text."""
        fields.setdefault("model", "tiny")
        if self.kind == "sync":
            await asyncio.to_thread(self._stream, url, prompt, settings or {}, fields)
        else:
            async with AsyncClient(url, **settings or {}) as client, client.stream(prompt, **fields) as deltas:
                async for delta in deltas:
                    self.seen.append(delta)
        return "".join(delta.text for delta in self.seen)

    def _stream(self, url: str, prompt: Any, settings: dict[str, Any], fields: dict[str, Any]) -> None:
        with Client(url, **settings) as client, client.stream(prompt, **fields) as deltas:
            for delta in deltas:
                self.seen.append(delta)

    async def generate(self, url: str, prompt: Any = "Hi", **fields: Any) -> Completion:
        """Return a complete answer."""
        fields.setdefault("model", "tiny")
        return await self.ask(url, "generate", prompt, **fields)  # type: ignore[no-any-return]

    async def ask(self, url: str, method: str, *arguments: Any, **fields: Any) -> Any:
        """Call any other method of the client."""

        def blocking() -> Any:
            with Client(url) as client:
                return getattr(client, method)(*arguments, **fields)

        if self.kind == "sync":
            return await asyncio.to_thread(blocking)
        async with AsyncClient(url) as client:
            return await getattr(client, method)(*arguments, **fields)
