"""What a model's weights are, by the `quantization_config` of its config.json, and which variant serves them.

Read by engine.py, which refuses a mismatch at load, and by the tools. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ServingError

VARIANT = "variant"  # config.pbtxt's parameter: its name; without it every weights will do
FULL, AWQ, GPTQ = "fp16", "awq", "gptq"
COMPRESSED_TENSORS = "compressed-tensors"  # what llm-compressor writes, whichever way the weights were rounded
MODIFIERS = {"AWQModifier": AWQ, "GPTQModifier": GPTQ}  # as llm-compressor's recipe.yaml, beside config.json, has them
WIDE, NARROW = "avx512f", "avx2"  # x86's; vLLM's build for the narrow one alone has no kernel for 4-bit weights
AWQ_BITS = 8  # where nothing says how they were rounded: of the variants AWQ is the one with 8 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How weights are stored: vLLM's name for the format ("" for none), bits of a weight and of an activation.

    `variants` are the names of those that serve them, the likeliest first. A format that no variant is named after is
    left to vLLM by the plain one. `group` is how many weights share a scale, 0 where a whole channel does.
    """

    method: str = ""
    bits: int = 16
    activation_bits: int = 16
    group: int = 0
    symmetric: bool = True
    variants: tuple[str, ...] = (FULL,)

    @property
    def quantized(self) -> bool:
        """Whether they are in any other format than a plain floating-point one."""
        return bool(self.method)

    @property
    def scheme(self) -> str:
        """Bits of weights and activations, as in W8A16; of a format known by name alone, that name."""
        known = not self.method or self.variants != (FULL,)
        return f"W{self.bits}A{self.activation_bits}" if known else self.method

    def refusal(self, variant: str, *, cpu: frozenset[str] | None) -> str:
        """Say in one sentence why a variant (a name, or "" for any) cannot serve these weights here; "" if it can.

        `cpu`: the instruction sets of the CPU that serves (see `instructions`), None where a GPU does.
        """
        if variant and variant not in self.variants:
            likeliest = self.variants[0]
            held = f"{self.scheme} weights ({self.method})" if self.quantized else "weights that are not quantized"
            return f"variant {variant} does not serve {held}: start with --model-config-name={likeliest}"
        if cpu is None or self.variants == (FULL,) or self.activation_bits != 16:
            return ""
        if self.bits == 8:
            lacking = f"{self.scheme} weights have no kernel in vLLM's CPU backend"
        elif NARROW in cpu and WIDE not in cpu:
            lacking = f"{self.scheme} weights have no kernel in vLLM's CPU backend where the CPU has no AVX-512"
        else:
            return ""
        return f"{lacking}: quantize with --variant awq --scheme w8a8, or use a GPU"


def instructions() -> frozenset[str]:
    """Instruction sets of this machine's CPU, by Linux' names; none where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def of_config(config: Mapping[str, Any], recipe: str = "") -> Weights:
    """Read a model's config; `recipe` is the text of llm-compressor's recipe.yaml, which says how it rounded."""
    found: Mapping[str, Any] = config.get("quantization_config") or config.get("compression_config") or {}
    if not found:
        return Weights()
    method = str(found.get("quant_method", "unknown"))
    if method in (AWQ, GPTQ):
        return Weights(
            method=method,
            bits=int(found.get("bits") or found.get("w_bit") or 4),
            group=max(0, int(found.get("group_size") or found.get("q_group_size") or 0)),
            symmetric=bool(found.get("sym", not found.get("zero_point", False))),
            variants=(method,),
        )
    schemes = [group for group in (found.get("config_groups") or {}).values() if (group or {}).get("weights")]
    if method != COMPRESSED_TENSORS or not schemes or schemes[0]["weights"].get("type") != "int":
        return Weights(method=method)
    weights, activations = schemes[0]["weights"], schemes[0].get("input_activations") or {}
    bits = int(weights["num_bits"])
    said = tuple(variant for modifier, variant in MODIFIERS.items() if modifier in recipe)
    return Weights(
        method=method,
        bits=bits,
        activation_bits=int(activations.get("num_bits") or 16),
        group=int(weights.get("group_size") or 0),
        symmetric=bool(weights.get("symmetric", True)),
        variants=said or ((AWQ, GPTQ) if bits == AWQ_BITS else (GPTQ, AWQ)),
    )


def of_folder(folder: Path) -> Weights:
    """Read a model's folder. Raises ServingError when its config.json cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ServingError(f"{folder / 'config.json'} cannot be read ({error}): download the model again") from error
    recipe = folder / "recipe.yaml"
    return of_config(config, recipe.read_text(encoding="utf-8") if recipe.is_file() else "")
