"""The greenlets' side of the driver: starts it, hands it questions, and wakes who waits for an answer.

Read by users.py, on gevent. A greenlet that is killed while it waits has its request cancelled; when the driver is gone
everybody who waits is told so, and the next question starts another.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gevent
from gevent.event import AsyncResult, Event
from gevent.lock import RLock

from loadtests.kit import talk
from loadtests.kit.talk import Ask, Pulse, Seen, Target

ROOT = Path(__file__).resolve().parents[2]
DIED = "DriverDied"
READY_SECONDS = 60.0


class Pump:
    """One driver process, started with the first question."""

    def __init__(self, target: Target, beat: Callable[[Pulse], object]) -> None:
        """`beat` is told once a second what the driver does."""
        self._target = target
        self._beat = beat
        self._numbers = itertools.count()
        self._waiting: dict[int, AsyncResult[Seen]] = {}
        self._lock = RLock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = Event()

    @property
    def open(self) -> int:
        """How many questions have no answer yet."""
        return len(self._waiting)

    def start(self) -> None:
        """Start the driver, and wait until it is connected: what that takes is not the server's latency."""
        with self._lock:
            if self._socket is None:
                self._start()
        self._ready.wait(READY_SECONDS)

    def ask(self, ask: Ask) -> Seen:
        """Ask, and wait for what is seen of the answer."""
        number = next(self._numbers)
        answer: AsyncResult[Seen] = AsyncResult()
        self._waiting[number] = answer
        try:
            self._send(talk.write("ask", number, talk.plain(ask)))
            seen = answer.get()
            assert seen is not None
            return seen
        except OSError as error:
            return Seen(outcome="failed", kind=DIED, said=f"the process that receives is gone: {error}")
        except gevent.GreenletExit:
            with contextlib.suppress(OSError):
                self._send(talk.write("cancel", number, {}))
            raise
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """End the driver, and with it what is open."""
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # closing would wait for who still reads
                self._socket = None
        if self._process is not None:
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _send(self, line: bytes) -> None:
        with self._lock:  # or two greenlets' lines would mix where the socket takes a part
            if self._socket is None:
                self._start()
            assert self._socket is not None
            self._socket.sendall(line)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "loadtests.kit.driver", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for locust, which then ends the driver
            )
        self._socket = ours
        self._ready.clear()
        ours.sendall(talk.write("target", 0, talk.plain(self._target)))
        gevent.spawn(self._listen, ours)

    def _listen(self, ours: socket.socket) -> None:
        """Wake whom each line is for, until the driver is gone."""
        with contextlib.suppress(OSError), ours.makefile("rb") as lines:
            for line in lines:
                kind, number, body = talk.read(line)
                if kind == "pulse":
                    self._beat(Pulse(**body))
                elif kind == "ready":
                    self._ready.set()
                elif (waiting := self._waiting.get(number)) is not None:
                    waiting.set(talk.seen_read(body))
        if self._socket is ours:
            self._socket = None
        self._ready.set()  # nobody waits for who is gone
        ours.close()
        for waiting in list(self._waiting.values()):
            waiting.set(Seen(outcome="failed", kind=DIED, said="the process that receives is gone"))
