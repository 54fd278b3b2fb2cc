"""Variants of a model, each served by the same model.py under its own `--model-config-name`, and what was seen of it.

Read by `tools.compare` and `tools.variants_report`. A variant is measured through Triton over gRPC, alone on the
machine, one after the other.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tritonstream.errors import TritonstreamError

from tools import configs, models, quality, server, ways
from tools.bench import Plan
from tools.contract import load
from tools.load import Level
from tools.processes import Watch
from tools.quantize import weight_bytes

LOADED_GIB = re.compile(r"Model loading took ([\d.]+) GiB")
TELLING = {"VLLM_LOGGING_LEVEL": "INFO"}  # else vLLM may keep that to itself


class BadVariant(Exception):
    """Something that cannot be compared; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is to be measured: a variant by name, and its weights; a folder of None is one that nobody gave."""

    variant: str
    folder: Path | None

    @property
    def scheme(self) -> str:
        """How the weights are stored, as in W8A16; "" for plain ones, or none."""
        found = None if self.folder is None else load(module="weights").of_folder(self.folder)
        return str(found.scheme) if found is not None and found.quantized else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was seen of one variant, memory in MB; `error` says why there is nothing else."""

    variant: str
    scheme: str
    model: str
    error: str | None = None
    load_s: float | None = None
    weights_mb: float | None = None
    kv_tokens: int | None = None
    peak_rss_mb: float | None = None
    peak_gpu_mb: float | None = None
    levels: tuple[Level, ...] = ()
    quality: quality.Quality | None = None

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.variant} {self.scheme}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """What is asked for the quality of answers."""

    text: str
    questions: Sequence[str]
    tokens: int


def subjects(given: Sequence[str], default: Path | None) -> list[Subject]:
    """Read `variant=folder` or folders alone, whose weights say which they are; variants without one come last.

    `default` is the plain variant's folder where none is given. Raises BadVariant.
    """
    found = []
    for one in given:
        name, equals, path = one.partition("=")
        folder = Path(path if equals else name)
        if not (folder / "config.json").is_file():
            raise BadVariant(f"{folder} has no config.json: give folders, or variant=folder")
        try:
            found.append(Subject(variant=name if equals else models.variant_of(folder), folder=folder))
        except models.ModelUnavailable as error:
            raise BadVariant(str(error)) from error
    for subject in found:
        configs.variant_named(subject.variant)
    if default is not None and all(subject.variant != configs.DEFAULT for subject in found):
        found.insert(0, Subject(variant=configs.DEFAULT, folder=default))
    there = {subject.variant for subject in found}
    return found + [Subject(variant=name, folder=None) for name in configs.VARIANTS if name not in there]


def measure(
    subject: Subject,
    arguments: Mapping[str, Any],
    plan: Plan,
    exam: Exam | None,
    log: Path,
    tell: Callable[..., object],
) -> Row:
    """Serve a variant, load it, ask it. What keeps it from being served is in the row."""
    row = Row(variant=subject.variant, scheme=subject.scheme, model=subject.folder.name if subject.folder else "")
    if subject.folder is None:
        return replace(row, error=f"no weights were given: `python -m tools.quantize --variant {subject.variant}`")
    label = row.label
    with tempfile.TemporaryDirectory(prefix="tritonstream-compare-") as scratch:
        own = {subject.variant: {**arguments, "model": str(subject.folder.resolve())}}
        configs.export_variants(ways.MODEL_NAME, Path(scratch), own)
        tell(label, "loading the model")
        begin = time.monotonic()
        try:
            with server.launch(Path(scratch), config_name=subject.variant, env=TELLING, log=log) as running:
                watch = Watch(running.pid)
                try:
                    running.wait_ready(ways.LOAD_TIMEOUT_S)
                    row = replace(row, load_s=time.monotonic() - begin, **_memory(subject.folder, running))
                    row = replace(row, levels=tuple(_load(label, running, plan, tell)))
                finally:
                    watch.stop()
                row = replace(row, peak_rss_mb=watch.peak_rss_mb, peak_gpu_mb=watch.peak_gpu_mb)
                if exam is not None:
                    asked = quality.ask(
                        running.grpc_address,
                        ways.MODEL_NAME,
                        text=exam.text,
                        questions=exam.questions,
                        tokens=exam.tokens,
                        tell=lambda what: tell(label, what),
                    )
                    row = replace(row, quality=asyncio.run(asked))
        except (server.LaunchFailed, RuntimeError, OSError, TritonstreamError) as error:
            return replace(row, error=reason(str(error)))
    return row


def reason(message: str) -> str:
    """The one sentence of a failure: without how Triton ended where it says why, and without the end of its log."""
    sentence = message.partition("; the end of its log")[0].partition("\n")[0]
    return re.sub(r"^tritonserver (ended with code \d+|was killed by \w+): ((Internal|\w*Error): )*", "", sentence)


def _load(label: str, running: server.TritonServer, plan: Plan, tell: Callable[..., object]) -> list[Level]:
    setting = ways.Setting(arguments={}, processes=plan.processes)
    way = ways.over_network("triton", running.grpc_address, setting, running.pid)
    levels = []
    loads = plan.loads()
    for number, (texts, tokens) in enumerate(loads, start=1):
        tell(f"{label}: load {number} of {len(loads)}", f"{len(texts)} streams of {tokens} tokens")
        levels.append(way.run(texts, tokens))
    return plan.median(levels[1:])


def _memory(folder: Path, running: server.TritonServer) -> dict[str, Any]:
    """Weights in MB, as the engine says or else as the files are, and the tokens that its KV cache holds."""
    said = LOADED_GIB.search(running.log_path.read_text(encoding="utf-8", errors="replace"))
    size = float(said[1]) * 2**30 if said else weight_bytes(folder)
    page = httpx.get(running.metrics_url, timeout=10, trust_env=False).text
    return {"weights_mb": size / 1e6 or None, "kv_tokens": kv_tokens(page)}


def kv_tokens(page: str) -> int | None:
    """Tokens that fit into the KV cache, by vLLM's own account on the metrics port."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith("vllm:cache_config_info") and "num_gpu_blocks" in sample.labels:
                return int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
    return None
