"""What is said of a server's health: what its metrics tell, and what the endpoint beside it makes of that.

tests/integration/test_replicas.py asks it of real servers, alive, draining and dead.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import TypeVar

import pytest

from tests.support.metrics import eventually
from tools import health
from tools.environment import ROOT
from tools.health import LIVE, READY, Bounds, Health, told
from tools.server import LOOPBACK, free_port

AnyServer = TypeVar("AnyServer", bound=HTTPServer)
NOW = 1_800_000_000.0
LABELS = '{model="Qwen3-0.6B",version="1"}'


def page(alive: float = 1, stalled: float = 0, silent: float = 0, now: float = NOW) -> str:
    """What the metrics port shows, as far as it matters here, and something that does not."""
    return (
        f"# TYPE {health.ALIVE} gauge\n{health.ALIVE}{LABELS} {alive:f}\n"
        f"{health.STALLED}{LABELS} {stalled:f}\n"
        f'{health.TOLD}{{model="Qwen3-0.6B",stub="0",version="1"}} {now - silent:f}\n'
        f"vllm:num_requests_running{LABELS} 0\n"
    )


@pytest.mark.parametrize(
    ("text", "bounds", "said"),
    [
        (page(), READY, None),
        (page(alive=0), READY, "the engine is dead: Qwen3-0.6B"),
        (page(alive=0), LIVE, "the engine is dead"),
        (page(stalled=READY.stalled), READY, None),
        (page(stalled=READY.stalled + 1), READY, "no progress for 31 s"),
        (page(stalled=READY.stalled + 1), LIVE, None),
        (page(stalled=LIVE.stalled + 1), LIVE, "no progress"),
        (page(silent=READY.silent + 1), READY, "has said nothing for 16 s"),
        (page(silent=READY.silent + 1), LIVE, None),
        (page(silent=LIVE.silent + 1), LIVE, "has said nothing"),
        (page() + page(alive=0), READY, "the engine is dead"),
        ("nv_inference_count 3\n", READY, "there is no engine"),
    ],
)
def test_what_a_page_tells(text: str, bounds: Bounds, said: str | None) -> None:
    """A dead engine, one that hangs, a stub that hangs; of several models one is enough."""
    found = told(text, bounds, NOW)
    assert found is None if said is None else said in (found or "")


def test_who_is_not_ready_may_still_be_alive() -> None:
    """Others take over long before anything is started again."""
    assert READY.stalled < LIVE.stalled
    assert READY.silent < LIVE.silent


@contextlib.contextmanager
def running(served: AnyServer) -> Iterator[AnyServer]:
    """Serve in a thread until the end of the block."""
    with served:
        serving = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield served
        finally:
            served.shutdown()
            serving.join()


@pytest.fixture
def endpoint() -> Iterator[Health]:
    """An endpoint beside a server that is not there."""
    nobody = f"http://{LOOPBACK}:{free_port()}"
    with running(Health((LOOPBACK, 0), nobody, f"{nobody}/metrics")) as served:
        yield served


def ask(endpoint: Health, path: str, method: str = "GET") -> tuple[int, str]:
    """A status, and why."""
    connection = HTTPConnection(LOOPBACK, endpoint.server_address[1], timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    said = json.loads(answer.read())
    connection.close()
    return answer.status, said.get("reason", said.get("status"))


def test_nobody_there_is_no_health(endpoint: Health) -> None:
    """Neither ready nor alive, and the reason says so."""
    for path in ("/ready", "/live"):
        status, reason = ask(endpoint, path)
        assert (status, "does not answer" in reason) == (503, True)
    assert ask(endpoint, "/metrics")[0] == 404


class Slow(BaseHTTPRequestHandler):
    """A server that can answer, and does while it is not too busy."""

    free = threading.Event()

    def do_GET(self) -> None:
        """Answer with metrics, when there is time."""
        self.free.wait()
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):  # who asked waits no longer
            self.wfile.write(page(now=time.time()).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


async def test_a_slow_server_is_not_a_sick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions that run out of time say nothing, until the server has been silent for as long as it may."""
    monkeypatch.setattr(health, "ASK_SECONDS", 0.05)
    bounds = {"/ready": Bounds(stalled=30, silent=1), "/live": Bounds(stalled=30, silent=60)}
    monkeypatch.setattr(health, "PATHS", bounds)
    Slow.free.set()
    with running(ThreadingHTTPServer((LOOPBACK, 0), Slow)) as server:
        url = f"http://{LOOPBACK}:{server.server_address[1]}"
        with running(Health((LOOPBACK, 0), url, f"{url}/metrics")) as endpoint:
            assert ask(endpoint, "/ready") == (200, "ok")
            Slow.free.clear()
            with pytest.raises(TimeoutError):
                health.failing(url, f"{url}/metrics")
            assert ask(endpoint, "/ready") == (200, "ok"), "one question too late"
            await eventually(lambda: ask(endpoint, "/ready")[0] == 503, "it has been silent for long")
            assert "has not answered for 1 s" in ask(endpoint, "/ready")[1]
            assert ask(endpoint, "/live") == (200, "ok")
            Slow.free.set()
            await eventually(lambda: ask(endpoint, "/ready")[0] == 200, "it answers again")


