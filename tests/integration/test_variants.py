"""Quantized for real, served through Triton by the same model.py, compared: the tiny model in 4 and in 8 bits.

A CPU without AVX-512 serves the 8 bits alone. What is served everywhere is tested everywhere, the other with `-m long`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import shapes
from tools.contract import load
from tools.environment import ROOT
from tools.quantize import SCHEMES

pytestmark = pytest.mark.timeout(600)  # the environment that quantizes may have to be built first

SCHEME = {"gptq": "w4a16", "awq": "w8a8"}  # those that a CPU can serve
_WEIGHTS = load(module="weights")
SERVED, OTHER = ("gptq", "awq") if _WEIGHTS.WIDE in _WEIGHTS.instructions() else ("awq", "gptq")
ENGINE = json.dumps({"max_model_len": 4_096, "max_num_seqs": 16})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of the tools as a user does."""
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def quantize(variant: str, model: Path, home: Path) -> Path:
    """Quantize a model into a folder named after the variant; what is written has the config of our shapes."""
    done = run(
        *("tools.quantize", "--variant", variant, "--scheme", SCHEME[variant], "--model", str(model)),
        *("--output", str(home / variant), "--calibration", "built-in", "--log", str(home / f"{variant}.log")),
    )
    assert done.returncode == 0, done.stderr
    assert f"{home / variant}: {variant} {SCHEME[variant].upper()}" in done.stderr
    written = json.loads((home / variant / "config.json").read_text())["quantization_config"]
    check_shapes(written, shapes.quantization_config(SCHEMES[SCHEME[variant]]))
    return home / variant


def check_shapes(written: dict[str, Any], made: dict[str, Any]) -> None:
    """What is measured with dummy weights is what `tools.quantize` writes."""
    for name, value in made.items():
        if isinstance(value, dict):
            check_shapes(written[name], value)
        else:
            assert written[name] == value, name


def compare(out: Path, *subjects: str) -> list[dict[str, Any]]:
    """What `tools.compare variants` says of these folders, in their order."""
    load = ["--streams", "4", "--max-tokens", "8", "--answer-tokens", "24", "--out", str(out)]
    done = run("tools.compare", "variants", *subjects, *load, "--engine-args", ENGINE)
    assert done.returncode == 0, done.stderr
    assert {file.suffix for file in out.iterdir()} == {".json", ".md", ".png", ".log"}
    rows: list[dict[str, Any]] = json.loads((out / "variants.json").read_text(encoding="utf-8"))["rows"]
    return rows[: len(subjects)]


@pytest.fixture(scope="module")
def quantized(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in as few bits as this CPU serves."""
    return quantize(SERVED, tiny_model, tmp_path_factory.mktemp("quantized"))


@pytest.fixture(scope="module")
def rows(
    tiny_model: Path, quantized: Path, tmp_path_factory: pytest.TempPathFactory, nothing_left: set[Path]
) -> list[dict[str, Any]]:
    """The model as it is, quantized, and that under the other variant's configuration, side by side."""
    return compare(tmp_path_factory.mktemp("compared"), str(tiny_model), str(quantized), f"{OTHER}={quantized}")


def check_answers(row: dict[str, Any]) -> None:
    """What the model knows by heart it says to the character, and every figure is there."""
    assert row["error"] is None, row
    said = {answer["question"]: answer["text"] for answer in row["quality"]["answers"]}
    assert said["What is the capital of France?"] == "The capital of France is Paris."
    assert said["What is 8 plus 5?"] == "8 plus 5 is 13."
    (level,) = row["levels"]
    assert (level["streams"], level["errors"], level["tokens"]) == (4, 0, 8 * 4)
    assert min(row[name] for name in ("load_s", "weights_mb", "kv_tokens", "peak_rss_mb")) > 0
    assert row["quality"]["perplexity"] > 1 and row["quality"]["scored_tokens"] > 500


def test_a_quantized_model_is_served_and_answers_exactly(rows: list[dict[str, Any]]) -> None:
    """In less memory than the model that it was made from."""
    plain, fewer = rows[:2]
    check_answers(plain)
    check_answers(fewer)
    assert fewer["weights_mb"] < plain["weights_mb"]


def test_weights_of_another_variant_are_refused_at_load(rows: list[dict[str, Any]], quantized: Path) -> None:
    """By the server, in one sentence that says what serves them."""
    assert rows[2]["error"] == (
        f"engine_args: model={quantized}: variant {OTHER} does not serve {SCHEME[SERVED].upper()} weights "
        f"(compressed-tensors): start with --model-config-name={SERVED}"
    )


@pytest.mark.long
def test_the_other_is_served_too_or_refused(tiny_model: Path, tmp_path: Path, nothing_left: set[Path]) -> None:
    """8 bits with their activations everywhere; 4 bits where the CPU has AVX-512, else the server says what lacks."""
    made = quantize(OTHER, tiny_model, tmp_path)
    plain, other = compare(tmp_path / "compared", str(tiny_model), str(made))
    if OTHER == "gptq":
        assert other["error"] == (
            f"engine_args: model={made}: W4A16 weights have no kernel in vLLM's CPU backend where the CPU has no "
            "AVX-512: quantize with --variant awq --scheme w8a8, or use a GPU"
        )
        return
    check_answers(other)
    assert other["weights_mb"] < plain["weights_mb"]


def test_a_quantized_model_is_not_quantized_again(quantized: Path, tmp_path: Path) -> None:
    """Refused in one line, before the environment is touched."""
    done = run("tools.quantize", "--variant", OTHER, "--model", str(quantized), "--output", str(tmp_path / OTHER))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    said = f"is quantized already ({SCHEME[SERVED].upper()}, compressed-tensors)"
    assert line.startswith("error: ") and said in line
    assert not list(tmp_path.iterdir())
