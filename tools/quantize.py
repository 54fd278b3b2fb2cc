"""Quantizes a model: `python -m tools.quantize --variant awq|gptq --model FOLDER --output FOLDER`.

Both are plain Hugging Face folders; vLLM reads what is written (compressed-tensors), `make serve MODEL=FOLDER` picks
the variant by it. AWQ is for 8 bits: weights alone (W8A16) for a GPU, activations too (W8A8) on a CPU, which has no
kernel for the former. GPTQ is for 4 bits. The work is done by llm-compressor, in an environment of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from tools import configs, environment, models
from tools.calibration import BUILT_IN, GENERATED, SAMPLES, BadCalibration, Calibration, questions
from tools.contract import load
from tools.progress import Progress
from tools.quantizer import REFUSED, SAID, Job

GROUPS = (128, 64, 32)  # what vLLM's kernels take, the smallest file first
SPARE_BYTES = 64_000_000
_LAYER = re.compile(r"\((\d+)/(\d+)\): (Calibrating|Propagating)")
_ARCHITECTURE = re.compile(r'^\s+"(\w+)": \(', re.MULTILINE)


class CannotQuantize(Exception):
    """The model cannot be quantized so; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How weights are stored. `grouped`: weights of a row share a scale in groups, else as a whole row.

    4 bits are asymmetric: with a zero point for each group GPTQ's perplexity of SmolLM2 was nearer to bfloat16's.
    """

    bits: int
    activation_bits: int
    symmetric: bool
    grouped: bool


SCHEMES: Mapping[str, Scheme] = {
    "w8a16": Scheme(bits=8, activation_bits=16, symmetric=True, grouped=True),
    "w8a8": Scheme(bits=8, activation_bits=8, symmetric=True, grouped=False),
    "w4a16": Scheme(bits=4, activation_bits=16, symmetric=False, grouped=True),
}
OF_VARIANT: Mapping[str, tuple[str, ...]] = {"awq": ("w8a16", "w8a8", "w4a16"), "gptq": ("w4a16",)}


def scheme_for(variant: str, asked: str, *, gpu: bool) -> str:
    """Choose a variant's scheme: the one asked for, else what runs on this machine. Raises CannotQuantize."""
    if variant not in OF_VARIANT:
        raise CannotQuantize(f"--variant must be one of {', '.join(OF_VARIANT)}, got {variant!r}")
    allowed = OF_VARIANT[variant]
    if asked and asked not in allowed:
        raise CannotQuantize(f"--scheme must be one of {', '.join(allowed)} with --variant {variant}, got {asked!r}")
    return asked or ("w8a8" if variant == "awq" and not gpu else allowed[0])


def group_for(columns: Iterable[int]) -> int:
    """The largest group that divides the columns of every layer. Raises CannotQuantize."""
    found = sorted(set(columns))
    for group in GROUPS:
        if found and not any(count % group for count in found):
            return group
    raise CannotQuantize(
        f"layers of {', '.join(map(str, found)) or 'no'} columns cannot be cut into groups of "
        f"{', '.join(map(str, GROUPS))} weights: use --variant awq --scheme w8a8, which needs none"
    )


def columns(folder: Path) -> set[int]:
    """Columns of the layers that are quantized, read from the headers of the safetensors files."""
    found = set()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as source:
            header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        for name, tensor in header.items():
            layer = name.endswith(".weight") and "embed" not in name and "lm_head" not in name
            if layer and len(tensor["shape"]) == 2:
                found.add(int(tensor["shape"][1]))
    return found


