"""`tritonstream models`, and the command as a whole."""

from __future__ import annotations

import json

import pytest
from tritonstream.cli import app
from typer.testing import CliRunner

from tests.unit.client.scripted import ScriptedTriton


def test_models_are_listed_with_their_state(triton: ScriptedTriton) -> None:
    """Also those that are not ready, with the reason; markup in a name is text."""
    triton.models = [("[red]tiny", "READY"), ("big", "LOADING")]
    done = CliRunner().invoke(app, ["models", "--url", triton.url])
    assert done.exit_code == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[1:] == [["[red]tiny", "1", "READY"], ["big", "1", "LOADING", "still", "loading"]]


def test_models_as_json(triton: ScriptedTriton) -> None:
    """For scripts."""
    done = CliRunner().invoke(app, ["models", "--url", triton.url, "--json"])
    assert json.loads(done.stdout) == [{"name": "tiny", "version": "1", "state": "READY", "reason": ""}]


@pytest.mark.parametrize("arguments", [["--help"], ["chat", "--help"], ["generate", "-h"], ["models", "--help"]])
def test_help_is_there(arguments: list[str]) -> None:
    """Every command explains itself."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert "Usage" in done.stdout


def test_the_version_is_told() -> None:
    """Also from a source tree, where there may be none."""
    assert CliRunner().invoke(app, ["--version"]).exit_code == 0
