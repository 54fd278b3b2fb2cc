"""Real load tests: locust, headless, in a process of its own, as `locust -f loadtests/SCENARIO.py` starts it."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support import tiny_qwen3

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 120.0  # far above what any of them takes: that it ends at all is what is asserted
_AGGREGATED = re.compile(r"Aggregated +(\d+) +(\d+)\(")


def known(folder: Path) -> Path:
    """A file of questions that the tiny model answers by heart, in whole characters and of itself."""
    file = folder / "known.jsonl"
    lines = [{"messages": [dict(message) for message in case.messages]} for case in tiny_qwen3.cases()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def endless(folder: Path) -> Path:
    """A file of one question, whose answer goes on for as long as it may."""
    file = folder / "endless.jsonl"
    question = {"messages": [{"role": "user", "content": tiny_qwen3.WHEEL_QUESTION}], "max_tokens": 10_000}
    file.write_text(json.dumps(question) + "\n")
    return file


@dataclass
class LoadTest:
    """A load test that runs or has run; its files are `name`… in `folder`."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def output(self) -> str:
        """What it said so far."""
        return (self.folder / "output").read_text(errors="replace")

    @property
    def counted(self) -> tuple[int, int]:
        """Requests and failures, as locust last printed them."""
        found = _AGGREGATED.findall(self.output)
        return (int(found[-1][0]), int(found[-1][1])) if found else (0, 0)

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        return self.process.wait(END_SECONDS)

    def end(self) -> int:
        """Ask it to end, as Ctrl-C and a supervisor do, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    @cached_property
    def result(self) -> dict[str, Any]:
        """What --result wrote."""
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    @cached_property
    def rows(self) -> dict[str, dict[str, str]]:
        """The rows of locust's CSV, by name."""
        with (self.folder / "csv_stats.csv").open() as lines:
            return {row["Name"]: row for row in csv.DictReader(lines)}

    @cached_property
    def html(self) -> str:
        """Locust's HTML report."""
        return (self.folder / "report.html").read_text()


@contextmanager
def load_test(scenario: str, host: str, folder: Path, *arguments: str, headless: bool = True) -> Iterator[LoadTest]:
    """Start a scenario, and kill it if it is still there at the end."""
    command = [sys.executable, "-m", "locust", "-f", f"loadtests/{scenario}.py", "--host", host]
    command += ["--csv", f"{folder}/csv", "--html", f"{folder}/report.html", "--result", f"{folder}/result.json"]
    command += ["--headless"] if headless else []
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    run = LoadTest(process, folder)
    try:
        yield run
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        print(run.output)


def ran(scenario: str, host: str, folder: Path, *arguments: str) -> tuple[int, LoadTest]:
    """Run a scenario to its end; returns its exit code and what it left."""
    with load_test(scenario, host, folder, *arguments) as run:
        return run.wait(), run


@dataclass
class Workers:
    """Locust's workers, started each by its own command."""

    processes: list[subprocess.Popen[bytes]]

    def wait(self) -> None:
        """Wait for their end, which comes with their master's."""
        for process in self.processes:
            assert process.wait(END_SECONDS) == 0


@contextmanager
def workers(scenario: str, count: int, port: str) -> Iterator[Workers]:
    """Start so many workers of the master at this port, and kill those that are still there at the end."""
    command = [sys.executable, "-m", "locust", "-f", f"loadtests/{scenario}.py", "--worker", "--master-port", port]
    started = Workers([subprocess.Popen(command, cwd=ROOT) for _ in range(count)])
    try:
        yield started
    finally:
        for process in started.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
