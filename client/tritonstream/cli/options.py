"""The options that several commands share, and what they mean to the client."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from tritonstream.connection import TLS
from tritonstream.errors import InvalidRequest
from tritonstream.sampling import Sampling

DEFAULT_URL = "localhost:8001"
_SERVER, _SAMPLING = "Server", "Sampling (the model's own defaults where nothing is given)"

Url = Annotated[
    str,
    typer.Option(
        "--url", "-u", envvar="TRITONSTREAM_URL", help="host:port of Triton's gRPC service.", rich_help_panel=_SERVER
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        envvar="TRITONSTREAM_MODEL",
        help="Name of the model; without it, the only one that is ready.",
        rich_help_panel=_SERVER,
    ),
]
Encrypt = Annotated[
    bool, typer.Option("--tls", help="Encrypt the connection; any option --tls-… does too.", rich_help_panel=_SERVER)
]
TlsRoot = Annotated[
    Path | None,
    typer.Option("--tls-root", help="PEM file of the certificates to trust.", rich_help_panel=_SERVER),
]
TlsCertificate = Annotated[
    Path | None, typer.Option("--tls-cert", help="PEM file of our own certificate.", rich_help_panel=_SERVER)
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", help="PEM file of its key.", rich_help_panel=_SERVER)]
TlsAuthority = Annotated[
    str | None,
    typer.Option("--tls-authority", help="Name to expect in the server's certificate.", rich_help_panel=_SERVER),
]
Header = Annotated[
    list[str] | None,
    typer.Option("--header", "-H", help="NAME=VALUE to send with every call; repeatable.", rich_help_panel=_SERVER),
]
Deadline = Annotated[
    float | None, typer.Option("--deadline", "-d", help="Seconds an answer may take.", rich_help_panel=_SERVER)
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Longest answer, in tokens.", rich_help_panel=_SAMPLING)
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", help="0 always takes the likeliest token.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="Choose among this share of probability.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[
    int | None, typer.Option("--top-k", help="Choose among this many tokens; -1: all.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[int | None, typer.Option("--seed", help="Make chance repeatable.", rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="End at this text; repeatable.", rich_help_panel=_SAMPLING)
]
More = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="NAME=VALUE for any other of vLLM's sampling parameters, the value as JSON; repeatable.",
        rich_help_panel=_SAMPLING,
    ),
]
Thinking = Annotated[
    bool | None,
    typer.Option("--thinking/--no-thinking", help="Let a model that can think first do so, or not."),
]
System = Annotated[str | None, typer.Option("--system", "-s", help="A system message to open the chat with.")]


def tls(
    encrypt: bool, root: Path | None, certificate: Path | None, key: Path | None, authority: str | None
) -> TLS | None:
    """Return what the options say about encryption; None when none was asked for."""
    if not encrypt and all(given is None for given in (root, certificate, key, authority)):
        return None
    return TLS(root_certificates=root, client_certificate=certificate, client_key=key, authority=authority)


def headers(given: list[str] | None) -> dict[str, str]:
    """Read NAME=VALUE pairs to send with every call."""
    return {name.lower(): value for name, value in (_pair("--header", text) for text in given or ())}


def sampling(
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: list[str] | None,
    more: list[str] | None,
) -> Sampling:
    """Return the sampling parameters that the options name."""
    named: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop or None,
    }
    known = {item.name for item in fields(Sampling)} - {"extra"}
    extra: dict[str, Any] = {}
    for text in more or ():
        name, value = _pair("--set", text)
        try:
            read = json.loads(value)
        except ValueError as error:
            raise InvalidRequest(f"--set {name}: {value!r} is not JSON (a text needs quotes: '\"…\"')") from error
        (named if name in known else extra)[name] = read
    return Sampling(**named, extra=extra)


def template_kwargs(thinking: bool | None) -> dict[str, Any]:
    """Return what the chat template is told."""
    return {} if thinking is None else {"enable_thinking": thinking}


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidRequest(f"{option} must be NAME=VALUE, got {text!r}")
    return name, value
