"""`tritonstream chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from rich.console import Console

from tritonstream.cli import options
from tritonstream.cli.failure import exits, tell
from tritonstream.cli.screen import harmless
from tritonstream.cli.server import choose_model
from tritonstream.errors import TritonstreamError
from tritonstream.request import Message, Request
from tritonstream.sync import Client

_HELP = """/reset  forget the conversation
/help   show this
/quit   leave (so does Ctrl-D)
Ctrl-C stops an answer; what was said of it stays in the conversation."""


def chat(
    url: options.Url = options.DEFAULT_URL,
    model: options.Model = None,
    system: options.System = None,
    thinking: options.Thinking = None,
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
    """Talk to a model. It remembers what was said; /help lists what else can be typed."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives the prompt its editing and its history
    with exits(url):
        sampling = options.sampling(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop, more=more
        )
        tls = options.tls(encrypt, tls_root, tls_cert, tls_key, tls_authority)
        with Client(url, tls=tls, metadata=options.headers(header)) as client:
            name = choose_model(client, model)
            opening = (Message(role="system", content=system),) if system is not None else ()
            first = Request(
                prompt=(*opening, Message(role="user", content="-")),  # each turn brings its own; checks the rest now
                model=name,
                sampling=sampling,
                chat_template_kwargs=options.template_kwargs(thinking),
                deadline=deadline,
            )
            Conversation(client, first, opening, url).run()


class Conversation:
    """What was said so far, and the loop that goes on with it. `request` holds all but the messages of each turn."""

    def __init__(self, client: Client, request: Request, opening: tuple[Message, ...], url: str) -> None:
        self._client = client
        self._request = request
        self._opening = opening
        self._said = list(opening)
        self._url = url
        self._console = Console(highlight=False, soft_wrap=True)

    def run(self) -> None:
        """Read and answer until the user leaves."""
        self._note(f"Talking to {self._request.model} at {self._url}. /help for help, /quit to leave.")
        while True:
            try:
                line = input("> ").strip()  # not rich's, whose prompt readline does not know of and wipes out
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print()
                self._note("/quit or Ctrl-D leaves.")
                continue
            if line == "/quit":
                return
            if line == "/reset":
                self._said = list(self._opening)
                self._note("Forgotten.")
            elif line == "/help":
                self._note(_HELP)
            elif line.startswith("/") and " " not in line:
                self._note(f"{line} is nothing I know. {_HELP}")
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        """Stream one answer and remember both sides of the turn; a turn that failed is as if it had not been."""
        turn = [*self._said, Message(role="user", content=line)]
        spoken: list[str] = []
        reason: str | None = "stopped"
        try:
            with self._client.stream(replace(self._request, prompt=turn)) as deltas:
                for delta in deltas:
                    spoken.append(delta.text)
                    self._console.print(harmless(delta.reasoning), end="", markup=False, style="dim")
                    self._console.print(harmless(delta.text), end="", markup=False)
                    reason = delta.finish_reason
        except KeyboardInterrupt:
            reason = "stopped"
        except TritonstreamError as error:
            if spoken:
                self._console.print()
            tell(error, self._url)
            return
        self._console.print()
        if reason == "length":
            self._note("(cut: the limit of tokens was reached)")
        elif reason == "stopped":
            self._note("(stopped)")
        if spoken:
            self._said = [*turn, Message(role="assistant", content="".join(spoken))]

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)
