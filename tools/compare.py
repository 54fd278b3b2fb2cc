"""Compares what one could serve, side by side on this machine: variants of a model, or deployments of one.

`python -m tools.compare variants` serves FP16, AWQ and GPTQ in turn through Triton: speed, memory, quality.
`python -m tools.compare deployments` sets Triton beside Transformers, `vllm serve` and LangChain over our gateway.
Both write JSON, Markdown and plots.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from tools import bench, configs, deployments, load, models, quality, report, tune, variants, variants_report, ways
from tools.progress import Progress

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
console = Console(stderr=True)


def keep(found: dict[str, Any], out: Path, name: str, markdown: str, draw: Callable[[], object]) -> None:
    """Write a report's three forms and show the tables."""
    (out / f"{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(markdown, encoding="utf-8")
    try:
        draw()
    except ImportError:
        console.print(f"matplotlib is not installed: no plot; `python -m tools.compare redraw {out / name}.json` draws")
    console.print(Markdown(markdown))
    console.print(f"written to {out}/{name}.json, {name}.md")


@app.command(name="variants")
def variants_command(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            help="variant=folder, or folders alone, whose weights say what they are; default: SmolLM2 alone"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for the report and the logs")] = Path("build/variants"),
    streams: Annotated[str, typer.Option(help="concurrent streams of each load")] = "1,16,64,256",
    repeats: Annotated[int, typer.Option(min=1, help="times each load is run; the median counts")] = 1,
    prompt_words: Annotated[int, typer.Option(min=1)] = 60,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens of each answer under load")] = 64,
    processes: Annotated[int, typer.Option(min=1, help="client processes")] = bench.CLIENT_PROCESSES,
    text: Annotated[Path, typer.Option(help="text for the perplexity")] = quality.TEXT,
    answer_tokens: Annotated[int, typer.Option(min=1, help="tokens of each answer that is compared to FP16's")] = 48,
    engine_args: Annotated[str, typer.Option(help="JSON object laid over every variant's engine arguments")] = "{}",
) -> None:
    """Compare variants: load time, memory, KV cache, tokens/s, TTFT, perplexity, greedy answers."""
    load.allow_files()
    try:
        arguments = configs.for_this_machine(engine_args)
        default = None if folders else models.smollm2(Progress())
        subjects = variants.subjects(folders or [], default)
        exam = variants.Exam(text=text.read_text("utf-8"), questions=quality.QUESTIONS, tokens=answer_tokens)
    except (variants.BadVariant, configs.BadConfig, models.ModelUnavailable, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    plan = bench.Plan(
        arguments=arguments,
        streams=bench.counts(streams),
        repeats=repeats,
        prompt_words=prompt_words,
        max_tokens=(max_tokens,),
        processes=processes,
    )
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"command": report.command(), "machine": report.machine(), "plan": asdict(plan), "rows": []}
    progress = Progress()
    dummy = arguments.get("load_format") == "dummy"  # noise says nothing of quality
    for number, subject in enumerate(subjects):
        log = out / f"{number}-{subject.variant}.log"
        row = variants.measure(subject, arguments, plan, None if dummy else exam, log, progress.update)
        found["rows"].append(asdict(row))
        if row.error:
            progress.say(f"{row.label} could not run: {row.error}")
        (out / "variants.json").write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")
    keep(found, out, "variants", variants_report.markdown(found), lambda: _plot_variants(found, out))
    raise typer.Exit(0 if any(not row["error"] for row in found["rows"]) else 1)


def _plot_variants(found: dict[str, Any], out: Path) -> None:
    variants_report.plot(found, out / "variants.png", out / "variants-pareto.png")


@app.command(name="deployments")
def deployments_command(
    model: Annotated[str, typer.Option(help="a model's folder; default: SmolLM2-135M")] = "",
    out: Annotated[Path, typer.Option(help="folder for the report and the logs")] = Path("build/deployments"),
    of: Annotated[str, typer.Option(help="which, and in which order")] = ",".join(deployments.NAMES),
    streams: Annotated[str, typer.Option(help="requests at once")] = "1,16",
    repeats: Annotated[int, typer.Option(min=1, help="times each load is run; TTFT is over all of them")] = 5,
    characters: Annotated[int, typer.Option(min=1, help="of each prompt")] = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="of each answer")] = 256,
    processes: Annotated[int, typer.Option(min=1, help="client processes")] = 1,
    engine_args: Annotated[str, typer.Option(help="JSON object laid over the FP16 variant's engine arguments")] = "{}",
) -> None:
    """Compare deployments: TTFT (mean ± sd), tokens/s, memory, GPU utilisation."""
    load.allow_files()
    folder = model or str(models.smollm2(Progress()))
    chosen = of.split(",")
    if unknown := [name for name in chosen if name not in deployments.NAMES]:
        raise typer.BadParameter(f"--of takes {', '.join(deployments.NAMES)}, got {unknown[0]!r}")
    try:
        own = configs.for_this_machine(engine_args) | {"model": folder}
    except configs.BadConfig as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    plan = deployments.Plan(
        arguments=configs.arguments_of(configs.variant_named(ways.VARIANT), own),
        streams=bench.counts(streams),
        repeats=repeats,
        characters=characters,
        max_tokens=max_tokens,
        processes=processes,
    )
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"command": report.command(), "machine": report.machine(), "plan": asdict(plan), "rows": []}
    found["plan"]["arguments"]["model"] = Path(folder).name
    progress = Progress()
    for name in chosen:
        row = deployments.measure(name, plan, out / f"{name}.log", progress.update)
        found["rows"].append(asdict(row))
        if row.error:
            progress.say(f"{deployments.NAMES[name]} could not run: {row.error}")
        (out / "deployments.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    draw = lambda: deployments.plot(found, out / "deployments.png")  # noqa: E731
    keep(found, out, "deployments", deployments.markdown(found), draw)
    raise typer.Exit(1 if any(row["error"] for row in found["rows"]) else 0)


@app.command()
def redraw(file: Annotated[Path, typer.Argument(help="a variants.json, deployments.json or tune.json")]) -> None:
    """Draw and tabulate a report again, for example one measured on a machine without matplotlib."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if "trials" in found:
        file.with_suffix(".md").write_text(tune.tabulate(found), encoding="utf-8")
        tune.redraw(found, file.with_suffix(".png"))
    elif "way" in found["rows"][0]:
        file.with_suffix(".md").write_text(deployments.markdown(found), encoding="utf-8")
        deployments.plot(found, file.with_suffix(".png"))
    else:
        file.with_suffix(".md").write_text(variants_report.markdown(found), encoding="utf-8")
        variants_report.plot(found, file.with_suffix(".png"), file.with_name(f"{file.stem}-pareto.png"))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was loaded is ended
    app()
