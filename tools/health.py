"""Whether a Triton can answer, told truly: for Kubernetes, a proxy or a container's health check.

Triton goes on to call itself ready when an engine died or hangs; the served model's own metrics know better. Here both
are asked. `python -m tools.health ready` (or `live`) says it with its exit code; `serve` says it over HTTP, beside the
server that it tells of, at /ready and /live; `drain` has that one say that the server is leaving, and waits until
whoever routes has heard it. `gateway` asks a gateway, which asks its Triton by itself. Standard library only: the file
runs alone, with any Python.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

ASK_SECONDS = 2.0
GATEWAY_SECONDS = 5.0  # the gateway gives its Triton 3 s before it says no
PAUSE_SECONDS = 0.25  # routers ask several times a second, each for itself; the server is asked once in that time
HTTP, METRICS, PORT = "http://127.0.0.1:8000", "http://127.0.0.1:8002/metrics", 8003
GATEWAY = "http://127.0.0.1:9000/health/ready"
ALIVE, STALLED, TOLD = (
    f"tritonstream:{name}" for name in ("engine_alive", "engine_stalled_seconds", "metrics_timestamp_seconds")
)
_SAMPLE = re.compile(rf"^({ALIVE}|{STALLED}|{TOLD})\{{(.*)\}} (\S+)$", re.MULTILINE)
_MODEL = re.compile(r'\bmodel="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds beyond which something is wrong: `stalled` without progress while somebody waits, `silent` altogether."""

    stalled: float
    silent: float


# Not ready: others shall answer for a while. Not alive: it will not get better, and is to be started again.
READY, LIVE = Bounds(stalled=30, silent=15), Bounds(stalled=120, silent=60)
PATHS = {"/ready": READY, "/live": LIVE}


def failing(triton: str, metrics: str) -> dict[str, str | None]:
    """Say why the server is not ready and not alive, by path; None when it is. Raises TimeoutError when it is slow."""
    try:
        ready, _ = get(triton + "/v2/health/ready")
        status, page = get(metrics)
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException) as error:
        return dict.fromkeys(PATHS, f"Triton does not answer: {error}")
    if status != 200:
        return dict.fromkeys(PATHS, f"Triton's metrics answer with status {status}")
    reasons = {path: told(page, bounds, time.time()) for path, bounds in PATHS.items()}
    return reasons if ready == 200 else reasons | {"/ready": "Triton is not ready"}


def told(page: str, bounds: Bounds, now: float) -> str | None:
    """Say what a page of metrics tells against the server at the Unix time `now`; None when it is nothing."""
    found = _SAMPLE.findall(page)
    if not any(name == ALIVE for name, _, _ in found):
        return "there is no engine"
    if names := dead(page):
        return f"the engine is dead: {', '.join(names)}"
    for name, labels, value in found:
        if name == STALLED and float(value) > bounds.stalled:
            return f"the engine has made no progress for {float(value):.0f} s: {_model(labels)}"
        if name == TOLD and now - float(value) > bounds.silent:
            return f"the process that runs the model has said nothing for {now - float(value):.0f} s: {_model(labels)}"
    return None


def dead(page: str) -> list[str]:
    """Names of the models whose engine has died, by a page of metrics."""
    return [_model(labels) for name, labels, value in _SAMPLE.findall(page) if name == ALIVE and float(value) == 0]


def _model(labels: str) -> str:
    found = _MODEL.search(labels)
    return found[1] if found else labels


def refusing(gateway: str) -> str | None:
    """Say what a gateway's own readiness endpoint says against it; None when it is ready."""
    try:
        status, page = get(gateway, seconds=GATEWAY_SECONDS)
    except (OSError, http.client.HTTPException) as error:
        return f"{gateway} does not answer: {error}"
    return None if status == 200 else f"{gateway} answers {status}: {page.strip()}"


def gone(triton: str) -> bool:
    """Whether nobody listens where Triton did."""
    try:
        get(triton + "/v2/health/live")
    except ConnectionRefusedError:
        return True
    except (OSError, http.client.HTTPException):
        pass
    return False


