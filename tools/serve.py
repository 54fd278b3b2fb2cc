"""`make serve`: checks, a model, a repository, tritonserver, the gateway; says when they are ready, leaves nothing.

It is also what a container of the server runs, as its first process: without a gateway, its log on standard error.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from tools import checks, configs, gateway, health, models
from tools.contract import MODEL
from tools.environment import gpu_present
from tools.gateway import GatewayProcess
from tools.progress import Progress
from tools.server import LOOPBACK, LaunchFailed, TritonServer, launch

READY_SECONDS = 900.0  # a GPU compiles its kernels at the first start
ENGINE_SECONDS = 2.0  # between two looks at the metrics port, whether the engines live
STDERR = "-"
_PREFIX = "TRITONSTREAM_SERVE_"

# Lines of vLLM's log (0.26 and 0.32 alike), and what goes on after each.
PHASES = (
    ("Resolved architecture", "starting the engine's process"),
    ("Initializing a V1 LLM engine", "starting the engine's worker"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "measuring memory"),
    ("KV cache size", "warming up"),
    ("Capturing CUDA graphs", "capturing CUDA graphs"),
    ("successfully loaded", "opening ports"),
)


class Leave(BaseException):
    """The user, or who supervises us, wants the server to end."""


class Signals:
    """SIGINT and SIGTERM: the first asks to leave, which drains; the second kills the server."""

    def __init__(self, progress: Progress) -> None:
        self.server: TritonServer | None = None
        self.gateway: GatewayProcess | None = None
        self._leaving = False
        self._progress = progress

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._leaving:
            self._leaving = True
            raise Leave
        if self.gateway is not None:
            self.gateway.kill()
        if self.server is not None:
            self._progress.say("killing tritonserver")
            self.server.kill()


def _option(name: str, help_text: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, envvar=_PREFIX + name, help=help_text, **more)


def main(
    model: Annotated[str, _option("MODEL", "folder of a Hugging Face model; default: the best this machine has")] = "",
    name: Annotated[str, _option("NAME", "its name in Triton; default: its own")] = "",
    variant: Annotated[
        str,
        _option("VARIANT", f"one of {', '.join(configs.VARIANTS)}; default: what the model's weights are"),
    ] = "",
    instances: Annotated[
        int, _option("INSTANCES", "stub processes that share the engine, for many streams", min=1)
    ] = 1,
    repository: Annotated[str, _option("REPOSITORY", "serve this model repository as it is, all its models")] = "",
    host: Annotated[str, _option("HOST", "address to listen on; 0.0.0.0 is every one")] = LOOPBACK,
    http_port: Annotated[int, _option("HTTP_PORT", "HTTP; 0 picks a free one, as for the others")] = 8000,
    grpc_port: Annotated[int, _option("GRPC_PORT", "gRPC")] = 8001,
    metrics_port: Annotated[int, _option("METRICS_PORT", "Prometheus metrics")] = 8002,
    gateway_port: Annotated[int, _option("GATEWAY_PORT", "OpenAI's API")] = 9000,
    with_gateway: Annotated[bool, _option("GATEWAY", "start the gateway too", "--gateway/--no-gateway")] = True,
    drain: Annotated[
        int, _option("DRAIN", "seconds that requests in flight get when the server is to end", min=0)
    ] = 30,
    log: Annotated[
        str, _option("LOG", "file for the server's log; - is standard error, with nothing on the disk")
    ] = "",
) -> None:
    """Serve a model through Triton until Ctrl-C or SIGTERM."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    progress = Progress()
    gpu = gpu_present()
    ports = (http_port, grpc_port, metrics_port, *((gateway_port,) if with_gateway else ()))
    folder = Path(model) if model else None
    try:
        with Signals(progress) as signals:  # from here on: the first process of a container has no default of its own
            variant = configs.variant_named(variant).name if variant else models.variant_of(folder)
            plan = checks.Plan(host=host, ports=ports, gpu=gpu, variant=variant, model=folder)
            found = checks.failures(checks.run(plan))
            for failure in found:
                progress.say(f"error: {failure}")
            if found:
                raise typer.Exit(1)
            own = _given(Path(repository)) if repository else _made(plan, name, instances, progress)
            with own as (repository_folder, served):
                default = Path(".cache", f"tritonserver-{http_port}.log").absolute()
                log_path = Path(log) if log and log != STDERR else default
                server = launch(
                    repository_folder,
                    http_port=http_port,
                    grpc_port=grpc_port,
                    metrics_port=metrics_port,
                    host=host,
                    env={} if repository else {"HF_HUB_OFFLINE": "1"},  # a model made ready is a folder by now
                    log=log_path,
                    relay=log == STDERR,
                    exit_timeout=drain,
                )
                signals.server = server
                front_log = log_path.with_name(f"gateway-{gateway_port}.log")
                _attend(server, served, drain, progress, signals, (gateway_port, front_log) if with_gateway else None)
    except (LaunchFailed, configs.BadConfig, models.ModelUnavailable) as error:
        progress.say(f"error: {error}")
        raise typer.Exit(1) from error
    except Leave:
        progress.say("stopped before the server was up")
        raise typer.Exit(130) from None


@contextlib.contextmanager
def _given(repository: Path) -> Iterator[tuple[Path, str]]:
    """A repository of the user's own, as one made by `tools.configs export`; yields it and its models' names."""
    names = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not names:
        raise LaunchFailed(f"{repository} is no model repository: no folder in it has a config.pbtxt")
    yield repository, ", ".join(names)


