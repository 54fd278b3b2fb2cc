"""Triton's side of the model: its lifecycle, and the story of one request.

Triton's Python backend loads this file in a process of its own, the stub. `execute` reads each request, opens a mailbox
for its reply and hands both to the engine; from there on engine.py pushes what it generates into the mailbox, and
replies.py sends it. Nothing here runs per token but `Responder.send`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from .contract import parse
from .engine import Engine, Guardian
from .errors import DeadlineExceeded, ServingError
from .metrics import Counts, Mirror
from .parsing import TOOL_CALL_PARSER
from .replies import LEFT, Mailbox, PostOffice
from .stubs import Stubs
from .weights import VARIANT

log = logging.getLogger(__name__)

LORA_MODULES = "lora_modules"  # beside engine_args: a JSON object of names and folders
ENGINE_ARGS_VARIABLE = "TRITONSTREAM_ENGINE_ARGS"


class Responder:
    """Triton's response sender, as the mailbox wants it."""

    __slots__ = ("_sender",)

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()

    def send(self, tensors: list[tuple[str, npt.NDArray[Any]]], *, final: bool) -> None:
        """Send one response, with the final flag on it when it is the last."""
        response = pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors])
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)

    def fail(self, error: ServingError) -> None:
        """Send an error as the last response."""
        code = getattr(pb_utils.TritonError, error.triton_code)
        response = pb_utils.InferenceResponse([], pb_utils.TritonError(error.spelled(), code))
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def gone(self) -> bool:
        """Ask the server whether the caller cancelled or went away."""
        return bool(self._sender.is_cancelled())


class TritonPythonModel:
    """One model instance: an engine, its post office, its metrics."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model; what is raised here is what Triton reports as the reason it could not."""
        logging.basicConfig(format="%(levelname).1s %(asctime)s %(name)s: %(message)s", level=logging.INFO)
        self._stubs = Stubs.of_instance(args)
        self._guardian = Guardian(self._stubs)
        try:
            config = json.loads(args["model_config"])
            self._engine = Engine(
                _engine_arguments(config),
                Path(__file__).parents[1],
                args["model_name"],
                self._stubs,
                tool_call_parser=_parameter(config, TOOL_CALL_PARSER, ""),
                lora_modules=_object("config.pbtxt's lora_modules", _parameter(config, LORA_MODULES, "{}")),
                variant=_parameter(config, VARIANT, ""),
            )
            self._engine.start()
        except BaseException:
            self._guardian.release()
            self._stubs.give_up()
            raise
        self._counts = Counts()
        self._post_office = PostOffice(on_left=self._caller_left, on_closed=self._closed)
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._mirror = Mirror(_metric, lambda: self._engine.alive, self._stubs, labels)
        self._mirror.start()
        # What vLLM's imports leave lives for ever: to look through it took 0.37 s of every full collection.
        gc.collect()
        gc.freeze()

    def execute(self, requests: list[Any]) -> None:
        """Take requests in; each is answered through its response sender, with exactly one final response."""
        for triton_request in requests:
            mailbox = self._post_office.open(Responder(triton_request))
            try:
                mailbox.request = parse(_tensors(triton_request), triton_request.parameters())
                mailbox.job = self._engine.submit(mailbox.request, mailbox)
            except ServingError as error:
                mailbox.fail(error)
            except Exception:
                log.exception("a request could not be read")
                mailbox.fail(ServingError("internal error: the server's log has the details"))

    def is_ready(self) -> bool:
        """Tell Triton (from 26.03 on, which asks) whether the engine can answer."""
        return self._engine.alive

    def finalize(self) -> None:
        """Stop; Triton has waited for the open requests before, as long as its --exit-timeout-secs allows."""
        self._guardian.release()
        self._engine.shutdown()
        self._stubs.give_up()
        self._post_office.close()
        self._mirror.stop()
        _FAMILIES.clear()  # Triton's metrics must go before the interpreter: they point into its shared memory

    def _caller_left(self, mailbox: Mailbox) -> None:
        if mailbox.job is not None:
            self._engine.abort(mailbox.job, LEFT)

    def _closed(self, mailbox: Mailbox, error: ServingError | None) -> None:
        if error is LEFT:
            self._counts.cancelled.inc()
            self._counts.wasted.inc(mailbox.unseen)
        elif isinstance(error, DeadlineExceeded):
            self._counts.expired.inc()


def _engine_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Read vLLM's engine arguments: config.pbtxt's `engine_args`, and the environment's over them."""
    arguments: dict[str, Any] = {}
    sources = {
        "config.pbtxt's engine_args": _parameter(config, "engine_args", "{}"),
        ENGINE_ARGS_VARIABLE: os.environ.get(ENGINE_ARGS_VARIABLE, "{}"),
    }
    for source, text in sources.items():
        arguments |= _object(source, text)
    return arguments


def _object(source: str, text: str) -> dict[str, Any]:
    try:
        return {**json.loads(text)}
    except (ValueError, TypeError) as error:
        raise ServingError(f"{source} must be a JSON object ({error}): {text}") from error


def _parameter(config: dict[str, Any], name: str, default: str) -> str:
    return str(config["parameters"].get(name, {}).get("string_value", default))


def _tensors(request: Any) -> dict[str, npt.NDArray[Any]]:
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def _metric(name: str, description: str, kind: str, labels: dict[str, str]) -> Any:
    family = _FAMILIES.get(name)
    if family is None:
        kinds = {"counter": pb_utils.MetricFamily.COUNTER, "gauge": pb_utils.MetricFamily.GAUGE}
        family = _FAMILIES[name] = pb_utils.MetricFamily(name=name, description=description, kind=kinds[kind])
    return family.Metric(labels=labels)


_FAMILIES: dict[str, Any] = {}  # Triton forgets a family that nobody holds
