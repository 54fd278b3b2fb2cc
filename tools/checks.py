"""What must be true of a machine before anything heavy starts: each check answers in one sentence, with what to do.

`tools.serve` runs them and stops at a failure; `tools.doctor` shows them all. No check imports vLLM or torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tools import configs, models
from tools.contract import MODEL
from tools.server import SHARED_MEMORY, LaunchFailed, SystemInstallation, installation, port_taken

# Triton's Python backend begins with 1 MB for each stub and grows with the answers under way.
SHARED_MEMORY_MB = 64
DISK_GB = 1.0
TESTED_VLLM = ((0, 26), (0, 32))  # the CUDA and the CPU release that the locks hold
KERNEL = (5, 3)  # guardian.py waits on pidfds
ENGINE_GB = 2.5  # what vLLM, torch and Triton take beside weights and KV cache, measured with SmolLM2 on a CPU


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check: `remedy` says what to do when it is not `ok`."""

    name: str
    ok: bool
    said: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.said}: {self.remedy}" if self.remedy else self.said


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is about to be started. A `model` of None is SmolLM2 or the hub's; `gpu` tells whether a GPU will run it."""

    host: str
    ports: tuple[int, ...]
    gpu: bool
    variant: str = configs.DEFAULT
    model: Path | None = None
    kv_cache_gb: float = 2.0


def installed() -> Iterator[Finding]:
    """Run those that look at what is installed, and at nothing of the machine: an image can be asked them at its build.

    A tritonserver of the system's has its own Python and the NumPy that it wants; neither is this one.
    """
    yield triton()
    if not _of_the_system():
        yield shared_python()
        yield numpy(_version("numpy"))
    yield vllm(configs.vllm_version())
    yield sources(MODEL)


def run(plan: Plan) -> Iterator[Finding]:
    """Run all checks, the cheapest first."""
    yield from installed()
    yield kernel(platform.release())
    for port in plan.ports:
        yield port_free(plan.host, port)
    yield shared_memory(SHARED_MEMORY)
    for folder in _kept_in():
        yield disk(folder)
    if plan.model is not None:
        yield weights(plan.model)
        yield variant(plan)
    if plan.gpu:
        yield gpu(plan.variant, configs.gpu_capability())
    else:
        yield memory(psutil.virtual_memory().available, plan)


def failures(findings: Iterator[Finding]) -> list[Finding]:
    """Return those which are not ok."""
    return [finding for finding in findings if not finding.ok]


def triton() -> Finding:
    """There is the wheel with tritonserver, with a stub for this Python, or a tritonserver of the system's."""
    try:
        found = installation()
    except LaunchFailed as error:
        said, _, remedy = str(error).rpartition(": ")
        return Finding("tritonserver", False, said, remedy)
    if isinstance(found, SystemInstallation):
        if found.backend.is_dir():
            return Finding("tritonserver", True, f"{found.binary}, the system's")
        remedy = "use an image of Triton's that has it (…-vllm-python-py3)"
        return Finding("tritonserver", False, f"{found.binary} has no Python backend in {found.backend}", remedy)
    lacking = [str(path) for path in (found.binary, found.backend, found.libraries) if not path.exists()]
    if lacking:
        return Finding(
            "tritonserver", False, f"nvidia-pytriton lacks {lacking[0]}", "remove .venv and run `make serve`"
        )
    return Finding("tritonserver", True, f"found, with a stub for Python {sysconfig.get_python_version()}")


def _of_the_system() -> bool:
    with contextlib.suppress(LaunchFailed):
        return isinstance(installation(), SystemInstallation)
    return False


def shared_python() -> Finding:
    """The stub loads this Python as a shared library."""
    folder, name = Path(str(sysconfig.get_config_var("LIBDIR"))), str(sysconfig.get_config_var("INSTSONAME"))
    if (folder / name).exists() and ".so" in name:
        return Finding("libpython", True, str(folder / name))
    return Finding(
        "libpython",
        False,
        f"this Python has no shared library ({folder / name}), which Triton's stub loads",
        "install it (Debian: libpython3.11), or name a Python built with --enable-shared: `make PYTHON=… serve`",
    )


def kernel(release: str) -> Finding:
    """Linux has pidfds, with which the engine's processes are guarded."""
    found = re.match(r"(\d+)\.(\d+)", release)
    if found and (int(found[1]), int(found[2])) >= KERNEL:
        return Finding("kernel", True, release)
    return Finding("kernel", False, f"Linux {release} is too old", f"{KERNEL[0]}.{KERNEL[1]} or newer is needed")


def numpy(version: str | None) -> Finding:
    """NumPy is older than 2."""
    remedy = "run `make serve`, which installs 1.26.4 from the lock"
    if version is None:
        return Finding("numpy", False, "NumPy is not installed", remedy)
    if int(version.split(".")[0]) >= 2:
        return Finding(
            "numpy", False, f"NumPy {version} is installed; Triton's stub reads garbage from NumPy 2", remedy
        )
    return Finding("numpy", True, version)


