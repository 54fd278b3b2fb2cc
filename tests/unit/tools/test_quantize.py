"""What is refused before anything is quantized, which scheme and group are chosen, what progress says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from tools.calibration import BUILT_IN, GENERATED, BadCalibration, Calibration, questions, read
from tools.environment import ROOT
from tools.quantize import CannotQuantize, app, check, columns, doing, group_for, scheme_for, weight_bytes

SHAPES = {"model.layers.0.mlp.down_proj.weight": [64, 96], "model.embed_tokens.weight": [512, 50]}
SHAPES |= {"lm_head.weight": [512, 50], "model.norm.weight": [50], "model.layers.0.self_attn.q_proj.weight": [64, 64]}


def safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a file with this header, without the weights that it speaks of."""
    header = json.dumps({"__metadata__": {"format": "pt"}} | {name: {"shape": shapes[name]} for name in shapes})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(1_000))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder, as far as it is looked at before it is loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))
    (folder / "tokenizer_config.json").write_text("{}")
    safetensors(folder / "model.safetensors", SHAPES)
    return folder


def reconfigured(folder: Path, **changed: Any) -> None:
    """Change a folder's config."""
    config = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("variant", "asked", "gpu", "chosen"),
    [
        ("awq", "", True, "w8a16"),
        ("awq", "", False, "w8a8"),
        ("awq", "w4a16", True, "w4a16"),
        ("gptq", "", True, "w4a16"),
        ("gptq", "", False, "w4a16"),
    ],
)
def test_a_scheme_is_chosen_for_the_machine(variant: str, asked: str, gpu: bool, chosen: str) -> None:
    """AWQ has 8 bits, with activations where weights alone have no kernel; GPTQ has 4."""
    assert scheme_for(variant, asked, gpu=gpu) == chosen


@pytest.mark.parametrize(
    ("variant", "asked", "sentence"),
    [
        ("int3", "", "--variant must be one of awq, gptq, got 'int3'"),
        ("gptq", "w8a8", "--scheme must be one of w4a16 with --variant gptq, got 'w8a8'"),
    ],
)
def test_another_scheme_is_refused(variant: str, asked: str, sentence: str) -> None:
    """The sentence names those that there are."""
    with pytest.raises(CannotQuantize) as refused:
        scheme_for(variant, asked, gpu=True)
    assert str(refused.value) == sentence


def test_the_group_divides_every_layer() -> None:
    """The largest that does; SmolLM2 has 576 columns, and none of them is cut."""
    assert group_for([1_024, 3_072, 2_048]) == 128
    assert group_for([576, 1_536]) == 64
    assert group_for([96, 128]) == 32
    with pytest.raises(CannotQuantize, match=r"layers of 50, 128 columns cannot be cut .* --scheme w8a8"):
        group_for([50, 128])


def test_columns_are_those_of_the_layers_alone(model: Path) -> None:
    """Embeddings, the output layer and norms are not quantized."""
    assert columns(model) == {96, 64}
    assert weight_bytes(model) == (model / "model.safetensors").stat().st_size


def test_a_model_that_is_quantized_already_is_refused(model: Path, tmp_path: Path) -> None:
    """The sentence says what it is."""
    check(model, tmp_path / "out")
    reconfigured(model, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(CannotQuantize, match=r"is quantized already \(W4A16, gptq\): give the model that it was made"):
        check(model, tmp_path / "out")


def test_an_unknown_architecture_is_refused(model: Path, tmp_path: Path) -> None:
    """Before anything is loaded: what vLLM cannot serve need not be quantized."""
    reconfigured(model, architectures=["MadeUpForCausalLM"])
    with pytest.raises(CannotQuantize, match="is a MadeUpForCausalLM, which the installed vLLM does not serve"):
        check(model, tmp_path / "out")


def test_a_full_disk_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says how much is free, where, and how much is needed."""

    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10_000_000))
    with pytest.raises(CannotQuantize, match=r"0\.01 GB free at .*, 0\.06 GB are needed: free some space"):
        check(model, tmp_path / "new" / "out")


def test_an_output_that_exists_is_not_written_over(model: Path, tmp_path: Path) -> None:
    """Nor is a model that lacks something taken for one."""
    with pytest.raises(CannotQuantize, match=r"--output .* exists: remove it"):
        check(model, tmp_path)
    (model / "model.safetensors").unlink()
    with pytest.raises(CannotQuantize, match=r"\*\.safetensors missing"):
        check(model, tmp_path / "out")


def test_the_command_refuses_in_one_line(model: Path, tmp_path: Path) -> None:
    """And exits with 1, and leaves nothing."""
    reconfigured(model, quantization_config={"quant_method": "awq", "bits": 4})
    arguments = ["--variant", "awq", "--model", str(model), "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "quantized already" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_progress_tells_the_step_and_the_layer() -> None:
    """By the log, in which llm-compressor draws its bars over each other."""
    assert doing("") == "starting Python"
    log = "noise\n» loading the model\n» calibrating with 24 texts\n(1/3): Calibrating: 50%|##|\r(2/3): Propagating: 1%"
    assert doing(log) == "calibrating with 24 texts · propagating 2 of 3"
    assert doing(f"{log}\n» writing the quantized model\n") == "writing the quantized model"


def test_calibration_texts_come_from_a_file(tmp_path: Path) -> None:
    """Paragraphs of a text, or a text in each line of JSON; at most as many as asked for."""
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("one\nstill one\n\n\n\ntwo\n\nthree\n")
    lines.write_text('{"text": "one"}\n\n{"text": "zwei"}\n')
    assert Calibration(source=str(plain), samples=2).texts() == ["one\nstill one", "two"]
    assert read(lines) == ["one", "zwei"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (" \n\n", "holds no text"),
        ('{"txt": 1}', 'each line must be an object with a "text"'),
        ("nonsense", "each line"),
    ],
)
def test_a_calibration_without_texts_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    """The sentence names the file."""
    file = tmp_path / ("a.txt" if content.isspace() else "a.jsonl")
    file.write_text(content)
    with pytest.raises(BadCalibration, match=f"{file.name}.*{sentence}"):
        read(file)
    with pytest.raises(BadCalibration, match="cannot be read"):
        read(tmp_path / "missing.txt")


def test_the_built_in_calibration_has_many_languages() -> None:
    """Latin, Chinese, Japanese, Korean, Cyrillic, Arabic and Devanagari among them; none of it is the text to score."""
    texts = Calibration(source=BUILT_IN, samples=128).texts()
    assert len(texts) >= 20
    for sign in "e水駅비жقप":
        assert any(sign in text for text in texts), sign
    scored = (ROOT / "tools" / "texts" / "perplexity.txt").read_text(encoding="utf-8")
    assert not any(text in scored for text in texts)


def test_the_model_is_asked_for_as_many_texts_as_wanted() -> None:
    """All different, and the same every time."""
    asked = questions(128)
    assert len(set(asked)) == 128 and asked == questions(128)
    assert len(questions(130)) == 130
    assert Calibration(source=GENERATED, samples=4).texts() == []
    with pytest.raises(BadCalibration, match="--samples must be at least 1, got 0"):
        Calibration(source=GENERATED, samples=0)
