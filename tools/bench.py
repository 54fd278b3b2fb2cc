"""How fast each way to the engine is, measured side by side in one run on one machine.

`python -m tools.bench paths` loads the same model with the same engine arguments behind each path in turn: vLLM offline
(the limit), AsyncLLM in one process, `vllm serve` over SSE, and Triton over gRPC. All get the same prompts.
`python -m tools.bench gate` measures what Triton's path costs in CPU, and compares it to the committed figure;
`python -m tools.bench chat` what a chat costs more than a text.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tools import configs, load, models, report, server, ways
from tools import gate as gates
from tools.load import Level
from tools.processes import Watch
from tools.progress import Progress

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
console = Console(stderr=True)

CLIENT_PROCESSES = max(1, min(8, (os.cpu_count() or 2) // 2))  # more would take the cores from what is measured
WARM_UP_SEED, WARM_UP_STREAMS = 1_000_000, 16


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured: the engine, and the loads in order, each `repeats` times.

    `streams` at once, each of `max_tokens` tokens: every count of the one with every count of the other.
    """

    arguments: dict[str, Any]
    streams: tuple[int, ...]
    repeats: int
    prompt_words: int
    max_tokens: tuple[int, ...]
    processes: int

    def loads(self) -> list[tuple[list[str], int]]:
        """Make the prompts of every load, the same for every path; the first load warms up and is not counted."""
        counts = [(max(min(self.streams), min(WARM_UP_STREAMS, max(self.streams))), min(self.max_tokens))]
        counts += [(n, tokens) for n in self.streams for tokens in self.max_tokens for _ in range(self.repeats)]
        return [
            (load.prompts(count, self.prompt_words, WARM_UP_SEED + number), tokens)
            for number, (count, tokens) in enumerate(counts)
        ]

    def median(self, levels: Sequence[Level]) -> list[Level]:
        """Take, of the repeats of each load, the one of median tokens/s; errors of any repeat are kept."""
        found = []
        for load_ in dict.fromkeys((level.streams, level.max_tokens) for level in levels):
            repeats = [level for level in levels if (level.streams, level.max_tokens) == load_]
            repeats.sort(key=lambda level: level.tokens_per_s)
            middle = repeats[len(repeats) // 2]
            found.append(replace(middle, errors=sum(level.errors for level in repeats)))
        return found


@dataclass(kw_only=True)
class Result:
    """One path's levels and what it took, memory in MB."""

    path: str
    start_s: float
    levels: list[Level]
    peak_rss_mb: float
    peak_gpu_mb: float | None


def measure(names: Sequence[str], plan: Plan, out: Path, tell: Callable[[str, str], object]) -> list[Result]:
    """Load these paths side by side, and run every load through each of them in turn."""
    setting = ways.Setting(arguments=plan.arguments, processes=plan.processes)
    with contextlib.ExitStack() as stack:
        loaded, starts, watches = {}, {}, {}
        for name in names:
            tell(name, "loading the model")
            started = time.monotonic()
            loaded[name] = stack.enter_context(ways.way(name, setting, out / f"{name}.log"))
            starts[name] = time.monotonic() - started
            watches[name] = Watch(loaded[name].pid)
            stack.callback(watches[name].stop)
        levels: dict[str, list[Level]] = {name: [] for name in names}
        loads = plan.loads()
        for number, (texts, tokens) in enumerate(loads, start=1):
            for name in names:
                tell(f"{name}: load {number} of {len(loads)}", f"{len(texts)} streams of {tokens} tokens")
                level = loaded[name].run(texts, tokens)
                levels[name].append(level)
                if level.errors:
                    console.print(
                        f"[red]{name}: {level.errors} of {level.requests} failed:[/] {level.first_error}",
                        highlight=False,
                    )
        return [
            Result(
                path=name,
                start_s=starts[name],
                levels=plan.median(levels[name][1:]),
                peak_rss_mb=watches[name].peak_rss_mb,
                peak_gpu_mb=watches[name].peak_gpu_mb,
            )
            for name in names
        ]


def counts(text: str) -> tuple[int, ...]:
    """Read counts like "1,16,64"; raises BadParameter."""
    try:
        counts = tuple(int(count) for count in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"counts like 1,16,64 are wanted, got {text!r}") from None
    if min(counts) < 1:
        raise typer.BadParameter(f"a count must be at least 1, got {min(counts)}")
    return counts


@app.command()
def paths(
    model: Annotated[str, typer.Option(help="a model folder, or a name on the hub; default: SmolLM2-135M")] = "",
    out: Annotated[Path, typer.Option(help="folder for paths.json, paths.md, paths.png and the logs")] = Path(
        "build/bench"
    ),
    paths: Annotated[
        str, typer.Option(help="of: offline, async, serve(-N API servers), triton(-N stubs), gateway(-N workers)")
    ] = ("offline,async,serve,triton"),
    streams: Annotated[str, typer.Option(help="concurrent streams of each load")] = "1,16,64,256",
    repeats: Annotated[int, typer.Option(min=1, help="times each load is run; the median counts")] = 3,
    prompt_words: Annotated[int, typer.Option(min=1)] = 60,
    max_tokens: Annotated[
        str, typer.Option(help="tokens of each answer; several, like 128,4096, are compared")
    ] = "128",
    processes: Annotated[int, typer.Option(min=1, help="client processes that the streams are spread over")] = (
        CLIENT_PROCESSES
    ),
    interleave: Annotated[
        bool, typer.Option("--interleave", help="load all paths at once and run each load through them in turn")
    ] = False,
    engine_args: Annotated[str, typer.Option(help="JSON object laid over the FP16 variant's engine arguments")] = "{}",
) -> None:
    """Compare the ways to the same engine: tokens/s, TTFT, inter-token latency, messages, CPU, memory."""
    load.allow_files()
    model = model or str(models.smollm2(Progress()))
    try:
        own = {"model": model, **configs.for_this_machine(engine_args)}
    except configs.BadConfig as error:
        raise typer.BadParameter(str(error)) from None
    arguments = configs.arguments_of(configs.variant_named(ways.VARIANT), own)
    plan = Plan(
        arguments=arguments,
        streams=counts(streams),
        repeats=repeats,
        prompt_words=prompt_words,
        max_tokens=counts(max_tokens),
        processes=processes,
    )
    out.mkdir(parents=True, exist_ok=True)
    command = f"python -m tools.bench paths --model {Path(model).name} --paths {paths} --streams {streams} "
    command += f"--repeats {repeats} --prompt-words {prompt_words} --max-tokens {max_tokens} --processes {processes} "
    command += f"{'--interleave ' if interleave else ''}--engine-args '{engine_args}'"
    found: dict[str, Any] = {"command": command, "machine": report.machine(), "plan": asdict(plan), "results": []}
    names = paths.split(",")
    failed = False
    progress = Progress()
    for group in [names] if interleave else [[name] for name in names]:
        try:
            results = measure(group, plan, out, progress.update)
        except (RuntimeError, OSError, server.LaunchFailed) as error:
            console.print(f"[red]{', '.join(group)} could not be measured:[/] {error}")
            failed = True
            continue
        found["results"] += [asdict(result) for result in results]
        (out / "paths.json").write_text(json.dumps(found, indent=1) + "\n")
    if not found["results"]:
        raise typer.Exit(1)
    (out / "paths.md").write_text(report.markdown(found))
    report.show(found)
    try:
        report.plot(found, out / "paths.png")
    except ImportError:
        console.print(
            f"matplotlib is not installed: no plot; `python -m tools.bench plot {out / 'paths.json'}` draws it"
        )
    console.print(f"written to {out}/paths.json, paths.md")
    raise typer.Exit(1 if failed else 0)


@app.command(name="plot")
def redraw(file: Annotated[Path, typer.Argument(help="a paths.json")]) -> None:
    """Draw and tabulate a report again, for example one measured on a machine without matplotlib."""
    found = json.loads(file.read_text())
    file.with_suffix(".md").write_text(report.markdown(found))
    report.plot(found, file.with_suffix(".png"))
    report.show(found)


@app.command()
def gateway(
    out: Annotated[Path, typer.Option(help="folder for the logs")] = Path("build/gateway"),
) -> None:
    """Measure what a token costs the gateway, over the API server of `vllm serve`; exit 1 above half of it."""
    cost = gates.measure(out, Progress().update, front="gateway", base="serve")
    typer.echo(cost.described())
    if cost.ratio > gates.GATEWAY_MOST:
        typer.echo(f"at most {gates.GATEWAY_MOST} is allowed")
        raise typer.Exit(1)


@app.command()
def gate(
    update: Annotated[bool, typer.Option("--update", help="commit to what is measured now")] = False,
    out: Annotated[Path, typer.Option(help="folder for the logs")] = Path("build/gate"),
) -> None:
    """Measure what a token costs Triton's front end, over AsyncLLM; exit 1 when it is too far above what it was."""
    cost = gates.measure(out, Progress().update)
    typer.echo(cost.described())
    if update:
        gates.update(cost, report.machine())
    elif cost.ratio > (most := gates.committed() * gates.TOLERANCE):
        typer.echo(f"at most {most:.2f} is allowed: `{gates.COMMAND}` commits to more, if it must be")
        raise typer.Exit(1)


@app.command()
def chat(
    out: Annotated[Path, typer.Option(help="folder for the logs")] = Path("build/chat"),
) -> None:
    """Measure what a chat and its parsing cost Triton's front end, over the same prompt as a text; exit 1 above 1.1."""
    costs = gates.measure_chat(out, Progress().update)
    for name, cost in costs.items():
        typer.echo(f"{name}: {cost.described()}")
    if max(cost.ratio for cost in costs.values()) > gates.CHAT_MOST:
        typer.echo(f"at most {gates.CHAT_MOST} is allowed")
        raise typer.Exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was loaded is ended
    app()
