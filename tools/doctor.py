"""`python -m tools.doctor`: the checks that `make serve` makes before it starts, alone and as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tools import checks, configs, models
from tools.environment import gpu_present
from tools.server import LOOPBACK


def main(
    host: Annotated[str, typer.Option(help="address to listen on")] = LOOPBACK,
    port: Annotated[int, typer.Option(help="first of the three ports: HTTP, gRPC, metrics")] = 8000,
    gateway_port: Annotated[int, typer.Option(help="of the gateway; 0: there is to be none")] = 9000,
    model: Annotated[str, typer.Option(help="folder of the model to be served")] = "",
    variant: Annotated[
        str, typer.Option(help=f"one of {', '.join(configs.VARIANTS)}; default: what the model's weights are")
    ] = "",
    installed: Annotated[
        bool,
        typer.Option("--installed", help="only what is installed, nothing of the machine: for the build of an image"),
    ] = False,
) -> None:
    """Check whether this machine can serve; exits with 1 when it cannot."""
    folder = Path(model) if model else None
    try:
        variant = configs.variant_named(variant).name if variant else models.variant_of(folder)
    except (configs.BadConfig, models.ModelUnavailable) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    plan = checks.Plan(
        host=host,
        ports=(port, port + 1, port + 2, *((gateway_port,) if gateway_port else ())),
        gpu=gpu_present(),
        variant=variant,
        model=folder,
    )
    table = Table("", "check", "found", "what to do", box=None, pad_edge=False)
    failed = 0
    for finding in checks.installed() if installed else checks.run(plan):
        failed += not finding.ok
        mark = "[green]ok[/]" if finding.ok else "[red]no[/]"
        table.add_row(mark, finding.name, finding.said, finding.remedy)
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
    if failed:
        typer.echo(f"{failed} {'checks fail' if failed > 1 else 'check fails'}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
