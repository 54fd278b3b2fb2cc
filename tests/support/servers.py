"""Real tritonservers around the tiny model, or another: a repository of a few models, started and waited for."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.version import Version

from tests.support import metrics, processes, tiny_qwen3
from tools import configs
from tools.server import TritonServer, launch

TINY = "Tiny-Qwen3"
# The tiny model on the CPU, in all of its context: an endless answer lasts longer than a busy machine stands still.
ENGINE = configs.CPU_ARGUMENTS | {
    "max_model_len": tiny_qwen3.CONTEXT,
    "max_num_seqs": 64,
    "enable_prefix_caching": True,
    "reasoning_parser": "qwen3",
}
TOOL_CALL_PARSER = "hermes"
# The same model with room for one request and 8 tokens a step: what comes second waits, and a long prompt takes long.
NARROW = "Tiny-Narrow"
NARROW_ENGINE: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 8,
    "scheduling_policy": "priority",
    "enable_prefix_caching": False,
    "structured_outputs_config": {"backend": "xgrammar"},  # an object, as config.pbtxt may have them
}
READY_SECONDS = 240.0  # 25 s for one model where nothing else runs
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    # Two threads per engine that spin at every barrier would fight with each other, and the client, over two cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


# README.md, "vLLM's versions", has what 0.26 lacks.
SINCE_0_32 = pytest.mark.skipif(
    Version(configs.vllm_version() or "0") < Version("0.32"), reason="vLLM 0.26 does not have it"
)


@dataclass(frozen=True, slots=True)
class Triton:
    """A ready server, and the model that is meant where none is named."""

    server: TritonServer
    model: str

    @property
    def grpc(self) -> str:
        """The gRPC address."""
        return self.server.grpc_address

    def url(self, path: str, model: str | None = None) -> str:
        """The URL of an HTTP endpoint of the model."""
        return f"{self.server.http_url}/v2/models/{model or self.model}/{path}"

    def stubs(self, model: str) -> list[int]:
        """The processes that run a model's model.py: one for each instance."""
        return [pid for pid in self.server.stub_pids() if any(f"/{model}/" in word for word in _command(pid))]

    def processes(self, model: str) -> list[psutil.Process]:
        """Everything that runs for a model: its stubs, the engine and its workers, the guardians."""
        stubs = [psutil.Process(pid) for pid in self.stubs(model)]
        return stubs + [child for stub in stubs for child in stub.children(recursive=True)]

    def engine_core(self, model: str) -> psutil.Process:
        """The process in which a model's engine lives."""
        (found,) = (core for stub in self.stubs(model) for core in processes.engine_cores(stub))
        return found

    @contextmanager
    def engine_paused(self, model: str) -> Iterator[None]:
        """Stop a model's engine for as long as the block lasts: its open requests neither go on nor end."""
        core = self.engine_core(model)
        core.suspend()
        try:
            yield
        finally:
            core.resume()

    def scrape(self, *names: str) -> metrics.Page:
        """Read the metrics port: everything, or the metrics whose names begin so."""
        return metrics.scrape(self.server.metrics_url, *names)

    def gauge(self, name: str, model: str | None = None) -> float:
        """One metric of the model, summed over its other labels; 0 when it never was set."""
        return sum(sample.value for sample in self.scrape(name).find(name, model=model or self.model))

    def load(self, model: str | None = None) -> float:
        """Requests running and waiting in the model's engine."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        page = self.scrape(*names)
        return sum(sample.value for name in names for sample in page.find(name, model=model or self.model))

    async def settled(self, model: str | None = None, within: float = metrics.PATIENCE) -> None:
        """Wait until the metrics port tells of all that happened so far: counters are brought there once a second."""
        now = time.time()
        told = "tritonstream:metrics_timestamp_seconds"
        await metrics.eventually(
            lambda: all(sample.value > now for sample in self.scrape(told).find(told, model=model or self.model)),
            "the metrics of every stub are of now",
            within,
        )


def _command(pid: int) -> list[str]:
    return psutil.Process(pid).cmdline()


@contextmanager
def serving(
    repository: Path,
    models: Mapping[str, Mapping[str, Any]],
    env: Mapping[str, str] | None = None,
    instances: int = 1,
) -> Iterator[Triton]:
    """Start one tritonserver over models of these names and engine arguments; the first is the one that is meant."""
    for name, arguments in models.items():
        configs.export(
            configs.DEFAULT,
            name,
            repository,
            engine_args=arguments,
            tool_call_parser=TOOL_CALL_PARSER if arguments.get("reasoning_parser") else "",
            instances=instances,
        )
    with launch(repository, env={**ENVIRONMENT, **(env or {})}) as server:
        try:
            server.wait_ready(READY_SECONDS)
            yield Triton(server, next(iter(models)))
        finally:
            if server.log_path.exists():
                print(f"--- {server.log_path}", server.log_path.read_text(errors="replace"), sep="\n", file=sys.stderr)
