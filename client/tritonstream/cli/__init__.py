"""The `tritonstream` command: talk to a model behind Triton from a terminal."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from tritonstream.cli.chat import chat
from tritonstream.cli.generate import generate
from tritonstream.cli.models import models

app = typer.Typer(
    name="tritonstream",
    help="Talk to a language model behind NVIDIA Triton, over gRPC.",
    epilog="Exit codes: 0 done, 2 the request must be changed, 3 the server or the network failed, 130 interrupted.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)
app.command()(chat)
app.command()(generate)
app.command()(models)


def _tell_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(version("tritonstream"))
        except PackageNotFoundError:  # run from a source tree
            typer.echo("not installed")
        raise typer.Exit


@app.callback()
def _main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""