def vllm(version: str | None) -> Finding:
    """The installed vLLM is one that model.py was tested with."""
    low, high = (f"{major}.{minor}" for major, minor in TESTED_VLLM)
    if version is None:
        return Finding("vLLM", False, "vLLM is not installed", "run `make serve`, which installs it from the lock")
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not TESTED_VLLM[0] <= found <= TESTED_VLLM[1]:
        return Finding("vLLM", False, f"vLLM {version} is not among the tested ones", f"install {low} to {high}")
    return Finding("vLLM", True, f"{version} (tested: {low} to {high})")


def sources(model: Path) -> Finding:
    """The model folder has its code and configurations."""
    wanted = ("config.pbtxt", "1/model.py", "1/contract.py", *(f"configs/{name}.pbtxt" for name in configs.VARIANTS))
    lacking = [name for name in wanted if not (model / name).is_file()]
    if not lacking:
        return Finding("model folder", True, str(model))
    return Finding("model folder", False, f"{model} lacks {', '.join(lacking)}", "check the source tree out anew")


def weights(folder: Path) -> Finding:
    """A model of the caller's own is complete."""
    try:
        models.check_folder(folder)
    except models.ModelUnavailable as error:
        said, _, remedy = str(error).partition(": ")
        if not remedy:
            said, _, remedy = str(error).partition("; ")
        return Finding("model", False, str(error) if not remedy else said, remedy)
    return Finding("model", True, str(folder))


def variant(plan: Plan) -> Finding:
    """The weights are those that the variant serves, and there is a kernel for them here."""
    try:
        configs.check_weights(configs.variant_named(plan.variant), str(plan.model), cpu=not plan.gpu)
    except configs.BadConfig as error:
        said, _, remedy = str(error).rpartition(": ")
        return Finding("variant", False, said, remedy)
    return Finding("variant", True, plan.variant)


def port_free(host: str, port: int) -> Finding:
    """A port can be listened on; 0 picks a free one."""
    name = f"port {port}"
    if port and port_taken(host, port):
        return Finding(name, False, f"port {port} is taken on {host}", "stop what listens there, or give PORT=")
    return Finding(name, True, "free" if port else "will be picked")


def shared_memory(folder: Path) -> Finding:
    """There is room for what Triton and its stub exchange."""
    try:
        free = shutil.disk_usage(folder).free / 2**20
    except OSError as error:
        return Finding("shared memory", False, f"{folder} cannot be used ({error.strerror})", "mount a tmpfs there")
    if free < SHARED_MEMORY_MB or not os.access(folder, os.W_OK):
        return Finding(
            "shared memory",
            False,
            f"{folder} has {free:.0f} MB free, {SHARED_MEMORY_MB} MB are needed",
            "enlarge it (in a container: --shm-size=1g) or remove what was left in it",
        )
    return Finding("shared memory", True, f"{free:,.0f} MB free at {folder}")


def disk(folder: Path) -> Finding:
    """There is room for logs and for a model made out of its package."""
    free = shutil.disk_usage(folder).free / 1e9
    if free < DISK_GB:
        return Finding("disk", False, f"{free:.1f} GB free at {folder}, {DISK_GB:.0f} GB are needed", "free some space")
    return Finding("disk", True, f"{free:.1f} GB free at {folder}")


def gpu(variant: str, capability: configs.Capability | None) -> Finding:
    """The GPU can run the variant."""
    if capability is None:
        return Finding(
            "GPU", False, "the GPU does not answer nvidia-smi", "check its driver, or set CUDA_VISIBLE_DEVICES="
        )
    try:
        chosen = configs.variant_named(variant)
        configs.check_capability(chosen, chosen.engine_args, capability)
    except configs.BadConfig as error:
        said, _, remedy = str(error).partition(": ")
        return Finding("GPU", False, said, remedy)
    return Finding("GPU", True, f"compute capability {capability[0]}.{capability[1]} runs {variant}")


def memory(available: int, plan: Plan) -> Finding:
    """Weights, KV cache and the engine fit into the memory that is available, in bytes."""
    size = _size(plan.model) / 1e9 if plan.model is not None and plan.model.is_dir() else 0.3
    needed = ENGINE_GB + 2 * size + plan.kv_cache_gb  # while they are loaded, weights are there twice
    free = available / 1e9
    if free < needed:
        remedy = "stop other programs, or set VLLM_CPU_KVCACHE_SPACE=1 for a smaller KV cache"
        return Finding("memory", False, f"{free:.1f} GB of memory are free, about {needed:.1f} GB are needed", remedy)
    return Finding("memory", True, f"{free:.1f} GB free, about {needed:.1f} GB needed")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _kept_in() -> set[Path]:
    """Folders that are written to, or the nearest parent of one that does not exist yet."""
    places = (models.cache_home(), Path(tempfile.gettempdir()))
    return {next(path for path in (place, *place.absolute().parents) if path.exists()) for place in places}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
