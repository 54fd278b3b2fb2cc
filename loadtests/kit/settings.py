"""The arguments that the scenarios add to locust's own, checked once and read as one value.

Read by session.py and users.py. Locust shows them in `--help` and in the form of its web UI.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from locust import events
from locust.argument_parser import LocustArgumentParser

from loadtests.kit import prompts, slo
from loadtests.kit.arrivals import Kind
from loadtests.kit.talk import Api, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a test was told."""

    target: Target
    objectives: tuple[slo.Objective, ...] = ()
    result: Path | None = None
    prompts: Path | None = None
    max_tokens: int | None = None
    seed: int = 0
    rate_per_user: float = 1.0
    arrivals: Kind = "poisson"
    metrics_urls: tuple[str, ...] = ()
    watch_pid: int | None = None
    options: argparse.Namespace = field(repr=False, default_factory=argparse.Namespace)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Read what locust parsed. Raises ValueError naming the argument and what is wrong with it."""
        host = (options.host or "").strip()
        api: Api = options.api or ("openai" if host.startswith(("http://", "https://")) else "grpc")
        if not options.rate_per_user > 0:
            raise ValueError(f"--rate-per-user must be above 0, got {options.rate_per_user:g}")
        given = Path(options.prompts) if options.prompts else None
        if given is not None:
            prompts.read(given, max_tokens=options.max_tokens or DEFAULT_TOKENS)
        return cls(
            target=Target(
                api=api,
                url=host,
                model=options.model or "",
                deadline=options.deadline,
                channels=options.channels,
                key=options.api_key or "",
            ),
            objectives=slo.parse(options.slo or ""),
            result=Path(options.result) if options.result else None,
            prompts=given,
            max_tokens=options.max_tokens or None,
            seed=options.seed,
            rate_per_user=options.rate_per_user,
            arrivals=options.arrivals,
            metrics_urls=(options.metrics_url,) if options.metrics_url else _metrics_urls(api, host),
            watch_pid=options.watch_pid or None,
            options=options,
        )


def _metrics_urls(api: str, host: str) -> tuple[str, ...]:
    """Where the engine's metrics may be: an HTTP host's own page, or Triton's behind it; of Triton the port above."""
    try:
        parts = urlsplit(host if api == "openai" else f"http://{host.rpartition('://')[2]}")
        name, port = parts.hostname, parts.port
    except ValueError:
        return ()
    if not name:
        return ()
    name = f"[{name}]" if ":" in name else name
    if api == "openai":
        own = f"{host.rstrip('/').removesuffix('/v1')}/metrics"
        return own, f"http://{name}:{TRITON_METRICS_PORT}/metrics"
    return (f"http://{name}:{port + 1}/metrics",) if port else ()


TRITON_METRICS_PORT = 8002
DEFAULT_TOKENS = 128
_SLO_HELP = (
    "e.g. 'ttft_p95<800ms, itl_p99<60ms, error_rate<1%%': judged at the end; the exit code is 1 if one is broken"
)
_METRICS_HELP = (
    "Prometheus page with vLLM's queue time; default: the port above a gRPC host's; /metrics of an HTTP one, or else "
    "port 8002 there, which is Triton's"
)


@events.init_command_line_parser.add_listener
def _add(parser: LocustArgumentParser) -> None:
    add = _group(parser, "Streaming load tests")
    add("--api", choices=("grpc", "openai"), default="", help="default: openai for a host with http://, else grpc")
    add("--model", default="", help="default: the first one that the server says is ready")
    add("--slo", default="", help=_SLO_HELP)
    add("--result", metavar="FILE", default="", help="write the result as JSON, which `-m loadtests.kit.plot` draws")
    add("--prompts", metavar="JSONL", default="", help='lines {"prompt": …} or {"messages": […]}, maybe "max_tokens"')
    add("--max-tokens", type=int, default=0, help="length of every answer, instead of the scenario's")
    add("--seed", type=int, default=0, help="equal seeds ask equal questions at equal times")
    add("--deadline", type=float, default=120.0, metavar="SECONDS", help="of one request; later, it has failed")
    add("--rate-per-user", type=float, default=1.0, help="requests/s that a user of an open loop stands for")
    add("--arrivals", choices=("poisson", "constant"), default="poisson", help="how an open loop spaces requests")
    add("--channels", type=int, default=4, help="gRPC connections of each locust process")
    add("--metrics-url", default="", help=_METRICS_HELP)
    add("--watch-pid", type=int, default=0, metavar="PID", help="watch the memory of this process and its children")
    key = add("--api-key", default="", env_var="LOADTEST_API_KEY", help="sent as a bearer token")
    key.include_in_web_ui = False  # its page would show it to everybody
    parser.set_defaults(stop_timeout="30")  # locust's 0 would cut off what is open, the slowest answers


def _group(parser: LocustArgumentParser, title: str) -> Callable[..., Any]:
    """Make a group of arguments; what is added shows in the web UI's form too, as locust's own `add_argument` does."""
    group: Any = parser.add_argument_group(title)

    def add(*names: str, **how: Any) -> Any:
        action = group.add_argument(*names, **how)
        action.include_in_web_ui, action.is_secret, action.is_required, action.is_multiple = True, False, False, False
        return action

    return add


def defaults(**values: object) -> None:
    """Give a scenario defaults of its own, under the names of locust's options (`num_users`, `run_time`, …)."""

    def put(parser: LocustArgumentParser) -> None:
        parser.set_defaults(**values)

    events.init_command_line_parser.add_listener(put)


def arguments(add: Callable[[Callable[..., Any]], object]) -> None:
    """Give a scenario arguments of its own: `add` is told how to add one, as argparse's add_argument."""

    def put(parser: LocustArgumentParser) -> None:
        add(_group(parser, "This scenario"))

    events.init_command_line_parser.add_listener(put)
