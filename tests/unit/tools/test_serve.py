"""`python -m tools.serve` as its user sees it: ready, signals, deaths, refusals; with a trivial model."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tools.environment import ROOT
from tools.serve import phase
from tools.server import STUB


class Serving:
    """A running `tools.serve`, what it said so far, and its tree of processes."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.serve", *arguments],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self._lines = self._process.stderr
        self.said = ""

    def read_until(self, word: str) -> None:
        """Read what it says until a line contains `word`."""
        while word not in self.said:
            line = self._lines.readline()
            assert line, f"ended without saying {word!r}:\n{self.said}"
            self.said += line

    def family(self) -> list[psutil.Process]:
        """Everything below it."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def named(self, name: str) -> psutil.Process:
        """The one process of its tree that runs the file `name`."""
        (found,) = (process for process in self.family() if Path(process.exe()).name == name)
        return found

    def signal(self, number: int) -> None:
        """Send a signal to it alone, as a supervisor does."""
        self._process.send_signal(number)

    def end(self) -> int:
        """Read the rest, and return its exit code."""
        self.said += self._lines.read()
        return self._process.wait(30)

    def close(self) -> None:
        """End it whatever it does, with its tree."""
        with contextlib.suppress(psutil.Error):
            for process in [*self.family(), psutil.Process(self._process.pid)]:
                process.kill()
        self._lines.close()
        self._process.wait(10)


@pytest.fixture
def serve(repository: Path, tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    """Starts `tools.serve` over the repository with the trivial model, on free ports."""
    started: list[Serving] = []

    def start(*arguments: str, told: bool = True) -> Serving:
        ports = [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", "0")]
        given = ("--log", str(tmp_path / "serve.log"), "--no-gateway") if told else ()
        started.append(Serving("--repository", str(repository), *given, *ports, *arguments))
        return started[-1]

    yield start
    for serving in started:
        serving.close()


def nothing_left(family: list[psutil.Process]) -> bool:
    """Whether all of them have ended."""
    return not any(process.is_running() and process.status() != "zombie" for process in family)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_leaves_nothing(serve: Callable[..., Serving], number: int) -> None:
    """It says when it is ready and how to talk to it; a signal ends it with 0 and no process is left."""
    serving = serve()
    serving.read_until("Ctrl-C ends it")
    url = re.search(r"curl -sSN (http://127.0.0.1:\d+)/v2/models/echo/generate_stream", serving.said)
    assert url is not None
    assert httpx.get(f"{url[1]}/v2/health/ready", trust_env=False).status_code == 200
    family = serving.family()
    serving.signal(number)
    assert serving.end() == 0, serving.said
    assert "draining" in serving.said
    assert serving.said.rstrip().endswith("stopped; nothing is left running")
    assert nothing_left(family)


@pytest.mark.parametrize(
    ("victim", "said"),
    [
        ("tritonserver", "error: tritonserver was killed by SIGKILL"),
        (STUB, "error: the process that runs the model died"),
    ],
)
def test_a_death_ends_it_with_the_log(serve: Callable[..., Serving], victim: str, said: str) -> None:
    """When tritonserver or its stub dies, serve says so, shows the log, ends with 1, and leaves nothing."""
    serving = serve()
    serving.read_until("Ctrl-C ends it")
    family = serving.family()
    serving.named(victim).kill()
    assert serving.end() == 1
    assert said in serving.said
    assert "the end of its log" in serving.said
    assert nothing_left(family)


MORTAL = """
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="tritonstream:engine_alive", description="for the test", kind=pb_utils.MetricFamily.GAUGE
        )
        self.alive = self.family.Metric(labels={"model": "echo"})
        self.alive.set(1)

    def execute(self, requests):
        self.alive.set(0)
        texts = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text", text)]) for text in texts]
"""


def test_an_engines_death_ends_it(serve: Callable[..., Serving], repository: Path) -> None:
    """The stub lives and Triton calls itself ready; the engine's own gauge says that no answer will come any more."""
    model = repository / "echo" / "1" / "model.py"
    head = model.read_text(encoding="utf-8").partition("    def initialize")[0]
    model.write_text(head + MORTAL.lstrip("\n"), encoding="utf-8")
    serving = serve()
    serving.read_until("Ctrl-C ends it")
    family = serving.family()
    url = re.search(r"HTTP +(http://127.0.0.1:\d+)", serving.said)
    assert url is not None
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}
    assert httpx.post(f"{url[1]}/v2/models/echo/infer", json=body, trust_env=False).status_code == 200
    assert serving.end() == 1
    assert "error: the engine of echo died; the end of its log" in serving.said
    assert nothing_left(family)


