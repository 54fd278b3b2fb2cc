"""`make lint`: ruff, ruff format, mypy --strict and the generated files; runs all of them and says which failed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.contract import MODEL
from tools.environment import ROOT

# mypy wants a package's name: the served code lies in a folder called 1, and imports itself as a package.
SERVED = "served_model"


def main() -> int:
    """Run every linter; returns 1 when one of them complains."""
    ruff = [sys.executable, "-m", "ruff"]
    mypy = [sys.executable, "-m", "mypy", "--strict", f"--config-file={ROOT / 'pyproject.toml'}"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / SERVED).symlink_to(MODEL / "1", target_is_directory=True)
        runs = {
            "ruff": ([*ruff, "check", "."], {}),
            "ruff format": ([*ruff, "format", "--check", "."], {}),
            "mypy": ([*mypy, "client", "gateway", "loadtests", "tools", "tests"], {}),
            "mypy of the served model": ([*mypy, "-p", SERVED], {"MYPYPATH": folder}),
            "generated files": ([sys.executable, "-m", "tools.configs", "--check"], {}),
            "tables": ([sys.executable, "-m", "tools.tables", "--check"], {}),
        }
        failed = [name for name, (command, extra) in runs.items() if not _passes(name, command, extra)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


def _passes(name: str, command: Sequence[str], extra: Mapping[str, str]) -> bool:
    print(f"--- {name}", flush=True)
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **extra}, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
