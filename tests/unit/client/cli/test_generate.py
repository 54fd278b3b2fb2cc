"""`tritonstream generate`: for people and for pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from tritonstream.cli import app
from typer.testing import CliRunner, Result

from tests.unit.client.scripted import ScriptedTriton, hangs, refuses, says

CLIENT = Path(__file__).parents[4] / "client"


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    """Run the command in this process."""
    return CliRunner(env={"TRITONSTREAM_URL": None, "TRITONSTREAM_MODEL": None}).invoke(app, arguments, input=stdin)


def test_the_answer_is_streamed_to_stdout_as_it_is(triton: ScriptedTriton) -> None:
    """Nothing is added for a pipe, and the only ready model is found."""
    triton.models = [("big", "LOADING"), ("tiny", "READY")]
    done = run("generate", "Hi", "--url", triton.url)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "Hello world", "")
    assert triton.calls[0].request.stream
    assert triton.calls[0].request.prompt == "Hi"
    assert triton.calls[0].message.model_name == "tiny"


def test_options_reach_the_server(triton: ScriptedTriton) -> None:
    """Sampling, deadline, chat and headers as they were typed."""
    done = run(
        *("generate", "Hi", "--url", triton.url, "--model", "m", "--no-stream", "--max-tokens", "3", "-t", "0"),
        *("--stop", "A", "--stop", "B", "--set", "min_p=0.5", "--set", 'bad_words=["x"]', "--deadline", "9"),
        *("--system", "Be brief", "--no-thinking", "-H", "X-Key=s=1"),
    )
    assert (done.exit_code, done.stdout) == (0, "Hello world")
    call = triton.calls[0]
    assert call.request.sampling == {
        "max_tokens": 3,
        "temperature": 0.0,
        "stop": ["A", "B"],
        "min_p": 0.5,
        "bad_words": ["x"],
    }
    assert call.request.prompt == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    assert call.request.chat == {"chat_template_kwargs": {"enable_thinking": False}}
    assert 8_000 < call.request.deadline_ms <= 9_000
    assert call.metadata["x-key"] == "s=1"
    assert not call.request.stream


def test_stdin_is_the_prompt_when_asked(triton: ScriptedTriton) -> None:
    """A dash reads it whole; what is no UTF-8 is refused."""
    assert run("generate", "-", "--url", triton.url, stdin="né\n").exit_code == 0
    assert triton.calls[0].request.prompt == "né\n"
    refused = run("generate", "-", "--url", triton.url, stdin=b"ab\xff")
    assert (refused.exit_code, len(triton.calls)) == (2, 1)
    assert "stdin is not valid UTF-8 at byte 2" in refused.stderr


def test_json_tells_all(triton: ScriptedTriton) -> None:
    """One object with choices, reasons and usage."""
    found = json.loads(run("generate", "Hi", "--url", triton.url, "--json").stdout)
    assert found["choices"][0]["text"] == "Hello world"
    assert found["choices"][0]["finish_reason"] == "stop"
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "cached_tokens": 4, "reasoning_tokens": 0}
    assert found["usage"] == usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "max_tokens must be a whole number from 1"),
        (["--set", "top_p"], "--set must be NAME=VALUE, got 'top_p'"),
        (["--set", "top_p=high"], "--set top_p: 'high' is not JSON"),
        (["--tls-cert", "/nowhere"], "go together"),
        (["--tls-root", "/nowhere"], "root_certificates: /nowhere cannot be read"),
        (["--deadline", "-1"], "deadline must be above 0"),
    ],
)
def test_what_the_caller_must_change_is_exit_code_2(triton: ScriptedTriton, arguments: list[str], message: str) -> None:
    """The message names the field, and nothing is sent."""
    done = run("generate", "Hi", "--url", triton.url, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert triton.calls == []


def test_several_models_must_be_told_apart(triton: ScriptedTriton) -> None:
    """The names to choose from are in the message."""
    triton.models = [("b", "READY"), ("a", "READY")]
    done = run("generate", "Hi", "--url", triton.url)
    assert done.exit_code == 2
    assert "several models are ready (a, b): choose one with --model" in done.stderr


def test_no_ready_model_is_the_servers_fault(triton: ScriptedTriton) -> None:
    """Its state is in the message."""
    triton.models = [("a", "LOADING")]
    done = run("generate", "Hi", "--url", triton.url)
    assert done.exit_code == 3
    assert "no model of this server is ready: a is LOADING" in done.stderr


def test_a_failing_server_is_exit_code_3(triton: ScriptedTriton) -> None:
    """What happened and what to do next."""
    triton.script(refuses(grpc.StatusCode.INTERNAL, "internal error"))
    done = run("generate", "Hi", "--url", triton.url)
    assert done.exit_code == 3
    assert "error: internal error" in done.stderr
    assert "The server's log says more" in done.stderr


def test_nobody_there_is_exit_code_3() -> None:
    """The advice names the address."""
    done = run("generate", "Hi", "--url", "127.0.0.1:1", "--model", "m")
    assert done.exit_code == 3
    assert "Is a server running at 127.0.0.1:1?" in done.stderr


def test_ctrl_c_ends_the_command_and_the_request(triton: ScriptedTriton) -> None:
    """What was said stays said, the exit code is the shell's own for it, and the server is told."""
    triton.script(hangs("Once"))
    command = [sys.executable, "-m", "tritonstream", "generate", "Hi", "--url", triton.url, "--model", "m"]
    environment = {**os.environ, "PYTHONPATH": str(CLIENT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"Once"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    assert triton.calls[0].left.wait(5)


def test_a_terminal_is_not_obeyed(triton: ScriptedTriton) -> None:
    """Escape sequences of a model are shown, not done; a pipe gets them as they are."""
    triton.script(says("\x1b]0;owned\x07"))
    assert run("generate", "Hi", "--url", triton.url).stdout == "\x1b]0;owned\x07"
    command = [sys.executable, "-m", "tritonstream", "generate", "Hi", "--url", triton.url, "--model", "m"]
    ours, theirs = os.openpty()
    try:
        environment = {**os.environ, "PYTHONPATH": str(CLIENT)}
        subprocess.run(command, stdout=theirs, env=environment, check=True, timeout=30)
        shown = os.read(ours, 1_000).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert shown == "\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}\r\n"
