"""`python -m loadtests.kit.plot RESULT…`: latency against rate, with the knee, of ramps; else a test as it went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help=__doc__, add_completion=False)


def draw(results: dict[str, dict[str, Any]], to: Path) -> None:
    """Draw results, by name: ramps against each other, or the first one over time where none is a ramp."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 8), sharex=True, layout="constrained")
    ramps = {name: found for name, found in results.items() if found["steps"]}
    for name, found in ramps.items():
        steps = found["steps"]
        rates = [step["offered"] for step in steps]
        (line,) = above.plot(rates, [step["ttft_p95"] * 1e3 for step in steps], "o-", label=f"{name} TTFT p95")
        above.plot(rates, [step["ttft_p50"] * 1e3 for step in steps], "o:", color=line.get_color(), label=f"{name} p50")
        below.plot(rates, [step["completed"] for step in steps], "o-", color=line.get_color(), label=name)
        if (bend := found["knee"]) is not None:
            for axes in (above, below):
                axes.axvline(bend["offered"], color=line.get_color(), linestyle="--", linewidth=1)
            above.annotate(
                f"knee {bend['offered']:.3g}/s", (bend["offered"], bend["ttft_p95"] * 1e3), xytext=(6, 12),
                textcoords="offset points",
            )  # fmt: skip
    if ramps:
        most = max(step["offered"] for found in ramps.values() for step in found["steps"])
        below.plot([0, most], [0, most], color="grey", linewidth=0.5, label="all that is offered")
        above.set(ylabel="TTFT, ms", yscale="log", title="Latency against rate")
        below.set(xlabel="offered requests/s", ylabel="completed requests/s")
    else:
        _over_time(next(iter(results.values()))["timeline"], above, below)
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(to, dpi=120)
    pyplot.close(figure)


def _over_time(points: list[dict[str, float]], above: Any, below: Any) -> None:
    for key in ("ttft_p50", "ttft_p95", "itl_p95"):
        line = [(point["second"], point[key] * 1e3) for point in points if key in point]
        above.plot([x for x, _ in line], [y for _, y in line], label=key)
    for key in ("offered", "completed", "failed"):
        below.plot([point["second"] for point in points], [point[key] for point in points], label=key)
    above.set(ylabel="ms", yscale="log")
    below.set(xlabel="seconds", ylabel="requests/s")


@app.command()
def main(
    results: Annotated[list[Path], typer.Argument(help="what --result wrote; several ramps are drawn together")],
    out: Annotated[Path | None, typer.Option(help="default: beside the first, as .png")] = None,
) -> None:
    """Draw latency against rate, with the knee marked; a test without a ramp is drawn over time."""
    to = out or results[0].with_suffix(".png")
    try:
        draw({path.stem: json.loads(path.read_text(encoding="utf-8")) for path in results}, to)
    except (OSError, ValueError, KeyError) as error:
        raise typer.BadParameter(f"not a result of a load test: {error!r}") from error
    typer.echo(f"written to {to}")


if __name__ == "__main__":
    app()
