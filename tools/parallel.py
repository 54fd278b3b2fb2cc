"""How an engine is spread over several GPUs or machines: vLLM's own parallelism, as arguments that can be meant.

Read by `tools.configs`. Triton has no part in it: the instance group is KIND_MODEL, so Triton leaves the choice of
devices to vLLM, and a model stays one model with one queue. More replicas are Envoy's matter: deploy/README.md says
which of the two is wanted when.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
NODES = "nnodes"
EXECUTOR = "distributed_executor_backend"


class CannotSpread(Exception):
    """The engine cannot be spread like this; the message names the argument, its value and its bound."""


def arguments(*, tensor: int = 1, pipeline: int = 1, data: int = 1, nodes: int = 1) -> dict[str, Any]:
    """Spell the engine arguments: those that are not 1.

    `tensor` splits every layer, `pipeline` the model by layers, `data` runs whole engines side by side behind one
    queue. `nodes` is the number of machines that tensor and pipeline parallelism together are laid over; one of them
    has Triton, the others a headless `vllm serve`.
    """
    given = dict(zip((*SIZES, NODES), (tensor, pipeline, data, nodes), strict=True))
    return {name: size for name, size in given.items() if size != 1}


def gpus(engine_args: Mapping[str, Any]) -> int:
    """How many GPUs the engine takes on each machine."""
    return math.prod(int(engine_args.get(name, 1)) for name in SIZES) // int(engine_args.get(NODES, 1))


def check(engine_args: Mapping[str, Any]) -> None:
    """Refuse sizes that are none, that do not fill their machines, or that the model's shape does not have.

    The model is looked at where it is a folder here. Raises CannotSpread.
    """
    for name in (*SIZES, NODES):
        value = engine_args.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CannotSpread(f"{name} must be a whole number of at least 1, got {value!r}")
    tensor, pipeline, data, nodes = (engine_args.get(name, 1) for name in (*SIZES, NODES))
    if tensor * pipeline % nodes:
        raise CannotSpread(
            f"{NODES} must divide tensor_parallel_size x pipeline_parallel_size ({tensor} x {pipeline}), got {nodes}"
        )
    if nodes > 1 and data > 1:
        raise CannotSpread(f"data_parallel_size must be 1 on {nodes} machines, got {data}: run replicas instead")
    executor = str(engine_args.get(EXECUTOR, ""))
    if tensor * pipeline > 1 and "uniproc" in executor.lower():
        raise CannotSpread(f"{EXECUTOR} must be mp or ray for {tensor * pipeline} workers, got {executor}")
    config = Path(str(engine_args.get("model", "")), "config.json")
    if config.is_file():
        _check_shape(json.loads(config.read_text(encoding="utf-8")), tensor, pipeline)


def _check_shape(model: Mapping[str, Any], tensor: int, pipeline: int) -> None:
    heads, layers = model.get("num_attention_heads"), model.get("num_hidden_layers")
    if heads and heads % tensor:
        raise CannotSpread(f"tensor_parallel_size must divide the model's {heads} attention heads, got {tensor}")
    shared = model.get("num_key_value_heads", heads)
    if shared and shared % tensor and tensor % shared:  # fewer heads than GPUs are copied, in equal numbers
        raise CannotSpread(
            f"tensor_parallel_size must divide the model's {shared} key-value heads, or be a multiple, got {tensor}"
        )
    if layers and pipeline > layers:
        raise CannotSpread(f"pipeline_parallel_size must be at most the model's {layers} layers, got {pipeline}")
