"""The command: `tritonstream-gateway serve`, `key`, `openapi`. Every option can be an environment variable, too."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tritonstream_gateway import openapi
from tritonstream_gateway.keys import make
from tritonstream_gateway.settings import BadSettings, Settings
from tritonstream_gateway.supervisor import Supervisor

app = typer.Typer(
    help="OpenAI's HTTP API over a model that Tritonstream serves: chat, completions, models; streaming, keys, limits.",
    no_args_is_help=True,
    add_completion=False,
)
_PREFIX = "TRITONSTREAM_GATEWAY_"
DEFAULT = Settings()


def _option(name: str, help_text: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, envvar=_PREFIX + name.upper(), help=help_text, **more)


@app.command()
def serve(
    host: Annotated[str, _option("host", "Address to listen on; 0.0.0.0 is every one.")] = DEFAULT.host,
    port: Annotated[int, _option("port", "Port to listen on; 0 picks a free one.")] = DEFAULT.port,
    workers: Annotated[
        int, _option("workers", "Processes that answer, each with a core's worth of Python.")
    ] = DEFAULT.workers,
    triton: Annotated[str, _option("triton", "host:port of Triton's gRPC service.")] = DEFAULT.triton,
    triton_metrics: Annotated[
        str,
        _option(
            "triton_metrics", "URL of Triton's metrics, for /health/ready; empty: readiness is Triton's word alone."
        ),
    ] = DEFAULT.triton_metrics,
    triton_tls: Annotated[bool, _option("triton_tls", "Speak TLS to Triton.", "--triton-tls")] = False,
    triton_ca: Annotated[Path | None, _option("triton_ca", "PEM file of who signs for Triton; turns TLS on.")] = None,
    triton_certificate: Annotated[Path | None, _option("triton_certificate", "PEM file: who we are to Triton.")] = None,
    triton_key: Annotated[Path | None, _option("triton_key", "PEM file: the key of that certificate.")] = None,
    alias: Annotated[
        list[str] | None, _option("aliases", "ALIAS=MODEL, a further name of a model; may be given several times.")
    ] = None,
    keys: Annotated[
        Path | None, _option("keys", "TOML file of API keys (see `key`); without it everybody may ask.")
    ] = None,
    tls_certificate: Annotated[Path | None, _option("tls_certificate", "PEM file: serve HTTPS.")] = None,
    tls_key: Annotated[Path | None, _option("tls_key", "PEM file: the key of that certificate.")] = None,
    max_body: Annotated[int, _option("max_body", "Bytes of a request, at most; more is 413.")] = DEFAULT.max_body,
    body_timeout: Annotated[
        float, _option("body_timeout", "Seconds that a request's body may take; longer is 408.")
    ] = DEFAULT.body_timeout,
    max_open: Annotated[
        int, _option("max_open", "Requests open at once over all workers; beyond is 503.")
    ] = DEFAULT.max_open,
    max_waiting: Annotated[
        int, _option("max_waiting", "Of these, those without a first token yet; beyond is 503.")
    ] = DEFAULT.max_waiting,
    request_timeout: Annotated[
        float, _option("request_timeout", "Seconds that an answer may take; longer is 408, or an error event.")
    ] = DEFAULT.request_timeout,
    keep_alive: Annotated[
        float, _option("keep_alive", "Seconds without a first token after which a stream begins with a comment.")
    ] = DEFAULT.keep_alive,
    stall: Annotated[
        float, _option("stall", "Seconds without progress of the engine after which we are not ready.")
    ] = DEFAULT.stall,
    grace: Annotated[
        float, _option("grace", "Seconds that open requests get when we are to end (SIGTERM, Ctrl-C).")
    ] = DEFAULT.grace,
    cors_origin: Annotated[
        list[str] | None, _option("cors_origins", "Origin whose pages may ask; may be given several times.")
    ] = None,
    log_requests: Annotated[bool, _option("log_requests", "A line for each request.", "--log-requests")] = False,
    log_prompts: Annotated[
        bool, _option("log_prompts", "Prompts too: they are your callers' words.", "--log-prompts")
    ] = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C; a second one ends at once."""
    logging.basicConfig(format="%(levelname).1s %(asctime)s %(process)d %(message)s", level=logging.INFO)
    given = dict(locals())
    aliases, origins = given.pop("alias"), given.pop("cors_origin")
    try:
        if aliases is not None:
            given["aliases"] = dict(_pair(text) for text in aliases)
        code = Supervisor(Settings(**given, cors_origins=tuple(origins or ()))).run()
    except BadSettings as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(code)


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="whose it is: a name for logs")],
    max_concurrency: Annotated[int | None, typer.Option(help="requests open at once")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="tokens of prompts and answers together")] = None,
) -> None:
    """Make an API key: the secret, once, on standard error; its hash, for the keys file, on standard output."""
    secret, table = make(name, max_concurrency=max_concurrency, tokens_per_minute=tokens_per_minute)
    typer.echo(f"the key of {name}, shown only now: {secret}", err=True)
    typer.echo(table, nl=False)


@app.command(name="openapi")
def show_openapi() -> None:
    """Print the OpenAPI document."""
    sys.stdout.buffer.write(openapi.DOCUMENT + b"\n")


def _pair(text: str) -> tuple[str, str]:
    alias, equals, model = text.partition("=")
    if not (alias and equals and model):
        raise BadSettings(f"alias must be ALIAS=MODEL, got {text!r}")
    return alias, model


if __name__ == "__main__":
    app()
