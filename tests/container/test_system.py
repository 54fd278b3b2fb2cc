"""The server's image on a base that has a tritonserver of its own, as NVIDIA's: it is used as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.docker import SERVER, Build, Docker
from tests.support.metrics import eventually
from tests.support.servers import ENVIRONMENT
from tests.support.servers import TINY as MODEL
from tests.support.tiny_qwen3 import case
from tests.support.wire import connect
from tools.environment import ROOT
from tools.server import free_port

pytestmark = [pytest.mark.container, pytest.mark.timeout(1_200)]

BASE, IMAGE, NAME = "tritonstream-test-system-base", "tritonstream-test-system", "tritonstream-test-system"
GRPC = free_port()
READY_SECONDS = 240.0


@pytest.fixture(scope="module")
def running(images: Docker, build: Build, models: Path) -> Iterator[Docker]:
    """A container of the image, on the host's network, with the tiny model."""
    build(BASE, Path(__file__).parent / "system.Dockerfile", {"SERVER_IMAGE": SERVER})
    build(IMAGE, ROOT / "docker" / "Dockerfile", {"BASE_IMAGE": BASE})
    ports = {"HTTP": free_port(), "GRPC": GRPC, "METRICS": free_port()}
    settings = {f"TRITONSTREAM_SERVE_{name}_PORT": str(port) for name, port in ports.items()}
    settings |= {"TRITONSTREAM_SERVE_HOST": "127.0.0.1", "TRITONSTREAM_SERVE_MODEL": f"/models/{MODEL}"}
    words = [f"--env={name}={value}" for name, value in (settings | ENVIRONMENT).items()]
    images.run(
        "run", "--detach", "--name", NAME, "--network=host", "--shm-size=1g", f"-v={models}:/models:ro", *words, IMAGE
    )
    try:
        yield images
    finally:
        print(images.run("logs", NAME).stderr)
        images.run("rm", "--force", NAME)


async def test_its_triton_serves_and_its_python_has_the_engine(running: Docker) -> None:
    """An exact stream; the stub is the base's, and the launcher's own environment holds neither Triton nor vLLM."""
    await eventually(lambda: "Ctrl-C ends it" in running.run("logs", NAME).stderr, "it is ready", READY_SECONDS)
    known = case("capital")
    chat = {"messages": list(known.messages), "chat_template_kwargs": known.template_kwargs}
    async with connect(f"127.0.0.1:{GRPC}", MODEL) as wire:
        assert (await wire.ask(chat=chat)).ok().text() == known.expected
    commands = running.run("top", NAME, "-eo", "pid,args").stdout
    assert "/opt/tritonserver/bin/tritonserver --model-repository=" in commands
    assert "/opt/tritonserver/backends/python/triton_python_backend_stub" in commands
    own = running.run(
        "exec", NAME, "ls", *(f".venv/lib/python3.11/site-packages/{name}" for name in ("vllm", "torch")), check=False
    )
    assert own.returncode != 0
    assert not own.stdout


def test_it_stops_as_the_other_does(running: Docker) -> None:
    """With 0, and without a process that would hold it up."""
    running.run("stop", "--time", "60", NAME)
    state = running.inspect(NAME)["State"]
    assert (state["Status"], state["ExitCode"]) == ("exited", 0)
