"""`tritonstream chat`: a conversation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from tritonstream.cli import app
from typer.testing import CliRunner, Result

from tests.unit.client.scripted import Call, ScriptedTriton, hangs, refuses, says

CLIENT = Path(__file__).parents[4] / "client"


def chat(triton: ScriptedTriton, *lines: str, options: tuple[str, ...] = ()) -> Result:
    """Type these lines, then Ctrl-D."""
    typed = "".join(line + "\n" for line in lines)
    return CliRunner().invoke(app, ["chat", "--url", triton.url, "--model", "m", *options], input=typed)


def test_it_remembers_what_was_said(triton: ScriptedTriton) -> None:
    """The second turn carries the first, under the system message."""
    triton.script(says("I am", " well"), says("Bye"))
    done = chat(triton, "How are you?", "", "Good bye", options=("--system", "Be brief"))
    assert done.exit_code == 0
    assert "I am well" in done.stdout
    assert triton.calls[1].request.prompt == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "I am well"},
        {"role": "user", "content": "Good bye"},
    ]
    assert len(triton.calls) == 2


def test_reset_forgets_all_but_the_system_message(triton: ScriptedTriton) -> None:
    """A new conversation under the same rules."""
    chat(triton, "One", "/reset", "Two", options=("--system", "Be brief"))
    assert [message["content"] for message in triton.calls[1].request.prompt] == ["Be brief", "Two"]


def test_commands_are_not_sent(triton: ScriptedTriton) -> None:
    """/help tells what can be typed, and so does a command that does not exist; /quit leaves."""
    done = chat(triton, "/help", "/nonsense", "/quit", "never read")
    assert done.exit_code == 0
    assert "/reset  forget the conversation" in done.stdout
    assert "/nonsense is nothing I know" in done.stdout
    assert triton.calls == []


def test_a_failed_turn_is_as_if_it_had_not_been(triton: ScriptedTriton) -> None:
    """The error is shown and the conversation goes on without it."""
    triton.script(refuses(grpc.StatusCode.INVALID_ARGUMENT, "the prompt is too long"), says("Fine"))
    done = chat(triton, "x", "y")
    assert done.exit_code == 0
    assert "the prompt is too long" in done.stderr
    assert [message["content"] for message in triton.calls[1].request.prompt] == ["y"]


def test_a_cut_answer_is_marked(triton: ScriptedTriton) -> None:
    """The reader learns that the model was not done, and markup of the model is text."""

    def script(call: Call) -> Iterator[Any]:
        yield call.reply("[bold]Once", final=True, reason="length")

    triton.script(script)
    done = chat(triton, "x")
    assert "[bold]Once" in done.stdout
    assert "(cut: the limit of tokens was reached)" in done.stdout


def test_wrong_options_end_it_before_it_starts(triton: ScriptedTriton) -> None:
    """Not at the first turn, when something was already typed."""
    done = chat(triton, "x", options=("--deadline", "-1"))
    assert done.exit_code == 2
    assert "deadline must be above 0" in done.stderr


def test_ctrl_c_stops_the_answer_and_not_the_program(triton: ScriptedTriton) -> None:
    """The server is told, what was said stays in the conversation, and the next turn works."""
    triton.script(hangs("Once upon"), says("Bye"))
    command = [sys.executable, "-u", "-m", "tritonstream", "chat", "--url", triton.url, "--model", "m"]
    environment = {**os.environ, "PYTHONPATH": str(CLIENT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("Tell me\n")
        said = ""
        while "Once upon" not in said:
            said += process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert triton.calls[0].left.wait(5)
        while "(stopped)" not in said:
            said += process.stdout.read(1)
        process.stdin.write("Go on\n/quit\n")
        assert "Bye" in process.stdout.read()
        assert process.wait(10) == 0
    assert [message["content"] for message in triton.calls[1].request.prompt] == ["Tell me", "Once upon", "Go on"]
