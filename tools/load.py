"""Load from several client processes, and what they saw: the measuring end of `tools.bench`.

One Python client tops out near 5,000 messages a second and would measure itself, so the streams of a level are spread
over worker processes (`python -m tools.load`), which start together on a word from their parent. Every time is
CLOCK_MONOTONIC, in seconds, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

Path = Literal["triton", "serve", "openai", "langchain"]
Prompt = str | dict[str, Any]  # a text, or to Triton the fields of a request: the messages of a chat as its prompt

WARM_UP_TOKENS = 8

WORDS = """
    river stone light paper window garden silver morning cloud table story number signal forest engine bridge letter
    market color winter summer ocean mountain city village music school doctor teacher camera pencil orange yellow
    purple thunder island valley desert planet rocket circle square shadow mirror candle copper basket hammer ladder
    needle pocket ribbon saddle temple tunnel velvet wallet anchor beacon cactus dragon falcon
""".split()  # noqa: SIM905 - sixty quoted words would be harder to read


def prompts(count: int, words: int, seed: int) -> list[str]:
    """Make `count` different prompts of `words` common words: no two share a prefix that a cache could serve."""
    source = random.Random(seed)
    return [" ".join(source.choices(WORDS, k=words)) for _ in range(count)]


@dataclass(slots=True)
class Stream:
    """What one client saw of one request: when it sent it, when each message came, how many tokens it got."""

    sent: float
    messages: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one worker process is to do: a stream for each prompt, all at once or each `due` so many seconds later."""

    path: Path
    url: str
    model: str
    prompts: Sequence[Prompt]
    max_tokens: int
    due: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Level:
    """One load as its clients saw it; times in milliseconds, `None` where a path shows none (offline)."""

    streams: int
    max_tokens: int
    requests: int
    errors: int
    tokens: int
    seconds: float
    tokens_per_s: float
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    messages_per_request: float | None
    front_cpu_s_per_1k_tokens: float | None = None
    stub_cpu_s_per_1k_tokens: float | None = None
    server_cpu_s_per_1k_tokens: float | None = None
    ttft_mean: float | None = None
    ttft_sd: float | None = None
    gpu_percent: float | None = None
    first_error: str | None = None


def summarize(max_tokens: int, seen: Sequence[Stream]) -> Level:
    """Sum up streams that ran at once. A token's time is that of the message that brought it."""
    good = [stream for stream in seen if stream.error is None and stream.messages]
    tokens = sum(stream.tokens for stream in good)
    seconds = max(s.messages[-1] for s in good) - min(s.sent for s in good) if good else 0.0
    firsts = np.array([s.messages[0] - s.sent for s in good]) * 1e3
    gaps = [np.diff(s.messages) for s in good if len(s.messages) > 1]
    together = sum(s.tokens - len(s.messages) for s in good)  # tokens that came along with another: no gap at all
    between = np.concatenate([*gaps, np.zeros(max(together, 0))]) * 1e3 if gaps else np.zeros(0)
    return Level(
        streams=len(seen),
        max_tokens=max_tokens,
        requests=len(seen),
        errors=len(seen) - len(good),
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        ttft_p50=_percentile(firsts, 50),
        ttft_p99=_percentile(firsts, 99),
        itl_p50=_percentile(between, 50),
        itl_p99=_percentile(between, 99),
        messages_per_request=float(np.mean([len(s.messages) for s in good])) if good else None,
        ttft_mean=float(firsts.mean()) if good else None,
        ttft_sd=float(firsts.std()) if good else None,
        first_error=next((stream.error for stream in seen if stream.error is not None), None),
    )


