"""One worker: `python -m tritonstream_gateway.worker`, started by supervisor.py with an inherited socket and ledger.

On SIGTERM it drains: new requests get 503 while open ones, in all workers, finish; then it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import uvicorn
import uvloop

from tritonstream_gateway import app, metrics
from tritonstream_gateway.keys import Keys
from tritonstream_gateway.ledger import Ledger
from tritonstream_gateway.routes import Gateway
from tritonstream_gateway.settings import Settings

log = logging.getLogger("tritonstream_gateway")

DRAIN_POLL_SECONDS = 0.05
LAST_WORDS_SECONDS = 5.0  # for the error events of streams that the grace period cuts
GARBAGE = 20_000  # objects more than before, after which it is looked for
KEEP_ALIVE_SECONDS = 75  # of an idle connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What a worker is started with: its number, the supervisor's process, and the descriptors that it inherits."""

    number: int
    parent: int
    listener: int
    ledger: int
    ready: int
    settings: str

    def dump(self) -> str:
        """Spell it as JSON."""
        return json.dumps(asdict(self))


class Server(uvicorn.Server):
    """uvicorn's server, with the signals left to us, and word of when it listens."""

    def __init__(self, config: uvicorn.Config, ready: int) -> None:
        super().__init__(config)
        self._ready = ready
        self.ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        os.write(self._ready, b".")  # and left open: it closes when this process ends, however that happens
        gc.collect()
        gc.freeze()  # what the imports leave lives for ever
        # A burst of requests leaves more than the usual 700 objects, none of them garbage: collections took a tenth of
        # the CPU.
        gc.set_threshold(GARBAGE, 20, 20)

    async def main_loop(self) -> None:
        """Keep the time of day in the headers, once a second and not ten times, until we are to end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self.ending.wait()
            self.should_exit = self.ending.is_set()


class Drain:
    """The end of a worker."""

    def __init__(self, gateway: Gateway, ledger: Ledger, server: Server, grace: float) -> None:
        self._gateway, self._ledger, self._server, self._grace = gateway, ledger, server, grace
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Take no new requests, and end when the open ones are done."""
        if self._task is None:
            self._gateway.draining = True
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        ends = time.monotonic() + self._grace
        while (left := self._ledger.open_requests()) and time.monotonic() < ends:  # noqa: ASYNC110  # other processes
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        if left:
            log.warning("the grace period of %g s is over: %d requests are cut", self._grace, left)
            await self._gateway.upstream.close()
        self._server.ending.set()


async def _run(post: Post, settings: Settings) -> None:
    keys = Keys.read(settings.keys)
    ledger = Ledger(post.ledger, settings.workers, keys.keys, post.number, settings.max_open, settings.max_waiting)
    gateway = Gateway(settings, keys, ledger)
    config = uvicorn.Config(
        app.build(gateway, settings),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=2_048,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=round(LAST_WORDS_SECONDS),
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    server = Server(config, post.ready)
    drain = Drain(gateway, ledger, server, settings.grace)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, drain.begin)
    if os.getppid() != post.parent:  # the supervisor died before the kernel knew whom to tell
        return
    await server.serve(sockets=[socket.socket(fileno=post.listener)])
    await gateway.upstream.close()


def main(arguments: list[str]) -> None:
    """Serve until SIGTERM, or until the supervisor dies."""
    post = Post(**json.loads(arguments[0]))
    settings = Settings.load(post.settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which drains
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    logging.basicConfig(format="%(levelname).1s %(asctime)s %(process)d %(message)s", level=logging.INFO)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(post, settings))
    finally:
        folder: Any = os.environ.get(metrics.DIRECTORY)
        if os.getppid() != post.parent and folder:  # nobody else will
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
