"""`make serve` and the README: the real small model, started by the real command, asked as a newcomer would ask.

The tests of this module run in their order: the last one ends the server, in the middle of an answer.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.support import metrics, processes
from tests.support.wire import RETURN_ALL, connect
from tools import models
from tools.progress import Progress
from tools.server import free_port

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
READY_SECONDS = 240.0
WARM_SECONDS = 90.0  # what a second start may take
SMOLLM2 = models.SMOLLM2
FRANCE: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
TALE: dict[str, Any] = {"messages": [{"role": "user", "content": "Write a long story about a dog, a cat and a boat."}]}

pytestmark = pytest.mark.timeout(600)


@dataclass(slots=True)
class Serve:
    """A running `python -m tools.serve`."""

    process: subprocess.Popen[str]
    http: int
    grpc: int
    metrics: int
    openai: int
    said: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0

    def listen(self) -> None:
        """Note what it says, and when it says that it is ready."""
        assert self.process.stderr is not None
        began = time.monotonic()
        with self.process.stderr as lines:
            for line in lines:
                self.said.append(line.rstrip())
                if "Ctrl-C ends it" in line:
                    self.seconds = time.monotonic() - began
                    self.ready.set()
        self.ready.set()

    @property
    def text(self) -> str:
        """All that it said."""
        return "\n".join(self.said)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, nothing_left: set[Path]) -> Iterator[Serve]:
    """The command, ready, on ports of its own; on a machine with a GPU it is told to take the small model too."""
    models.smollm2(Progress())  # made before, so that a warm start is timed
    ports = [free_port() for _ in range(4)]
    names = ("--http-port", "--grpc-port", "--metrics-port", "--gateway-port")
    command = [sys.executable, "-m", "tools.serve", "--log", str(tmp_path_factory.mktemp("serve") / "log")]
    command += [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    )
    running = Serve(process, http=ports[0], grpc=ports[1], metrics=ports[2], openai=ports[3])
    listener = threading.Thread(target=running.listen, daemon=True)
    listener.start()
    try:
        assert running.ready.wait(READY_SECONDS), running.text
        assert process.poll() is None, running.text
        nothing_left |= processes.shared_memory(processes.marked(os.environ[processes.MARK]))
        yield running
    finally:
        process.terminate()
        process.wait(60)
        listener.join(10)


def test_it_says_what_it_serves_and_how_to_talk_to_it(serve: Serve) -> None:
    """The model and why, the addresses, the commands, how to end it; and a warm start is quick."""
    assert f"\n  {SMOLLM2}\n" in serve.text
    for port in (serve.http, serve.grpc, serve.metrics, serve.openai):
        assert f"127.0.0.1:{port}" in serve.text
    assert re.search(r"model: .*SmolLM2", serve.text)
    assert "tritonstream chat" in serve.text
    assert "curl" in serve.text
    assert serve.seconds < WARM_SECONDS


async def test_a_real_model_answers(serve: Serve) -> None:
    """The capital of France, streamed and whole, with its usage."""
    async with connect(f"127.0.0.1:{serve.grpc}", SMOLLM2) as wire:
        for stream in (True, False):
            asked: dict[str, Any] = {"chat": FRANCE, "sampling": {"temperature": 0}, "flags": RETURN_ALL}
            answer = (await wire.ask(**asked, stream=stream)).ok()
            assert answer.text() == "The capital of France is Paris."
            assert answer.last("finish_reason") == "stop"
            assert answer.total("num_output_tokens") == 8
            assert answer.last("num_input_tokens") > 20


async def test_sixteen_at_once(serve: Serve) -> None:
    """Each gets its own answer, alone or in company."""
    async with connect(f"127.0.0.1:{serve.grpc}", SMOLLM2) as wire:
        sampling = {"temperature": 0, "max_tokens": 24}
        answers = await asyncio.gather(*(wire.ask(chat=FRANCE, sampling=sampling, within=120) for _ in range(16)))
        assert {answer.ok().text() for answer in answers} == {"The capital of France is Paris."}


def commands() -> list[str]:
    """The README's shell blocks that call curl."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "curl" in block]


def test_the_readme_shows_the_endpoints() -> None:
    """generate, generate_stream, the metrics, and OpenAI's chat."""
    shown = "\n".join(commands())
    for path in ("/generate ", "/generate_stream ", "/metrics", "/v1/chat/completions "):
        assert path in shown


@pytest.mark.parametrize("block", commands(), ids=range(len(commands())))
def test_the_readmes_curl_lines_work(serve: Serve, block: str) -> None:
    """Run as they stand, but for the ports, they succeed and print an answer."""
    ports = {"8000": serve.http, "8001": serve.grpc, "8002": serve.metrics, "9000": serve.openai}
    command = re.sub(r"(?<=:)(800[012]|9000)\b", lambda found: str(ports[found[0]]), block)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert '"error":' not in done.stdout
    assert any(word in done.stdout for word in ("text_output", "vllm:num_requests_running", "chat.completion"))


def test_the_greetings_curl_line_works(serve: Serve) -> None:
    """What the command prints at the end of its start is true."""
    block = serve.text[serve.text.index("curl") : serve.text.index("Ctrl-C ends it")]
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("text_output") > 3
    assert done.stdout.count("chat.completion.chunk") > 3
    assert "data: [DONE]" in done.stdout


def test_the_tritonstream_command(serve: Serve) -> None:
    """One answer on standard output, for a script."""
    command = [sys.executable, "-m", "tritonstream", "generate", "--chat", "--temperature", "0"]
    command += ["--url", f"127.0.0.1:{serve.grpc}", FRANCE["messages"][0]["content"]]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT / "client")}
    )
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout


def test_openais_client(serve: Serve) -> None:
    """The gateway that came with it answers the client that applications use."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{serve.openai}/v1", api_key="EMPTY", max_retries=0) as client:
        completion = client.chat.completions.create(model=SMOLLM2, messages=FRANCE["messages"], temperature=0)
    assert completion.choices[0].message.content == "The capital of France is Paris."


async def test_sigterm_lets_the_open_answer_finish_and_leaves_nothing(serve: Serve) -> None:
    """The story that is being told is told to its end; then no process of the command is left."""
    family = [psutil.Process(serve.process.pid), *psutil.Process(serve.process.pid).children(recursive=True)]
    assert len(family) > 4, "the command, tritonserver, a stub, an engine, a guardian at least"
    async with connect(f"127.0.0.1:{serve.grpc}", SMOLLM2) as wire:
        sampling = {"temperature": 0, "max_tokens": 120, "ignore_eos": True}
        async with wire.open(chat=TALE, sampling=sampling, flags=RETURN_ALL) as call:
            await call.until(30)
            serve.process.send_signal(signal.SIGTERM)
            answer = (await call.rest()).ok()
    assert answer.total("num_output_tokens") == 120
    assert answer.last("finish_reason") == "length"
    assert await asyncio.to_thread(serve.process.wait, 60) == 0, serve.text
    processes.gone(family, 1)
    assert "draining" in serve.text
    with pytest.raises(OSError, match="refused"):
        metrics.scrape(f"http://127.0.0.1:{serve.metrics}/metrics")
    with pytest.raises(OSError, match="refused"):
        metrics.scrape(f"http://127.0.0.1:{serve.openai}/metrics")
