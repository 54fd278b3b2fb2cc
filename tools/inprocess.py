"""A model without a server: vLLM's `LLM.generate` (offline) and AsyncLLM, and the pipeline of Transformers.

Run by `tools.ways` in a process of its own: `python -m tools.inprocess offline|async|transformers` reads loads from
standard input and writes a Level for each to standard output.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from tools.load import Level, Stream, summarize

Run = Callable[[Sequence[str], int], list[Stream]]


def offline(arguments: dict[str, Any]) -> Run:
    """Return what runs prompts through `LLM.generate`: each answer is one message, at the end of the whole batch."""
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)

    def run(texts: Sequence[str], max_tokens: int) -> list[Stream]:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        sent = time.monotonic()
        answers = llm.generate(list(texts), sampling, use_tqdm=False)
        end = time.monotonic()
        return [Stream(sent=sent, messages=[end], tokens=len(answer.outputs[0].token_ids)) for answer in answers]

    return run


def asynchronous(arguments: dict[str, Any]) -> Run:
    """Return what streams prompts from AsyncLLM, each read by a task of the same event loop."""
    import uvloop
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)

    async def start() -> AsyncLLM:
        # With a server's limits, where none are given: those of an engine by itself are lower.
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.OPENAI_API_SERVER)

    llm = loop.run_until_complete(start())

    async def one(number: int, text: str, max_tokens: int) -> Stream:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        seen = Stream(sent=time.monotonic())
        async for output in llm.generate(text, sampling, f"{number}-{seen.sent}"):
            seen.messages.append(time.monotonic())
            seen.tokens += len(output.outputs[0].token_ids)
        return seen

    async def all_of(texts: Sequence[str], max_tokens: int) -> list[Stream]:
        return list(await asyncio.gather(*(one(number, text, max_tokens) for number, text in enumerate(texts))))

    return lambda texts, max_tokens: loop.run_until_complete(all_of(texts, max_tokens))


def transformers(arguments: dict[str, Any]) -> Run:
    """Return what runs prompts, as chats, through a text-generation pipeline: all of a load in one batch.

    A pipeline streams one request alone; the time of a batch's tokens is that of the step which made them.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, pipeline

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder, dtype = arguments["model"], getattr(torch, arguments["dtype"])
    if arguments.get("load_format") == "dummy":
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).to(device)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    model.generation_config.update(do_sample=False, temperature=None, top_p=None, top_k=None, max_length=None)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device=device)

    class Clock(StoppingCriteria):  # type: ignore[misc]  # transformers is not there where types are checked
        """Asked after each step whether to stop; notes when that was."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            if device == "cuda":
                torch.cuda.synchronize()
            self.times.append(time.monotonic())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def run(texts: Sequence[str], max_tokens: int) -> list[Stream]:
        chats = [[{"role": "user", "content": text}] for text in texts]
        clock = Clock()
        sent = time.monotonic()
        limits = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens}
        pipe(chats, batch_size=len(chats), stopping_criteria=[clock], return_full_text=False, **limits)
        return [Stream(sent=sent, messages=list(clock.times), tokens=len(clock.times)) for _ in chats]

    return run


def measure(run: Run, texts: Sequence[str], max_tokens: int, *, shows_times: bool) -> Level:
    """Run one load and sum it up, with the CPU seconds that this process spent on it."""
    before = time.process_time()
    level = summarize(max_tokens, run(texts, max_tokens))
    level = replace(level, front_cpu_s_per_1k_tokens=(time.process_time() - before) / level.tokens * 1e3)
    if shows_times:
        return level
    return replace(level, ttft_p50=None, ttft_p99=None, itl_p50=None, itl_p99=None, messages_per_request=None)


def main(kind: str) -> None:
    """Read engine arguments, answer "ready"; then read loads, a JSON line each, and answer each with its Level."""
    arguments = json.loads(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM's log goes to standard error: standard output carries the results alone
    run = {"offline": offline, "async": asynchronous, "transformers": transformers}[kind](arguments)
    # As `vllm serve` does: else a collection of all that the imports left (0.4 s of CPU) falls on some load by chance.
    gc.collect()
    gc.freeze()
    print("ready", file=out)
    for line in sys.stdin:
        load = json.loads(line)
        level = measure(run, load["texts"], load["max_tokens"], shows_times=kind != "offline")
        print(json.dumps(asdict(level)), file=out)
    os._exit(0)  # vLLM's teardown may abort after the results are out, and has nothing left to save


if __name__ == "__main__":
    main(sys.argv[1])
