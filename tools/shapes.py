"""A model folder with Qwen3-0.6B's exact shapes and no weights, to be loaded with load_format=dummy.

Speed and memory are the real model's; the text is noise. The shapes are those of its published config.json.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

VOCABULARY = 151_936
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 1_024,
    "intermediate_size": 3_072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write(tokenizer: Path, out: Path) -> Path:
    """Write the folder `out`, with the tokenizer of another model, padded so that every id decodes to a word."""
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(CONFIG))
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    spelled = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = spelled["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in spelled["added_tokens"])}
    vocabulary |= {f"\u0120w{number}": number for number in range(VOCABULARY) if number not in taken}
    (out / "tokenizer.json").write_text(json.dumps(spelled))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, out / name)
    return out