@contextlib.contextmanager
def _made(plan: checks.Plan, name: str, instances: int, progress: Progress) -> Iterator[tuple[Path, str]]:
    """Make the model ready and a repository around it, which goes when the block ends; yields it and the name."""
    own: dict[str, Any] = {} if plan.gpu else configs.CPU_ARGUMENTS.copy()
    calls: str | None = None
    if plan.variant == configs.DEFAULT or plan.model is not None:
        choice = models.choose(
            folder=plan.model, gpu=plan.gpu, cached=plan.gpu and models.hub_cached(), hub=models.hub_answers
        )
        progress.say(f"model: {choice.reason}")
        served = name or choice.name
        folder = models.provide(choice, plan.model, progress)
        own["model"] = str(folder)
        own["reasoning_parser"], calls = models.parsers(folder)
    else:  # its weights lie in the model folder
        served = name or MODEL.name
        models.check_folder(MODEL / str(configs.VARIANTS[plan.variant].engine_args["model"]))
        progress.say(f"model: the {plan.variant} weights of {MODEL.name}")
    with tempfile.TemporaryDirectory(prefix="tritonstream-repository-") as scratch:
        configs.export(
            plan.variant,
            served,
            Path(scratch),
            engine_args=own,
            tool_call_parser=calls,
            instances=instances,
            link=True,
        )
        yield Path(scratch), served


def _attend(
    server: TritonServer,
    name: str,
    drain: int,
    progress: Progress,
    signals: Signals,
    front_at: tuple[int, Path] | None,
) -> None:
    """Wait until the server is ready, then until somebody wants it to end or it ends by itself (LaunchFailed)."""
    begin = time.monotonic()
    ready = False
    front: GatewayProcess | None = None
    try:
        server.wait_ready(
            READY_SECONDS,
            progress=lambda elapsed: progress.update(
                f"tritonserver loads {name}", f"{elapsed:.0f} s · {phase(server.tail(200))}"
            ),
        )
        ready = True
        if front_at is not None:
            progress.update("starting the gateway", "")
            front = signals.gateway = gateway.launch(
                server.grpc_address,
                server.metrics_url,
                host=server.host,
                port=front_at[0],
                grace=drain,
                log=front_at[1],
            )
            front.wait_ready()
        progress.say(f"ready after {time.monotonic() - begin:.0f} s")
        progress.say(greeting(server, name, front))
        looked = time.monotonic()
        while True:
            time.sleep(1)
            if server.exit_code is not None:
                raise LaunchFailed(server.epitaph())
            if not server.stub_pids():  # Triton goes on to say that it is ready
                raise LaunchFailed(
                    f"the process that runs the model died; the end of its log {server.log_path}:\n{server.tail()}"
                )
            if front is not None and front.exit_code is not None:
                raise LaunchFailed(front.epitaph())
            if time.monotonic() - looked > ENGINE_SECONDS:
                if names := _dead_engines(server):
                    raise LaunchFailed(
                        f"the engine of {', '.join(names)} died; the end of its log {server.log_path}:\n{server.tail()}"
                    )
                looked = time.monotonic()
    except Leave:
        if ready:
            progress.say(f"draining: requests in flight have up to {drain} s; Ctrl-C again kills")
        else:  # Triton would first load the model
            progress.say("stopping")
            server.kill()
    finally:
        if front is not None:  # first, for its requests are Triton's too
            front.stop()
        server.stop(drain + 15.0)
    progress.say("stopped; nothing is left running")


def _dead_engines(server: TritonServer) -> list[str]:
    """Names of the models whose engine has died, which no engine does that could come back; none if nobody tells."""
    try:
        return health.dead(health.get(server.metrics_url)[1])
    except (OSError, http.client.HTTPException):  # a busy server, or one that just ended: the next look tells
        return []


def phase(log: str) -> str:
    """What the engine is at, by the last of its lines that tells."""
    told = [(log.rfind(line), words) for line, words in PHASES]
    return max(told)[1] if max(told)[0] >= 0 else "starting Python and vLLM"


def greeting(server: TritonServer, name: str, front: GatewayProcess | None) -> str:
    """How to talk to a ready server."""
    model = name.split(", ")[0]
    openai = ask = ""
    if front is not None:
        openai = f"\n    OpenAI   {front.url}/v1"
        ask = f"""
    curl -sSN {front.url}/v1/chat/completions \\
      -d '{{"model": "{model}", "stream": true, "max_tokens": 16,
           "messages": [{{"role": "user", "content": "Say hello."}}]}}'"""
    command = Path(sys.executable).with_name("tritonstream")
    shown = os.path.relpath(command) if command.is_relative_to(Path.cwd()) else command
    return f"""
  {name}
    gRPC     {server.grpc_address}
    HTTP     {server.http_url}
    metrics  {server.metrics_url}{openai}
    log      {server.log_path}

  Talk to it from another terminal:
    {shown} chat --url {server.grpc_address}{ask}
    curl -sSN {server.http_url}/v2/models/{model}/generate_stream \\
      -d '{{"text_input": "The capital of France is", "stream": true, "max_tokens": 16, "temperature": 0}}'

  Ctrl-C ends it."""


if __name__ == "__main__":
    typer.run(main)
