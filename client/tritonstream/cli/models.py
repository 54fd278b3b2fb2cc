"""`tritonstream models`: what a server has."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tritonstream.cli import options
from tritonstream.cli.failure import exits
from tritonstream.sync import Client


def models(
    url: options.Url = options.DEFAULT_URL,
    encrypt: options.Encrypt = False,
    tls_root: options.TlsRoot = None,
    tls_cert: options.TlsCertificate = None,
    tls_key: options.TlsKey = None,
    tls_authority: options.TlsAuthority = None,
    header: options.Header = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the models of a server and whether they take requests."""
    with exits(url):
        tls = options.tls(encrypt, tls_root, tls_cert, tls_key, tls_authority)
        with Client(url, tls=tls, metadata=options.headers(header)) as client:
            found = client.models()
    if as_json:
        typer.echo(json.dumps([asdict(model) for model in found], ensure_ascii=False))
        return
    table = Table("MODEL", "VERSION", "STATE", "REASON", box=None, pad_edge=False)
    for model in found:
        table.add_row(
            escape(model.name),
            escape(model.version),
            f"[{'green' if model.ready else 'yellow'}]{escape(model.state or 'not loaded')}[/]",
            escape(model.reason),
        )
    Console().print(table)
