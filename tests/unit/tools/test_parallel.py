"""Engines on several GPUs: what is spelled for vLLM, and what is refused before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup
from typer.testing import CliRunner

from tools import configs, parallel
from tools.parallel import CannotSpread

QWEN3 = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28}


@pytest.fixture
def qwen3(tmp_path: Path) -> str:
    """A folder with the shape of Qwen3-0.6B."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3), encoding="utf-8")
    return str(tmp_path)


def test_what_is_not_spread_has_no_arguments() -> None:
    """A model on one GPU keeps the configuration that it had."""
    assert parallel.arguments() == {}
    assert parallel.gpus({}) == 1


def test_the_arguments_are_vllms() -> None:
    """By its own names, all of which it knows; the GPUs are those of one machine."""
    given = parallel.arguments(tensor=4, pipeline=2, nodes=2)
    assert given == {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "nnodes": 2}
    configs.check_arguments([*parallel.SIZES, parallel.NODES, parallel.EXECUTOR], configs.known_arguments())
    assert parallel.gpus(given) == 4
    assert parallel.gpus(parallel.arguments(tensor=2, data=3)) == 6


@pytest.mark.parametrize("sizes", [{}, {"tensor": 16}, {"tensor": 2, "pipeline": 28}, {"pipeline": 2, "nodes": 2}])
def test_what_the_model_has_is_taken(qwen3: str, sizes: dict[str, int]) -> None:
    """Every divisor of its heads, every number of its layers."""
    parallel.check({"model": qwen3, **parallel.arguments(**sizes)})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a whole number of at least 1, got 0"),
        ({"pipeline_parallel_size": "2"}, "pipeline_parallel_size must be a whole number of at least 1, got '2'"),
        ({"tensor_parallel_size": 3}, "must divide the model's 16 attention heads, got 3"),
        ({"pipeline_parallel_size": 29}, "at most the model's 28 layers, got 29"),
        ({"tensor_parallel_size": 2, "nnodes": 3}, r"nnodes must divide .* \(2 x 1\), got 3"),
        (
            {"tensor_parallel_size": 2, "nnodes": 2, "data_parallel_size": 2},
            "data_parallel_size must be 1 on 2 machines",
        ),
        (
            {"tensor_parallel_size": 2, **configs.CPU_ARGUMENTS},
            "distributed_executor_backend must be mp or ray for 2 workers",
        ),
    ],
)
def test_what_cannot_be_is_refused(qwen3: str, given: dict[str, Any], said: str) -> None:
    """In a sentence, and not after minutes by a stack of processes."""
    with pytest.raises(CannotSpread, match=said):
        parallel.check({"model": qwen3, **given})


def test_heads_that_are_copied_are_copied_equally(tmp_path: Path) -> None:
    """8 GPUs can share 2 key-value heads; 6 cannot share 4."""
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 24, "num_key_value_heads": 2}))
    parallel.check({"model": str(tmp_path), "tensor_parallel_size": 8})
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 24, "num_key_value_heads": 4}))
    with pytest.raises(CannotSpread, match="4 key-value heads, or be a multiple, got 6"):
        parallel.check({"model": str(tmp_path), "tensor_parallel_size": 6})


def _export(to: Path, *words: str) -> Any:
    return CliRunner().invoke(configs.app, ["export", "--variant", "fp16", "--name", "m", "--to", str(to), *words])


def test_an_export_over_several_gpus(tmp_path: Path) -> None:
    """One instance that chooses its devices itself, with the sizes among its engine arguments."""
    done = _export(tmp_path, "--tensor-parallel", "2", "--pipeline-parallel", "2", "--capability", "9.0")
    assert done.exit_code == 0, done.output
    config = text_format.Parse((tmp_path / "m" / "config.pbtxt").read_text(encoding="utf-8"), ModelConfig())
    (group,) = config.instance_group
    assert (group.kind, group.count, list(group.gpus)) == (ModelInstanceGroup.KIND_MODEL, 1, [])
    arguments = json.loads(config.parameters["engine_args"].string_value)
    assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (2, 2)
    assert "data_parallel_size" not in arguments


def test_an_export_that_cannot_be_served_is_refused(tmp_path: Path, qwen3: str) -> None:
    """With the reason; nothing is written."""
    refused = _export(tmp_path / "to", "--tensor-parallel", "3", "--engine-args", json.dumps({"model": qwen3}))
    assert (refused.exit_code, "must divide the model's 16 attention heads" in refused.output) == (1, True)
    several = _export(tmp_path / "to", "--data-parallel", "2", "--instances", "2")
    assert (several.exit_code, "instances must be 1 with data_parallel_size 2, got 2" in several.output) == (1, True)
    assert not (tmp_path / "to").exists()
