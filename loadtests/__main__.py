"""`python -m loadtests`: what scenarios there are, and any of them by its name, with locust's arguments and its own."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent


def scenarios() -> dict[str, str]:
    """The scenarios by name, and what each says of itself."""
    files = sorted(path for path in HERE.glob("*.py") if not path.stem.startswith("__"))
    return {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in files}


def show() -> None:
    """List the scenarios."""
    table = Table("scenario", "what it is", box=None, title_justify="left")
    for name, said in scenarios().items():
        table.add_row(name, said)
    console = Console(highlight=False)
    console.print("python -m loadtests SCENARIO --host 127.0.0.1:8001 [--headless] …   over gRPC, with our client")
    console.print("python -m loadtests SCENARIO --host http://127.0.0.1:9000 …         OpenAI-compatible, over SSE")
    console.print("The same as `locust -f loadtests/SCENARIO.py …`; SCENARIO --help says what else it takes.\n")
    console.print(table)


def explain(scenario: Path) -> None:
    """Say what arguments a scenario takes beside locust's, which shows none of them in its own help."""
    from locust.argument_parser import get_parser
    from locust.util.load_locustfile import load_locustfile

    load_locustfile(str(scenario))
    formatter = get_parser()._get_formatter()
    formatter.add_usage(f"python -m loadtests {scenario.stem} [arguments of locust, see locust --help]", [], [])
    formatter.add_text(scenarios()[scenario.stem])
    for group in get_parser()._action_groups:
        if group.title in ("Streaming load tests", "This scenario"):
            formatter.start_section(group.title)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
    formatter.add_text(
        "Of locust's: --headless (no web UI), -u users, -t how long, --csv PREFIX, --html FILE, --processes N; "
        "-s seconds to wait for open answers at the end (30)."
    )
    print(formatter.format_help())


def main() -> int:
    """Run the command line; returns the exit code."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        show()
        return 0
    name, *rest = sys.argv[1:]
    if name not in scenarios():
        print(f"there is no scenario {name!r}; there are {', '.join(scenarios())}", file=sys.stderr)
        return 2
    scenario = HERE / f"{name}.py"
    if {"-h", "--help"} & set(rest):
        explain(scenario)
        return 0
    path = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "locust", "-f", str(scenario), *rest]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})


if __name__ == "__main__":
    sys.exit(main())
