"""One tritonserver process, of the nvidia-pytriton wheel or the system's: start, readiness, stop, nothing left behind.

Used by `tools.serve` and, as a context manager, by the tests:

    with launch(repository) as server:
        server.wait_ready(120)
        print(server.grpc_address)
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import http.client
import importlib.util
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

log = logging.getLogger(__name__)

STUB = "triton_python_backend_stub"
SYSTEM_BINARY = "/opt/tritonserver/bin/tritonserver"
SHARED_MEMORY = Path("/dev/shm")
STANDARD_ERROR = Path("/dev/stderr")
LOOPBACK = "127.0.0.1"
# What the engine's processes have to follow their killed parent by themselves before stop() kills them.
FOLLOW_SECONDS = 5.0
TAIL_LINES = 25
# A caller that froze, or whose machine or network went away without a word, is asked for a sign of life after these
# seconds without one, and has left when none comes in the next. Triton's own default is to ask after two hours. gRPC's
# libraries answer by themselves: a caller that is merely slow, or does not read, is not cut off.
KEEPALIVE_SECONDS, KEEPALIVE_PATIENCE_SECONDS = 5, 20
# Threads for each stub that pass on what its senders send, of which there are eight; 32 take a fifth more CPU.
PYTHON_THREADS = 8
_RUNTIME, _LOCK = "tritonstream-server-", "lock"
# How Triton says why a model is not there; the first line of an exception that model.py raised is part of it.
_REASON = re.compile(r"failed to load '[^']*' version \d+: (.+?)(?:\\n|\"?$)")
# Runs before tritonserver, or the gateway, in its process: the kernel is to end it when its launcher dies, however that
# happens. Not a preexec_fn, which may hang in a launcher that has threads. 1 is PR_SET_PDEATHSIG; exec keeps what it
# sets.
TRAMPOLINE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the launcher is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class LaunchFailed(Exception):
    """tritonserver cannot be started, or ended before it was ready; the message says why, and the end of its log."""


@dataclass(frozen=True, slots=True)
class Installation:
    """Where the pieces of the embedded Triton lie."""

    binary: Path
    backend: Path
    stub: Path
    libraries: Path

    @classmethod
    def find(cls, version: str = sysconfig.get_python_version()) -> Installation:
        """Find the installed wheel's pieces for this Python `version`; raises LaunchFailed, saying what is missing."""
        found = importlib.util.find_spec("pytriton")
        if found is None or found.origin is None:
            raise LaunchFailed("nvidia-pytriton is not installed in this Python: run `make serve`, which installs it")
        package = Path(found.origin).parent
        home = package / "tritonserver"
        stub = home / "python_backend_stubs" / version / STUB
        if not stub.exists():
            there = ", ".join(sorted(path.name for path in stub.parent.parent.glob("3.*"))) or "none"
            raise LaunchFailed(
                f"tritonserver has no Python stub for Python {version} (it has {there}): use one of these"
            )
        return cls(
            binary=home / "bin" / "tritonserver",
            backend=home / "backends" / "python",
            stub=stub,
            libraries=package.parent / "nvidia_pytriton.libs",
        )

    def prepare(self, folder: Path) -> Path:
        """Lay out a backend directory in `folder`, with the stub of this Python, for the wheel's own has none."""
        python = folder / "backends" / "python"
        python.mkdir(parents=True)
        for path in self.backend.iterdir():
            if path.is_file():
                (python / path.name).symlink_to(path)
        shutil.copy(self.stub, python / STUB)  # a link would not do: the stub looks for its files beside itself
        (python / STUB).chmod(0o755)
        return python.parent

    def environment(self) -> dict[str, str]:
        """Variables which let the stub find this very Python, its packages and the wheel's libraries."""
        libraries = [
            str(sysconfig.get_config_var("LIBDIR")),
            str(self.libraries),
            os.environ.get("LD_LIBRARY_PATH", ""),
        ]
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "PATH": os.pathsep.join(path),
        }


@dataclass(frozen=True, slots=True)
class SystemInstallation:
    """A tritonserver that the system has, as in NVIDIA's images: with its backends, and a Python of its own choice."""

    binary: Path

    @classmethod
    def find(cls) -> SystemInstallation | None:
        """The tritonserver on PATH, or where NVIDIA's images have theirs; None without one."""
        found = shutil.which("tritonserver") or shutil.which(SYSTEM_BINARY)
        return None if found is None else cls(Path(found).resolve())

    @property
    def backend(self) -> Path:
        """The Python backend."""
        return self.binary.parent.parent / "backends" / "python"

    def prepare(self, folder: Path) -> Path:
        """Return the backend directory, which is complete; nothing is laid out in `folder`."""
        return self.backend.parent

    def environment(self) -> dict[str, str]:
        """No variables: its stub finds the system's Python, and vLLM there, by those that are set."""
        return {}


