"""The story of a request, from its key to its last byte; and the smaller endpoints beside it.

Made by worker.py, one per worker. A request is read, checked and admitted before anything of it is sent to Triton, and
what fails before its first token is an HTTP status. Nothing runs for a token but `Answer.batch`, `Chunks.events` and
one `send`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from msgspec import json
from tritonstream import Completion, ModelNotFound, Request

from tritonstream_gateway import errors, metrics, openapi, translate, whole
from tritonstream_gateway.caller import Caller
from tritonstream_gateway.errors import Failure
from tritonstream_gateway.events import KEEP_ALIVE, ChatChunks, Chunks, Spent, TextChunks
from tritonstream_gateway.health import Health
from tritonstream_gateway.keys import Keys
from tritonstream_gateway.ledger import Ledger, Ticket
from tritonstream_gateway.many import Many
from tritonstream_gateway.schema import IGNORED_HEADER, Asked, ChatRequest, CompletionRequest
from tritonstream_gateway.settings import Settings
from tritonstream_gateway.upstream import Upstream
from tritonstream_gateway.version import VERSION

log = logging.getLogger("tritonstream_gateway")

DRAINING = "the gateway is shutting down"
Route = Callable[[Caller], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request, read and spelled: what to ask of Triton, and how to write the answer."""

    asked: Asked
    ident: str
    created: int
    model: str
    requests: list[Request]
    echoes: list[str]

    @property
    def head(self) -> tuple[str, int, str]:
        """What every object of the reply begins with."""
        return self.ident, self.created, self.model

    @property
    def top(self) -> int:
        """How many likeliest tokens a chat's reply lists for each."""
        return self.requests[0].sampling.logprobs or 0

    @property
    def choices(self) -> int:
        """How many answers there are to each prompt."""
        return self.requests[0].sampling.n or 1

    def chunks(self) -> Chunks:
        """What writes the stream."""
        options = self.asked.stream_options
        flags = {
            "include_usage": bool(options and options.include_usage),
            "continuous": bool(options and options.continuous_usage_stats),
        }
        if isinstance(self.asked, ChatRequest):
            return ChatChunks(*self.head, top=self.top, **flags)
        return TextChunks(*self.head, **flags)

    def opening(self, chunks: Chunks) -> bytes:
        """What the stream begins with, once the engine has answered."""
        if not isinstance(chunks, TextChunks):
            return chunks.opening(self.choices)
        return b"".join(
            chunks.echo(prompt * self.choices + index, echo)
            for prompt, echo in enumerate(self.echoes)
            if echo
            for index in range(self.choices)
        )

    def whole(self, completions: list[Completion]) -> bytes:
        """Write the reply that does not stream."""
        if isinstance(self.asked, ChatRequest):
            return json.encode(whole.chat_completion(*self.head, completions[0], self.top))
        return json.encode(whole.text_completion(*self.head, completions, self.echoes))


