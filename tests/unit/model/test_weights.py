"""What weights are, by their config, and which variants serve them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import served

weights = served.module("weights")
errors = served.module("errors")

WIDE, NARROW = frozenset({weights.NARROW, weights.WIDE}), frozenset({weights.NARROW})  # what CPUs of two kinds can

AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}


def compressed(bits: int, activations: int | None = None, kind: str = "int") -> dict[str, Any]:
    """A config as llm-compressor writes it."""
    group = {
        "weights": {"num_bits": bits, "type": kind, "group_size": 64, "symmetric": False},
        "input_activations": activations and {"num_bits": activations, "type": kind},
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "recipe", "scheme", "variants"),
    [
        ({}, "", "W16A16", ("fp16",)),
        ({"quantization_config": None}, "", "W16A16", ("fp16",)),
        ({"quantization_config": AWQ}, "", "W4A16", ("awq",)),
        ({"quantization_config": GPTQ}, "", "W8A16", ("gptq",)),
        ({"quantization_config": compressed(8)}, "", "W8A16", ("awq", "gptq")),
        ({"quantization_config": compressed(8, 8)}, "", "W8A8", ("awq", "gptq")),
        ({"quantization_config": compressed(4)}, "", "W4A16", ("gptq", "awq")),
        ({"quantization_config": compressed(4)}, "  AWQModifier:\n    duo_scaling: true", "W4A16", ("awq",)),
        ({"quantization_config": compressed(8)}, "  GPTQModifier: {}", "W8A16", ("gptq",)),
        ({"compression_config": compressed(4)}, "", "W4A16", ("gptq", "awq")),
        ({"quantization_config": compressed(8, 8, "float")}, "", "compressed-tensors", ("fp16",)),
        ({"quantization_config": {"quant_method": "fp8"}}, "", "fp8", ("fp16",)),
    ],
)
def test_weights_are_known_by_their_config(
    config: dict[str, Any], recipe: str, scheme: str, variants: tuple[str, ...]
) -> None:
    """The formats of AWQ, GPTQ and llm-compressor; a format that no variant is named after is the plain one's."""
    found = weights.of_config(config, recipe)
    assert (found.scheme, found.variants) == (scheme, variants)
    assert found.quantized == bool(config.get("quantization_config") or config.get("compression_config"))


def test_a_group_and_a_zero_point_are_read() -> None:
    """From either spelling; a whole channel is group 0."""
    awq, gptq = (weights.of_config({"quantization_config": one}) for one in (AWQ, GPTQ))
    assert (awq.group, awq.symmetric) == (128, False)
    assert (gptq.group, gptq.symmetric) == (0, True)


def test_a_mismatch_is_refused_in_one_sentence() -> None:
    """It says what the weights are, and what serves them."""
    found = weights.of_config({"quantization_config": GPTQ})
    assert found.refusal("gptq", cpu=None) == ""
    assert found.refusal("awq", cpu=None) == (
        "variant awq does not serve W8A16 weights (gptq): start with --model-config-name=gptq"
    )
    assert weights.of_config({}).refusal("awq", cpu=WIDE) == (
        "variant awq does not serve weights that are not quantized: start with --model-config-name=fp16"
    )
    assert weights.of_config({}).refusal("", cpu=WIDE) == ""


def test_a_cpu_has_no_kernel_for_eight_bit_weights_alone() -> None:
    """W8A16 is refused there whatever the variant; W8A8 and W4A16 are not."""
    found = weights.of_config({"quantization_config": compressed(8)})
    assert "no kernel in vLLM's CPU backend: quantize with --variant awq --scheme w8a8" in found.refusal(
        "awq", cpu=WIDE
    )
    assert found.refusal("", cpu=WIDE)
    assert found.refusal("awq", cpu=None) == ""
    for config in (compressed(8, 8), compressed(4)):
        assert weights.of_config({"quantization_config": config}).refusal("awq", cpu=WIDE) == ""


def test_four_bits_need_wide_instructions() -> None:
    """vLLM's build for AVX2 has no kernel for them, which it would notice with the first request; W8A8 it has."""
    said = "W4A16 weights have no kernel in vLLM's CPU backend where the CPU has no AVX-512: quantize with"
    for config in (compressed(4), {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4}):
        found = weights.of_config({"quantization_config": config})
        assert said in found.refusal("", cpu=NARROW)
        for able in (None, WIDE, frozenset({"asimd"}), frozenset()):
            assert found.refusal("", cpu=able) == ""
    for config in ({}, {"quantization_config": compressed(8, 8)}):
        assert weights.of_config(config).refusal("", cpu=NARROW) == ""


def test_the_instructions_are_this_machines() -> None:
    """By Linux' names, as torch sees them, which is what vLLM asks."""
    assert (weights.WIDE in weights.instructions()) == torch.cpu._is_avx512_supported()
    assert (weights.NARROW in weights.instructions()) == torch.cpu._is_avx2_supported()


def test_a_folder_is_read_with_its_recipe(tmp_path: Path) -> None:
    """What llm-compressor wrote says how it rounded; a config that cannot be read is named."""
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": compressed(4)}))
    assert weights.of_folder(tmp_path).variants == ("gptq", "awq")
    (tmp_path / "recipe.yaml").write_text("default_stage:\n  default_modifiers:\n    AWQModifier:\n")
    assert weights.of_folder(tmp_path).variants == ("awq",)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(errors.ServingError, match=r"config\.json cannot be read"):
        weights.of_folder(tmp_path)
