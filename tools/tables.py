"""The tables of README and docs, written from the committed reports between two markers, so that they cannot drift.

`python -m tools.tables` writes them, `--check` compares: it is a part of `make lint`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tools import capacity, deployments, report, tune, variants_report
from tools.environment import ROOT

REPORTS = ROOT / "docs" / "benchmarks"
KINDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "headline": report.headline,
    "table": report.markdown,
    "variants": variants_report.table,
    "deployments": deployments.markdown,
    "tuning": tune.tabulate,
    "capacity": capacity.table,
}
TABLES = (  # file, kind, report
    ("README.md", "headline", "h200"),
    ("docs/benchmarks.md", "table", "h200"),
    ("docs/benchmarks.md", "table", "h200-stubs"),
    ("docs/variants.md", "variants", "variants-cpu"),
    ("docs/variants.md", "variants", "variants-h200"),
    ("docs/benchmarks.md", "deployments", "deployments-cpu"),
    ("docs/benchmarks.md", "deployments", "deployments-h200"),
    ("docs/benchmarks.md", "tuning", "tune-cpu"),
    ("docs/benchmarks.md", "tuning", "tune-h200"),
    ("deploy/capacity.md", "capacity", "h200"),
)


class NoMarkers(Exception):
    """A file lacks the lines between which its table belongs."""


def filled(text: str, kind: str, name: str) -> str:
    """Return `text` with a report's table between its markers; raises NoMarkers."""
    begin, end = f"<!-- {kind} of {name}.json: `python -m tools.tables` -->\n", f"<!-- end of {name}.json -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise NoMarkers(f"the lines {begin.strip()} and {end} are wanted")
    source = REPORTS / f"{name}.json"
    table = f"Not measured yet: {source.relative_to(ROOT)} is not there.\n"
    if source.is_file():
        table = KINDS[kind](json.loads(source.read_text(encoding="utf-8")))
    return f"{before}{begin}{table}{end}{after}"


def main(
    check: Annotated[bool, typer.Option("--check", help="compare only; exit 1 when a file differs")] = False,
) -> None:
    """Write the tables of README and docs, or compare them."""
    stale = []
    for file, kind, name in TABLES:
        path: Path = ROOT / file
        text = path.read_text(encoding="utf-8")
        try:
            wanted = filled(text, kind, name)
        except NoMarkers as error:
            typer.echo(f"{file}: {error}", err=True)
            raise typer.Exit(1) from error
        if wanted != text:
            stale.append(file)
            if not check:
                path.write_text(wanted, encoding="utf-8")
    if check and stale:
        typer.echo(f"{', '.join(stale)} differ from the reports: run `python -m tools.tables`", err=True)
        raise typer.Exit(1)
    typer.echo(f"{len(TABLES)} tables {'as the reports say' if check or not stale else 'written'}")


if __name__ == "__main__":
    typer.run(main)
