"""The gateway as a child of `tools.serve`: started when Triton is ready, and drained before Triton is.

The tests start theirs with it, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from tools.server import LOOPBACK, TRAMPOLINE, LaunchFailed, free_port

READY_SECONDS = 120.0
MARGIN_SECONDS = 10.0  # what the gateway may take to end beyond its grace period


class GatewayProcess:
    """A gateway, its supervisor and workers; made by `launch`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, grace: float) -> None:
        self._process = process
        self._grace = grace
        self.url = url
        self.log = log

    @property
    def pid(self) -> int:
        """The supervisor's process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def wait_ready(self, timeout: float = READY_SECONDS) -> None:
        """Block until it listens. Raises LaunchFailed, with the end of its log, when it ends or takes longer."""
        deadline = time.monotonic() + timeout
        while not self._listens():
            if self.exit_code is not None:
                raise LaunchFailed(self.epitaph())
            if time.monotonic() > deadline:
                raise LaunchFailed(f"the gateway did not listen after {timeout:.0f} s; its log:\n{self._tail()}")
            time.sleep(0.1)

    def _listens(self) -> bool:
        return "the gateway listens" in self._tail(1_000)

    def epitaph(self) -> str:
        """Say how it ended, and the end of its log."""
        return f"the gateway ended with code {self.exit_code}; the end of its log {self.log}:\n{self._tail()}"

    def _tail(self, lines: int = 25) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
        return ""

    def terminate(self) -> None:
        """Ask it to drain and leave; `stop` waits for it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Have it end at once: a second signal kills its workers."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
            time.sleep(0.1)  # two signals at once are one
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End it: drain for up to its grace period, then kill; its workers follow it."""
        self.terminate()
        try:
            self._process.wait(self._grace + MARGIN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def launch(
    triton: str,
    metrics: str,
    *,
    log: Path,
    host: str = LOOPBACK,
    port: int = 0,
    grace: float = 30.0,
    scheme: str = "http",
    arguments: Iterable[str] = (),
) -> GatewayProcess:
    """Start a gateway and return at once; `wait_ready` waits until it listens.

    `triton` is host:port of the gRPC service, `metrics` the URL of Triton's metrics. A port of 0 picks a free one. The
    kernel tells the gateway to drain when the thread that launched it ends.
    """
    port = port or free_port(host)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-I", "-S", "-c", TRAMPOLINE, str(os.getpid()), sys.executable]
    command += ["-m", "tritonstream_gateway", "serve", "--host", host, "--port", str(port), "--grace", str(grace)]
    command += ["--triton", triton, "--triton-metrics", metrics, *arguments]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
    shown = LOOPBACK if host == "0.0.0.0" else host
    return GatewayProcess(process, f"{scheme}://{shown}:{port}", log, grace)
