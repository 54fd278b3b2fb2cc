"""A client with nothing hidden: one request on one gRPC stream, every response kept as it came.

Read by the integration tests of the model. It can say what the real client refuses to say, and see what that one hides:
which responses there were, with which tensors, which of them was final, and what status the stream ended with.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as rpc

# With it Triton ends the stream with the error as its gRPC status; the real client does without, for Triton 2.51 can
# crash of it.
REAL_STATUS = (("triton_grpc_error", "true"),)
_SPELLED = re.compile(rf"({'|'.join(code.name for code in grpc.StatusCode)}): ")
MAX_MESSAGE = 64 * 2**20
TIMEOUT = 60.0  # seconds; what takes longer hangs
RETURN_ALL = (
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
_NUMBERS = {"UINT32": "I", "FP32": "f", "INT32": "i", "BOOL": "?"}

Raw = tuple[str, Sequence[int], bytes]  # data type, shape, content


@dataclass(frozen=True, slots=True)
class Response:
    """One message of the stream."""

    outputs: dict[str, list[Any]]
    final: bool
    error: str
    at: float  # time.monotonic()

    @classmethod
    def read(cls, message: Any) -> Response:
        """Decode a ModelStreamInferResponse; texts come out as str, so that bytes cut inside a character raise."""
        response = message.infer_response
        outputs = {
            output.name: _elements(output.datatype, raw)
            for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        }
        final = response.parameters["triton_final_response"].bool_param if response.parameters else False
        return cls(outputs=outputs, final=final, error=message.error_message, at=time.monotonic())

    @property
    def texts(self) -> dict[int, str]:
        """The text of each choice in this response, by the choice's index."""
        return self.of("text_output") if "text_output" in self.outputs else {}

    def of(self, name: str) -> dict[int, Any]:
        """An output of each choice in this response, by the choice's index."""
        values = self.outputs[name]
        return dict(zip(self.outputs.get("index", range(len(values))), values, strict=True))


@dataclass(slots=True)
class Answer:
    """All that came for one request."""

    responses: list[Response] = field(default_factory=list)
    status: grpc.StatusCode = grpc.StatusCode.OK  # of the stream itself
    status_details: str = ""
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0

    @property
    def error(self) -> str:
        """What went wrong, as the stream's status or as an error response; empty when nothing did."""
        return self.status_details or next((response.error for response in self.responses if response.error), "")

    @property
    def code(self) -> grpc.StatusCode:
        """How it ended: the stream's status, or the one its error begins with; UNKNOWN for Triton's own errors."""
        if self.status is not grpc.StatusCode.OK or not self.error:
            return self.status
        spelled = _SPELLED.match(self.error)
        return grpc.StatusCode[spelled[1]] if spelled else grpc.StatusCode.UNKNOWN

    @property
    def details(self) -> str:
        """The error without its code."""
        return _SPELLED.sub("", self.error, count=1)

    @property
    def finals(self) -> int:
        """How many responses had the final flag."""
        return sum(response.final for response in self.responses)

    @property
    def indexes(self) -> list[int]:
        """The choices that were seen, in order."""
        return sorted({index for response in self.responses for index in response.texts})

    def text(self, index: int = 0) -> str:
        """All text of a choice."""
        return "".join(response.texts.get(index, "") for response in self.responses)

    def reasoning(self, index: int = 0) -> str:
        """All that a choice thought."""
        return "".join(self.every("reasoning_output", index))

    def calls(self, index: int = 0) -> list[dict[str, str]]:
        """The tools that a choice calls, put together from their deltas: id, name and arguments."""
        calls: dict[int, dict[str, str]] = {}
        for delta in (delta for deltas in self.every("tool_calls", index) for delta in json.loads(deltas)):
            call = calls.setdefault(delta["index"], {"id": "", "name": "", "arguments": ""})
            call["id"] += delta.get("id", "")
            for name, piece in delta.get("function", {}).items():
                call[name] += piece
        return [calls[place] for place in sorted(calls)]

    def total(self, name: str, index: int = 0) -> int:
        """The sum of a counting output of a choice."""
        return sum(int(value) for value in self.every(name, index))

    def last(self, name: str, index: int = 0) -> Any:
        """The last value of an output of a choice."""
        return self.every(name, index)[-1]

    def every(self, name: str, index: int = 0) -> list[Any]:
        """Every value of an output of a choice."""
        return [
            response.of(name)[index]
            for response in self.responses
            if name in response.outputs and index in response.of(name)
        ]

    def ok(self) -> Answer:
        """The answer itself, if it is whole: no error, and exactly one final response, which is the last."""
        assert (self.code, self.error) == (grpc.StatusCode.OK, ""), f"{self.code}: {self.error}"
        assert self.finals == 1, f"{self.finals} final responses of {len(self.responses)}"
        assert self.responses[-1].final
        return self


