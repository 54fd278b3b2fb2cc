"""A real gRPC server that speaks Triton's protocol from a script: for faults that a real Triton cannot be made to have.

It reads requests and writes replies with the server's own contract, so a client that passes here spells them right.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from tests.unit.client.contract import contract

_TYPES = {"object": "BYTES", "uint32": "UINT32", "float32": "FP32"}


class Call:
    """One request as the server sees it: `request` as the contract reads it, `message` as it came."""

    def __init__(self, message: Any, context: grpc.ServicerContext) -> None:
        self.message = message
        self.context = context
        self.metadata = dict(context.invocation_metadata())
        self.replies = 0
        self.left = threading.Event()  # the client cancelled, or is gone
        context.add_callback(self.left.set)
        inputs = zip(message.inputs, message.raw_input_contents, strict=True)
        tensors = {item.name: _array(item.datatype, raw) for item, raw in inputs}
        parameters = {name: _value(value) for name, value in message.parameters.items()}
        self.request = contract.parse(tensors, json.dumps(parameters))

    def reply(self, *texts: str, final: bool = False, reason: str = "stop", logprobs: Any = None) -> Any:
        """Spell a response: one text for each choice, each of one token."""
        self.replies += 1
        deltas = [
            contract.Delta(
                index=index,
                text=text,
                num_output_tokens=1,
                total_output_tokens=self.replies,
                num_input_tokens=7,
                num_cached_tokens=4,
                finish_reason=reason if final else None,
                logprobs=logprobs,
                cumulative_logprob=None if logprobs is None else -0.5,
            )
            for index, text in enumerate(texts)
        ]
        response = empty(final=final)
        for name, array in contract.reply(deltas, self.request):
            output = response.infer_response.outputs.add(name=name, datatype=_TYPES[array.dtype.name])
            output.shape.extend(array.shape)
            raw = serialize_byte_tensor(array).item() if array.dtype == np.object_ else array.tobytes()
            response.infer_response.raw_output_contents.append(raw)
        return response

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status, as Triton does for `triton_grpc_error`."""
        self.context.abort(code, details)


Script = Callable[[Call], Iterator[Any]]


def empty(*, final: bool) -> Any:
    """Make a response without tensors."""
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.parameters["triton_final_response"].bool_param = final
    return response


def error(said: str) -> Any:
    """Make a response that is an error in words, as Triton's own checks are."""
    return service_pb2.ModelStreamInferResponse(error_message=said)


def says(*texts: str) -> Script:
    """Script an answer of these deltas."""

    def script(call: Call) -> Iterator[Any]:
        if not call.request.stream:
            yield call.reply("".join(texts), final=True)
            return
        for text in texts[:-1]:
            yield call.reply(text)
        yield call.reply(texts[-1], final=True)

    return script


def refuses(code: grpc.StatusCode, details: str) -> Script:
    """Script a failure before any response."""

    def script(call: Call) -> Iterator[Any]:
        call.fail(code, details)
        yield from ()

    return script


def hangs(*texts: str) -> Script:
    """Script some deltas, and then nothing until the client leaves."""

    def script(call: Call) -> Iterator[Any]:
        for text in texts:
            yield call.reply(text)
        call.left.wait(30)

    return script


class ScriptedTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The server, for as long as the block lasts. Each request takes the next script; the last one stays."""

    def __init__(self, *, credentials: grpc.ServerCredentials | None = None) -> None:
        self.calls: list[Call] = []
        self.came = threading.Semaphore(0)  # one permit for every call that arrived
        self.models: list[tuple[str, str]] = [("tiny", "READY")]
        self.ready = True
        self._scripts: list[Script] = [says("Hello", " world")]
        self._server = grpc.server(
            ThreadPoolExecutor(16), options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
        )
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        if credentials is None:
            self.port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self.url = f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait(5)

    def script(self, *scripts: Script) -> None:
        """Set what the coming requests are answered with."""
        self._scripts = list(scripts)

    def ModelStreamInfer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: D102
        for message in requests:
            script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
            try:
                call = Call(message, context)
            except contract.InvalidRequest as invalid:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(invalid))
            self.calls.append(call)
            self.came.release()
            yield from script(call)

    def ServerLive(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: D102
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: D102
        return service_pb2.ServerReadyResponse(ready=self.ready)

    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: D102
        return service_pb2.ModelReadyResponse(ready=(request.name, "READY") in self.models)

    def RepositoryIndex(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: D102
        index = service_pb2.RepositoryIndexResponse()
        for name, state in self.models:
            index.models.add(name=name, version="1", state=state, reason="" if state == "READY" else "still loading")
        return index


def _array(data_type: str, raw: bytes) -> Any:
    if data_type == "BOOL":
        return np.frombuffer(raw, np.bool_)
    size = int.from_bytes(raw[:4], "little")
    if data_type != "BYTES" or size != len(raw) - 4:
        raise AssertionError(f"an input of type {data_type} and {len(raw)} bytes")
    return np.array([raw[4:]], np.object_)


def _value(parameter: Any) -> Any:
    return getattr(parameter, parameter.WhichOneof("parameter_choice"))
