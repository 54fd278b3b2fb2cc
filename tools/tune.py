"""Searches the engine arguments that keep an objective at a rate of requests with the least of the machine.

`python -m tools.tune --slo 'ttft_p99<320ms' --rate 100 --prompt-tokens 64 --max-tokens 128` starts Triton anew for each
trial and sends an open loop over gRPC: arrivals do not wait for answers. It prints the frontier and the arguments that
it chose, ready for `python -m tools.configs export`, and writes JSON, Markdown and a plot.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from loadtests.kit import slo
from loadtests.kit.arrivals import arrivals
from tools import bench, configs, load, models, report, server, ways
from tools.progress import Progress
from tools.tuning import BadSearch, Settings, Space, Trial, chosen, frontier, overshoot, search
from tools.variants import reason

console = Console(stderr=True)
HOPELESS = 0.5  # a probe that misses an objective by this share of its bound is not gone on with
SEED = 3_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The open loop of a trial: requests a second for so many seconds, and a probe of it before."""

    rate: float
    seconds: float
    probe_s: float
    prompt_words: int
    max_tokens: int
    processes: int

    def due(self, seconds: float, seed: int) -> list[float]:
        """When its requests are due, the same for every trial."""
        times = arrivals("poisson", self.rate, random.Random(seed), 0.0)
        return list(itertools.takewhile(lambda at: at < seconds, times)) or [0.0]


def metrics(level: load.Level) -> dict[str, float]:
    """What was seen of a load, under the objectives' names: in seconds, shares, and numbers per second."""
    times = {"ttft_p50": level.ttft_p50, "ttft_p99": level.ttft_p99, "ttft_mean": level.ttft_mean}
    times |= {"itl_p50": level.itl_p50, "itl_p99": level.itl_p99}
    found = {name: value / 1e3 for name, value in times.items() if value is not None}
    found["error_rate"] = level.errors / level.requests
    found["output_tokens_per_s"] = level.tokens_per_s
    if level.seconds:
        found["requests_per_s"] = (level.requests - level.errors) / level.seconds
    return found


MEASURED = (
    *("ttft_p50", "ttft_p99", "ttft_mean", "itl_p50", "itl_p99"),
    *("error_rate", "output_tokens_per_s", "requests_per_s"),
)


def objectives(text: str) -> tuple[slo.Objective, ...]:
    """Read --slo; raises BadParameter."""
    try:
        found = slo.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"--slo: {error}") from None
    if not found:
        raise typer.BadParameter("--slo must name an objective, as in ttft_p99<320ms")
    for one in found:
        if one.metric not in MEASURED:
            raise typer.BadParameter(f"--slo: {one.metric} is not measured here; there are {', '.join(MEASURED)}")
    return (*found, *slo.parse("error_rate<=0%"))


def measure(
    settings: Settings, arguments: Mapping[str, Any], asked: Load, kept: Sequence[slo.Objective], log: Path
) -> Trial:
    """Serve the model with these settings and load it. What keeps it from that is in the trial."""
    with tempfile.TemporaryDirectory(prefix="tritonstream-tune-") as scratch:
        configs.export(
            ways.VARIANT,
            ways.MODEL_NAME,
            Path(scratch),
            engine_args={**arguments, **settings.engine_args()},
            instances=settings.instances,
            link=True,
        )
        try:
            with server.launch(Path(scratch), log=log) as running:
                running.wait_ready(ways.LOAD_TIMEOUT_S)

                def run(seconds: float, seed: int) -> dict[str, float]:
                    due = asked.due(seconds, seed)
                    texts = load.prompts(len(due), asked.prompt_words, seed)
                    seen = load.drive(
                        *("triton", running.grpc_address, ways.MODEL_NAME, texts, asked.max_tokens, asked.processes),
                        start=lambda: None,
                        due=due,
                    )
                    return metrics(load.summarize(asked.max_tokens, seen))

                run(min(1.0, asked.probe_s), SEED - 1)  # the first calls' work
                probe = run(asked.probe_s, SEED)
                if max(overshoot(one, probe) for one in kept) > HOPELESS:
                    return Trial(settings=settings, found=probe, probed=True)
                return Trial(settings=settings, found=run(asked.seconds, SEED + 1))
        except (server.LaunchFailed, RuntimeError, OSError) as error:
            return Trial(settings=settings, error=reason(str(error)))


