"""The checks before a start: each failure is one sentence that says what to do."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tools import checks
from tools.checks import Plan

PLAN = Plan(host="127.0.0.1", ports=(0, 0, 0), gpu=False)


def test_this_machine_can_serve() -> None:
    """Where the tests run, every check passes."""
    assert [str(finding) for finding in checks.failures(checks.run(PLAN))] == []


@pytest.mark.parametrize(
    ("finding", "sentence"),
    [
        (checks.numpy("2.1.0"), "NumPy 2.1.0 is installed; Triton's stub reads garbage from NumPy 2: run `make serve`"),
        (checks.numpy(None), "NumPy is not installed: run `make serve`"),
        (checks.vllm("0.25.1"), "vLLM 0.25.1 is not among the tested ones: install 0.26 to 0.32"),
        (checks.vllm("0.33.0"), "vLLM 0.33.0 is not among the tested ones"),
        (checks.vllm(None), "vLLM is not installed: run `make serve`"),
        (checks.kernel("4.19.0-27-amd64"), "Linux 4.19.0-27-amd64 is too old: 5.3 or newer"),
        (checks.gpu("awq", (7, 0)), "this GPU has compute capability 7.0, awq needs 7.5: Marlin"),
        (checks.gpu("fp16", None), "the GPU does not answer nvidia-smi: check its driver"),
        (checks.memory(3 * 10**9, PLAN), "3.0 GB of memory are free, about 5.1 GB are needed: stop other programs"),
        (checks.shared_memory(Path("/nowhere")), "/nowhere cannot be used (No such file or directory): mount"),
        (checks.weights(Path("/nowhere")), "/nowhere is not a folder: MODEL= takes a folder"),
    ],
)
def test_a_failure_is_one_sentence_with_a_remedy(finding: checks.Finding, sentence: str) -> None:
    """It names what was found, what is needed, and what to do."""
    assert not finding.ok
    assert finding.remedy
    assert str(finding).startswith(sentence)


@pytest.mark.parametrize(
    "finding",
    [
        checks.numpy("1.26.4"),
        checks.vllm("0.26.0"),
        checks.vllm("0.32.1+cpu"),
        checks.kernel("6.1.0"),
        checks.gpu("awq", (9, 0)),
    ],
)
def test_what_is_right_passes(finding: checks.Finding) -> None:
    """A check that passes needs no remedy."""
    assert finding.ok
    assert not finding.remedy


def test_shared_memory_too_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compared with what Triton's stub needs."""
    monkeypatch.setattr(checks, "SHARED_MEMORY_MB", 10**9)
    finding = checks.shared_memory(tmp_path)
    assert not finding.ok
    assert "MB free, 1000000000 MB are needed: enlarge it" in str(finding)


def test_a_taken_port() -> None:
    """The sentence names port and address."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert str(checks.port_free("127.0.0.1", port)).startswith(f"port {port} is taken on 127.0.0.1: stop what")
    assert checks.port_free("127.0.0.1", port).ok


def test_an_incomplete_model_folder(tmp_path: Path) -> None:
    """A source tree that lost a file."""
    (tmp_path / "config.pbtxt").touch()
    assert "lacks 1/model.py, 1/contract.py, configs/fp16.pbtxt" in str(checks.sources(tmp_path))


def test_an_incomplete_model_of_the_users_own(tmp_path: Path) -> None:
    """Every missing part is named, shards of the index among them."""
    (tmp_path / "config.json").touch()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (tmp_path / "model-1.safetensors").touch()
    said = str(checks.weights(tmp_path))
    assert "is not complete" in said
    assert "tokenizer_config.json, model-2.safetensors missing" in said


def test_the_memory_needed_grows_with_the_model(tmp_path: Path) -> None:
    """Weights are there twice while they are loaded."""
    with (tmp_path / "model.safetensors").open("wb") as sparse:
        sparse.truncate(4 * 10**9)
    plan = Plan(host="127.0.0.1", ports=(), gpu=False, model=tmp_path)
    assert not checks.memory(12 * 10**9, plan).ok
    assert checks.memory(13 * 10**9, plan).ok


def test_weights_are_held_against_the_variant_and_the_machine(tmp_path: Path) -> None:
    """Before anything is started: a GPU serves 8-bit weights alone, a CPU does not."""
    weights = {"num_bits": 8, "type": "int"}
    quantized = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantized}), encoding="utf-8")

    def found(variant: str, *, gpu: bool) -> checks.Finding:
        return checks.variant(Plan(host="127.0.0.1", ports=(), gpu=gpu, variant=variant, model=tmp_path))

    assert found("awq", gpu=True).ok
    refused = found("awq", gpu=False)
    assert not refused.ok and refused.remedy == "quantize with --variant awq --scheme w8a8, or use a GPU"
    assert found("fp16", gpu=True).remedy == "start with --model-config-name=awq"
