"""gRPC as this package calls it: channels, and the methods of Triton's service bound to them.

Read by the two clients. The generated stubs carry no types, so calls and messages are `Any` here and in wire.py, and
go no further than the clients.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tritonstream.connection import TLS, Connection

_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


class Link:
    """One open channel, blocking or asynchronous, with the methods that are called on it."""

    __slots__ = ("channel", "infer", "service")

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        # The method takes a stream of requests; we send one and are done. Called as one that takes a single request it
        # is the same on the wire, without the thread (or task) that gRPC would start to wait for more of them.
        self.infer = channel.unary_stream(
            _STREAM_INFER,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        self.service = service_pb2_grpc.GRPCInferenceServiceStub(channel)


def connect(connection: Connection) -> Link:
    """Make a blocking channel; it connects with the first call."""
    arguments = connection.arguments()
    if connection.tls is None:
        return Link(grpc.insecure_channel(connection.url, options=arguments))
    return Link(grpc.secure_channel(connection.url, _credentials(connection.tls), options=arguments))


def connect_async(connection: Connection) -> Link:
    """Make an asynchronous channel, which belongs to the running event loop; it connects with the first call."""
    arguments = connection.arguments()
    if connection.tls is None:
        return Link(grpc.aio.insecure_channel(connection.url, options=arguments))
    return Link(grpc.aio.secure_channel(connection.url, _credentials(connection.tls), options=arguments))


def _credentials(tls: TLS) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=tls.root_certificates,  # type: ignore[arg-type]  # bytes since TLS.__post_init__
        private_key=tls.client_key,  # type: ignore[arg-type]
        certificate_chain=tls.client_certificate,  # type: ignore[arg-type]
    )