def markdown(found: Mapping[str, Any], trials: Sequence[Trial], kept: Sequence[slo.Objective]) -> str:
    """Write the trials as a table, the frontier marked, and what was chosen."""
    best, edge = chosen(trials, kept), frontier(trials, kept)
    lines = [f"`{found['command']}`", "", report.where(found["machine"]), ""]
    head = ["instances", "GPU memory", "max_num_seqs", "max_num_batched_tokens", "TTFT p50 ms", "p99", "ITL p99 ms"]
    head += ["requests/s", "tokens/s", "failed"]
    lines += [f"| {' | '.join(head)} | |", "|" + "---:|" * len(head) + "---|"]
    for trial in trials:
        cells = [str(trial.settings.instances), f"{trial.settings.gpu_memory_utilization:g}"]
        cells += [report.number(trial.settings.max_num_seqs), report.number(trial.settings.max_num_batched_tokens)]
        for name in ("ttft_p50", "ttft_p99", "itl_p99"):
            cells.append(report.number(trial.found[name] * 1e3, 1) if name in trial.found else "")
        cells += [report.number(trial.found.get(name), 1) for name in ("requests_per_s", "output_tokens_per_s")]
        cells.append(f"{trial.found['error_rate']:.1%}" if "error_rate" in trial.found else "")
        lines.append(f"| {' | '.join(cells)} | {_verdict(trial, kept, best, edge)} |")
    spelled = ", ".join(one.spelled for one in kept)
    if best is None:
        nearest = min(trials, key=lambda one: (one.error is not None, one.probed, one.excess(kept)))
        lines += ["", f"No trial keeps {spelled}; the nearest misses by {nearest.excess(kept):.0%} of its bound."]
    else:
        arguments = json.dumps(best.settings.engine_args())
        lines += ["", f"Chosen, the least of the machine that keeps {spelled}:", "", "```bash"]
        lines += [f"python -m tools.configs export --variant {ways.VARIANT} --name NAME --to FOLDER \\"]
        lines += [f"  --instances {best.settings.instances} --engine-args '{arguments}'", "```"]
    return "\n".join(lines) + "\n"


def tabulate(found: Mapping[str, Any]) -> str:
    """Write the table of a report, as tune.json holds it."""
    return markdown(found, _trials(found), objectives(found["slo"]))


def redraw(found: Mapping[str, Any], target: Path) -> None:
    """Draw a report, as tune.json holds it."""
    plot(_trials(found), objectives(found["slo"]), target)


def _trials(found: Mapping[str, Any]) -> list[Trial]:
    return [Trial(**{**one, "settings": Settings(**one["settings"])}) for one in found["trials"]]


def _verdict(trial: Trial, kept: Sequence[slo.Objective], best: Trial | None, edge: Sequence[Trial]) -> str:
    if trial.error is not None:
        return f"could not run: {trial.error}"
    words = ["chosen"] if trial is best else []
    words += ["frontier"] if trial in edge else []
    words += ["stopped after the probe"] if trial.probed else ["kept" if trial.keeps(kept) else "missed"]
    return ", ".join(words)


