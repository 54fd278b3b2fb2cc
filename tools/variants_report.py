"""The comparison of variants as Markdown and as plots: speed and memory, quality, answers side by side.

Read by `tools.compare` and `tools.tables`. A report is what variants.json holds: command, machine, plan, rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import report
from tools.configs import DEFAULT
from tools.quality import Agreement, agreement

SHOWN_CHARACTERS = 160


def markdown(found: Mapping[str, Any]) -> str:
    """Write the tables; a variant that could not run has its reason in the place of its figures."""
    rows, counts = found["rows"], _counts(found)
    lines = [f"`{found['command']}`", "", report.where(found["machine"]), *_notes(found)]
    columns = [f"tokens/s at {count:,}" for count in counts] + [f"TTFT p50 ms at {count:,}" for count in counts]
    columns = ["load s", "weights MB", "KV tokens", "peak RSS MB", "peak GPU MB", *columns]
    lines += ["", f"| variant | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for row in rows:
        if row["error"]:
            lines.append(f"| {label(row)} | could not run: {row['error']} |" + " |" * (len(columns) - 1))
            continue
        levels = {level["streams"]: level for level in row["levels"]}
        cells = [report.number(row["load_s"], 1), report.number(row["weights_mb"]), report.number(row["kv_tokens"])]
        cells += [report.number(row["peak_rss_mb"]), report.number(row["peak_gpu_mb"])]
        cells += [_speed(levels.get(count)) for count in counts]
        cells += [report.number((levels.get(count) or {}).get("ttft_p50"), 1) for count in counts]
        lines.append(f"| {label(row)} | {' | '.join(cells)} |")
    return "\n".join(lines + _quality(rows) + _answers(rows)) + "\n"


def table(found: Mapping[str, Any]) -> str:
    """Write what belongs in the documentation: the tables without the answers."""
    return markdown(found).partition("\n\n#### Answers")[0].rstrip("\n") + "\n"


def label(row: Mapping[str, Any]) -> str:
    """Name a row: the variant and how its weights are stored."""
    return f"{row['variant']} {row['scheme']}".strip()


def agreements(rows: Sequence[Mapping[str, Any]]) -> dict[int, Agreement]:
    """How near each row's answers, by its place, are to those of the plain variant; empty without these."""
    asked = {place: row["quality"] for place, row in enumerate(rows) if row["quality"]}
    base = next((asked[place] for place in asked if rows[place]["variant"] == DEFAULT), None)
    if base is None:
        return {}
    return {place: agreement(_tokens(quality), _tokens(base)) for place, quality in asked.items()}


def _tokens(quality: Mapping[str, Any]) -> list[list[int]]:
    return [answer["tokens"] for answer in quality["answers"]]


def _counts(found: Mapping[str, Any]) -> list[int]:
    return sorted({level["streams"] for row in found["rows"] for level in row["levels"]})


def _notes(found: Mapping[str, Any]) -> list[str]:
    dummy = found["plan"]["arguments"].get("load_format") == "dummy"
    return ["", "Dummy weights: speed and memory are real, the text is noise, so there is no quality."] if dummy else []


def _speed(level: Mapping[str, Any] | None) -> str:
    if level is None:
        return ""
    failed = f" ({level['errors']} failed)" if level["errors"] else ""
    return f"{level['tokens_per_s']:,.0f}{failed}"


def _quality(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    near = agreements(rows)
    if not any(row["quality"] for row in rows):
        return []
    lines = ["", "| variant | perplexity | tokens scored | same tokens | same answers | first other token |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for place, row in enumerate(rows):
        quality = row["quality"]
        if not quality:
            lines.append(f"| {label(row)} | not measured | | | | |")
            continue
        cells = [report.number(quality["perplexity"], 2), report.number(quality["scored_tokens"])]
        if place in near:
            found = near[place]
            cells += [f"{found.tokens:.0%}", f"{found.whole:.0%}", report.number(found.first_divergence)]
        lines.append(f"| {label(row)} | {' | '.join(cells)} |" + " |" * (5 - len(cells)))
    return lines


def _answers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    asked = [row for row in rows if row["quality"]]
    if not asked:
        return []
    lines = ["", "#### Answers, greedy", "", f"| question | {' | '.join(label(row) for row in asked)} |"]
    lines.append("|---|" + "---|" * len(asked))
    for answers in zip(*(row["quality"]["answers"] for row in asked), strict=True):
        cells = [_cell(answers[0]["question"]), *(_cell(answer["text"]) for answer in answers)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}…"


def plot(found: Mapping[str, Any], bars: Path, pareto: Path) -> None:
    """Draw tokens/s as bars, and what a variant gives for its memory: tokens/s and, where known, perplexity."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in found["rows"] if row["levels"]]
    counts = _counts(found)
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    width = 0.8 / max(1, len(rows))
    for place, row in enumerate(rows):
        speeds = {level["streams"]: level["tokens_per_s"] for level in row["levels"]}
        places = [position + place * width for position in range(len(counts))]
        drawn = axes.bar(places, [speeds.get(count, 0.0) for count in counts], width, label=label(row))
        axes.bar_label(drawn, fmt="{:,.0f}", fontsize=7)
    middle = width * (len(rows) - 1) / 2
    axes.set_xticks([position + middle for position in range(len(counts))], [str(count) for count in counts])
    axes.set(xlabel="concurrent streams", ylabel="tokens/s", yscale="log")
    axes.legend()
    figure.savefig(bars, dpi=120)
    pyplot.close(figure)

    panels: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
        "tokens/s, best": lambda row: max(level["tokens_per_s"] for level in row["levels"])
    }
    if any(row["quality"] for row in rows):
        panels["perplexity"] = lambda row: row["quality"]["perplexity"] if row["quality"] else None
    figure, grid = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 5), layout="constrained", squeeze=False)
    for axes, (name, value) in zip(grid.flat, panels.items(), strict=True):
        points = [(row["weights_mb"], y, label(row)) for row in rows if row["weights_mb"] and (y := value(row))]
        higher = name.startswith("tokens")
        best = frontier([(x, -y if higher else y) for x, y, _ in points])
        for place, (x, y, text) in enumerate(points):
            axes.scatter(x, y, marker="o" if place in best else "x", color="C0" if place in best else "C7")
            axes.annotate(text, (x, y), textcoords="offset points", xytext=(6, 6))
        line = sorted(points[place][:2] for place in best)
        if line:
            axes.plot(*zip(*line, strict=True), alpha=0.4)
        axes.set(xlabel="weights, MB", ylabel=name, title="dots: nothing is better in both")
        axes.margins(0.25)
        axes.grid(alpha=0.3)
    figure.savefig(pareto, dpi=120)
    pyplot.close(figure)


def frontier(points: Sequence[tuple[float, float]]) -> set[int]:
    """Places of the points that no other beats in one coordinate without losing in the other; less is better."""
    return {
        place
        for place, (x, y) in enumerate(points)
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    }
