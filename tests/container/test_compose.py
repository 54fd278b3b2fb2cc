"""docker/compose.yaml on a CPU: up, asked, watched, stopped in the midst of answers, hurt, and up again.

The tests run in their order, each leaves everything up; the image registry's own images have Debian's as stand-ins.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import openai
import pytest

from tests.support import tiny_qwen3
from tests.support.docker import Project
from tests.support.metrics import eventually
from tests.support.servers import TINY as MODEL
from tests.support.tiny_qwen3 import case
from tests.support.wire import RETURN_ALL, Wire, connect
from tools import checks

pytestmark = [pytest.mark.container, pytest.mark.timeout(900)]

STORY = case("story")
CHAT: dict[str, Any] = {"messages": list(STORY.messages), "chat_template_kwargs": STORY.template_kwargs}
WHEEL: dict[str, Any] = {
    "messages": [{"role": "user", "content": tiny_qwen3.WHEEL_QUESTION}],
    "chat_template_kwargs": {"enable_thinking": False},
}
TOKENS = 1_500  # three seconds at least: the engine can be frozen before it has made them
OURS = ("triton", "gateway")
UP_SECONDS = 240.0  # for a model to be there again, where everything else has started too
# The health check is looked at every 10 s, and three times before a container counts as unhealthy.
TOLD_SECONDS = 90.0
# Runs in the server's container: a signal to the process in which vLLM's engine lives.
TO_ENGINE = """
import os, psutil, sys
for process in psutil.process_iter():
    if process.pid != os.getpid() and "EngineCore" in f"{process.name()} {' '.join(process.cmdline())}":
        process.send_signal(int(sys.argv[1]))
        print(process.pid)
"""


def page(project: Project, service: str, path: str) -> str:
    """What a service answers on its published port."""
    with urllib.request.urlopen(f"http://127.0.0.1:{project.variables[f'{service}_PORT']}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def to_engine(project: Project, number: int) -> None:
    """Send the engine a signal."""
    assert project.execute("triton", ".venv/bin/python", "-c", TO_ENGINE, str(number)).strip(), "there is an engine"


@contextlib.asynccontextmanager
async def asking(project: Project) -> AsyncIterator[Wire]:
    """A channel to the server's published gRPC port."""
    async with connect(f"127.0.0.1:{project.variables['GRPC_PORT']}", MODEL) as wire:
        yield wire


def gateway(project: Project) -> openai.AsyncOpenAI:
    """OpenAI's client of the gateway's published port."""
    base = f"http://127.0.0.1:{project.variables['GATEWAY_PORT']}/v1"
    return openai.AsyncOpenAI(base_url=base, api_key="EMPTY", max_retries=0, timeout=60)


def probe(project: Project, service: str) -> tuple[int, str]:
    """Run a container's own health check in it: its exit code and what it says."""
    container = project.container(service)
    test = project.docker.inspect(container)["Config"]["Healthcheck"]["Test"]
    done = project.docker.run("exec", container, *test[1:], check=False)
    return done.returncode, done.stdout.strip()


async def healthy(project: Project, service: str, within: float) -> None:
    """Wait until a container is healthy."""
    await eventually(lambda: project.health(service) == "healthy", f"{service} is healthy", within)


def test_everything_is_up_and_healthy(project: Project) -> None:
    """`up --wait` came back, and that is what it means; each health check passes when it is run by hand, too."""
    services = project.compose("--profile", "cache", "ps", "--services").stdout.split()
    assert sorted(services) == ["alertmanager", "gateway", "prometheus", "redis", "triton"]
    assert {project.health(service) for service in services} == {"healthy"}
    for service in OURS:
        assert probe(project, service) == (0, "ok")


async def test_a_stream_over_grpc_is_exact(project: Project) -> None:
    """The tiny model's story, in many pieces."""
    async with asking(project) as wire:
        answer = (await wire.ask(chat=CHAT, flags=RETURN_ALL)).ok()
    assert answer.text() == STORY.expected
    assert len(answer.responses) > 20


async def test_a_stream_over_the_gateway_is_exact(project: Project) -> None:
    """The same story in OpenAI's events."""
    async with gateway(project) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=CHAT["messages"], stream=True, extra_body={"enable_thinking": False}
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == STORY.expected
    assert len([piece for piece in pieces if piece]) > 20


@pytest.mark.parametrize("service", OURS)
def test_nobody_is_root(project: Project, service: str) -> None:
    """The first process is user 10001's without a capability, and can get none; what it runs from is not its own."""
    status = dict(line.split(":\t", 1) for line in project.execute(service, "cat", "/proc/1/status").splitlines())
    assert status["Uid"].split() == ["10001"] * 4
    assert status["Gid"].split() == ["10001"] * 4
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    container = project.container(service)
    refused = project.docker.run("exec", container, "touch", "/opt/tritonstream/x", check=False)
    assert refused.returncode != 0


def test_the_gateways_root_is_read_only(project: Project) -> None:
    """Not even root could write anywhere but in /tmp, which is memory."""
    container = project.container("gateway")
    refused = project.docker.run("exec", "--user", "0", container, "touch", "/opt/x", check=False)
    assert "Read-only file system" in refused.stderr
    assert project.docker.run("exec", container, "touch", "/tmp/x").returncode == 0


def test_the_server_has_the_shared_memory_that_it_needs(project: Project) -> None:
    """Of which Docker's default would be too little."""
    size = project.execute("triton", "df", "--output=size", "--block-size=1M", "/dev/shm").split()[-1]
    assert int(size) >= 2 * checks.SHARED_MEMORY_MB


