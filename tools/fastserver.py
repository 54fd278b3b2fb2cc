"""`python -m tools.fastserver`: a gRPC server that says the same, fast, to whoever asks: for measuring load generators.

Read by `tools.generators`. It speaks Triton's protocol as far as a stream goes and knows no model. Messages are spelled
once; a request costs what grpc.aio takes to write them.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import grpc
import grpc.aio
import typer
from tritonclient.grpc import service_pb2

_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def message(text: str, summary: dict[str, Any] | None = None) -> bytes:
    """Spell a response of one token; with a summary it is the last one."""
    response = service_pb2.ModelStreamInferResponse()
    infer = response.infer_response
    infer.parameters["triton_final_response"].bool_param = summary is not None
    outputs = {"text_output": text} | ({} if summary is None else {"summary": json.dumps(summary)})
    for name, value in outputs.items():
        infer.outputs.add(name=name, datatype="BYTES", shape=(1,))
        data = value.encode()
        infer.raw_output_contents.append(len(data).to_bytes(4, "little") + data)
    return bytes(response.SerializeToString())


class Beat:
    """Wakes everybody who waits, once every `pace` seconds: as an engine's step gives a token to all streams."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._next = asyncio.Event()

    async def run(self) -> None:
        """Beat forever."""
        while True:
            await asyncio.sleep(self._pace)
            beat, self._next = self._next, asyncio.Event()
            beat.set()

    async def wait(self) -> None:
        """Wait for the next beat."""
        await self._next.wait()


class Handler(grpc.GenericRpcHandler):
    """Answers each stream with so many messages."""

    def __init__(self, tokens: int, beat: Beat | None) -> None:
        self._token = message(" token")
        summary = {"finish_reason": "length", "num_input_tokens": 64, "num_output_tokens": tokens}
        self._last = message(" end", summary)
        self._tokens, self._beat = tokens, beat

    def service(self, handler_call_details: Any) -> Any:
        """Serve the stream, and nothing else."""
        return grpc.unary_stream_rpc_method_handler(self._stream) if handler_call_details.method == _STREAM else None

    async def _stream(self, request: bytes, context: Any) -> None:
        for _ in range(self._tokens - 1):
            await context.write(self._token)
            if self._beat is not None:
                await self._beat.wait()
        await context.write(self._last)


async def serve(port: int, tokens: int, pace: float) -> None:
    """Serve until killed; says "ready"."""
    beat = Beat(pace) if pace else None
    # grpc.aio in several processes on one port: the kernel spreads connections over them.
    server = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
    server.add_generic_rpc_handlers((Handler(tokens, beat),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready", flush=True)
    await (beat.run() if beat is not None else server.wait_for_termination())


def main(
    port: Annotated[int, typer.Argument()],
    tokens: Annotated[int, typer.Option(min=2, help="messages of each answer")] = 128,
    pace: Annotated[float, typer.Option(min=0, help="seconds between a stream's messages; 0: as fast as it goes")] = 0,
) -> None:
    """Serve the same answer to everybody, until killed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(port, tokens, pace))
    else:
        uvloop.run(serve(port, tokens, pace))


if __name__ == "__main__":
    typer.run(main)
