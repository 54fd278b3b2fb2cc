"""The tiny model as applications might deploy it, side by side; and a search for engine arguments, a short one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.environment import ROOT

pytestmark = pytest.mark.timeout(600)

ENGINE = json.dumps({"max_model_len": 2_048, "max_num_seqs": 16})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of the tools as a user does."""
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(
            "transformers", id="short"
        ),  # the servers of the others are tested elsewhere, and take half a minute
        pytest.param("transformers,openai,langchain,triton", id="all", marks=pytest.mark.long),
    ],
)
def test_deployments_are_measured_side_by_side(
    tiny_model: Path, tmp_path: Path, nothing_left: set[Path], ways: str
) -> None:
    """Each gives every request exactly the tokens that were asked for; no GPU, no share of one."""
    arguments = ["--model", str(tiny_model), "--of", ways, "--streams", "1,4", "--repeats", "2", "--max-tokens", "16"]
    done = run("tools.compare", "deployments", *arguments, "--out", str(tmp_path), "--engine-args", ENGINE)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "deployments.json").read_text(encoding="utf-8"))
    assert [row["way"] for row in found["rows"]] == ways.split(",")
    for row in found["rows"]:
        assert row["error"] is None and row["peak_rss_mb"] > 100
        for level in row["levels"]:
            assert level["errors"] == 0, level
            assert level["tokens"] == 16 * level["streams"]
            assert level["ttft_mean"] > 0 and level["ttft_sd"] is not None
    table = (tmp_path / "deployments.md").read_text(encoding="utf-8")
    assert table.count("±") == 1 + 2 * len(found["rows"])
    assert (tmp_path / "deployments.png").stat().st_size > 10_000


@pytest.mark.long
def test_a_search_ends_with_arguments_that_were_measured(
    tiny_model: Path, tmp_path: Path, nothing_left: set[Path]
) -> None:
    """The objective is one that every machine keeps: the cheapest is chosen; what vLLM refuses is said to be so."""
    space = ["--instances", "1,2", "--max-num-seqs", "16", "--max-num-batched-tokens", "1024,512"]
    load = ["--rate", "4", "--seconds", "3", "--probe", "1", "--prompt-tokens", "8", "--max-tokens", "8"]
    arguments = ["--slo", "ttft_p99<30s", "--model", str(tiny_model), "--out", str(tmp_path), *space, *load]
    done = run("tools.tune", *arguments, "--engine-args", json.dumps({"max_model_len": 512}))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "tune.json").read_text(encoding="utf-8"))
    assert [trial["error"] for trial in found["trials"]] == [None] * 3
    assert all(trial["found"]["error_rate"] == 0 for trial in found["trials"])
    text = (tmp_path / "tune.md").read_text(encoding="utf-8")
    assert "--instances 1 --engine-args" in text and "chosen, frontier, kept" in text
    assert (tmp_path / "tune.png").stat().st_size > 10_000