class Gateway:
    """The endpoints of one worker."""

    def __init__(self, settings: Settings, keys: Keys, ledger: Ledger) -> None:
        self._settings = settings
        self._keys = keys
        self._ledger = ledger
        self.upstream = Upstream(settings.address)
        self._health = Health(settings, self.upstream)
        self.draining = False
        self.routes: dict[str, tuple[str, Route]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._live),
            "/health/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
            "/version": ("GET", self._version),
            "/openapi.json": ("GET", self._openapi),
            "/docs": ("GET", self._docs),
        }

    # --- the story of a request ------------------------------------------------------------------------------------

    async def _chat(self, caller: Caller) -> None:
        async def read() -> Work:
            asked = translate.read(ChatRequest, await self._body(caller))
            model = await self._model(asked)
            request = translate.chat(asked, model, self._settings.request_timeout)
            return Work(asked=asked, model=model, requests=[request], echoes=[""], **_stamp("chatcmpl-"))

        await self._serve(caller, read)

    async def _completions(self, caller: Caller) -> None:
        async def read() -> Work:
            asked = translate.read(CompletionRequest, await self._body(caller))
            model = await self._model(asked)
            requests = translate.completions(asked, model, self._settings.request_timeout)
            echoes = [str(request.prompt) if asked.echo else "" for request in requests]
            return Work(asked=asked, model=model, requests=requests, echoes=echoes, **_stamp("cmpl-"))

        await self._serve(caller, read)

    async def _serve(self, caller: Caller, read: Callable[[], Awaitable[Work]]) -> None:
        """Check the key, read the request, admit it, answer it."""
        key = self._keys.find(caller.header("authorization"))
        if self.draining:
            raise errors.overloaded(DRAINING, "draining")
        work = await read()
        if self.draining:  # it began while the body came
            raise errors.overloaded(DRAINING, "draining")
        if self._settings.log_prompts:
            log.info("%s asks %r", work.ident, [request.prompt for request in work.requests])
        caller.reply_headers["x-request-id"] = work.ident
        if ignored := work.asked.ignored():
            caller.reply_headers[IGNORED_HEADER] = ", ".join(ignored).encode("ascii", "replace").decode()
        ticket = self._ledger.admit(key)
        caller.key = None if key is None else self._keys.keys[key].name
        spent = Spent()
        try:
            async with caller.present():  # who leaves ends this block, and with it the engine's work
                if work.asked.stream:
                    await self._stream(caller, work, ticket, spent)
                else:
                    await self._whole(caller, work, ticket, spent)
        finally:
            usage = spent.usage()
            ticket.close(usage.total_tokens)
            metrics.tokens.labels("prompt").inc(usage.prompt_tokens)
            metrics.tokens.labels("completion").inc(usage.completion_tokens)
            caller.tokens = usage.completion_tokens

    async def _stream(self, caller: Caller, work: Work, ticket: Ticket, spent: Spent) -> None:
        chunks = work.chunks()
        chunks.spent = spent
        async with Many(self.upstream, work.requests, stream=True) as answers:
            try:
                first = asyncio.ensure_future(answers.batch())
                try:
                    while not (await asyncio.wait({first}, timeout=self._settings.keep_alive))[0]:
                        await caller.begin_events()
                        await caller.more(KEEP_ALIVE)
                    prompt, deltas = first.result()
                finally:
                    first.cancel()
                ticket.start()
                caller.first_token()
                await caller.begin_events()
                data = work.opening(chunks)
                while deltas:
                    data += chunks.events(deltas, prompt, prompt * work.choices)
                    if answers.complete:  # the last delta and the end are one write
                        break
                    await caller.more(data)
                    data = b""
                    prompt, deltas = await answers.batch()
                await caller.end(data + chunks.ending())
            except Exception as error:
                if not caller.begun:
                    raise
                await caller.end(self._failure(error).event())

    async def _whole(self, caller: Caller, work: Work, ticket: Ticket, spent: Spent) -> None:
        async with Many(self.upstream, work.requests, stream=False) as answers:
            found = await answers.whole()
        ticket.start()
        caller.first_token()
        for prompt, deltas in enumerate(found):
            for delta in deltas:
                spent.add(delta, prompt)
        await caller.reply(200, work.whole([Completion.gather(deltas) for deltas in found]))

    def _failure(self, error: Exception) -> Failure:
        found = errors.failure(error)
        if found.status == 500:
            log.error("a request failed: %s", error, exc_info=error)
        return found

    async def _body(self, caller: Caller) -> bytes:
        return await caller.body(self._settings.max_body, self._settings.body_timeout)

    async def _model(self, asked: Asked) -> str:
        """Resolve an alias; without a name it is the only model there is."""
        if asked.model:
            aliased = self._settings.aliases.get(asked.model)
            if aliased is not None and all(model.name != asked.model for model in await self._health.models()):
                return aliased
            return asked.model
        models = await self._health.models()
        if len(models) != 1:
            names = ", ".join(model.name for model in models) or "none"
            raise errors.invalid(f"model is missing: name one of those served: {names}", "model")
        return models[0].name

    # --- the smaller endpoints ---------------------------------------------------------------------------------------

    async def _models(self, caller: Caller) -> None:
        self._keys.find(caller.header("authorization"))
        names = {model.name: model.name for model in await self._health.models()}
        names |= {alias: name for alias, name in self._settings.aliases.items() if name in names and alias not in names}
        cards = [
            {"id": name, "object": "model", "created": 0, "owned_by": "tritonstream", "root": root}
            for name, root in names.items()
        ]
        await caller.reply(200, json.encode({"object": "list", "data": cards}))

    async def model(self, caller: Caller, name: str) -> None:
        """GET /v1/models/NAME."""
        self._keys.find(caller.header("authorization"))
        root = self._settings.aliases.get(name, name)
        if all(model.name != root for model in await self._health.models()):
            raise ModelNotFound(f"the model {name!r} is not served here")
        card = {"id": name, "object": "model", "created": 0, "owned_by": "tritonstream", "root": root}
        await caller.reply(200, json.encode(card))

    async def _live(self, caller: Caller) -> None:
        await caller.reply(200, json.encode({"status": "ok"}))

    async def _ready(self, caller: Caller) -> None:
        reason = DRAINING if self.draining else await self._health.failing()
        if reason is None:
            await caller.reply(200, json.encode({"status": "ok"}))
        else:
            caller.reply_headers["retry-after"] = str(errors.RETRY_SECONDS)
            await caller.reply(503, json.encode({"status": "unavailable", "reason": reason}))

    async def _metrics(self, caller: Caller) -> None:
        more = {"open_requests": self._ledger.open_requests(), "waiting_requests": self._ledger.waiting()}
        await caller.reply(200, metrics.page(more), metrics.CONTENT_TYPE)

    async def _version(self, caller: Caller) -> None:
        await caller.reply(200, json.encode({"version": VERSION}))

    async def _openapi(self, caller: Caller) -> None:
        await caller.reply(200, openapi.DOCUMENT)

    async def _docs(self, caller: Caller) -> None:
        await caller.reply(200, openapi.PAGE, "text/html; charset=utf-8")


def _stamp(prefix: str) -> dict[str, Any]:
    return {"ident": prefix + uuid.uuid4().hex, "created": int(time.time())}
