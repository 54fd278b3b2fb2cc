"""How many streamed messages a second one core receives: ways a load generator could be built, and the one that is.

`python -m tools.generators compare` runs each way in a process of its own against `tools.fastserver`;
`python -m tools.generators locust` runs the load tests themselves. What counts is messages for each CPU second, which a
busy machine changes less than messages a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tools import report, server

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
WAYS = ("asyncio", "uvloop", "threads", "threads-1", "gevent", "gevent-1")
START_S = 60.0
# gRPC's option to let the thread that reads a stream poll for it: no other thread has to wake it.
SINGLE = {"SingleThreadedUnaryStream": 1}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What one process received: messages a second, and messages for each second of CPU that it spent."""

    way: str
    messages: int
    messages_per_s: float
    messages_per_cpu_s: float

    @property
    def told(self) -> str:
        """One row of a table."""
        return f"| {self.way} | {self.messages_per_s:,.0f} | {self.messages_per_cpu_s:,.0f} |"


@contextlib.contextmanager
def fast_server(processes: int, tokens: int, pace: float) -> Iterator[str]:
    """Run `tools.fastserver` in so many processes; yields its address."""
    port = server.free_port()
    command = [sys.executable, "-m", "tools.fastserver", str(port), "--tokens", str(tokens), "--pace", str(pace)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    try:
        for process in running:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the fast server ended with exit code {process.wait()}")
        yield f"127.0.0.1:{port}"
    finally:
        for process in running:
            process.kill()
            process.communicate()


def measured(way: str, url: str, streams: int, requests: int) -> Speed:
    """Read `requests` answers, `streams` at once, in this process and this way."""
    if way in ("asyncio", "uvloop"):
        return _asynchronous(way, url, streams, requests)
    spawn: Callable[[Callable[[], None]], Any]
    if way.startswith("gevent"):
        from gevent import monkey

        monkey.patch_all()
        import grpc.experimental.gevent

        grpc.experimental.gevent.init_gevent()
        from gevent import spawn
    else:
        import threading

        def spawn(run: Callable[[], None]) -> Any:
            thread = threading.Thread(target=run)
            thread.start()
            return thread

    from tritonstream import Client

    counts: list[int] = []
    with Client(url, channels=4, options=SINGLE if way.endswith("-1") else None) as client:

        def read(answers: int) -> int:
            count = 0
            for _ in range(answers):
                with client.stream("x", model="m") as deltas:
                    count += sum(1 for _ in deltas)
            return count

        read(1)
        begin, cpu = time.monotonic(), time.process_time()
        running = [spawn(lambda: counts.append(read(requests // streams))) for _ in range(streams)]
        for one in running:
            one.join()
        return _speed(way, sum(counts), begin, cpu)


def _asynchronous(way: str, url: str, streams: int, requests: int) -> Speed:
    from tritonstream import AsyncClient

    async def run() -> Speed:
        async with AsyncClient(url, channels=4) as client:

            async def read(answers: int) -> int:
                count = 0
                for _ in range(answers):
                    async with client.stream("x", model="m") as deltas:
                        async for _ in deltas:
                            count += 1
                return count

            await read(1)
            begin, cpu = time.monotonic(), time.process_time()
            counts = await asyncio.gather(*(read(requests // streams) for _ in range(streams)))
            return _speed(way, sum(counts), begin, cpu)

    if way == "asyncio":
        return asyncio.run(run())
    import uvloop

    return uvloop.run(run())


def _speed(way: str, messages: int, begin: float, cpu: float) -> Speed:
    seconds, spent = time.monotonic() - begin, time.process_time() - cpu
    return Speed(
        way=way, messages=messages, messages_per_s=messages / seconds, messages_per_cpu_s=messages / max(spent, 1e-9)
    )


def of_locust(streams: int, seconds: int, tokens: int, pace: float, servers: int) -> Speed:
    """Run the steady scenario in one locust process, and read what its driver received in its best second."""
    with tempfile.TemporaryDirectory() as folder, fast_server(servers, tokens, pace) as url:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "locust", "-f", "loadtests/steady.py", "--headless", "--host", url]
        command += ["--model", "any", "-u", str(streams), "-r", str(streams), "-t", f"{seconds}s", "-s", "0"]
        command += ["--only-summary", "--loglevel", "WARNING", "--result", str(result)]
        subprocess.run(command, check=False, timeout=seconds + START_S, capture_output=True)
        generator = json.loads(result.read_text())["generator"]
    return Speed(
        way="locust, the load tests' driver",
        messages=generator["messages"],
        messages_per_s=generator["messages_per_s"],
        messages_per_cpu_s=generator["messages"] / max(generator["cpu_seconds"], 1e-9),
    )


@app.command()
def compare(
    streams: Annotated[int, typer.Option(min=1, help="streams at once")] = 320,
    answers: Annotated[int, typer.Option(min=1, help="answers that each of them reads, one after the other")] = 2,
    tokens: Annotated[int, typer.Option(min=2)] = 64,
    pace: Annotated[float, typer.Option(min=0, help="seconds from one token to the next")] = 0.03,
    servers: Annotated[int, typer.Option(min=1, help="processes of the server")] = 2,
) -> None:
    """Compare the ways, one after the other."""
    where = report.machine()
    typer.echo(f"{where['date']}, {where['cpu']}, {where['cores']} cores; {streams} streams, a message each {pace} s\n")
    typer.echo("| way | messages/s | messages per CPU second |\n|---|---:|---:|")
    with fast_server(servers, tokens, pace) as url:
        for way in WAYS:
            command = [sys.executable, "-m", "tools.generators", "one", way, url, str(streams), str(streams * answers)]
            output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
            typer.echo(Speed(**json.loads(output.splitlines()[-1])).told)


@app.command(hidden=True)
def one(way: str, url: str, streams: int, requests: int) -> None:
    """Measure one way, in this process."""
    typer.echo(json.dumps(asdict(measured(way, url, streams, requests))))


@app.command()
def locust(
    streams: Annotated[int, typer.Option(min=1, help="streams at once")] = 400,
    seconds: Annotated[int, typer.Option(min=2)] = 15,
    tokens: Annotated[int, typer.Option(min=2)] = 128,
    pace: Annotated[float, typer.Option(min=0, help="seconds from one token to the next")] = 0.03,
    servers: Annotated[int, typer.Option(min=1, help="processes of the server")] = 2,
) -> None:
    """Measure the load tests themselves: one locust process and its driver."""
    where = report.machine()
    typer.echo(f"{where['date']}, {where['cpu']}, {where['cores']} cores; {streams} streams, a message each {pace} s\n")
    typer.echo("| way | messages/s, best second | messages per CPU second |\n|---|---:|---:|")
    typer.echo(of_locust(streams, seconds, tokens, pace, servers).told)


if __name__ == "__main__":
    app()
