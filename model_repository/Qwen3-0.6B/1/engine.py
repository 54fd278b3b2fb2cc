"""The vLLM engine: start, stream, abort, health, shutdown. The only module that knows vLLM and its versions.

Read by model.py. Tested with vLLM 0.26 (CUDA) and 0.32 (CPU). The engine lives on an event loop in a thread of its own;
a request's outputs go from vLLM's output handler straight into its sink: no task and no generator stands between them.
"""
# ruff: noqa: E402 - the locale must be set before torch and vLLM are imported

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import locale
import logging
import os
import re
import shutil
import subprocess
import threading
import traceback
from collections.abc import Coroutine, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, get_args

# The Python backend's stub runs in the C locale, where torch cannot read its own files; no environment variable helps.
locale.setlocale(locale.LC_CTYPE, "C.UTF-8")

import msgspec
import pydantic
import uvloop
from vllm import SamplingParams, exceptions
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreOutput, core_client
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from . import weights
from .backlog import Backlog
from .chat import REFUSALS, TRUNCATION, Prompt, render
from .contract import STRUCTURED_OUTPUTS, Delta, Request
from .conversation import CHAT
from .errors import DeadlineExceeded, InvalidRequest, ServingError, Unavailable, shown
from .parsing import Parsers, Said, check_names
from .stubs import Stubs
from .yielding import yield_to_engine

log = logging.getLogger(__name__)

# What vLLM raises when a limit of its queue (max_num_queued_reqs and the like) is reached; 0.26 has no such limits.
_FULL = getattr(exceptions, "GracefulHTTPError", EngineDeadError)

# Limits that nobody set are those of `vllm serve`: on an H100 1,024 requests and 8,192 tokens a step. An engine within
# another program gets 128 and 2,048 from vLLM, wherever it runs.
SERVER = UsageContext.OPENAI_API_SERVER

SHUTDOWN_SECONDS = 3.0  # nothing is left to save by then: what needs longer is killed, and guardian.py sees to the rest
LEAST_LOGPROB = -9_999.0  # what vLLM's server says for minus infinity, which is no JSON
DEAD = "the engine is dead: it must be restarted; its log says why"


class Sink(Protocol):
    """Where a request's deltas go; each call returns at once and comes from the engine's own thread."""

    def push(self, deltas: list[Delta], *, final: bool) -> None:
        """Take what the choices gained; nothing comes after `final`."""

    def fail(self, error: ServingError) -> None:
        """Take the error that ends the request; nothing comes after it."""


class Job:
    """One request inside the engine, from admission to its end. Only the engine's thread changes it."""

    __slots__ = ("ended", "engine_id", "prompt", "request", "sink", "timer")

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.prompt: Prompt | None = None  # once it is rendered
        self.engine_id: str | None = None  # vLLM's own id, once it has the request
        self.timer: asyncio.TimerHandle | None = None
        self.ended = False

    def end(self) -> None:
        """Mark the request as over: whatever the engine still says about it is dropped."""
        self.ended = True
        if self.timer is not None:
            self.timer.cancel()


