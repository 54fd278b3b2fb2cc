"""What is said of a server's health: what its metrics tell, and what the endpoint beside it makes of that.

tests/integration/test_replicas.py asks it of real servers, alive, draining and dead.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from tools import health
from tools.environment import ROOT
from tools.health import LIVE, READY, Bounds, Health, told
from tools.server import LOOPBACK, free_port

NOW = 1_800_000_000.0
LABELS = '{model="Qwen3-0.6B",version="1"}'


def page(alive: float = 1, stalled: float = 0, silent: float = 0) -> str:
    """What the metrics port shows, as far as it matters here, and something that does not."""
    return (
        f"# TYPE {health.ALIVE} gauge\n{health.ALIVE}{LABELS} {alive:f}\n"
        f"{health.STALLED}{LABELS} {stalled:f}\n"
        f'{health.TOLD}{{model="Qwen3-0.6B",stub="0",version="1"}} {NOW - silent:f}\n'
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


@pytest.fixture
def endpoint() -> Iterator[Health]:
    """An endpoint beside a server that is not there."""
    nobody = f"http://{LOOPBACK}:{free_port()}"
    with Health((LOOPBACK, 0), nobody, f"{nobody}/metrics") as served:
        serving = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield served
        served.shutdown()
        serving.join()


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


def test_a_drain_is_said_at_once_and_ends_with_the_server(endpoint: Health) -> None:
    """The next server in the pod begins anew: the endpoint outlives the one that was told to leave."""
    assert ask(endpoint, "/drain", "POST") == (200, "draining")
    assert ask(endpoint, "/ready") == (503, "the server is leaving")
    assert not endpoint.draining, "there is nobody any more who leaves"
    assert "does not answer" in ask(endpoint, "/ready")[1]


def test_a_gateway_says_itself_why(endpoint: Health, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason of its readiness endpoint is what a container's health check tells."""
    assert ask(endpoint, "/drain", "POST")[0] == 200
    url = f"http://{LOOPBACK}:{endpoint.server_address[1]}/ready"
    assert health.main(["gateway", "--gateway", url]) == 1
    assert "answers 503" in (said := capsys.readouterr().out)
    assert "the server is leaving" in said
    assert health.main(["gateway", "--gateway", f"http://{LOOPBACK}:{free_port()}/ready"]) == 1
    assert "does not answer" in capsys.readouterr().out


def test_draining_leaves_time(endpoint: Health) -> None:
    """The command returns after the notice, and says when nobody could be told."""
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
