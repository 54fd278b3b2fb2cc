"""Which processes and shared memory are ours: told by a mark in the environment that every child inherits."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

MARK = "TRITONSTREAM_TEST_SESSION"
SHARED_MEMORY = "/dev/shm/"


def marked(mark: str, variable: str = MARK) -> list[psutil.Process]:
    """The living processes (no zombies) that were started under `mark`, by whomever, this one left out."""
    needle = f"{variable}={mark}".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if needle in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def described(processes: list[psutil.Process]) -> str:
    """Say which processes these are."""
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            lines.append(f"{process.pid} {process.name()}: {' '.join(process.cmdline())[:150]}")
    return "\n".join(lines)


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """The files in /dev/shm that these processes have mapped or open."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines()
            found |= {line.split(maxsplit=5)[-1] for line in lines if SHARED_MEMORY in line}
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(str(descriptor.readlink()))
    return {Path(name) for name in found if name.startswith(SHARED_MEMORY) and not name.endswith("(deleted)")}


def gone(processes: list[psutil.Process], within: float) -> float:
    """Wait until all of these are dead or zombies; returns the seconds it took, and fails after `within`."""
    began = time.monotonic()
    while living := [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() - began < within, f"after {within} s there still are\n{described(living)}"
        time.sleep(0.02)
    return time.monotonic() - began


def engine_cores(stub: int) -> list[psutil.Process]:
    """The processes below a stub in which vLLM's engine lives."""
    below = psutil.Process(stub).children(recursive=True)
    return [process for process in below if "EngineCore" in f"{process.name()} {' '.join(process.cmdline())}"]