def installation() -> Installation | SystemInstallation:
    """The tritonserver to start: the wheel's, else the system's. Raises LaunchFailed where there is none."""
    system = None if importlib.util.find_spec("pytriton") else SystemInstallation.find()
    return system or Installation.find()


# vLLM phones home otherwise, and on a CPU would take most of the memory for its KV cache.
ENGINE_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    # Instances that load side by side abort 2.51's Python backend (interprocess::lock_exception), or hang in it.
    "TRITON_PARALLEL_INSTANCE_LOADING": "0",
}


class Relay:
    """Passes a server's output on to our standard error and keeps the last lines in memory: nothing grows on a disk."""

    KEPT = 400

    def __init__(self, source: IO[bytes]) -> None:
        """Read `source` to its end, in a thread."""
        self._lines: collections.deque[str] = collections.deque(maxlen=self.KEPT)
        self._thread = threading.Thread(target=self._pass_on, args=(source,), name="relay", daemon=True)
        self._thread.start()

    def lines(self) -> list[str]:
        """The last lines so far."""
        return list(self._lines)

    def close(self, timeout: float) -> None:
        """Wait until the last line has been passed on, or some process that outlived the server holds it up."""
        self._thread.join(timeout)

    def _pass_on(self, source: IO[bytes]) -> None:
        with source:
            for line in source:
                text = line.decode(errors="replace")
                self._lines.append(text.rstrip("\n"))
                sys.stderr.write(text)
                sys.stderr.flush()