class Engine:
    """One vLLM engine. `start` blocks until the weights are loaded; all other methods may be called from any thread."""

    def __init__(
        self,
        arguments: dict[str, Any],
        directory: Path,
        name: str,
        stubs: Stubs,
        *,
        tool_call_parser: str = "",
        lora_modules: Mapping[str, str] | None = None,
        variant: str = "",
    ) -> None:
        """Check the engine arguments; `directory` is the model's folder, `name` its name in Triton.

        `stubs` says with whom the engine is shared, and hears how it goes. `lora_modules` are the folders of the LoRA
        adapters that requests may name. `variant` names what the weights must be. Raises ServingError.
        """
        check_names(tool_call_parser, arguments.get("reasoning_parser", ""))
        self._tool_call_parser = tool_call_parser
        self._adapters = {
            adapter: LoRARequest(lora_name=adapter, lora_int_id=number, lora_path=_within(directory, path))
            for number, (adapter, path) in enumerate((lora_modules or {}).items(), start=1)
        }
        if self._adapters:
            arguments = _with_room(arguments, len(self._adapters))
        self._parsers: Any = None
        arguments = resolve(arguments, directory, name)
        self._variant, self._model = variant, arguments["model"]
        self._of_hub = not Path(arguments["model"]).is_dir()
        if not self._of_hub:  # vLLM would fail late, or serve what nobody asked for
            self._check(weights.of_folder(Path(arguments["model"])))
        self._arguments = AsyncEngineArgs(**arguments, _api_process_count=stubs.count, _api_process_rank=stubs.index)
        self._stubs = stubs
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._llm: Any = None
        self._defaults: dict[str, Any] = {}
        self._vocabulary = 0
        self._priorities = False
        self._jobs = 0  # a counter that names them
        self._open: set[Job] = set()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Load the model; raises what vLLM raises."""
        self._thread.start()
        self._call(self._boot()).result()

    def submit(self, request: Request, sink: Sink) -> Job:
        """Hand a request to the engine; the sink hears of everything else, and of exactly one end."""
        job = Job(request, sink)
        self._loop.call_soon_threadsafe(self._admit, job)
        return job

    def abort(self, job: Job, error: ServingError) -> None:
        """End a request with `error`, wherever it is: queued, in prefill or in decode. Does nothing after its end."""
        self._loop.call_soon_threadsafe(self._end, job, error)

    @property
    def alive(self) -> bool:
        """Whether the engine can still answer."""
        return self._llm is not None and not self._llm.errored and not self._closing

    def shutdown(self) -> None:
        """End what is open with UNAVAILABLE, then stop vLLM and its processes."""
        if self._thread.is_alive():
            self._call(self._close()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(SHUTDOWN_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)

    async def _boot(self) -> None:
        config = self._arguments.create_engine_config(SERVER)
        if self._of_hub:  # its config is here by now
            self._check(weights.of_config(config.model_config.hf_config.to_dict()))
        build = functools.partial(
            AsyncLLM.from_vllm_config,
            config,
            usage_context=SERVER,
            enable_log_requests=self._arguments.enable_log_requests,
            disable_log_stats=self._arguments.disable_log_stats,
            stat_loggers=[lambda _config, _index=0: Pulse(self._stubs)],
            client_count=self._stubs.count,
            client_index=self._stubs.index,
        )
        if self._stubs.first:
            with _open_to(self._stubs):
                self._llm = build()
            self._stubs.announce([process.pid for process in self._llm.engine_core.resources.engine_manager.processes])
        else:
            processes = await asyncio.to_thread(self._stubs.join)
            self._llm = build(client_addresses=self._stubs.addresses(self._stubs.index))
            for pid in processes:  # vLLM watches over them only where it started them
                self._loop.add_reader(os.pidfd_open(pid), self._core_died)
        core = self._llm.engine_core
        core.get_output_async = Backlog(core, self._llm.output_processor.request_states, EngineCoreOutput).get
        self._defaults = self._llm.model_config.get_diff_sampling_param()
        self._vocabulary = self._llm.model_config.get_vocab_size()
        self._parsers = Parsers(
            self._tool_call_parser,
            self._llm.vllm_config.structured_outputs_config.reasoning_parser,
            self._llm.model_config,
            self._llm.renderer.get_tokenizer(),
        )
        self._priorities = self._llm.vllm_config.scheduler_config.policy == "priority"
        if current_platform.is_cpu():
            yield_to_engine()

    def _check(self, found: weights.Weights) -> None:
        cpu = weights.instructions() if current_platform.is_cpu() else None
        if refusal := found.refusal(self._variant, cpu=cpu):
            raise ServingError(f"engine_args: model={self._model}: {refusal}")

    def _core_died(self) -> None:
        if self.alive:
            log.error("a process of the engine died")
        self._llm.engine_core.resources.engine_dead = True
        for job in list(self._open):
            self._end(job, Unavailable(DEAD))

    async def _close(self) -> None:
        self._closing = True
        for job in list(self._open):
            self._end(job, Unavailable("the server is shutting down"))
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_SECONDS)

    def _admit(self, job: Job) -> None:
        if job.ended:
            return
        self._open.add(job)
        self._stubs.note_open(len(self._open))
        if job.request.deadline_ms is not None:
            error = DeadlineExceeded(job.request.deadline_ms)
            job.timer = self._loop.call_later(job.request.deadline_ms / 1e3, self._end, job, error)
        self._spawn(self._enter(job))

    async def _enter(self, job: Job) -> None:
        """Bring a request into vLLM's queue, and its sink in the place of the collector that vLLM made for it."""
        try:
            if not self.alive:
                raise Unavailable("the server is shutting down" if self._closing else DEAD)
            parameters = self._sampling_parameters(job.request)
            adapter = self._adapter(job.request.lora_name)
            prompt = await render(self._llm.renderer, self._parsers, job.request)
            if job.ended:
                return
            job.prompt = prompt
            parameters.structured_outputs = prompt.structured_outputs
            if prompt.skip_special_tokens is not None:
                parameters.skip_special_tokens = prompt.skip_special_tokens
            kwargs = prompt.template_kwargs
            self._jobs += 1
            collector = await self._llm.add_request(
                f"{self._stubs.index}-{self._jobs}",
                prompt.engine_input,
                parameters,
                lora_request=adapter,
                priority=job.request.priority,
                reasoning_ended=prompt.reasoning_ended,
                reasoning_parser_kwargs=None if kwargs is None else {"chat_template_kwargs": kwargs},
            )
            job.engine_id = collector.request_id
            collector.put = lambda output: self._deliver(job, output)
            if job.ended:  # it ended while vLLM took it in
                await self._llm.abort(job.engine_id, internal=True)
            elif (early := collector.get_nowait()) is not None:
                self._deliver(job, early)
        except ServingError as error:
            self._end(job, error)
        except EngineDeadError:
            self._end(job, Unavailable(DEAD))
        except _FULL as error:
            self._end(job, Unavailable(str(error)))
        except REFUSALS as error:
            self._end(job, InvalidRequest(f"{_blamed(error, job.request)}{error}"))
        except Exception:
            log.exception("a request failed on its way into the engine")
            self._end(job, ServingError("internal error: the server's log has the details"))

    def _deliver(self, job: Job, output: RequestOutput | Exception) -> None:
        """Pass on what one engine step gave one request. This is the hot path: it runs once per token."""
        if job.ended:
            return
        if isinstance(output, Exception):
            self._end(job, self._translate(output))
            return
        try:
            deltas = self._deltas(job, output)
        except Exception:  # a parser met what it cannot read
            log.exception("an answer could not be read")
            self._end(job, ServingError("internal error: the server's log has the details"))
            return
        if output.finished:
            self._leave(job)
        job.sink.push(deltas, final=output.finished)

    def _deltas(self, job: Job, output: RequestOutput) -> list[Delta]:
        assert job.prompt is not None
        request, reader = job.request, job.prompt.reader
        shows = not job.prompt.hides_reasoning
        want_logprobs = shows and "return_logprobs" in request.returns
        prompt_tokens = len(output.prompt_token_ids or ())
        cached = output.num_cached_tokens or 0
        asked = output.prompt_logprobs if "return_prompt_logprobs" in request.returns else None
        deltas = []
        for choice in output.outputs:
            if reader is None:
                said = Said(text=choice.text, finish_reason=choice.finish_reason)
            else:
                read = reader.read if request.stream else reader.read_whole
                said = read(choice.index, choice.text, list(choice.token_ids), choice.finish_reason)
            deltas.append(
                Delta(
                    index=choice.index,
                    text=said.text,
                    num_output_tokens=len(choice.token_ids),
                    num_input_tokens=prompt_tokens,
                    num_cached_tokens=cached,
                    finish_reason=said.finish_reason,
                    cumulative_logprob=choice.cumulative_logprob,
                    logprobs=[_logprobs(place) for place in choice.logprobs or ()] if want_logprobs else None,
                    reasoning=said.reasoning,
                    tool_calls=said.tool_calls,
                    num_reasoning_tokens=said.num_reasoning_tokens,
                    prompt_logprobs=[place and _logprobs(place) for place in asked] if asked else None,
                )
            )
        return deltas

    def _end(self, job: Job, error: ServingError) -> None:
        if job.ended:
            return
        self._leave(job)
        if job.engine_id is not None and self.alive:
            self._spawn(self._llm.abort(job.engine_id, internal=True))
        job.sink.fail(error)

    def _leave(self, job: Job) -> None:
        job.end()
        self._open.discard(job)
        self._stubs.note_open(len(self._open))

    def _translate(self, error: Exception) -> ServingError:
        if isinstance(error, EngineDeadError) or not self.alive:
            return Unavailable(DEAD)
        log.error("vLLM failed a request", exc_info=error)
        return ServingError("internal error: the server's log has the details")

    def _adapter(self, name: str | None) -> LoRARequest | None:
        if name is not None and name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise InvalidRequest(f"lora_name is none of this model's adapters ({known}), got {shown(name)}")
        return None if name is None else self._adapters[name]

    def _sampling_parameters(self, request: Request) -> SamplingParams:
        """Read the caller's values over the model's own defaults (its generation_config), as `vllm serve` does."""
        if request.priority and not self._priorities:
            raise InvalidRequest(
                f"request_priority={request.priority} needs the engine argument scheduling_policy=priority"
            )
        values: dict[str, Any] = {
            "max_tokens": None,
            **self._defaults,
            **{name: value for name, value in request.sampling.items() if name not in TRUNCATION},
        }  # None: what fits the context
        for name in values:
            if name not in SamplingParams.__struct_fields__:
                raise InvalidRequest(f"{name} is not known to the installed vLLM")
        if values.get("prompt_logprobs") is None and "return_prompt_logprobs" in request.returns:
            values["prompt_logprobs"] = 0  # as for logprobs
        if values.get("logprobs") is None and request.returns & {"return_logprobs", "return_cumulative_logprob"}:
            values["logprobs"] = 0  # the chosen token's alone
        try:
            parameters = msgspec.convert(values, SamplingParams, strict=False, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidRequest(_explain(str(error), values)) from error
        except REFUSALS as error:
            raise InvalidRequest(str(error)) from error
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(parameters, name) or ():
                if not 0 <= token < self._vocabulary:
                    raise InvalidRequest(f"{name} must hold token ids from 0 to {self._vocabulary - 1}, got {token}")
        parameters.output_kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
        return parameters


@contextlib.contextmanager
def _open_to(stubs: Stubs) -> Iterator[None]:
    """Have the engine that is started meanwhile serve the other stubs too, as `vllm serve --api-server-count` has it.

    vLLM offers that only to who starts the engine's processes without AsyncLLM, and watches over them and ends them.
    """
    others = [stubs.addresses(index) for index in range(1, stubs.count)]
    launch = core_client.launch_core_engines

    def shared(config: Any, executor: Any, log_stats: bool, addresses: Any) -> Any:
        addresses.inputs.extend(one["input_address"] for one in others)
        addresses.outputs.extend(one["output_address"] for one in others)
        return launch(config, executor, log_stats, addresses)

    core_client.launch_core_engines = shared
    try:
        yield
    finally:
        core_client.launch_core_engines = launch


class Pulse(StatLoggerBase):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Hears from vLLM of each step of the engine, once a step."""

    def __init__(self, stubs: Stubs) -> None:
        self._stubs = stubs

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """Note it."""
        self._stubs.note_step(load=scheduler_stats is not None)

    def log_engine_initialized(self) -> None:
        """Nothing to log."""


def resolve(arguments: dict[str, Any], directory: Path, name: str) -> dict[str, Any]:
    """Complete engine arguments as config.pbtxt gives them; raises ServingError for what cannot be meant.

    A model that begins with "./" lies in the model's own folder; the model is served under its name in Triton.
    """
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for unknown in arguments.keys() - known:
        near = ", ".join(get_close_matches(unknown, known, n=3)) or "see vLLM's documentation"
        raise ServingError(f"engine_args: {unknown} is not an engine argument of the installed vLLM ({near})")
    model = arguments.get("model")
    if not isinstance(model, str) or not model:
        raise ServingError(f"engine_args: model must name a folder or a model of the hub, got {shown(model)}")
    if model.startswith("./"):
        folder = directory / model
        if not (folder / "config.json").is_file():
            raise ServingError(f"engine_args: model={model} has no config.json: put the model's weights into {folder}")
        model = _within(directory, model)
    defaults = {"served_model_name": name, "disable_log_stats": False}
    return defaults | arguments | {"model": model} | dict(_objects(arguments))


def _objects(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Make vLLM's objects of JSON objects, as its command line does: its classes themselves do so for some alone."""
    for field in dataclasses.fields(AsyncEngineArgs):
        given = arguments.get(field.name)
        kinds = get_args(field.type) or (field.type,)
        objects: list[Any] = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        if isinstance(given, dict) and objects:
            try:
                yield field.name, objects[0](**given)
            except pydantic.ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, (field.name, *first["loc"])))
                raise ServingError(f"engine_args: {place}={shown(first['input'])}: {first['msg']}") from error
            except (TypeError, ValueError) as error:
                raise ServingError(f"engine_args: {field.name}={shown(given)}: {error}") from error


