"""A real tritonserver with a trivial model: starting, readiness, stopping, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tools.server import (
    SHARED_MEMORY,
    STUB,
    Installation,
    LaunchFailed,
    SystemInstallation,
    TritonServer,
    free_port,
    installation,
    launch,
    port_taken,
    sweep,
)

READY_SECONDS = 60.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child of the trivial model never follows its parent: do not give it the seconds that an engine gets."""
    monkeypatch.setattr("tools.server.FOLLOW_SECONDS", 0.5)


def regions(server: TritonServer) -> list[Path]:
    """The shared memory between tritonserver and its stubs."""
    return list(SHARED_MEMORY.glob(f"{server.shm_prefix}*"))


def gone(pids: list[int], within: float) -> bool:
    """Whether all processes have ended, and been reaped or left as zombies, within so many seconds."""
    deadline = time.monotonic() + within
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_started_server_answers_and_leaves_nothing(repository: Path, region: Callable[[], Path]) -> None:
    """Ready, an answer over HTTP, metrics; after stop no process, no shared memory and no port is left."""
    with launch(repository) as server:
        server.wait_ready(READY_SECONDS)
        body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["grüß dich"]}]}
        answer = httpx.post(f"{server.http_url}/v2/models/echo/infer", json=body, timeout=10)
        assert answer.json()["outputs"][0]["data"] == ["grüß dich"]
        assert "nv_inference_request_success" in httpx.get(server.metrics_url, timeout=10).text
        (stub,) = server.stub_pids()
        family = [child.pid for child in psutil.Process(server.pid).children(recursive=True)]
        assert stub in family
        assert len(family) > 1, "the model started a child"
        assert region().exists()
        assert regions(server)
    assert gone([server.pid, *family], within=0.1)
    assert not region().exists()
    assert not regions(server)
    assert not port_taken("127.0.0.1", server.grpc_port)


@pytest.mark.parametrize("victim", ["tritonserver", "stub"])
def test_a_killed_server_leaves_nothing(repository: Path, region: Callable[[], Path], victim: str) -> None:
    """After SIGKILL of either process, stop ends what the dead one would have ended."""
    with launch(repository) as server:
        server.wait_ready(READY_SECONDS)
        family = [server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]
        os.kill(server.pid if victim == "tritonserver" else server.stub_pids()[0], signal.SIGKILL)
        if victim == "tritonserver":
            while server.exit_code is None:  # its last thread takes a moment
                time.sleep(0.01)
            assert server.exit_code == -signal.SIGKILL
            assert "was killed by SIGKILL" in server.epitaph()
    assert gone(family, within=0.1)
    assert not region().exists()
    assert not regions(server)