class TritonServer:
    """A running tritonserver; made by `launch`. Not to be shared between threads, save for `stop` after a signal.

    The server is ended (SIGTERM) when the thread that launched it ends: launch from one that lives long enough.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        host: str,
        ports: tuple[int, int, int],
        runtime: Path,
        shm_prefix: str,
        log_path: Path,
        relay: Relay | None = None,
    ) -> None:
        self.host = host
        self.http_port, self.grpc_port, self.metrics_port = ports
        self.log_path = log_path
        self._process = process
        self._runtime = runtime
        self.shm_prefix = shm_prefix
        self._family: set[psutil.Process] = set()
        self._regions: set[Path] = set()
        self._stopped = False
        self._relay = relay

    @property
    def pid(self) -> int:
        """The process id of tritonserver."""
        return self._process.pid

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP endpoints."""
        return f"http://{self._reachable}:{self.http_port}"

    @property
    def metrics_url(self) -> str:
        """URL of the Prometheus text."""
        return f"http://{self._reachable}:{self.metrics_port}/metrics"

    @property
    def grpc_address(self) -> str:
        """What gRPC clients connect to."""
        return f"{self._reachable}:{self.grpc_port}"

    @property
    def _reachable(self) -> str:
        return LOOPBACK if self.host in ("0.0.0.0", "::", "") else self.host

    @property
    def exit_code(self) -> int | None:
        """What tritonserver ended with (negative: the signal), or None while it runs."""
        return self._process.poll()

    def stub_pids(self) -> list[int]:
        """Process ids of the Python backend's stubs: the processes that run model.py."""
        return sorted(process.pid for process in self._note_family() if self._is_stub(process))

    def is_ready(self) -> bool:
        """Whether the server and all its models say that they are ready."""
        # http.client, for it is asked often while every core is busy with loading: httpx makes a TLS context each time.
        connection = http.client.HTTPConnection(self._reachable, self.http_port, timeout=2)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def wait_ready(self, timeout: float, *, progress: Callable[[float], None] | None = None) -> None:
        """Block until every model is ready; `progress` is told the seconds elapsed, about four times a second.

        Raises LaunchFailed, with the end of the log, when the server ends before, or `timeout` seconds pass.
        """
        begin = noted = time.monotonic()
        while not self.is_ready():
            elapsed = time.monotonic() - begin
            if time.monotonic() - noted > 1:  # it reads every process's memory map: some milliseconds
                self._remember()
                noted = time.monotonic()
            if self.exit_code is not None:
                raise LaunchFailed(self.epitaph())
            if elapsed > timeout:
                raise LaunchFailed(
                    f"tritonserver was not ready after {timeout:.0f} s; the end of its log:\n{self.tail()}"
                )
            if progress is not None:
                progress(elapsed)
            time.sleep(0.25)
        self._remember()

    def epitaph(self) -> str:
        """Say how tritonserver ended, why most likely, and the end of its log."""
        code = self.exit_code
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"ended with code {code}"
        )
        why = next((f": {found[1]}" for line in reversed(self._log_lines()) if (found := _REASON.search(line))), "")
        return f"tritonserver {how}{why}; the end of its log {self.log_path}:\n{self.tail()}"

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of the log, without Triton's tables."""
        kept = [line for line in self._log_lines() if line.strip() and not line.startswith(("|", "+-"))]
        return "\n".join(kept[-lines:])

    def _log_lines(self) -> list[str]:
        if self._relay is not None:
            return self._relay.lines()
        try:
            return self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:  # stopped, and the log went with the server
            return []

    def terminate(self) -> None:
        """Ask tritonserver to drain and leave; `stop` waits for it."""
        self._remember()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL tritonserver at once; `stop` removes what is left."""
        self._remember()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def stop(self, timeout: float = 30.0) -> None:
        """End the server: drain for up to `timeout` seconds, then kill; returns when no process or region is left."""
        if self._stopped:
            return
        self._stopped = True
        self.terminate()
        deadline = time.monotonic() + timeout
        while self._process.poll() is None and time.monotonic() < deadline:
            self._remember()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
        if self._process.poll() is None:
            log.warning("tritonserver did not drain within %.0f s: killing it", timeout)
            self._process.kill()
            self._process.wait()
        self._end_family()
        if self._relay is not None:
            self._relay.close(FOLLOW_SECONDS)
        for region in (*SHARED_MEMORY.glob(f"{self.shm_prefix}*"), *self._regions):
            region.unlink(missing_ok=True)
        shutil.rmtree(self._runtime, ignore_errors=True)

    def leftovers(self) -> list[psutil.Process]:
        """Processes of this server's tree, as far as seen, that live after tritonserver itself ended."""
        return [process for process in self._family if process.pid != self.pid and _lives(process)]

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _note_family(self) -> set[psutil.Process]:
        """Note the tree's processes, for nothing leads to the children of a killed parent; returns the living ones."""
        with contextlib.suppress(psutil.Error):
            self._family |= set(psutil.Process(self.pid).children(recursive=True))
        for process in list(self._family):
            with contextlib.suppress(psutil.Error):
                self._family |= set(process.children(recursive=True))
        return {process for process in self._family if _lives(process)}

    def _remember(self) -> None:
        """Note the tree's processes and the shared memory that they use, to remove what a killed one could not."""
        for process in self._note_family():
            self._regions |= set(_regions(process))

    def _is_stub(self, process: psutil.Process) -> bool:
        # By the file that runs, for model code may rename its process; and what a stub forked runs the same file.
        with contextlib.suppress(psutil.Error, OSError):
            return process.ppid() == self.pid and Path(process.exe()).name == STUB
        return False

    def _end_family(self) -> None:
        _, alive = psutil.wait_procs(self.leftovers(), timeout=FOLLOW_SECONDS)
        # psutil's wait_procs waits for zombies of other parents too, which are nobody's resources.
        remaining = [process for process in alive if _lives(process)]
        for process in remaining:
            with contextlib.suppress(psutil.Error):
                log.warning(
                    "process %d (%s) outlived tritonserver: killing it", process.pid, " ".join(process.cmdline())
                )
                process.kill()
        psutil.wait_procs(remaining, timeout=FOLLOW_SECONDS)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _regions(process: psutil.Process) -> Iterator[Path]:
    """Yield the files in /dev/shm that a process has mapped; named semaphores (sem.*) among them."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.startswith(f"{SHARED_MEMORY}/") and not path.endswith("(deleted)"):
                yield Path(path)


_GIVEN: set[int] = set()
_FIRST_PORT = 10_000


def _first_ephemeral_port() -> int:
    """Where the ports begin that the kernel gives to outgoing connections and to listeners without a wish."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32_768  # Linux's default


def free_port(host: str = LOOPBACK) -> int:
    """Return a port that is free now, and another each time.

    A server takes its port only once its models are loaded, and the kernel may give the one that it had named free to
    any outgoing connection meanwhile: so the port is from below those that the kernel gives away.
    """
    ports = range(_FIRST_PORT, max(_first_ephemeral_port(), _FIRST_PORT + 1_000))
    while True:
        port = random.choice(ports)
        if port not in _GIVEN and not port_taken(host, port):
            _GIVEN.add(port)
            return port