class Guardian:
    """Has this process and all that it starts killed when it or tritonserver dies, however it dies.

    vLLM's engine and worker processes outlive a killed parent otherwise, and keep the GPU's memory. Moves this process
    into a process group of its own, which its children share; guardian.py watches from outside.
    """

    def __init__(self, stubs: Stubs) -> None:
        """Start it. Raises ServingError when there is no Python to run it."""
        if os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)
        python = shutil.which("python3")
        if python is None:
            raise ServingError("python3 is not on PATH: the guardian of the engine's processes cannot be started")
        self._process = subprocess.Popen(
            [python, "-I", "-S", str(Path(__file__).with_name("guardian.py")), str(os.getpid()), str(os.getppid())]
            + [str(path) for path in stubs.paths],
            start_new_session=True,
            stdin=subprocess.PIPE,
        )

    def release(self) -> None:
        """Say that this process is about to end as it should: the server is to live on."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b".")
            self._process.stdin.flush()


def _with_room(arguments: dict[str, Any], adapters: int) -> dict[str, Any]:
    """Check the engine arguments that LoRA adapters need, and complete them.

    On a CPU vLLM (0.32) gives tokens that are to have no adapter the one in its last place, when others in the same
    step have one: a place more than adapters keeps the last one empty.
    """
    if not arguments.get("enable_lora"):
        raise ServingError("lora_modules need the engine argument enable_lora=true")
    if not current_platform.is_cpu():
        return arguments
    places = arguments.get("max_loras", adapters + 1)
    if places <= adapters:
        raise ServingError(f"on a CPU max_loras must be above the number of lora_modules ({adapters}), got {places}")
    return arguments | {"max_loras": places}


def _within(directory: Path, path: str) -> str:
    """A path that begins with "./" lies in the model's own folder."""
    return str(directory / path) if path.startswith("./") else path