def _percentile(values: Any, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def drive(
    path: Path,
    url: str,
    model: str,
    texts: Sequence[Prompt],
    max_tokens: int,
    processes: int,
    start: Callable[[], object],
    due: Sequence[float] = (),
) -> list[Stream]:
    """Run a stream for each prompt from worker processes, and return what they saw. Raises RuntimeError if one fails.

    `start` is called when all of them are connected and warm, before the first stream. `due` makes an open loop: each
    stream begins so many seconds after that, whatever becomes of the others, and its times count from then.
    """
    shares = [(texts[n::processes], due[n::processes]) for n in range(min(processes, len(texts)))]
    workers = [
        subprocess.Popen([sys.executable, "-m", "tools.load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in shares
    ]
    try:
        for worker, (share, times) in zip(workers, shares, strict=True):
            job = Job(path=path, url=url, model=model, prompts=share, max_tokens=max_tokens, due=times)
            _tell(worker, json.dumps(asdict(job)))
        for worker in workers:
            _hear(worker)  # connected
        start()
        for worker in workers:
            _tell(worker, "go")
        return [Stream(**stream) for worker in workers for stream in json.loads(_hear(worker))]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _tell(worker: subprocess.Popen[str], line: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(line + "\n")
    worker.stdin.flush()


def _hear(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"a load process ended early, with exit code {worker.wait()}")
    return line


Runner = Callable[[Prompt, int, Stream], Awaitable[None]]  # prompt, tokens at most, what was seen


@asynccontextmanager
async def _triton(job: Job) -> AsyncIterator[Runner]:
    from tritonstream import Request, Sampling
    from tritonstream_gateway.upstream import Address, Upstream  # grpc.aio takes several times the CPU for a message

    upstream = Upstream(Address(url=job.url))

    async def run(prompt: Prompt, max_tokens: int, seen: Stream) -> None:
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        fields = prompt if isinstance(prompt, dict) else {"prompt": prompt}
        async with upstream.answer(Request(**fields, model=job.model, sampling=sampling), stream=True) as answer:
            while deltas := await answer.batch():
                seen.messages += [time.monotonic()] * len(deltas)
                seen.tokens += sum(delta.num_output_tokens for delta in deltas)

    try:
        yield run
    finally:
        await upstream.close()


@asynccontextmanager
async def _serve(job: Job) -> AsyncIterator[Runner]:
    import aiohttp  # vLLM brings it; only this path needs it

    body = {"model": job.model, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        job.url, connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def run(prompt: Prompt, max_tokens: int, seen: Stream) -> None:
            request = body | {"prompt": prompt, "max_tokens": max_tokens}
            async with session.post("/v1/completions", json=request) as response:
                response.raise_for_status()
                async for line in response.content:
                    if b'"choices":[]' in line:
                        seen.tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                    elif line.startswith(b"data: {"):
                        seen.messages.append(time.monotonic())

        yield run


@asynccontextmanager
async def _openai(job: Job) -> AsyncIterator[Runner]:
    """The `openai` package, as applications use it."""
    from openai import AsyncOpenAI  # vLLM brings it

    async with AsyncOpenAI(base_url=f"{job.url}/v1", api_key="EMPTY", max_retries=0, timeout=None) as client:

        async def run(prompt: Prompt, max_tokens: int, seen: Stream) -> None:
            stream = await client.chat.completions.create(
                model=job.model,
                messages=[{"role": "user", "content": str(prompt)}],
                max_tokens=max_tokens,
                temperature=0.0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                if chunk.usage is not None:
                    seen.tokens = chunk.usage.completion_tokens
                if chunk.choices and chunk.choices[0].delta.content:
                    seen.messages.append(time.monotonic())

        yield run


@asynccontextmanager
async def _langchain(job: Job) -> AsyncIterator[Runner]:
    """LangChain's ChatOpenAI."""
    from langchain_openai import ChatOpenAI

    def chat(max_tokens: int) -> ChatOpenAI:
        return ChatOpenAI(
            model=job.model,
            base_url=f"{job.url}/v1",
            api_key="EMPTY",  # type: ignore[arg-type]  # it takes a text too
            max_completion_tokens=max_tokens,
            temperature=0.0,
            max_retries=0,
            timeout=None,
            stream_usage=True,
            extra_body={"ignore_eos": True},
        )

    chats = {count: chat(count) for count in (WARM_UP_TOKENS, job.max_tokens)}

    async def run(prompt: Prompt, max_tokens: int, seen: Stream) -> None:
        async for chunk in chats[max_tokens].astream(str(prompt)):
            if chunk.usage_metadata:
                seen.tokens = max(seen.tokens, chunk.usage_metadata["output_tokens"])
            if chunk.content:
                seen.messages.append(time.monotonic())

    yield run


RUNNERS = {"triton": _triton, "serve": _serve, "openai": _openai, "langchain": _langchain}


async def _observe(run: Runner, prompt: Prompt, max_tokens: int, due: float) -> Stream:
    if (wait := due - time.monotonic()) > 0:
        await asyncio.sleep(wait)
    seen = Stream(sent=due)  # a stream that this process was late with waited all the same
    try:
        await run(prompt, max_tokens, seen)
    except Exception as error:  # one broken stream is a figure in the report, not the end of the run
        seen.error = f"{type(error).__name__}: {error}"
    return seen


async def _work(job: Job, go: Callable[[], None]) -> list[Stream]:
    async with RUNNERS[job.path](job) as run:
        await run(
            "warm up", WARM_UP_TOKENS, Stream(sent=0.0)
        )  # connections, imports, the first call's work: not part of the figures
        await asyncio.to_thread(go)
        begin = time.monotonic()
        due = [begin + seconds for seconds in job.due] or [begin] * len(job.prompts)
        streams = zip(job.prompts, due, strict=True)
        return list(await asyncio.gather(*(_observe(run, prompt, job.max_tokens, at) for prompt, at in streams)))


def allow_files() -> None:
    """Allow this process and its children as many open files as it may: a stream of `vllm serve` is a socket."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Read a Job from standard input, answer "ready", wait for "go", answer with the streams."""
    job = Job(**json.loads(sys.stdin.readline()))

    def go() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    print(json.dumps([asdict(stream) for stream in asyncio.run(_work(job, go))]), flush=True)


if __name__ == "__main__":
    main()
