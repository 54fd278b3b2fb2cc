"""Processes under measurement: the CPU they use, the memory they take, and their end.

Read by `tools.ways`, `tools.bench` and the comparisons. Linux only, as all that is measured here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

# Python's resource tracker leaves by itself when its last client dies, and then removes the shared memory they left.
SPARED = "multiprocessing.resource_tracker"
SPARED_S = 10.0
SAMPLE_S = 0.5


class Tree:
    """A process and all below it."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)

    def processes(self) -> list[psutil.Process]:
        """Return those that live now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._root, *self._root.children(recursive=True)]
        return []

    def front_cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by program, of every process that is not the engine's core or one of its workers."""
        total: defaultdict[str, float] = defaultdict(float)
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                command = process.cmdline()
                title = " ".join(command)
                if command and ("VLLM::" not in title or "APIServer" in title):
                    total[Path(command[0]).name] += cpu_s(process.pid)
        return total


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, to the nanosecond: /proc/PID/stat has them to 10 ms. Raises OSError."""
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) returns


class Watch:
    """Samples the memory of one or more process trees, twice a second, for its peak."""

    def __init__(self, *pids: int) -> None:
        self._trees = [Tree(pid) for pid in pids]
        self._stop = threading.Event()
        self.peak_rss_mb = 0.0
        self.peak_gpu_mb: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            rss = 0
            for process in (process for tree in self._trees for process in tree.processes()):
                with contextlib.suppress(psutil.Error):
                    rss += process.memory_info().rss
            self.peak_rss_mb = max(self.peak_rss_mb, rss / 1e6)
            if (gpu := _gpu_memory_mb()) is not None:
                self.peak_gpu_mb = max(self.peak_gpu_mb or 0.0, gpu)
            if self._stop.wait(SAMPLE_S):  # after a sample: what is watched may last for less
                return

    def stop(self) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join()


class Utilisation:
    """Listens to nvidia-smi, ten times a second, for the share of time that GPUs are busy."""

    def __init__(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=100"]
        self._process: subprocess.Popen[str] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def stop(self) -> float | None:
        """Stop; returns the mean in percent, or None where no GPU answers."""
        if self._process is None:
            return None
        self._process.terminate()
        said, _ = self._process.communicate()
        seen = [float(line) for line in said.split() if line.isdigit()]
        return sum(seen) / len(seen) if seen else None


def _gpu_memory_mb() -> float | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return sum(float(line) for line in subprocess.check_output(command, text=True, timeout=5).split())
    return None


def end_group(group: int, within: float = SPARED_S) -> None:
    """Kill a process group until nobody is left in it, its resource trackers last: they have `within` seconds to tidy.

    The group dies by SIGKILL, for vLLM's children outlive their parent. Killed with it, a tracker would leave the
    regions (psm_*) in /dev/shm that it is there to remove.
    """
    while victims := [process.pid for process, spared in _members(group) if not spared]:
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)  # the killed need a moment, and may have started others before
    deadline = time.monotonic() + within
    while trackers := [process.pid for process, _ in _members(group)]:
        if time.monotonic() > deadline:
            log.warning("resource trackers %s outlived their clients: killing them", trackers)
            for pid in trackers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _members(group: int) -> Iterator[tuple[psutil.Process, bool]]:
    """Yield the living processes of a group, each with whether it is a resource tracker."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and (command := process.cmdline()):  # without: dead, not yet reaped
                yield process, any(SPARED in word for word in command)
