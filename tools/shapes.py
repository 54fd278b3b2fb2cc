"""Model folders with Qwen3-0.6B's exact shapes and no weights, to be loaded with load_format=dummy.

Speed and memory are the real model's; the text is noise. The shapes are those of its published config.json, and the
`quantization_config` of a variant is that which `tools.quantize` would write. `python -m tools.shapes` writes them all.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from tools import models
from tools.progress import Progress
from tools.quantize import SCHEMES, Scheme, group_for

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


FOLDERS = {  # what is written: a folder, and how its weights are stored
    "fp16": None,
    "awq-w8a16": SCHEMES["w8a16"],
    "awq-w8a8": SCHEMES["w8a8"],
    "gptq-w4a16": SCHEMES["w4a16"],
}


def quantization_config(scheme: Scheme) -> dict[str, Any]:
    """What llm-compressor's checkpoints of these shapes have in their config."""
    hidden, inner, heads = (int(CONFIG[key]) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    group = group_for([hidden, inner, heads * int(CONFIG["head_dim"])]) if scheme.grouped else None
    weights = {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric, "dynamic": False}
    weights |= {"strategy": "group" if group else "channel", "group_size": group}
    activations = None
    if scheme.activation_bits < 16:
        activations = {"num_bits": scheme.activation_bits, "type": "int", "symmetric": True, "dynamic": True}
        activations |= {"strategy": "token"}
    stored = "int-quantized" if activations else "pack-quantized"
    one = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": stored}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": one},
        "ignore": ["lm_head"],
    }


def write(tokenizer: Path, out: Path, scheme: Scheme | None = None) -> Path:
    """Write the folder `out`, with the tokenizer of another model, padded so that every id decodes to a word."""
    out.mkdir(parents=True)
    quantized = {} if scheme is None else {"quantization_config": quantization_config(scheme)}
    (out / "config.json").write_text(json.dumps(CONFIG | quantized))
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


def main(
    output: Annotated[Path, typer.Option(help="folder that takes a folder for each variant")],
    tokenizer: Annotated[str, typer.Option(help="a model's folder, whose tokenizer is taken; default: SmolLM2's")] = "",
) -> None:
    """Write shape-only folders of Qwen3-0.6B and its quantized variants, for `tools.compare variants` and the like."""
    try:
        source = Path(tokenizer) if tokenizer else models.smollm2(Progress())
        for name, scheme in FOLDERS.items():
            typer.echo(write(source, output / name, scheme))
    except FileExistsError as error:
        typer.echo(f"error: {error.filename} exists: remove it, or choose another --output", err=True)
        raise typer.Exit(1) from error
    except (FileNotFoundError, models.ModelUnavailable) as error:
        typer.echo(f"error: no tokenizer: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
