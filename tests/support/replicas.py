"""Several tritonservers of one model, each with its probe beside it, as the pods of a deployment are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from tests.support import servers
from tests.support.envoy import Endpoint
from tests.support.servers import READY_SECONDS, Triton
from tools.environment import ROOT
from tools.server import LOOPBACK, TRAMPOLINE, TritonServer, free_port, launch

NOTICE_SECONDS = 2.0  # what the tests leave to Envoy to hear that a replica leaves; it asks twice a second


class Probe:
    """`python -m tools.health serve` beside a server: a pod's second container."""

    def __init__(self, http: str, metrics: str) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(_command("serve", "--http", http, "--metrics", metrics, "--port", self.port))

    def status(self, path: str = "/ready") -> tuple[int, str]:
        """What it answers, and why; 0 while it does not listen."""
        try:
            with urlopen(f"http://{LOOPBACK}:{self.port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def drain(self, notice: float = NOTICE_SECONDS) -> int:
        """What a pod's preStop does; returns its exit code."""
        return subprocess.run(_command("drain", "--port", self.port, "--notice", notice), check=False).returncode

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(10)


def _command(*words: object) -> list[str]:
    command = [sys.executable, "-I", "-S", "-c", TRAMPOLINE, str(os.getpid()), sys.executable]
    return [*command, str(ROOT / "tools" / "health.py"), *map(str, words)]


class Replica:
    """One pod: a tritonserver that may be started again at the same ports, and the probe, which stays."""

    def __init__(self, repository: Path, model: str) -> None:
        self._repository, self._model = repository, model
        self._http, self._grpc, self._metrics = (free_port() for _ in range(3))
        self._server: TritonServer | None = None
        self.probe = Probe(f"http://{LOOPBACK}:{self._http}", f"http://{LOOPBACK}:{self._metrics}/metrics")
        self.endpoint = Endpoint(self._grpc, self.probe.port)

    @property
    def triton(self) -> Triton:
        """Its server."""
        assert self._server is not None, "it was not started"
        return Triton(self._server, self._model)

    def start(self) -> None:
        """Start the server; `wait` waits for it. From the thread that lives on, for the server dies with it."""
        self._server = launch(
            self._repository,
            http_port=self._http,
            grpc_port=self._grpc,
            metrics_port=self._metrics,
            env=servers.ENVIRONMENT,
        )

    def wait(self) -> None:
        """Wait until it is ready."""
        self.triton.server.wait_ready(READY_SECONDS)

    def stop(self) -> None:
        """Drain and end the server; after it nothing of it is left."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def close(self) -> None:
        """End it all."""
        self.stop()
        self.probe.stop()