def get(url: str, method: str = "GET", seconds: float | None = None) -> tuple[int, str]:
    """Fetch a page, waiting `seconds` at a time (ASK_SECONDS unless told). Raises OSError or HTTPException."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=seconds or ASK_SECONDS)
    try:
        connection.request(method, parts.path or "/")
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    finally:
        connection.close()


class Health(ThreadingHTTPServer):
    """The endpoint beside a server: GET /ready and /live, POST /drain.

    It asks the server all the time and answers at once with what it last heard: a machine that has much to do makes a
    server slow, not sick. One that says nothing for as long as its metrics may be silent is.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], triton: str, metrics: str) -> None:
        """Listen and ask at once; `serve_forever` answers."""
        super().__init__(address, Handler)
        self._triton, self._metrics = triton, metrics
        self._heard: dict[str, str | None] = dict.fromkeys(PATHS, "Triton has not answered yet")
        self._heard_at = time.monotonic()
        self._asked, self._over = threading.Event(), threading.Event()
        self.draining = False
        threading.Thread(target=self._ask, name="asking", daemon=True).start()

    def server_close(self) -> None:
        """Ask no more, and listen no more."""
        self._over.set()
        super().server_close()

    def failing(self, path: str) -> str | None:
        """Say why a path's answer is no; None when it is yes."""
        if path == "/ready" and self.draining:
            return "the server is leaving"
        self._asked.wait()
        silent = time.monotonic() - self._heard_at
        if silent > PATHS[path].silent:
            return f"Triton has not answered for {silent:.0f} s"
        return self._heard[path]

    def _ask(self) -> None:
        while not self._over.is_set():
            # A container that is started again in its pod finds the endpoint of the one that left. What was heard of
            # that one counts no more: it is asked anew first, for its open streams may go on when its HTTP does not.
            left = self.draining and gone(self._triton)
            with contextlib.suppress(TimeoutError):
                self._heard, self._heard_at = failing(self._triton, self._metrics), time.monotonic()
                if left:
                    self.draining = False
            self._asked.set()
            self._over.wait(PAUSE_SECONDS)


class Handler(BaseHTTPRequestHandler):
    """One request to the endpoint."""

    server: Health
    timeout = 60
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer a probe."""
        if self.path not in PATHS:
            self._reply(404, {"reason": f"there is no {self.path:.100}"})
            return
        reason = self.server.failing(self.path)
        self._reply(200 if reason is None else 503, {"status": "ok"} if reason is None else {"reason": reason})

    def do_POST(self) -> None:
        """Begin to say that the server is leaving: only a process of the same pod may have that said."""
        if self.path != "/drain" or not self.client_address[0].startswith(("127.", "::1")):
            self._reply(404, {"reason": f"there is no {self.path:.100}"})
            return
        self.server.draining = True
        self._reply(200, {"status": "draining"})

    def log_message(self, *_: object) -> None:
        """Say nothing: probes come all the time."""

    def _reply(self, status: int, said: dict[str, str]) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def drain(port: int, notice: float) -> int:
    """Have the endpoint on `port` say that the server is leaving, and wait `notice` seconds; returns an exit code."""
    code = 0
    try:
        status, said = get(f"http://127.0.0.1:{port}/drain", "POST")
        if status != 200:
            raise OSError(f"status {status}: {said}")
    except (OSError, http.client.HTTPException) as error:
        print(f"nobody could be told: {error}", file=sys.stderr)
        code = 1
    time.sleep(notice)
    return code


def _serve(host: str, port: int, triton: str, metrics: str) -> int:
    with Health((host, port), triton, metrics) as health:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=health.shutdown).start())
        print(f"health at http://{host}:{health.server_address[1]}/ready and /live", flush=True)
        health.serve_forever(poll_interval=0.2)
    return 0


def command_line() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.health", description=__doc__)
    parser.add_argument("action", choices=("ready", "live", "serve", "drain", "gateway"))
    parser.add_argument("--http", default=HTTP, help=f"Triton's HTTP endpoints; default: {HTTP}")
    parser.add_argument("--metrics", default=METRICS, help=f"Triton's metrics; default: {METRICS}")
    parser.add_argument("--gateway", default=GATEWAY, help=f"what gateway asks; default: {GATEWAY}")
    parser.add_argument("--host", default="127.0.0.1", help="address that serve listens on; default: %(default)s")
    parser.add_argument("--port", type=int, default=PORT, help="port of serve and drain; default: %(default)s")
    parser.add_argument(
        "--notice", type=float, default=10, help="seconds that drain leaves to whoever routes; default: %(default)s"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 for yes."""
    chosen = command_line().parse_args(arguments)
    if chosen.action == "serve":
        return _serve(chosen.host, chosen.port, chosen.http, chosen.metrics)
    if chosen.action == "drain":
        return drain(chosen.port, chosen.notice)
    if chosen.action == "gateway":
        reason = refusing(chosen.gateway)
    else:
        try:
            reason = failing(chosen.http, chosen.metrics)[f"/{chosen.action}"]
        except TimeoutError:
            reason = f"Triton does not answer within {ASK_SECONDS:.0f} s"
    print("ok" if reason is None else reason)
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main())