def encode(
    model: str,
    *,
    text_input: str | bytes | None = None,
    chat: Any = None,
    stream: bool | None = True,
    sampling: Any = None,
    parameters: Mapping[str, str | int | bool | float] | None = None,
    flags: Sequence[str] = (),
    raw: Mapping[str, Raw] | None = None,
) -> Any:
    """Build a ModelInferRequest.

    `chat` and `sampling` are sent as they are when they are text or bytes, else as JSON; `flags` are BOOL inputs set to
    true, a flag that begins with "!" to false; `raw` adds inputs of any type, shape and content.
    """
    message = pb.ModelInferRequest(model_name=model)

    def add(name: str, data_type: str, shape: Sequence[int], content: bytes) -> None:
        tensor = message.inputs.add()
        tensor.name, tensor.datatype = name, data_type
        tensor.shape.extend(shape)
        message.raw_input_contents.append(content)

    texts = {"text_input": text_input, "chat": chat, "sampling_parameters": sampling}
    for name, value in texts.items():
        if value is not None:
            text = value if isinstance(value, str | bytes) else json.dumps(value)
            add(name, "BYTES", [1], pack([text]))
    if stream is not None:
        add("stream", "BOOL", [1], bytes([stream]))
    for flag in flags:
        add(flag.removeprefix("!"), "BOOL", [1], bytes([not flag.startswith("!")]))
    for name, (data_type, shape, content) in (raw or {}).items():
        add(name, data_type, shape, content)
    for name, parameter in (parameters or {}).items():
        kind = {str: "string_param", bool: "bool_param", int: "int64_param", float: "double_param"}[type(parameter)]
        setattr(message.parameters[name], kind, parameter)
    return message


def pack(texts: Sequence[str | bytes]) -> bytes:
    """The content of a BYTES tensor."""
    packed = [text.encode() if isinstance(text, str) else text for text in texts]
    return b"".join(struct.pack("<I", len(text)) + text for text in packed)


def _elements(data_type: str, raw: bytes) -> list[Any]:
    if data_type != "BYTES":
        kind = _NUMBERS[data_type]
        return [value for (value,) in struct.iter_unpack(f"<{kind}", raw)]
    elements, at = [], 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        elements.append(raw[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return elements


class Call:
    """One open stream: read its responses one by one, or cancel it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.answer = Answer()

    async def receive(self) -> Response | None:
        """Wait for the next response; None at the end of the stream, whose status is in `answer` then."""
        message = grpc.aio.EOF
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self.answer.status, self.answer.status_details = error.code(), error.details() or ""
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self.answer.status = grpc.StatusCode.CANCELLED  # not this task was cancelled but the call
        if message is grpc.aio.EOF:
            self.answer.ended = time.monotonic()
            return None
        self.answer.responses.append(Response.read(message))
        return self.answer.responses[-1]

    async def rest(self, within: float = TIMEOUT) -> Answer:
        """Read to the end of the stream; TimeoutError when that does not come."""
        async with asyncio.timeout(within):
            while await self.receive() is not None:
                pass
        return self.answer

    async def until(self, characters: int, within: float = TIMEOUT) -> str:
        """Read until the first choice has so many characters, and leave the stream open."""
        async with asyncio.timeout(within):
            while len(self.answer.text()) < characters:
                assert await self.receive() is not None, f"ended after {self.answer.text()!r}: {self.answer.error}"
        return self.answer.text()

    def cancel(self) -> float:
        """Cancel the RPC, which is how a caller leaves; returns the moment (time.monotonic)."""
        self._call.cancel()
        return time.monotonic()


class Wire:
    """A channel to one server, and the model to ask there."""

    def __init__(self, channel: grpc.aio.Channel, model: str) -> None:
        self.model = model
        self.stub: Any = rpc.GRPCInferenceServiceStub(channel)
        self._channel = channel

    def to(self, model: str) -> Wire:
        """The same channel, to ask another model."""
        return Wire(self._channel, model)

    async def close(self) -> None:
        """Close the connection under whatever is open on it."""
        await self._channel.close()

    @asynccontextmanager
    async def open(self, *, real_status: bool = False, **request: Any) -> AsyncIterator[Call]:
        """Send one request (see `encode`); leaving the block cancels what is unfinished."""
        message = encode(request.pop("model", self.model), **request)
        call = self.stub.ModelStreamInfer(iter([message]), metadata=REAL_STATUS if real_status else None)
        try:
            yield Call(call)
        finally:
            call.cancel()

    async def ask(self, *, within: float = TIMEOUT, **request: Any) -> Answer:
        """Send one request and read everything that comes for it."""
        async with self.open(**request) as call:
            return await call.rest(within)

    async def refused(self, **request: Any) -> Answer:
        """Send a request that must be refused, before anything was generated for it: with one final response."""
        answer = await self.ask(**request)
        assert answer.code is not grpc.StatusCode.OK, f"answered with {answer.text()[:200]!r}"
        assert [(response.outputs, response.final) for response in answer.responses] == [({}, True)]
        return answer


@asynccontextmanager
async def connect(address: str, model: str) -> AsyncIterator[Wire]:
    """Open a channel of its own, shared with nobody, to the server at `address`."""
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE),
        ("grpc.max_send_message_length", MAX_MESSAGE),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield Wire(channel, model)