def plot(trials: Sequence[Trial], kept: Sequence[slo.Objective], target: Path) -> None:
    """Draw the first objective's metric against the share of GPU memory, a colour for each number of instances."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    objective = kept[0]
    scale = 1e3 if objective.metric.startswith(("ttft", "itl")) else 1.0
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    best, edge = chosen(trials, kept), frontier(trials, kept)
    for count in sorted({trial.settings.instances for trial in trials}):
        for probed in (False, True):
            there = [
                trial
                for trial in trials
                if (trial.settings.instances, trial.probed) == (count, probed) and objective.metric in trial.found
            ]
            if there:
                axes.scatter(
                    [trial.settings.gpu_memory_utilization for trial in there],
                    [trial.found[objective.metric] * scale for trial in there],
                    marker="x" if probed else "o",
                    color=f"C{count % 10}",
                    label=f"{count} instances{', stopped after the probe' if probed else ''}",
                )
    for trial in edge:
        text = f"{trial.settings.max_num_seqs} seqs, {trial.settings.max_num_batched_tokens} tokens"
        place = trial.settings.gpu_memory_utilization, trial.found[objective.metric] * scale
        axes.annotate(
            f"{text}{' (chosen)' if trial is best else ''}",
            place,
            textcoords="offset points",
            xytext=(6, 6),
            fontsize=8,
        )
    axes.axhline(objective.bound * scale, linestyle="--", color="C7", label=objective.spelled)
    unit = ", ms" if scale > 1 else ""
    axes.set(xlabel="gpu_memory_utilization", ylabel=f"{objective.metric}{unit}", title="named: the frontier")
    axes.set_yscale("log")
    axes.legend()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def _values(text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(value) for value in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"numbers like 1,2,4 are wanted, got {text!r}") from None


def main(
    wanted: Annotated[str, typer.Option("--slo", help="objectives, as in 'ttft_p99<320ms, itl_p99<50ms'")],
    rate: Annotated[float, typer.Option(min=0.01, help="requests a second")] = 100.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="of each prompt, about: a common word is a token")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="of each answer")] = 128,
    seconds: Annotated[float, typer.Option(min=1.0, help="that a trial's load lasts")] = 20.0,
    probe: Annotated[
        float, typer.Option(min=0.5, help="seconds of a first look: who misses by far is not gone on with")
    ] = (4.0),
    instances: Annotated[str, typer.Option(help="stubs; the first value of each is where the search starts")] = "1,2,4",
    gpu_memory_utilization: Annotated[str, typer.Option(help="shares of the GPU's memory; on a CPU 0.3 alone")] = "",
    max_num_seqs: Annotated[str, typer.Option(help="requests that a step takes at most")] = "256,128,512",
    max_num_batched_tokens: Annotated[str, typer.Option(help="tokens that a step takes at most")] = "8192,2048,16384",
    trials: Annotated[int, typer.Option(min=1, help="that are made at most")] = 16,
    model: Annotated[str, typer.Option(help="a model's folder; default: SmolLM2-135M")] = "",
    out: Annotated[Path, typer.Option(help="folder for the report and the logs")] = Path("build/tune"),
    processes: Annotated[int, typer.Option(min=1, help="client processes")] = bench.CLIENT_PROCESSES,
    engine_args: Annotated[str, typer.Option(help="JSON object laid over the FP16 variant's engine arguments")] = "{}",
) -> None:
    """Search the engine arguments that keep objectives at a rate with the least of the machine."""
    load.allow_files()
    kept = objectives(wanted)
    gpu = configs.gpu_capability() is not None
    try:
        space = Space(
            instances=_values(instances, int),
            gpu_memory_utilization=_values(gpu_memory_utilization or ("0.9,0.6,0.3" if gpu else "0.3"), float),
            max_num_seqs=_values(max_num_seqs, int),
            max_num_batched_tokens=_values(max_num_batched_tokens, int),
        )
        arguments = configs.for_this_machine(engine_args) | {"model": model or str(models.smollm2(Progress()))}
    except (BadSearch, configs.BadConfig, models.ModelUnavailable) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    asked = Load(
        rate=rate,
        seconds=seconds,
        probe_s=probe,
        prompt_words=prompt_tokens,
        max_tokens=max_tokens,
        processes=processes,
    )
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"command": report.command(), "machine": report.machine(), "load": asdict(asked)}
    found |= {"slo": wanted, "trials": []}
    progress = Progress()

    def one(settings: Settings) -> Trial:
        number = len(found["trials"]) + 1
        progress.update(f"trial {number} of at most {trials}", json.dumps(asdict(settings)))
        trial = measure(settings, arguments, asked, kept, out / f"trial-{number}.log")
        found["trials"].append(asdict(trial))
        (out / "tune.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return trial

    made = search(space, kept, one, trials)
    text = markdown(found, made, kept)
    (out / "tune.md").write_text(text, encoding="utf-8")
    try:
        plot(made, kept, out / "tune.png")
    except ImportError:
        console.print(f"no matplotlib, no plot: `python -m tools.compare redraw {out}/tune.json` draws it")
    console.print(Markdown(text))
    console.print(f"written to {out}/tune.json, tune.md")
    raise typer.Exit(0 if chosen(made, kept) is not None else 1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was launched is ended
    typer.run(main)
