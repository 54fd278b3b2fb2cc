"""Quantized for real, served through Triton by the same model.py, compared: the tiny model in every variant."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import shapes
from tools.environment import ROOT
from tools.quantize import OF_VARIANT, SCHEMES

pytestmark = pytest.mark.timeout(600)  # the environment that quantizes may have to be built first

QUANTIZED = {"gptq": "w4a16", "awq": "w8a8"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of the tools as a user does."""
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def quantized(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model in 4 bits by GPTQ and in 8 by AWQ, each where a CPU can serve it."""
    home = tmp_path_factory.mktemp("quantized")
    for variant, scheme in QUANTIZED.items():
        done = run(
            *("tools.quantize", "--variant", variant, "--scheme", scheme, "--model", str(tiny_model)),
            *("--output", str(home / variant), "--calibration", "built-in", "--log", str(home / f"{variant}.log")),
        )
        assert done.returncode == 0, done.stderr
        assert f"{home / variant}: {variant} {scheme.upper()}" in done.stderr
    return {variant: home / variant for variant in QUANTIZED}


@pytest.fixture(scope="module")
def report(
    tiny_model: Path, quantized: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, nothing_left: set[Path]
) -> dict[str, Any]:
    """What `tools.compare variants` says of the three, and of GPTQ's weights under AWQ's configuration."""
    out = tmp_path_factory.mktemp("compared")
    subjects = [str(tiny_model), *(str(folder) for folder in quantized.values()), f"awq={quantized['gptq']}"]
    arguments = ["--streams", "1,4", "--max-tokens", "8", "--answer-tokens", "24", "--out", str(out)]
    engine = {"max_model_len": 4_096, "max_num_seqs": 16}
    done = run("tools.compare", "variants", *subjects, *arguments, "--engine-args", json.dumps(engine))
    assert done.returncode == 0, done.stderr
    assert {file.suffix for file in out.iterdir()} == {".json", ".md", ".png", ".log"}
    found: dict[str, Any] = json.loads((out / "variants.json").read_text(encoding="utf-8"))
    return found


def test_every_variant_is_served_and_answers_exactly(report: dict[str, Any]) -> None:
    """What the model knows by heart it knows in 4 and in 8 bits."""
    for row in report["rows"][:3]:
        assert row["error"] is None, row
        said = {answer["question"]: answer["text"] for answer in row["quality"]["answers"]}
        assert said["What is the capital of France?"] == "The capital of France is Paris."
        assert said["What is 8 plus 5?"] == "8 plus 5 is 13."


def test_every_figure_is_there(report: dict[str, Any]) -> None:
    """Load time, memory, KV cache, speed and perplexity, and nothing failed."""
    for row in report["rows"][:3]:
        assert [level["streams"] for level in row["levels"]] == [1, 4]
        assert all(level["errors"] == 0 and level["tokens"] == 8 * level["streams"] for level in row["levels"])
        assert min(row[name] for name in ("load_s", "weights_mb", "kv_tokens", "peak_rss_mb")) > 0
        assert row["quality"]["perplexity"] > 1 and row["quality"]["scored_tokens"] > 500
    plain, four, eight = (row["weights_mb"] for row in report["rows"][:3])
    assert four < eight < plain


def test_weights_of_another_variant_are_refused_at_load(report: dict[str, Any]) -> None:
    """By the server, in one sentence that says what serves them."""
    error = report["rows"][3]["error"]
    assert error.endswith(
        "variant awq does not serve W4A16 weights (compressed-tensors): start with --model-config-name=gptq"
    )
    assert error.startswith("engine_args: model=") and "\n" not in error


def test_shapes_have_the_config_of_what_is_quantized(quantized: dict[str, Path]) -> None:
    """What is measured with dummy weights is what `tools.quantize` would write."""
    for variant, scheme in QUANTIZED.items():
        written = json.loads((quantized[variant] / "config.json").read_text())["quantization_config"]
        made = shapes.quantization_config(SCHEMES[scheme])
        (group,) = made.pop("config_groups").values()
        for name, value in made.items():
            assert written[name] == value, name
        real = written["config_groups"]["group_0"]
        for part in ("weights", "input_activations"):
            for name, value in (group.pop(part) or {}).items():
                assert real[part][name] == value, (part, name)
        for name, value in group.items():
            assert real[name] == value, name


def test_a_quantized_model_is_not_quantized_again(quantized: dict[str, Path], tmp_path: Path) -> None:
    """Refused in one line, before the environment is touched."""
    for variant in OF_VARIANT:
        done = run(
            *("tools.quantize", "--variant", variant, "--model", str(quantized["gptq"])),
            *("--output", str(tmp_path / variant)),
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ") and "is quantized already (W4A16, compressed-tensors)" in line
    assert not list(tmp_path.iterdir())
