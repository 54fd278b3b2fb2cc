"""What streaming costs, held against a committed figure: the CPU seconds of Triton's front end, over AsyncLLM's.

Read by `tools.bench gate` and tests/integration/test_cost.py; and by `tools.bench gateway`, which holds the gateway
against the API server of `vllm serve` in the same way. Tokens per second say little on a machine whose two cores
engine, server and client fight for; the CPU seconds that a token takes say what the code does, if it always does the
same. So the engine is paced (`tools.paced`): senders keep up, no two tokens coalesce, and every token is a message of
its own. What still moves the CPU seconds (a cold cache, a slower core) moves the other way's too, measured in turn in
the same run: their ratio is what is held.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.configs import CPU_ARGUMENTS
from tools.load import Level
from tools.ways import ROOT, Setting, way

FIGURE = ROOT / "docs" / "benchmarks" / "cost.json"
COMMAND = "python -m tools.bench gate --update"
TOLERANCE = 1.2  # times the committed ratio
GATEWAY_MOST = 0.5  # what the gateway itself may take of what the API server of `vllm serve` does
STREAMS, MAX_TOKENS = 64, 40
ROUNDS, SPARE_ROUNDS = 5, 5
CHAT_MOST = 1.1  # times what the same tokens cost as a text
CHAT_ROUNDS, CHAT_TOKENS = 5, 128  # tokens as in `tools.bench paths`: what a request costs once is spread over them
CHATS = {"plain": "sum", "thinking": "sum-thinking", "with tools": "no-call", "calling a tool": "weather"}
WHOLE = 0.98  # messages for a token in a round that counts: below, the machine was so busy that tokens coalesced
ENGINE = CPU_ARGUMENTS | {
    "max_model_len": 1_024,
    "max_num_seqs": STREAMS,
    "scheduler_cls": "tools.paced.Paced",
    "async_scheduling": False,  # its scheduler is another class
}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Round:
    """CPU seconds per 1,000 tokens of both ways, one after the other."""

    front: float
    base: float

    @property
    def ratio(self) -> float:
        """How many times the base's."""
        return self.front / self.base


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What was measured: the rounds that count, and how many did not; `base` is the name of what it is compared to."""

    base: str
    rounds: tuple[Round, ...]
    void: int

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(one.ratio for one in self.rounds)

    def described(self) -> str:
        """Say the ratio, and how far apart the rounds were."""
        ratios = sorted(one.ratio for one in self.rounds)
        front = statistics.median(one.front for one in self.rounds)
        base = statistics.median(one.base for one in self.rounds)
        return (
            f"{self.ratio:.2f} times the CPU of {self.base} ({front:.3f} and {base:.3f} s per 1,000 tokens), median of "
            f"{len(ratios)} rounds from {ratios[0]:.2f} to {ratios[-1]:.2f}, {self.void} void"
        )


class TooBusy(Exception):
    """The machine is too busy to measure: tokens coalesced in too many rounds."""


def measure(out: Path, tell: Callable[[str], object], front: str = "triton", base: str = "async") -> Cost:
    """Load two ways over the tests' tiny model and ask them in turn; logs go to `out`. Raises TooBusy.

    The front is Triton or the gateway: a server ends with the thread that launched it, so it is launched in this one.
    """
    from tests.support import tiny_qwen3  # the model is the tests' own, as the gate is one of them

    model = tiny_qwen3.ensure(Path(sys.executable))
    story = tiny_qwen3.case("story")  # it begins with words: half a character would not be a message
    prompt = tiny_qwen3.prompt(story.messages, enable_thinking=story.enable_thinking)
    setting = Setting(arguments=ENGINE | {"model": str(model)}, processes=1, environment=ENVIRONMENT)
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        tell("loading the model twice")
        with ThreadPoolExecutor(1) as aside:
            other = aside.submit(stack.enter_context, way(base, setting, out / f"{base}.log"))
            ways = {front: stack.enter_context(way(front, setting, out / f"{front}.log"))}
            ways[base] = other.result()

        def cost(name: str) -> Level:
            level = ways[name].run([prompt] * STREAMS, MAX_TOKENS)
            if level.errors:
                raise RuntimeError(f"{name}: {level.errors} of {level.requests} failed: {level.first_error}")
            return level

        rounds: list[Round] = []
        void = 0
        for number in range(1 + ROUNDS + SPARE_ROUNDS):
            tell(f"round {number}: {len(rounds)} of {ROUNDS} measured")
            compared, level = cost(base), cost(front)
            if number == 0:
                continue  # the first calls' work
            if (level.messages_per_request or 0) < WHOLE * MAX_TOKENS:
                void += 1
                continue
            assert level.front_cpu_s_per_1k_tokens and compared.front_cpu_s_per_1k_tokens
            rounds.append(Round(front=level.front_cpu_s_per_1k_tokens, base=compared.front_cpu_s_per_1k_tokens))
            if len(rounds) == ROUNDS:
                return Cost(base=base, rounds=tuple(rounds), void=void)
    raise TooBusy(f"only {len(rounds)} of {ROUNDS + SPARE_ROUNDS} rounds had every token in a message of its own")


@dataclass(frozen=True, kw_only=True)
class ChatCost:
    """CPU seconds per 1,000 tokens of a text and of the same prompt as a chat, one after the other, round by round."""

    rounds: tuple[tuple[float, float], ...]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(chat / text for text, chat in self.rounds)

    def described(self) -> str:
        """Say the ratio, and how far apart the rounds were."""
        ratios = sorted(chat / text for text, chat in self.rounds)
        text, chat = (statistics.median(column) for column in zip(*self.rounds, strict=True))
        return (
            f"{self.ratio:.3f} times a text's CPU ({chat:.3f} and {text:.3f} s per 1,000 tokens), median of "
            f"{len(ratios)} rounds from {ratios[0]:.2f} to {ratios[-1]:.2f}"
        )


def measure_chat(out: Path, tell: Callable[[str], object]) -> dict[str, ChatCost]:
    """Ask Triton for the same tokens as text and as chat, in turn: plain, thinking, with tools, calling one."""
    from tests.support import servers, tiny_qwen3

    model = tiny_qwen3.ensure(Path(sys.executable))
    arguments = ENGINE | {"model": str(model), "reasoning_parser": "qwen3"}
    setting = Setting(
        arguments=arguments, processes=1, environment=ENVIRONMENT, tool_call_parser=servers.TOOL_CALL_PARSER
    )
    out.mkdir(parents=True, exist_ok=True)
    rounds: dict[str, list[tuple[Level, Level]]] = {name: [] for name in CHATS}
    with way("triton", setting, out / "triton.log") as triton:
        for number in range(1 + CHAT_ROUNDS):
            for name, known in CHATS.items():
                tell(f"round {number} of {CHAT_ROUNDS}: {name}")
                one = tiny_qwen3.case(known)
                text = tiny_qwen3.prompt(one.messages, enable_thinking=one.enable_thinking, tools=one.tools)
                chat = {"prompt": one.messages, "chat_template_kwargs": one.template_kwargs, "tools": one.tools or None}
                levels = [triton.run([prompt] * STREAMS, CHAT_TOKENS) for prompt in (text, chat)]
                failed = next((level.first_error for level in levels if level.errors), None)
                if failed:
                    raise RuntimeError(f"{name}: {failed}")
                if number:  # not the first calls' work
                    rounds[name].append((levels[0], levels[1]))
    return {name: ChatCost(rounds=_undisturbed(found)) for name, found in rounds.items()}


def _undisturbed(rounds: list[tuple[Level, Level]]) -> tuple[tuple[float, float], ...]:
    """The CPU of those rounds in which about as many messages came as in any: in the others tokens coalesced."""
    most = [max(level.messages_per_request or 0.0 for level in column) for column in zip(*rounds, strict=True)]
    kept = [
        (text.front_cpu_s_per_1k_tokens or 0.0, chat.front_cpu_s_per_1k_tokens or 0.0)
        for text, chat in rounds
        if all(
            (level.messages_per_request or 0.0) >= WHOLE * best for level, best in zip((text, chat), most, strict=True)
        )
    ]
    if len(kept) < 3:
        raise TooBusy(f"only {len(kept)} of {len(rounds)} rounds were undisturbed")
    return tuple(kept)


def committed() -> float:
    """The ratio that is allowed for, times TOLERANCE."""
    return float(json.loads(FIGURE.read_text())["ratio"])


def update(cost: Cost, machine: dict[str, Any]) -> None:
    """Commit to what was measured."""
    found = {
        "command": COMMAND,
        "ratio": round(cost.ratio, 3),
        "rounds": [{"triton": round(one.front, 4), "async": round(one.base, 4)} for one in cost.rounds],
        "machine": machine,
    }
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    FIGURE.write_text(json.dumps(found, indent=1) + "\n")
