"""The process on top: binds the port, runs the workers, starts a dead one again, and ends them all in good order.

Read by cli.py. Every worker has a socket of its own on the same port (SO_REUSEPORT), so that the kernel spreads the
connections; the supervisor holds all of them, so that none is lost while a worker is started again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from prometheus_client import multiprocess

from tritonstream_gateway import metrics
from tritonstream_gateway.keys import Keys
from tritonstream_gateway.ledger import Ledger
from tritonstream_gateway.settings import BadSettings, Settings
from tritonstream_gateway.worker import LAST_WORDS_SECONDS, Post

log = logging.getLogger("tritonstream_gateway")

START_SECONDS = 60.0
AGAIN_SECONDS = 1.0  # between the starts of a worker that keeps dying
MARGIN_SECONDS = 5.0  # what a worker may take to end beyond the grace period


@dataclass(slots=True)
class Worker:
    """One worker: its socket, which outlives it, and its process."""

    number: int
    listener: socket.socket
    process: subprocess.Popen[bytes] | None = None
    ready: int = -1  # the end of a pipe on which it says that it listens
    started: float = 0.0


class Supervisor:
    """Runs the gateway until a signal; made and run by the main thread."""

    def __init__(self, settings: Settings) -> None:
        """Bind the port. Raises BadSettings when it is taken, or the keys cannot be read."""
        self._settings = settings
        self._keys = Keys.read(settings.keys)
        self._descriptor = Ledger.create(settings.workers, len(self._keys.keys))
        self._ledger = Ledger(self._descriptor, settings.workers, self._keys.keys, 0, 1, 1)
        self._workers = [Worker(number, one) for number, one in enumerate(_bind(settings))]
        self._folder = tempfile.mkdtemp(prefix="tritonstream-gateway-")
        self._woken = -1  # a pipe that becomes readable with a signal
        self._ending = False
        self._killing = False

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        scheme = "https" if self._settings.tls_certificate else "http"
        host, port = self._workers[0].listener.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> int:
        """Serve; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        try:
            for worker in self._workers:
                self._start(worker)
            if not self._wait_ready():
                return 0 if self._ending else 1
            log.info(
                "the gateway listens on %s: %d workers, Triton at %s, %s",
                self.url,
                self._settings.workers,
                self._settings.triton,
                f"{len(self._keys.keys)} keys" if self._keys.keys else "no keys: everybody may ask",
            )
            while not self._ending:
                self._wait()
                self._tend()
            return 0
        finally:
            self._end()

    def _signalled(self, *_: object) -> None:
        self._killing = self._ending
        self._ending = True

    def _start(self, worker: Worker) -> None:
        worker.ready, ready = os.pipe()
        post = Post(
            number=worker.number,
            parent=os.getpid(),
            listener=worker.listener.fileno(),
            ledger=self._descriptor,
            ready=ready,
            settings=self._settings.dump(),
        )
        worker.started = time.monotonic()
        worker.process = subprocess.Popen(
            [sys.executable, "-m", "tritonstream_gateway.worker", post.dump()],
            env={**os.environ, metrics.DIRECTORY: self._folder},
            pass_fds=[post.listener, post.ledger, post.ready],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(ready)

    def _wait_ready(self) -> bool:
        """Wait until every worker listens; false when one cannot."""
        deadline = time.monotonic() + START_SECONDS
        for worker in self._workers:
            while not select.select([worker.ready], [], [], 0.1)[0]:
                if self._ending or time.monotonic() > deadline:
                    return False
            if os.read(worker.ready, 1) == b"":
                log.error("worker %d could not start: its messages are above", worker.number)
                return False
        return True

    def _wait(self) -> None:
        """Sleep until a worker dies (its pipe closes) or a signal comes; looks up once in a while all the same."""
        living = [worker.ready for worker in self._workers if worker.process and worker.process.poll() is None]
        for readable in select.select([*living, self._woken], [], [], AGAIN_SECONDS)[0]:
            os.read(readable, 1)  # that a worker started listens, or that one ended

    def _tend(self) -> None:
        """Start workers that died."""
        for worker in self._workers:
            process = worker.process
            if process is None or process.poll() is None:
                continue
            if time.monotonic() - worker.started < AGAIN_SECONDS:
                continue
            log.error("worker %d died (exit code %d): starting another", worker.number, process.returncode)
            self._buried(worker)
            self._start(worker)

    def _buried(self, worker: Worker) -> None:
        assert worker.process is not None
        self._ledger.strike(worker.number)
        os.close(worker.ready)
        with contextlib.suppress(OSError):
            multiprocess.mark_process_dead(worker.process.pid, self._folder)  # type: ignore[no-untyped-call]

    def _end(self) -> None:
        processes = [worker.process for worker in self._workers if worker.process is not None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + self._settings.grace + LAST_WORDS_SECONDS + MARGIN_SECONDS
        while any(process.poll() is None for process in processes):
            for worker in self._workers:  # what a worker that was killed had open does not hold up the others
                if worker.process is not None and worker.process.poll() is not None:
                    self._ledger.strike(worker.number)
            if self._killing or time.monotonic() > deadline:
                log.warning("killing the workers")
                for process in processes:
                    process.kill()
            time.sleep(0.05)
        for worker in self._workers:
            worker.listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _bind(settings: Settings) -> list[socket.socket]:
    """Bind a listening socket for each worker, all on one port. Raises BadSettings."""
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:  # SO_REUSEPORT would let us in beside another gateway, unnoticed
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((settings.host, settings.port))
            probe.listen()
            port = probe.getsockname()[1]
        listeners = []
        for _ in range(settings.workers):
            listener = socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((settings.host, port))
            listener.listen(2_048)
            listeners.append(listener)
    except OSError as error:
        raise BadSettings(f"port {settings.port} of {settings.host} cannot be listened on: {error.strerror}") from error
    return listeners