@contextlib.contextmanager
def asked_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[Health]:
    """An endpoint that heard its server say that it is ready, and will not ask again; the server is gone by now."""
    monkeypatch.setattr(health, "PAUSE_SECONDS", 60)
    Slow.free.set()
    with running(ThreadingHTTPServer((LOOPBACK, 0), Slow)) as server:
        url = f"http://{LOOPBACK}:{server.server_address[1]}"
        endpoint = Health((LOOPBACK, 0), url, f"{url}/metrics")
        with running(endpoint):
            assert ask(endpoint, "/ready") == (200, "ok")
            assert ask(endpoint, "/drain", "POST") == (200, "draining")
            server.shutdown()
            server.server_close()
            yield endpoint


async def test_a_drain_is_said_at_once_and_ends_with_the_server(endpoint: Health) -> None:
    """The next server in the pod begins anew: the endpoint outlives the one that was told to leave."""
    assert ask(endpoint, "/drain", "POST") == (200, "draining")
    await eventually(lambda: not endpoint.draining, "there is nobody any more who leaves")
    assert "does not answer" in ask(endpoint, "/ready")[1]


def test_who_left_is_never_ready_by_what_was_heard_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton no longer listens for HTTP while its open streams go on: whoever is sent there then is turned away."""
    with asked_once(monkeypatch) as endpoint:
        assert [ask(endpoint, "/ready") for _ in range(5)] == [(503, "the server is leaving")] * 5


def test_a_gateway_says_itself_why(endpoint: Health, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason of its readiness endpoint is what a container's health check tells."""
    url = f"http://{LOOPBACK}:{endpoint.server_address[1]}/ready"
    assert health.main(["gateway", "--gateway", url]) == 1
    assert "answers 503" in (said := capsys.readouterr().out)
    assert "Triton does not answer" in said
    assert health.main(["gateway", "--gateway", f"http://{LOOPBACK}:{free_port()}/ready"]) == 1
    assert "does not answer" in capsys.readouterr().out


def test_draining_leaves_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command returns after the notice, and says when nobody could be told."""
    with asked_once(monkeypatch) as endpoint:
        endpoint.draining = False
        began = time.monotonic()
        assert health.main(["drain", "--port", str(endpoint.server_address[1]), "--notice", "0.3"]) == 0
        assert time.monotonic() - began >= 0.3
        assert endpoint.draining
    assert health.main(["drain", "--port", str(free_port()), "--notice", "0"]) == 1


def test_it_runs_alone() -> None:
    """In a container it is one file, for any Python: its exit code is the answer."""
    nobody = f"http://{LOOPBACK}:{free_port()}"
    command = [sys.executable, "-I", "-S", str(ROOT / "tools" / "health.py"), "ready", "--http", nobody]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, "does not answer" in done.stdout, done.stderr) == (1, True, "")