def port_taken(host: str, port: int) -> bool:
    """Whether `port` cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does: one in TIME_WAIT is free
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError:
            return True
    return False


def launch(
    repository: Path,
    *,
    http_port: int = 0,
    grpc_port: int = 0,
    metrics_port: int = 0,
    host: str = LOOPBACK,
    config_name: str | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    relay: bool = False,
    exit_timeout: int = 30,
    arguments: Iterable[str] = (),
) -> TritonServer:
    """Start tritonserver over a model repository and return at once; `wait_ready` waits for its models.

    Args:
        repository: folder of model folders, each with a complete config.pbtxt: Triton is told not to complete it, for
            that would load every Python model twice.
        http_port: port of the HTTP endpoints; 0 picks a free one, as for the next two.
        grpc_port: port of the gRPC service.
        metrics_port: port of Triton's metrics.
        host: address to listen on.
        config_name: picks `configs/NAME.pbtxt` of each model that has it.
        env: variables laid over this process's own for the server.
        log: file that takes the server's output, written anew; by default one that is removed at `stop`.
        relay: pass the server's output on to our standard error, in the place of a file.
        exit_timeout: seconds that requests in flight are given when the server is asked to leave.
        arguments: further arguments of tritonserver.

    Raises:
        LaunchFailed: a port is taken, the repository is no folder, or there is no tritonserver, or not all of it.
    """
    if not repository.is_dir():
        raise LaunchFailed(f"{repository} is not a folder: there is no model repository to serve")
    found = installation()
    ports = _ports(host, (http_port, grpc_port, metrics_port))
    sweep()
    runtime = Path(tempfile.mkdtemp(prefix=_RUNTIME))
    prefix = runtime.name.replace("-", "_") + "_"  # mkdtemp's random part is ours alone as long as the folder stands
    lock = (runtime / _LOCK).open("w", encoding="utf-8")
    fcntl.flock(lock, fcntl.LOCK_EX)
    log_path = STANDARD_ERROR if relay else log or runtime / "tritonserver.log"
    try:
        command = [
            *(sys.executable, "-I", "-S", "-c", TRAMPOLINE, str(os.getpid())),
            *(str(found.binary), f"--model-repository={repository.resolve()}"),
            f"--backend-directory={found.prepare(runtime)}",
            f"--backend-config=python,shm-region-prefix-name={prefix}",
            f"--backend-config=python,thread-pool-size={PYTHON_THREADS}",
            "--disable-auto-complete-config",
            "--model-load-thread-count=1",  # side by side has aborted it (interprocess::lock_exception)
            *(f"--http-address={host}", f"--http-port={ports[0]}"),
            *(f"--grpc-address={host}", f"--grpc-port={ports[1]}"),
            *(f"--metrics-address={host}", f"--metrics-port={ports[2]}"),
            f"--exit-timeout-secs={exit_timeout}",
            f"--grpc-keepalive-time={KEEPALIVE_SECONDS * 1_000}",
            f"--grpc-keepalive-timeout={KEEPALIVE_PATIENCE_SECONDS * 1_000}",
            "--grpc-http2-max-pings-without-data=0",  # no limit: a request in the queue gets no data for long
            *([f"--model-config-name={config_name}"] if config_name else []),
            *arguments,
        ]
        environment = {**ENGINE_ENVIRONMENT, **os.environ, **(env or {}), **found.environment()}
        with contextlib.ExitStack() as stack:
            sink: int | IO[bytes] = subprocess.PIPE
            if not relay:
                log_path.parent.mkdir(parents=True, exist_ok=True)
                sink = stack.enter_context(log_path.open("wb"))
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[lock.fileno()],  # the lock is held until tritonserver and its stubs are gone
                start_new_session=True,  # Ctrl-C is for the launcher, which drains
            )
    except BaseException:
        shutil.rmtree(runtime, ignore_errors=True)
        raise
    finally:
        lock.close()
    return TritonServer(
        process,
        host=host,
        ports=ports,
        runtime=runtime,
        shm_prefix=prefix,
        log_path=log_path,
        relay=None if process.stdout is None else Relay(process.stdout),
    )


def sweep() -> None:
    """Remove what servers left behind whose launcher could not: it was killed with SIGKILL, as they may have been."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_RUNTIME}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open(encoding="utf-8") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for region in SHARED_MEMORY.glob(lock.parent.name.replace("-", "_") + "_*"):
                region.unlink(missing_ok=True)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _ports(host: str, wanted: tuple[int, int, int]) -> tuple[int, int, int]:
    chosen = list(wanted)
    for place, port in enumerate(wanted):
        if port and port_taken(host, port):
            raise LaunchFailed(f"port {port} is taken on {host}: stop what listens there, or choose another port")
        while not chosen[place]:
            free = free_port(host)
            chosen[place] = 0 if free in chosen else free
    if len(set(chosen)) < 3:
        raise LaunchFailed(f"the three ports must differ, got {', '.join(map(str, chosen))}")
    return chosen[0], chosen[1], chosen[2]
