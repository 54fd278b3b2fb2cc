"""An error as a person meets it: what happened, what to do next, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from tritonstream.errors import (
    Cancelled,
    DeadlineExceeded,
    ModelNotFound,
    ServerError,
    ServerUnavailable,
    TritonstreamError,
)

CALLERS_FAULT, SERVERS_FAULT, INTERRUPTED = 2, 3, 130


def tell(error: TritonstreamError, url: str) -> None:
    """Write to stderr what happened and what to do next."""
    console = Console(stderr=True, highlight=False)
    console.print("[bold red]error:[/]", end=" ")
    console.print(str(error), markup=False, soft_wrap=True)
    advice = _advice(error, url)
    if advice:
        console.print(advice, style="dim", markup=False, soft_wrap=True)


@contextmanager
def exits(url: str) -> Iterator[None]:
    """Turn an error inside the block into its message and its exit code."""
    try:
        yield
    except TritonstreamError as error:
        tell(error, url)
        raise typer.Exit(CALLERS_FAULT if error.blame == "caller" else SERVERS_FAULT) from error
    except KeyboardInterrupt as error:
        sys.stderr.write("\n")
        raise typer.Exit(INTERRUPTED) from error


def _advice(error: TritonstreamError, url: str) -> str:
    if isinstance(error, ModelNotFound):
        return "`tritonstream models` lists what this server has."
    if isinstance(error, ServerUnavailable):
        if error.blame == "network":
            return f"Is a server running at {url}? Its gRPC port is needed (8001 unless changed); --url names another."
        return "The server is starting, stopping or full: try again in a moment; `tritonstream models` shows its state."
    if isinstance(error, DeadlineExceeded):
        return "Give it more time with --deadline, or ask for less with --max-tokens."
    if isinstance(error, Cancelled | ServerError):
        return "The server's log says more; the same request may succeed if sent again."
    return ""