def test_the_server_dies_with_its_launcher(repository: Path, region: Callable[[], Path]) -> None:
    """SIGKILL of the launching process ends tritonserver and its stub; the next launch sweeps up what they left."""
    script = (
        "import json, sys, time\nfrom pathlib import Path\nfrom tools.server import launch\n"
        f"server = launch(Path({str(repository)!r}))\nserver.wait_ready({READY_SECONDS})\n"
        "print(json.dumps([str(server.log_path), server.pid, *server.stub_pids()]), flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        log, *pids = json.loads(launcher.stdout.readline())
        children = [child for pid in pids for child in psutil.Process(pid).children()]
        sweep()
        assert Path(log).exists(), "what a living server needs stays"
        launcher.kill()
    try:
        assert gone(pids, within=15)
    finally:
        for child in children:
            if child.is_running():
                child.kill()
    psutil.wait_procs(children, timeout=5)
    sweep()
    assert not Path(log).parent.exists()


def test_a_taken_port_is_refused_before_anything_starts(repository: Path) -> None:
    """The sentence names the port and says what to do."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(LaunchFailed, match=f"port {port} is taken on 127.0.0.1: stop what listens there"):
            launch(repository, grpc_port=port)


def test_a_free_port_is_none_that_the_kernel_gives_away() -> None:
    """A port may be named a minute before it is taken: no connection or listener without a wish gets it meanwhile."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    ports = [free_port() for _ in range(200)]
    assert max(ports) < first
    assert len(set(ports)) == len(ports)


def test_a_taken_port_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another program listens on is passed over."""
    taken, free = free_port(), free_port()
    drawn = iter([taken, free])
    monkeypatch.setattr("tools.server._GIVEN", set())
    monkeypatch.setattr("tools.server.random.choice", lambda ports: next(drawn))
    with socket.create_server(("127.0.0.1", taken)):
        assert free_port() == free


def test_equal_ports_are_refused(repository: Path) -> None:
    """Three services cannot share a port."""
    with pytest.raises(LaunchFailed, match="must differ"):
        launch(repository, http_port=18999, grpc_port=18999)


def test_a_missing_repository_is_refused(tmp_path: Path) -> None:
    """No folder, no server."""
    with pytest.raises(LaunchFailed, match="there is no model repository"):
        launch(tmp_path / "nowhere")


def test_a_model_that_cannot_load_is_reported_with_the_log(repository: Path) -> None:
    """wait_ready does not wait for a server that has given up; it shows what the model said."""
    (repository / "echo" / "1" / "model.py").write_text("raise RuntimeError('no weights here')", encoding="utf-8")
    expected = r"ended with code 1: Internal: RuntimeError: no weights here; the end of its log"
    with launch(repository) as server, pytest.raises(LaunchFailed, match=expected):
        server.wait_ready(READY_SECONDS)
    assert server.exit_code == 1


def test_waiting_ends(repository: Path) -> None:
    """A server that is not ready in time is an error that says so; progress was told meanwhile."""
    (repository / "echo" / "1" / "model.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    told: list[float] = []
    with launch(repository) as server:
        with pytest.raises(LaunchFailed, match="not ready after 1 s"):
            server.wait_ready(1, progress=told.append)
        server.kill()  # Triton would load the model to its end
    assert told == sorted(told)
    assert told


def test_a_python_without_stub_is_refused() -> None:
    """The sentence names this version and those that the wheel has."""
    with pytest.raises(LaunchFailed, match=r"no Python stub for Python 3\.6 \(it has .*3\.11"):
        Installation.find("3.6")


def test_the_stub_gets_its_own_folder(tmp_path: Path) -> None:
    """The wheel's backend folder has no stub; the prepared one does, and the wheel stays as it was."""
    found = Installation.find()
    python = found.prepare(tmp_path) / "python"
    assert os.access(python / STUB, os.X_OK)
    assert (python / "libtriton_python.so").exists()
    assert not (found.backend / STUB).exists()


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a tritonserver laid out as in NVIDIA's images, and no wheel of it in this Python."""
    wheel = Installation.find()
    home = tmp_path / "opt" / "tritonserver"
    wheel.prepare(home)
    (home / "bin").mkdir()
    binary = home / "bin" / "tritonserver"
    # A link would lead to the wheel's own folder: the server is a program that runs that one.
    binary.write_text(
        f'#!/bin/sh\nexec "{wheel.binary}" --backend-directory="{home}/backends" "$@"\n', encoding="utf-8"
    )
    binary.chmod(0o755)
    for name, value in wheel.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", os.pathsep.join([str(binary.parent), os.environ["PATH"]]))
    monkeypatch.setattr("tools.server.importlib.util.find_spec", lambda name: None)
    return binary


def test_a_tritonserver_of_the_systems_serves(system: Path, repository: Path) -> None:
    """Where there is no wheel, the one on PATH is started, with its own backends and the same flags."""
    found = installation()
    assert isinstance(found, SystemInstallation)
    assert (found.binary, found.backend) == (system, system.parent.parent / "backends" / "python")
    with launch(repository) as server:
        server.wait_ready(READY_SECONDS)
        (stub,) = server.stub_pids()
        assert Path(psutil.Process(stub).exe()).is_relative_to(found.backend)
        flags = psutil.Process(server.pid).cmdline()
        assert "--grpc-keepalive-time=5000" in flags
    assert gone([stub], within=0.1)


def test_the_wheel_goes_before_the_system(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who installed it in this Python means it."""
    monkeypatch.undo()
    monkeypatch.setenv("PATH", os.pathsep.join([str(system.parent), os.environ["PATH"]]))
    assert isinstance(installation(), Installation)


def test_no_tritonserver_at_all_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the wheel nor the system's: what to do is said."""
    monkeypatch.setattr("tools.server.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("tools.server.SYSTEM_BINARY", "/nowhere/tritonserver")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchFailed, match="nvidia-pytriton is not installed in this Python: run `make serve`"):
        installation()


def test_a_relayed_log_is_passed_on_and_its_end_remembered(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container: nothing is written to a disk, and a failure still tells the log's end."""
    (repository / "echo" / "1" / "model.py").write_text("raise RuntimeError('no weights here')", encoding="utf-8")
    expected = r"Internal: RuntimeError: no weights here; the end of its log /dev/stderr:\n.*no weights here"
    with launch(repository, relay=True) as server:
        with pytest.raises(LaunchFailed, match=re.compile(expected, re.DOTALL)):
            server.wait_ready(READY_SECONDS)
        server.stop()
    passed_on = capsys.readouterr().err
    assert "failed to load 'echo'" in passed_on
    assert set(server.tail().splitlines()) <= set(passed_on.splitlines())
