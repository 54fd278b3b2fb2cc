"""The same model as an application might deploy it: Transformers, `vllm serve`, LangChain over our gateway, Triton.

Read by `tools.compare`. All get the same chats, one user message each, and answer with exactly as many tokens.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools import load, report, server, ways
from tools.load import Level
from tools.processes import Watch
from tools.variants import reason

NAMES: Mapping[str, str] = {
    "transformers": "Transformers pipeline",
    "openai": "`vllm serve`, openai client",
    "langchain": "LangChain over the gateway",
    "triton": "Triton, gRPC",
}
SEED = 2_000_000
WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked: so many at once, each a prompt of so many characters for so many tokens, `repeats` times."""

    arguments: dict[str, Any]
    streams: tuple[int, ...]
    repeats: int
    characters: int
    max_tokens: int
    processes: int

    def prompts(self, count: int, number: int) -> list[str]:
        """Make the prompts of one load, all different."""
        words = self.characters // 3 + 1  # a word and its space are at least that long
        return [text[: self.characters] for text in load.prompts(count, words, SEED + number)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was seen of one deployment, memory in MB; `error` says why there is nothing else."""

    way: str
    error: str | None = None
    load_s: float | None = None
    peak_rss_mb: float | None = None
    peak_gpu_mb: float | None = None
    levels: tuple[Level, ...] = ()


def measure(way: str, plan: Plan, log: Path, tell: Callable[..., object]) -> Row:
    """Start one deployment and run every load through it, after a short one. What keeps it from that is in the row."""
    if way not in NAMES:
        raise ValueError(f"{way!r} is no deployment: choose of {', '.join(NAMES)}")
    setting = ways.Setting(arguments=plan.arguments, processes=plan.processes, utilisation=True)
    tell(NAMES[way], "loading the model")
    begin = time.monotonic()
    try:
        with ways.way(way, setting, log) as loaded:
            row = Row(way=way, load_s=time.monotonic() - begin)
            watch = Watch(loaded.pid, *loaded.below)
            levels = []
            try:
                for count in plan.streams:
                    loaded.run(_spelled(way, plan.prompts(count, 1_000 * count)), min(WARM_UP_TOKENS, plan.max_tokens))
                    repeats = []
                    for number in range(1, plan.repeats + 1):
                        tell(f"{NAMES[way]}: {count} at once", f"{number} of {plan.repeats}")
                        texts = _spelled(way, plan.prompts(count, 1_000 * count + number))
                        repeats.append(loaded.run(texts, plan.max_tokens))
                    levels.append(pooled(repeats))
            finally:
                watch.stop()
            return replace(row, levels=tuple(levels), peak_rss_mb=watch.peak_rss_mb, peak_gpu_mb=watch.peak_gpu_mb)
    except (RuntimeError, OSError, server.LaunchFailed) as error:
        return Row(way=way, error=reason(str(error)))


def _spelled(way: str, texts: Sequence[str]) -> list[load.Prompt]:
    """What a way's client takes: to Triton a chat's messages, to the others their text."""
    return [{"prompt": [{"role": "user", "content": text}]} if way == "triton" else text for text in texts]


def pooled(levels: Sequence[Level]) -> Level:
    """Take repeats of one load together: the median's figures, TTFT's mean and deviation over all requests."""
    middle = sorted(levels, key=lambda level: level.tokens_per_s)[len(levels) // 2]
    firsts = [(level.ttft_mean, level.ttft_sd or 0.0) for level in levels if level.ttft_mean is not None]
    busy = [level.gpu_percent for level in levels if level.gpu_percent is not None]
    if firsts:
        mean = statistics.fmean(found for found, _ in firsts)
        square = statistics.fmean(found**2 + deviation**2 for found, deviation in firsts)
        middle = replace(middle, ttft_mean=mean, ttft_sd=math.sqrt(max(0.0, square - mean**2)))
    return replace(
        middle,
        errors=sum(level.errors for level in levels),
        first_error=next((level.first_error for level in levels if level.first_error), None),
        gpu_percent=statistics.fmean(busy) if busy else None,
    )


def markdown(found: Mapping[str, Any]) -> str:
    """Write a report as a table; a deployment that could not run has its reason in the place of its figures."""
    head = ["deployment", "at once", "TTFT ms, mean ± sd", "tokens/s", "peak RSS MB", "peak GPU MB", "GPU busy"]
    lines = [f"`{found['command']}`", "", report.where(found["machine"]), ""]
    lines += [f"| {' | '.join([*head, 'failed'])} |", "|---|" + "---:|" * len(head)]
    for row in found["rows"]:
        name = NAMES[row["way"]]
        if row["error"]:
            lines.append(f"| {name} | could not run: {row['error']} |" + " |" * (len(head) - 1))
        for level in row["levels"]:
            first, busy = level["ttft_mean"], level["gpu_percent"]
            cells = [name, report.number(level["streams"])]
            cells.append("" if first is None else f"{first:,.1f} ± {level['ttft_sd']:,.1f}")
            cells += [report.number(level["tokens_per_s"], 0 if level["tokens_per_s"] >= 100 else 1)]
            cells += [report.number(row["peak_rss_mb"]), report.number(row["peak_gpu_mb"])]
            cells += ["" if busy is None else f"{busy:.0f} %", str(level["errors"])]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(found: Mapping[str, Any], target: Path) -> None:
    """Draw tokens/s and TTFT as bars, a group for each number at once."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in found["rows"] if row["levels"]]
    counts = sorted({level["streams"] for row in rows for level in row["levels"]})
    figure, grid = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    width = 0.8 / max(1, len(rows))
    for axes, (name, key, spread) in zip(
        grid, (("tokens/s", "tokens_per_s", ""), ("TTFT, ms", "ttft_mean", "ttft_sd")), strict=True
    ):
        for place, row in enumerate(rows):
            levels = {level["streams"]: level for level in row["levels"]}
            there = [(position + place * width, levels[n]) for position, n in enumerate(counts) if n in levels]
            heights = [level[key] or 0.0 for _, level in there]
            errors = [level[spread] or 0.0 for _, level in there] if spread else None
            drawn = axes.bar(
                [x for x, _ in there], heights, width, yerr=errors, label=NAMES[row["way"]].replace("`", ""), capsize=3
            )
            axes.bar_label(drawn, fmt="{:,.0f}", fontsize=7)
        middle = width * (len(rows) - 1) / 2
        axes.set_xticks([position + middle for position in range(len(counts))], [f"{n} at once" for n in counts])
        axes.set(ylabel=name, yscale="log")
    grid[0].legend()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