async def test_prometheus_reads_both_and_knows_the_alerts(project: Project) -> None:
    """All targets are up, vLLM's metrics are there, the rules are loaded, and Alertmanager is known."""

    def up() -> bool:
        targets = json.loads(page(project, "PROMETHEUS", "/api/v1/targets"))["data"]["activeTargets"]
        return sorted((one["labels"]["job"], one["health"]) for one in targets) == [
            ("gateway", "up"),
            ("prometheus", "up"),
            ("triton", "up"),
        ]

    await eventually(up, "all targets are up", 30)
    found = json.loads(page(project, "PROMETHEUS", "/api/v1/query?query=vllm:generation_tokens_total"))
    assert found["data"]["result"][0]["metric"]["model"] == MODEL
    groups = json.loads(page(project, "PROMETHEUS", "/api/v1/rules"))["data"]["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}
    assert sum(len(group["rules"]) for group in groups) > 5
    managers = json.loads(page(project, "PROMETHEUS", "/api/v1/alertmanagers"))["data"]["activeAlertmanagers"]
    assert [one["url"] for one in managers] == ["http://alertmanager:9093/api/v2/alerts"]
    assert json.loads(page(project, "ALERTMANAGER", "/api/v2/status"))["config"]["original"]


async def test_stopping_the_server_loses_nothing_that_runs(project: Project) -> None:
    """A stream that runs is told to its end, a new request is refused meanwhile; the container ends with 0, in time."""
    async with (
        asking(project) as wire,
        wire.open(chat=WHEEL, sampling={"max_tokens": TOKENS, "ignore_eos": True}, flags=RETURN_ALL) as call,
    ):
        await call.until(30)
        to_engine(project, signal.SIGSTOP)  # the answer lasts for as long as is needed
        began = time.monotonic()
        stopping = asyncio.create_task(asyncio.to_thread(project.compose, "stop", "triton"))
        await eventually(lambda: "draining" in project.logs("triton"), "it drains", 30)
        await eventually(lambda: probe(project, "triton")[0] == 1, "its health check tells", 30)
        async with asking(project) as other:
            late = await other.ask(chat=CHAT, within=20)
        assert late.code is not grpc.StatusCode.OK
        assert not late.text()
        assert not stopping.done()
        to_engine(project, signal.SIGCONT)
        answer = (await call.rest()).ok()
        await stopping
    assert answer.total("num_output_tokens") == TOKENS
    assert answer.text() == tiny_qwen3.wheel(len(answer.text()))
    assert time.monotonic() - began < 60
    state = project.state("triton")
    assert (state["Status"], state["ExitCode"]) == ("exited", 0), project.logs("triton")
    assert "nothing is left running" in project.logs("triton")


async def test_the_gateway_tells_that_its_server_is_gone(project: Project) -> None:
    """Its health check fails, with the reason, and a request is a 503."""
    code, said = probe(project, "gateway")
    assert code == 1
    assert "answers 503" in said
    async with gateway(project) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model=MODEL, messages=CHAT["messages"])
    assert refused.value.status_code == 503
    await eventually(lambda: project.health("gateway") == "unhealthy", "the gateway is unhealthy", TOLD_SECONDS)


async def test_a_stopped_server_starts_again(project: Project) -> None:
    """The same container serves as before, and the gateway finds it without being started anew."""
    project.compose("up", "--wait", "--no-build", "triton", timeout=UP_SECONDS)
    await healthy(project, "gateway", TOLD_SECONDS)
    async with gateway(project) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=CHAT["messages"], extra_body={"enable_thinking": False}
        )
    assert answer.choices[0].message.content == STORY.expected


async def test_stopping_the_gateway_loses_nothing_that_runs(project: Project) -> None:
    """A stream that runs is told to its end, a new request gets 503 meanwhile; the container ends with 0."""
    async with gateway(project) as client:
        more = {"ignore_eos": True, "enable_thinking": False}
        stream = await client.chat.completions.create(
            model=MODEL, messages=WHEEL["messages"], stream=True, max_tokens=TOKENS, extra_body=more
        )
        pieces = [(await anext(stream)).choices[0].delta.content or "" for _ in range(5)]
        to_engine(project, signal.SIGSTOP)
        stopping = asyncio.create_task(asyncio.to_thread(project.compose, "stop", "gateway"))
        await eventually(lambda: "shutting down" in probe(project, "gateway")[1], "its health check says so", 30)
        async with gateway(project) as other:
            with pytest.raises(openai.InternalServerError) as refused:
                await other.chat.completions.create(model=MODEL, messages=CHAT["messages"])
        assert refused.value.status_code == 503
        assert not stopping.done()
        to_engine(project, signal.SIGCONT)
        finish = None
        async for chunk in stream:
            pieces.append(chunk.choices[0].delta.content or "")
            finish = chunk.choices[0].finish_reason or finish
        await stopping
    assert finish == "length"
    assert "".join(pieces) == tiny_qwen3.wheel(len("".join(pieces)))
    assert len("".join(pieces)) > TOKENS
    assert project.state("gateway")["ExitCode"] == 0
    project.compose("up", "--wait", "--no-build", "gateway", timeout=UP_SECONDS)


async def test_a_dead_engine_ends_the_container_which_is_started_again(project: Project) -> None:
    """Triton would call itself ready for ever; the container ends with 1 instead, comes back, and answers."""
    container = project.container("triton")
    assert project.docker.inspect(container)["RestartCount"] == 0
    to_engine(project, signal.SIGKILL)
    await eventually(
        lambda: project.docker.inspect(container)["RestartCount"] == 1, "it was started again", TOLD_SECONDS
    )
    assert f"error: the engine of {MODEL} died" in project.logs("triton")
    await healthy(project, "triton", UP_SECONDS)
    async with asking(project) as wire:
        assert (await wire.ask(chat=CHAT)).ok().text() == STORY.expected
