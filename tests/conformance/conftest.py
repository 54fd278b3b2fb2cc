"""One gateway over the server that the tests share, and real clients of it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.support import processes, servers
from tools import gateway
from tools.gateway import GatewayProcess

ALIAS = "Qwen-0.6B"
STALL_SECONDS = 2.0
Start = Callable[..., GatewayProcess]


@pytest.fixture(scope="session", autouse=True)
def checked(nothing_left: set[Path]) -> None:
    """Check at the end of the session that nothing of the servers is left."""


@pytest.fixture(scope="session")
def front(triton: servers.Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """The gateway that most tests share: two workers, no keys."""
    arguments = ["--workers", "2", "--alias", f"{ALIAS}={servers.TINY}", "--stall", str(STALL_SECONDS)]
    log = tmp_path_factory.mktemp("gateway") / "log"
    with gateway.launch(
        triton.grpc, triton.server.metrics_url, log=log, grace=5, arguments=[*arguments, "--log-requests"]
    ) as started:
        started.wait_ready()
        yield started
        print(log.read_text())
        family = psutil.Process(started.pid).children(recursive=True)
    processes.gone(family, within=10)


@pytest.fixture
def start(triton: servers.Triton, tmp_path: Path) -> Iterator[Start]:
    """Starts gateways of a test's own: one worker each, where nothing else is said."""
    started: list[GatewayProcess] = []

    def launch(*arguments: str, grace: float = 5.0, scheme: str = "http") -> GatewayProcess:
        log = tmp_path / f"gateway-{len(started)}.log"
        words = ["--workers", "1", *arguments] if "--workers" not in arguments else arguments
        one = gateway.launch(
            triton.grpc, triton.server.metrics_url, log=log, grace=grace, scheme=scheme, arguments=words
        )
        started.append(one)
        one.wait_ready()
        return one

    yield launch
    for one in started:
        one.stop()


@pytest.fixture
def client(front: GatewayProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's blocking client, as an application makes it; it does not hide a failure by asking again."""
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="EMPTY", max_retries=0) as made:
        yield made


@pytest.fixture
async def aclient(front: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's asynchronous client."""
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="EMPTY", max_retries=0) as made:
        yield made


def mark() -> str:
    """The mark of this session's processes."""
    return os.environ[processes.MARK]
