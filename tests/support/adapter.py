"""A LoRA adapter for the tiny model: its weights are chance, but always the same, and change every answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK = 8
STRENGTH = 0.3


def make(folder: Path, model: Path) -> Path:
    """Write an adapter of `model`'s attention, as PEFT would, to `folder`; returns it."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, heads = config["hidden_size"], config["head_dim"]
    widths = {"q_proj": config["num_attention_heads"] * heads, "v_proj": config["num_key_value_heads"] * heads}
    chance = np.random.default_rng(7)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, hidden)), ("lora_B", (width, RANK))):
                weights[f"{where}.{part}.weight"] = STRENGTH * chance.standard_normal(shape, np.float32)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": sorted(widths),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder
