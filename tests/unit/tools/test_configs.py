"""Configurations: from the table to the text, back through protobuf, and into a real tritonserver."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import httpx
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig
from typer.testing import CliRunner

from tools import configs
from tools.configs import (
    DEFAULT,
    VARIANTS,
    BadConfig,
    app,
    build,
    check_arguments,
    check_capability,
    committed,
    differences,
    export,
    export_variants,
    known_arguments,
    render,
)
from tools.contract import MODEL, load
from tools.server import launch


def read(path: Path) -> ModelConfig:
    """Parse a config.pbtxt as Triton does."""
    return text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())


def arguments(config: ModelConfig) -> dict[str, object]:
    """The engine arguments in a configuration."""
    found = json.loads(config.parameters["engine_args"].string_value)
    assert isinstance(found, dict)
    return found


def test_the_committed_files_are_what_the_table_says() -> None:
    """Nobody edited a generated file, or the table without writing them."""
    assert differences(committed()) == ""


def test_the_default_is_fp16() -> None:
    """config.pbtxt serves what configs/fp16.pbtxt serves."""
    assert DEFAULT == "fp16"
    assert read(MODEL / "config.pbtxt") == read(MODEL / "configs" / "fp16.pbtxt")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_configuration_holds_the_contract(name: str) -> None:
    """Every tensor of the contract, in its order, optional as it says; decoupled, unbatched, one engine."""
    contract = load()
    config = text_format.Parse(render(build(VARIANTS[name], "m")), ModelConfig())
    assert [(t.name, list(t.dims), t.optional) for t in config.input] == [
        (spec.name, [spec.dim], spec.optional) for spec in contract.INPUTS
    ]
    assert [(t.name, list(t.dims)) for t in config.output] == [(spec.name, [spec.dim]) for spec in contract.OUTPUTS]
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0
    assert [group.count for group in config.instance_group] == [1]
    assert config.backend == "python"
    assert arguments(config) == VARIANTS[name].engine_args


def test_the_text_is_the_same_every_time() -> None:
    """Generated files do not change unless the table does."""
    assert len({render(build(VARIANTS["awq"], "m", {"seed": 1, "dtype": "auto"})) for _ in range(5)}) == 1


def test_a_changed_file_is_shown_as_a_diff(tmp_path: Path) -> None:
    """The check says which line differs."""
    path = tmp_path / "config.pbtxt"
    path.write_text("a\nb\n", encoding="utf-8")
    assert "-b" in differences({path: "a\nc\n"}).splitlines()
    assert "+c" in differences({path: "a\nc\n"}).splitlines()


def test_check_exits_1_with_the_diff(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What CI runs."""
    model = tmp_path / "Qwen3-0.6B"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("weights"))
    (model / "configs" / "awq.pbtxt").write_text("name: 'edited'\n", encoding="utf-8")
    monkeypatch.setattr(configs, "committed", lambda: committed(model))
    done = CliRunner().invoke(app, ["--check"])
    assert done.exit_code == 1
    assert "-name: 'edited'" in done.output
    assert CliRunner().invoke(app, []).exit_code == 0
    assert CliRunner().invoke(app, ["--check"]).exit_code == 0


def test_an_unknown_engine_argument_is_refused_with_the_nearest_names() -> None:
    """A typing error costs a sentence, not a start of the engine."""
    with pytest.raises(BadConfig, match=r"gpu_memory_utilisation is no engine argument.*gpu_memory_utilization"):
        check_arguments(["gpu_memory_utilisation"], known_arguments())


@pytest.mark.slow
def test_the_known_arguments_are_vllms_own() -> None:
    """What is read from vLLM's source is what its class has."""
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    known = known_arguments() or frozenset()
    assert set(known) == {field.name for field in dataclasses.fields(arg_utils.AsyncEngineArgs)}


def test_without_vllm_nothing_is_checked() -> None:
    """A machine without vLLM can still export; the command says what it skipped."""
    check_arguments(["anything"], None)


@pytest.mark.parametrize(
    ("name", "own", "capability", "reason"),
    [
        ("fp16", {}, (7, 0), "compute capability 7.0, fp16 needs 7.5"),
        ("awq", {}, (7, 0), "awq needs 7.5: Marlin"),
        ("gptq", {}, (6, 1), "gptq needs 7.5: Marlin"),
        ("fp16", {"dtype": "bfloat16"}, (7, 5), "fp16 needs 8.0: bfloat16 does not exist"),
    ],
)
def test_a_gpu_too_old_is_refused_with_the_reason(
    name: str, own: dict[str, object], capability: tuple[int, int], reason: str
) -> None:
    """The sentence names what the GPU has, what the variant needs, and why."""
    variant = VARIANTS[name]
    with pytest.raises(BadConfig, match=reason):
        check_capability(variant, {**variant.engine_args, **own}, capability)
    check_capability(variant, {**variant.engine_args, **own}, (9, 0))


def test_export_makes_a_model_of_its_own(tmp_path: Path) -> None:
    """Copied code, its own name, merged engine arguments: two variants can stand in one repository."""
    folder = export("awq", "Qwen3-0.6B-awq", tmp_path, engine_args={"gpu_memory_utilization": 0.4})
    config = read(folder / "config.pbtxt")
    assert folder == tmp_path / "Qwen3-0.6B-awq"
    assert config.name == "Qwen3-0.6B-awq"
    assert arguments(config) == {**VARIANTS["awq"].engine_args, "gpu_memory_utilization": 0.4}
    assert (folder / "1" / "contract.py").read_bytes() == (MODEL / "1" / "contract.py").read_bytes()
    assert not (folder / "1").is_symlink()


@pytest.mark.parametrize("link", [False, True])
def test_export_takes_the_weights_along(tmp_path: Path, link: bool) -> None:
    """Weights that lie in the model folder are there under the new name too."""
    model = tmp_path / "model"
    for part in ("1", "weights/gptq"):
        (model / part).mkdir(parents=True)
        (model / part / "content").write_text(part, encoding="utf-8")
    folder = export("gptq", "other", tmp_path / "repository", link=link, model=model)
    assert (folder / "weights" / "gptq" / "content").read_text(encoding="utf-8") == "weights/gptq"
    assert (folder / "1").is_symlink() == link


@pytest.mark.parametrize(
    ("variant", "name", "own", "message"),
    [
        ("int3", "m", {}, r"'int3' is no variant: choose one of fp16, awq, gptq"),
        ("fp16", "../m", {}, r"'../m' is no model name"),
        ("fp16", "m", {"modle": "x"}, "modle is no engine argument"),
    ],
)
def test_export_refuses_nonsense_before_it_writes(
    tmp_path: Path, variant: str, name: str, own: dict[str, object], message: str
) -> None:
    """Nothing is left behind by a refused export."""
    with pytest.raises(BadConfig, match=message):
        export(variant, name, tmp_path, engine_args=own)
    assert not list(tmp_path.iterdir())


def test_one_folder_can_hold_a_configuration_for_each_variant(tmp_path: Path) -> None:
    """Each with its own weights, and the name of its variant, which the server holds the weights against."""
    own = {name: {"model": f"/models/{name}"} for name in ("gptq", "fp16")}
    folder = export_variants("m", tmp_path, own, instances=2)
    for name in own:
        config = read(folder / "configs" / f"{name}.pbtxt")
        assert arguments(config)["model"] == f"/models/{name}"
        assert config.parameters["variant"].string_value == name
        assert [group.count for group in config.instance_group] == [2]
    assert read(folder / "config.pbtxt") == read(folder / "configs" / "gptq.pbtxt")
    assert (folder / "1" / "model.py").is_file()


def test_export_refuses_weights_that_the_variant_does_not_serve(tmp_path: Path) -> None:
    """Before it writes; the sentence says what serves them."""
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    own = {"model": str(weights)}
    with pytest.raises(BadConfig, match=r"does not serve W4A16 weights \(gptq\): start with --model-config-name=gptq"):
        export("fp16", "m", tmp_path / "repository", engine_args=own)
    assert not (tmp_path / "repository").exists()
    assert export("gptq", "m", tmp_path / "repository", engine_args=own, link=True).is_dir()


def test_export_overwrites_nothing(tmp_path: Path) -> None:
    """A folder that exists is somebody's."""
    export("fp16", "m", tmp_path, link=True)
    with pytest.raises(BadConfig, match="exists: remove it"):
        export("fp16", "m", tmp_path, link=True)


def test_the_export_command_speaks_plainly(tmp_path: Path) -> None:
    """Errors are one line and exit code 1; success prints the folder."""
    base = ["export", "--variant", "awq", "--name", "m", "--to", str(tmp_path)]
    for wrong, message in (
        (["--engine-args", "[1]"], "error: --engine-args must be a JSON object, got [1]"),
        (["--engine-args", "{"], "error: --engine-args is not valid JSON"),
        (["--capability", "new"], "error: --capability must look like 8.6, got new"),
        (["--capability", "7.0"], "error: this GPU has compute capability 7.0"),
    ):
        done = CliRunner().invoke(app, base + wrong)
        assert (done.exit_code, message in done.output) == (1, True), done.output
    done = CliRunner().invoke(app, [*base, "--capability", "8.9"])
    assert (done.exit_code, str(tmp_path / "m") in done.output) == (0, True), done.output


TRIVIAL = '''
"""Says which engine arguments it was given: every answer is the JSON text."""

import numpy as np
import json
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.text = json.loads(args["model_config"])["parameters"]["engine_args"]["string_value"].encode()

    def execute(self, requests):
        for request in requests:
            output = pb_utils.Tensor("text_output", np.array([self.text], np.object_))
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([output]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''


@pytest.mark.parametrize("name", [None, "awq"])
def test_tritonserver_picks_a_variant_by_name(tmp_path: Path, name: str | None) -> None:
    """A real tritonserver reads the generated files, and `--model-config-name=awq` serves configs/awq.pbtxt."""
    model = tmp_path / MODEL.name
    for path, text in committed(model).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (model / "1").mkdir()
    (model / "1" / "model.py").write_text(TRIVIAL, encoding="utf-8")
    with launch(tmp_path, config_name=name) as server:
        server.wait_ready(60)
        url = f"{server.http_url}/v2/models/{MODEL.name}/generate"
        answer = httpx.post(url, json={"text_input": "x"}, timeout=10, trust_env=False).json()
    assert json.loads(answer["text_output"]) == VARIANTS[name or DEFAULT].engine_args
