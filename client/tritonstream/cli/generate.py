"""`tritonstream generate`: one prompt, one answer, for people and for pipes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from tritonstream.cli import options
from tritonstream.cli.failure import exits
from tritonstream.cli.screen import harmless
from tritonstream.cli.server import choose_model
from tritonstream.errors import InvalidRequest
from tritonstream.request import Message, Prompt, Request
from tritonstream.sync import Client


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to go on with; - reads it from stdin.")],
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message, through the model's chat template.")
    ] = False,
    system: options.System = None,
    thinking: options.Thinking = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Write text as it comes, or once.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: choices, reasons, usage.")] = False,
    url: options.Url = options.DEFAULT_URL,
    model: options.Model = None,
    encrypt: options.Encrypt = False,
    tls_root: options.TlsRoot = None,
    tls_cert: options.TlsCertificate = None,
    tls_key: options.TlsKey = None,
    tls_authority: options.TlsAuthority = None,
    header: options.Header = None,
    deadline: options.Deadline = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    more: options.More = None,
) -> None:
    """Let a model go on with PROMPT and write its answer to stdout.

    Without --chat, --system or --thinking the model gets PROMPT as it is; an instruct model answers better with --chat.
    """
    with exits(url):
        sampling = options.sampling(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop, more=more
        )
        tls = options.tls(encrypt, tls_root, tls_cert, tls_key, tls_authority)
        text = _read_stdin() if prompt == "-" else prompt
        chat = as_chat or system is not None or thinking is not None
        with Client(url, tls=tls, metadata=options.headers(header)) as client:
            request = Request(
                prompt=_messages(text, system) if chat else text,
                model=choose_model(client, model),
                sampling=sampling,
                chat_template_kwargs=options.template_kwargs(thinking),
                deadline=deadline,
            )
            if as_json:
                _write(json.dumps(asdict(client.generate(request)), ensure_ascii=False) + "\n")
            elif stream and (sampling.n or 1) == 1:
                with client.stream(request) as deltas:
                    for delta in deltas:
                        _write(delta.text)
                _end_line()
            else:
                _write("\n".join(choice.text for choice in client.generate(request).choices))
                _end_line()


def _messages(text: str, system: str | None) -> Prompt:
    opening = [Message(role="system", content=system)] if system is not None else []
    return [*opening, Message(role="user", content=text)]


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not valid UTF-8 at byte {error.start}") from error


def _write(text: str) -> None:
    """Write as it is to a pipe, and made harmless to a terminal."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _end_line() -> None:
    if sys.stdout.isatty():
        _write("\n")
