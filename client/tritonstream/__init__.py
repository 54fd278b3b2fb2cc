"""Tritonstream's client: stream what a language model behind Triton says.

    async with AsyncClient("localhost:8001") as client:
        async with client.stream("Once upon a time", model="Qwen3-0.6B", deadline=30) as deltas:
            async for delta in deltas:
                print(delta.text, end="", flush=True)

`Client` is the same for threads. Every error is a TritonstreamError and says in `blame` who has to act.
"""

from tritonstream.aio import AsyncClient, AsyncStream
from tritonstream.completion import Choice, Completion, Usage
from tritonstream.connection import TLS, Keepalive, Retries
from tritonstream.delta import Delta, TokenLogprob, TokenLogprobs, ToolCall, ToolCallDelta
from tritonstream.errors import (
    Blame,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    ServerError,
    ServerUnavailable,
    TritonstreamError,
)
from tritonstream.model import Model
from tritonstream.request import Message, Prompt, Request, RequestFields
from tritonstream.sampling import Sampling
from tritonstream.sync import Client, Stream

__all__ = [
    "TLS",
    "AsyncClient",
    "AsyncStream",
    "Blame",
    "Cancelled",
    "Choice",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "InvalidRequest",
    "Keepalive",
    "Message",
    "Model",
    "ModelNotFound",
    "Prompt",
    "Request",
    "RequestFields",
    "Retries",
    "Sampling",
    "ServerError",
    "ServerUnavailable",
    "Stream",
    "TokenLogprob",
    "TokenLogprobs",
    "ToolCall",
    "ToolCallDelta",
    "TritonstreamError",
    "Usage",
]