def weight_bytes(folder: Path) -> int:
    """Size of a folder's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def check(folder: Path, output: Path) -> None:
    """Refuse a model that cannot be quantized, or an output that cannot be written. Raises CannotQuantize."""
    try:
        models.check_folder(folder)
        found = load(module="weights").of_folder(folder)
    except (models.ModelUnavailable, load(module="errors").ServingError) as error:
        raise CannotQuantize(str(error)) from error
    if found.quantized:
        raise CannotQuantize(
            f"{folder} is quantized already ({found.scheme}, {found.method}): give the model that it was made from"
        )
    (name, *_) = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ["none"]
    known = known_architectures()
    if known is not None and name not in known:
        raise CannotQuantize(f"{folder} is a {name}, which the installed vLLM does not serve: choose another model")
    if output.exists():
        raise CannotQuantize(f"--output {output} exists: remove it, or choose another folder")
    place = next(path for path in output.absolute().parents if path.exists())
    needed, free = weight_bytes(folder) + SPARE_BYTES, shutil.disk_usage(place).free
    if free < needed:
        raise CannotQuantize(
            f"{free / 1e9:.2f} GB free at {place}, {needed / 1e9:.2f} GB are needed: free some space, or give --output"
        )


def known_architectures() -> frozenset[str] | None:
    """Names of the architectures of the installed vLLM, or None without one; from its source, as for arguments."""
    source = configs.vllm_source("model_executor/models/registry.py")
    return None if source is None else frozenset(_ARCHITECTURE.findall(source))


def written_texts(folder: Path) -> Path:
    """Where the texts that a model writes for its calibration are kept: for the next run and the next variant."""
    key = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as source:
            key.update(source.read(2**20))
    return models.cache_home() / "calibration" / f"{key.hexdigest()[:16]}.jsonl"


def doing(log: str) -> str:
    """What the quantizer is at, by its log."""
    said = log.rfind(f"\n{SAID}")
    now = log[said + 1 :].partition("\n")[0].removeprefix(SAID) if said >= 0 else "starting Python"
    layers = _LAYER.findall(log[said + 1 :])
    return f"{now} · {layers[-1][2].lower()} {layers[-1][0]} of {layers[-1][1]}" if layers else now


def quantize(job: Job, log: Path, progress: Progress) -> None:
    """Run the job in its environment. Raises CannotQuantize, with the reason or the end of the log."""
    python = environment.ensure(environment.Plan(environment.QUANTIZE, dev=False)) / "bin" / "python"
    begin = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as sink:
        process = subprocess.Popen(
            [str(python), "-m", "tools.quantizer"],
            cwd=environment.ROOT,
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asdict(job)))
            process.stdin.close()
        while process.poll() is None:
            text = log.read_text(encoding="utf-8", errors="replace")
            progress.update(f"{job.variant}: {doing(text)}", f"{time.monotonic() - begin:.0f} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        refusal = next((line.removeprefix(REFUSED) for line in lines if line.startswith(REFUSED)), "")
        tail = "\n".join(lines[-15:])
        raise CannotQuantize(
            refusal or f"llm-compressor failed (exit code {process.returncode}); the end of {log}:\n{tail}"
        )


def run(
    folder: Path, output: Path, variant: str, scheme: str, calibration: Calibration, log: Path, progress: Progress
) -> None:
    """Quantize `folder` into `output`, which is there only when it is whole. Raises CannotQuantize, BadCalibration."""
    check(folder, output)
    chosen = SCHEMES[scheme]
    partial = output.absolute().with_name(f".{output.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        job = Job(
            model=str(folder.resolve()),
            output=str(partial),
            variant=variant,
            bits=chosen.bits,
            activation_bits=chosen.activation_bits,
            symmetric=chosen.symmetric,
            group=group_for(columns(folder)) if chosen.grouped else 0,
            texts=calibration.texts(),
            questions=questions(calibration.samples) if calibration.source == GENERATED else [],
            written=str(written_texts(folder)),
        )
        quantize(job, log, progress)
        models.check_folder(partial)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    variant: Annotated[str, typer.Option(help=f"one of {', '.join(OF_VARIANT)}")],
    output: Annotated[Path, typer.Option(help="folder to write; made, and there only when it is whole")],
    model: Annotated[str, typer.Option(help="a model's folder, or its name on the hub")],
    scheme: Annotated[
        str, typer.Option(help="awq: w8a16 (default with a GPU), w8a8 (without) or w4a16; gptq: w4a16")
    ] = "",
    calibration: Annotated[
        str,
        typer.Option(
            help=f"{GENERATED}: the model writes its own, the best (kept: an interrupted run goes on from them); "
            f"{BUILT_IN}: a few of ours in many languages; or a file: paragraphs, or .jsonl with a text in each line"
        ),
    ] = GENERATED,
    samples: Annotated[
        int | None,
        typer.Option(help=f"texts to calibrate with; default: {SAMPLES['awq']}, for gptq {SAMPLES['gptq']}"),
    ] = None,
    log: Annotated[Path, typer.Option(help="what llm-compressor says")] = Path(".cache/quantize.log"),
) -> None:
    """Quantize a model."""
    progress = Progress()
    begin = time.monotonic()
    try:
        scheme = scheme_for(variant, scheme, gpu=environment.gpu_present())
        texts = Calibration(source=calibration, samples=SAMPLES[variant] if samples is None else samples)
        folder = models.folder_of(model, progress)
        run(folder, output, variant, scheme, texts, log, progress)
    except (*(CannotQuantize, BadCalibration, models.ModelUnavailable, environment.EnvironmentFailed),) as error:
        progress.say(f"error: {error}")
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        progress.say("interrupted; the same command goes on from the calibration texts that were written")
        raise typer.Exit(130) from None
    before, after = weight_bytes(folder), weight_bytes(output)
    progress.say(
        f"{output}: {variant} {scheme.upper()}, {before / 1e6:,.0f} MB of weights became {after / 1e6:,.0f} MB, "
        f"in {math.ceil(time.monotonic() - begin)} s; `make serve MODEL={output}` serves it"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what quantizes is ended
    app()
