"""`python -m tools.doctor`: a table, and an exit code for scripts."""

from __future__ import annotations

import subprocess
import sys

from tools.environment import ROOT
from tools.server import free_port


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it."""
    command = [sys.executable, "-m", "tools.doctor", "--gateway-port", str(free_port()), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_failed_check_is_shown_with_what_to_do() -> None:
    """The table has all checks; the exit code is 1."""
    done = doctor("--model", "/nowhere", "--port", str(free_port()))
    assert done.returncode == 1
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("no"))
    assert "/nowhere is not a folder" in line
    assert "MODEL= takes a folder with config.json and weights" in line
    assert "1 check fails" in done.stderr


def test_a_machine_that_can_serve_passes() -> None:
    """Exit code 0, a line for each check."""
    done = doctor("--port", str(free_port()))
    assert done.returncode == 0, done.stdout
    for name in ("tritonserver", "numpy", "vLLM", "model folder", "shared memory", "memory"):
        assert any(line.startswith("ok") and name in line for line in done.stdout.splitlines()), name
