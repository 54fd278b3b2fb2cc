"""What can be asked of a server besides an answer: the calls of one request and one reply, without I/O.

Read by both clients, which differ only in how they wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tritonclient.grpc import service_pb2

from tritonstream.model import Model

ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, slots=True)
class Question(Generic[ReplyT]):
    """A method of Triton's service, the message it takes, and how its reply is read."""

    method: str
    message: Any
    read: Callable[[Any], ReplyT]


def server_live() -> Question[bool]:
    """Ask whether the server's process answers."""
    return Question("ServerLive", service_pb2.ServerLiveRequest(), lambda reply: bool(reply.live))


def server_ready() -> Question[bool]:
    """Ask whether the server and all its models take requests."""
    return Question("ServerReady", service_pb2.ServerReadyRequest(), lambda reply: bool(reply.ready))


def model_ready(name: str, version: str) -> Question[bool]:
    """Ask whether one model takes requests."""
    message = service_pb2.ModelReadyRequest(name=name, version=version)
    return Question("ModelReady", message, lambda reply: bool(reply.ready))


def models() -> Question[tuple[Model, ...]]:
    """Ask for the repository's index."""
    return Question("RepositoryIndex", service_pb2.RepositoryIndexRequest(), _read_index)


def _read_index(reply: Any) -> tuple[Model, ...]:
    return tuple(
        Model(name=found.name, version=found.version, state=found.state, reason=found.reason) for found in reply.models
    )