def _blamed(error: Exception, request: Request) -> str:
    """Name the field that vLLM refused, where its message does not: a form that cannot be compiled."""
    frames = (frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__))
    if "_validate_structured_outputs" not in frames:
        return ""
    if request.chat.get("response_format") is not None:
        return f"{CHAT}.response_format: "
    if (structured := request.chat.get(STRUCTURED_OUTPUTS)) is not None:
        (kind,) = structured
        return (
            f"{STRUCTURED_OUTPUTS}.{kind}: "
            if isinstance(request.prompt, str)
            else f"{CHAT}.{STRUCTURED_OUTPUTS}.{kind}: "
        )
    return f"{CHAT}.tools: "


def _logprobs(position: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
    return {
        token: {
            "logprob": max(entry.logprob, LEAST_LOGPROB),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token, entry in position.items()
    }


def _explain(message: str, values: dict[str, Any]) -> str:
    """Turn msgspec's "Expected `int`, got `float` - at `$.max_tokens`" into a sentence that names field and value."""
    found = re.fullmatch(r"(?s)(.*) - at `\$\.(\w+)(.*)`", message)
    if found is None:
        return message
    what, name, rest = found.groups()
    return f"{name}{rest}: {what[0].lower()}{what[1:]}: {shown(values.get(name))}"