def test_options_come_from_the_environment_too(serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container is told; the log on standard error leaves no file."""
    monkeypatch.setenv("TRITONSTREAM_SERVE_LOG", "-")
    monkeypatch.setenv("TRITONSTREAM_SERVE_GATEWAY", "0")
    monkeypatch.setenv("TRITONSTREAM_SERVE_DRAIN", "7")
    serving = serve(told=False)
    serving.read_until("Ctrl-C ends it")
    assert "Started GRPCInferenceService" in serving.said
    assert "log      /dev/stderr" in serving.said
    assert "OpenAI" not in serving.said
    # A repository of the user's own may name a model of the hub.
    assert "HF_HUB_OFFLINE" not in serving.named("tritonserver").environ()
    serving.signal(signal.SIGTERM)
    assert serving.end() == 0
    assert "requests in flight have up to 7 s" in serving.said


def test_a_second_signal_kills(serve: Callable[..., Serving], repository: Path) -> None:
    """A request that never ends holds the drain up; the second signal does not wait for it."""
    model = repository / "echo" / "1" / "model.py"
    began = repository / "began"
    slow = "    def execute(self, requests):\n        import pathlib, time\n"
    slow += f"        pathlib.Path({str(began)!r}).touch()\n        time.sleep(600)\n"
    model.write_text(
        model.read_text(encoding="utf-8").replace("    def execute(self, requests):\n", slow), encoding="utf-8"
    )
    serving = serve()
    serving.read_until("Ctrl-C ends it")
    family = serving.family()
    port = re.search(r"HTTP +http://127.0.0.1:(\d+)", serving.said)
    assert port is not None
    body = b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"data":["x"]}]}'
    with socket.create_connection(("127.0.0.1", int(port[1]))) as asker:
        head = f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        asker.sendall(head.encode() + body)
        while not began.exists():
            time.sleep(0.02)
        serving.signal(signal.SIGINT)
        serving.read_until("draining")
        begin = time.monotonic()
        serving.signal(signal.SIGINT)
        serving.end()
    assert "killing tritonserver" in serving.said
    assert time.monotonic() - begin < 15, "the drain alone has 30 s"
    assert nothing_left(family)


def test_a_signal_while_loading_does_not_wait(serve: Callable[..., Serving], repository: Path) -> None:
    """There is nothing to drain before the model is ready."""
    model = repository / "echo" / "1" / "model.py"
    model.write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    serving = serve()
    serving.read_until("tritonserver loads echo")
    family = serving.family()
    begin = time.monotonic()
    serving.signal(signal.SIGTERM)
    serving.end()
    assert time.monotonic() - begin < 10
    assert nothing_left(family)


def test_a_taken_port_is_one_sentence(serve: Callable[..., Serving]) -> None:
    """Before anything starts; with what to do."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        serving = serve("--grpc-port", str(port))
        assert serving.end() == 1
    assert serving.said == f"error: port {port} is taken on 127.0.0.1: stop what listens there, or give PORT=\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--model", "/nowhere"),
            "error: /nowhere is not a folder: MODEL= takes a folder with config.json and weights\n",
        ),
        (("--variant", "int3"), "error: 'int3' is no variant: choose one of fp16, awq, gptq\n"),
        (("--repository", os.devnull), "error: /dev/null is no model repository: no folder in it has a config.pbtxt\n"),
    ],
)
def test_a_refusal_is_one_sentence(serve: Callable[..., Serving], arguments: tuple[str, str], said: str) -> None:
    """Nonsense is answered at once, with exit code 1."""
    serving = serve(*arguments)
    assert (serving.end(), serving.said) == (1, said)


def test_the_phase_is_told_by_the_last_line_that_tells() -> None:
    """Lines that say nothing to a user are left out."""
    log = "INFO Resolved architecture: Qwen3ForCausalLM\nINFO Starting to load model x...\nWARNING something\n"
    assert phase("") == "starting Python and vLLM"
    assert phase(log) == "loading weights"
