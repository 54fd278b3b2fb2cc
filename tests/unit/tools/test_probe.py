"""The probe, against real little servers: ready, dead, stalled, not there."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from tools import probe
from tools.environment import ROOT
from tools.server import free_port

ALIVE = 'tritonstream:engine_alive{model="Qwen3-0.6B",version="1"} '
STALLED = 'tritonstream:engine_stalled_seconds{model="Qwen3-0.6B",version="1"} '
Serve = Callable[[int, str], str]


class _Answer(http.server.BaseHTTPRequestHandler):
    def __init__(self, status: int, page: str, *arguments: object) -> None:
        self._status, self._page = status, page.encode()
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.send_response(self._status)
        self.end_headers()
        self.wfile.write(self._page)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that answer every GET with a status and a page; returns the URL."""
    started: list[http.server.ThreadingHTTPServer] = []

    def start(status: int, page: str) -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Answer, status, page))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}/"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (f"{ALIVE}1.000000\n{STALLED}0\n", ""),
        (f"{ALIVE}1.000000\n{STALLED}29\n", ""),
        ("", ""),
        (f"{ALIVE}0.000000\n{STALLED}0\n", "the engine is dead: Qwen3-0.6B"),
        (f"{ALIVE}1\n{STALLED}31\n", "the engine has made no progress for more than 30 s: Qwen3-0.6B"),
    ],
)
def test_the_metrics_decide_whether_a_ready_server_can_answer(serve: Serve, page: str, why: str) -> None:
    """Triton's own word does not count when an engine has died or hangs."""
    assert probe.refusal(serve(200, ""), serve(200, page)) == why


def test_a_server_that_is_not_ready_is_asked_for_the_reason(serve: Serve) -> None:
    """A gateway says why in its answer."""
    assert probe.refusal(serve(503, '{"status":"draining"}')).endswith('answers 503 {"status":"draining"}')


def test_what_does_not_answer_is_not_ready(serve: Serve) -> None:
    """Neither without the server nor without its metrics."""
    nowhere = f"http://127.0.0.1:{free_port()}/"
    assert probe.refusal(nowhere).startswith(f"{nowhere} does not answer: ")
    assert probe.refusal(serve(200, ""), nowhere).startswith(f"{nowhere} does not answer: ")


@pytest.mark.parametrize(("alive", "code", "said"), [(1, 0, "ready\n"), (0, 1, "the engine is dead: Qwen3-0.6B\n")])
def test_as_a_script_it_needs_nothing_but_python(serve: Serve, alive: int, code: int, said: str) -> None:
    """The exit code and one line are what a container's health check has; no package is there for it."""
    command = [
        sys.executable,
        "-I",
        "-S",
        str(ROOT / "tools" / "probe.py"),
        serve(200, ""),
        serve(200, f"{ALIVE}{alive}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, said, "")
