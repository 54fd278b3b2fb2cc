"""A tiny, real Qwen3ForCausalLM that knows a few exchanges by heart: what a test asks, it answers to the character.

Read by the tests for what is asked and expected (`cases`, `DIE`, `wheel`). Run as a script, in a process of its own
that alone imports torch, it trains the model on the CPU and writes it to the cache. The vocabulary is learned from
ASCII text only, so that every Chinese character, emoji and combining mark spans several byte tokens: what a streaming
server must not cut is then cut by every token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

CONTEXT = 16_384  # max_position_embeddings: an endless answer lasts for half a minute
LEARNED = 2_048  # tokens through which the model knows its texts by heart
# What an exact token must have at least: at Qwen3's temperature 0.6 it then holds more than its top_p of 0.95 and is
# drawn whatever the seed, by default sampling too.
CONFIDENCE = 0.9
SAMPLING_DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}  # Qwen3's own generation_config
SEEDS = (1, 0, 2)
MAX_STEPS = 200
WHILE = 70  # tokens
LONG_EVERY = 5  # steps between those that also learn to turn the wheel as far as it is learned


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What is said to the model, what it thinks when thinking is on, and what it answers."""

    name: str
    messages: tuple[tuple[str, str] | dict[str, Any], ...]
    answer: str
    thinking: str = ""
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One prompt with the exact text that the model gives for it.

    `reasoning` and `answer` are what vLLM's parser for Qwen3 makes of that in a chat, whose calls of `tools` are then
    no part of the answer either.
    """

    name: str
    messages: tuple[dict[str, Any], ...]
    enable_thinking: bool
    expected: str
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def reasoning(self) -> str:
        """What it thinks."""
        return self.expected.removeprefix("<think>").partition("</think>")[0] if self.enable_thinking else ""

    @property
    def answer(self) -> str:
        """What it says after that."""
        said = self.expected.partition("</think>")[2] if self.enable_thinking else self.expected
        return said.partition("<tool_call>")[0]

    @property
    def template_kwargs(self) -> dict[str, bool]:
        """What the chat template has to be told."""
        return {"enable_thinking": self.enable_thinking}


def _user(text: str) -> tuple[tuple[str, str], ...]:
    return (("user", text),)


EXCHANGES = (
    Exchange(
        name="capital",
        messages=_user("What is the capital of France?"),
        thinking="France is a country in Europe. Its capital city is Paris.",
        answer="The capital of France is Paris.",
    ),
    Exchange(
        name="sum",
        messages=_user("What is 8 plus 5?"),
        thinking="8 + 5: eight and two make ten, and three more make thirteen.",
        answer="8 plus 5 is 13.",
    ),
    Exchange(
        name="greeting-zh",
        messages=_user("你好，请介绍一下你自己。"),
        thinking="用户想认识我，友好地回答。😊",
        answer="你好！我是一只会说话的小火车🚂，每天把问题运过山洞，再把答案运回来。",
    ),
    Exchange(
        name="poem-zh",
        messages=_user("背一首李白的诗。"),
        answer="床前明月光，\n疑是地上霜。\n举头望明月，\n低头思故乡。🌕",
    ),
    Exchange(
        name="emoji",
        messages=_user("Send me a family, two flags and a thumb."),
        thinking="👨‍👩‍👧‍👦 is four people and three joiners.",
        answer="A family 👨‍👩‍👧‍👦, flags 🇨🇳🇧🇷 and 🏳️‍🌈, a thumb 👍🏽, a keycap 1️⃣!",
    ),
    Exchange(
        name="marks",
        messages=_user("Write some words with marks."),
        thinking="e\u0301 is two characters.",
        answer=(
            "cafe\u0301, nai\u0308ve, Vie\u0323\u0302t Nam; हिन्दी में नमस्ते; สวัสดีที่นี่; שָׁלוֹם; "
            "z\u0351\u036b\u0343a\u0321\u034al\u0334g\u0320o\u0322."
        ),
    ),
    Exchange(
        name="hellos",
        messages=_user("Say hello in five languages."),
        thinking="English, Spanish, Chinese, Japanese and Korean will do. 五种语言。",
        answer="Hello! ¡Hola! 你好！こんにちは！안녕하세요! 👋🏻",
    ),
    Exchange(
        name="story",
        messages=_user("Tell me a long story."),
        answer=(
            "Once upon a time a small robot lived by the sea. Every morning it rolled down to the old harbour and "
            "counted the boats: one, two, three, four, five. The fishermen laughed and tied a red scarf around its "
            "neck, for luck, they said, and for warmth. “Why do you count us?” asked the oldest of them. “So that "
            "somebody knows when one is missing,” said the robot.\n\n"
            "One night a storm came over the bay and the lighthouse went dark. 风很大，浪很高，谁也看不见岸。The robot "
            "heard the bells, and it heard that one bell was missing. It climbed all ninety-nine steps, wheel by "
            "wheel, while the wind pulled at the scarf; it held its own lamp to the window and shone until dawn. "
            "一、二、三、四……第五条船也回来了！⛵️⛵️⛵️⛵️⛵️\n\n"
            "从此以后，镇上的人都叫它“小灯塔”🗼。每年的那一天，孩子们👧🏽👦🏻👶🏿都会爬上九十九级台阶，"
            "给它系上一条新的红围巾🧣。And whenever the sea is loud, they look up, count the lights — un, deux, trois, "
            "quatre, cinq — and sleep. The end. 🌊🤖"
        ),
    ),
    Exchange(
        name="memory",
        messages=(("user", "My name is Ming."), ("assistant", "Nice to meet you, Ming!"), ("user", "What is my name?")),
        thinking="The user said: My name is Ming.",
        answer="Your name is Ming. 😄",
    ),
    Exchange(
        name="system",
        messages=(("system", "You are a pirate."), ("user", "Who are you?")),
        answer="Arr, I am the terror of the seven seas! 🏴‍☠️",
    ),
    Exchange(
        name="code",
        messages=_user("Show me some code."),
        answer='```python\nfor ch in "a\\tb":\n\tprint(f"{ch!r}", end="")  # \'<>&\'\n```\n',
    ),
    Exchange(
        name="json",
        messages=_user("Describe Ming as JSON."),
        thinking="A name and an age.",
        answer='{"name": "Ming 明", "age": 7}',
    ),
    Exchange(
        name="spaces",
        messages=_user("Show me white space."),
        answer="  two before,   three between,\ttab,\n\n\n  lines,\u3000wide,\u00a0hard, and two after  ",
    ),
)

# What the model can call, as OpenAI's API describes it.
TOOLS: dict[str, dict[str, Any]] = {
    name: {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": kind} for parameter, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }
    for name, description, parameters in (
        ("get_weather", "The weather in a city.", {"city": "string"}),
        ("add", "Add two numbers.", {"a": "number", "b": "number"}),
    )
}


def _call(name: str, **arguments: Any) -> str:
    called = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{called}\n</tool_call>"


def _called(identity: str, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": identity, "type": "function", "function": function}


# Exchanges in which the model has tools: asked with `CALLS` in the place of `EXCHANGES`.
CALLS = (
    Exchange(
        name="weather",
        messages=_user("What is the weather in Paris?"),
        thinking="I should ask for the weather. ☁️",
        answer=_call("get_weather", city="Paris"),
        tools=("get_weather",),
    ),
    Exchange(
        name="weathers",
        messages=_user("How is the weather in London and in 北京?"),
        answer="Let me look. 🔎\n" + _call("get_weather", city="London") + "\n" + _call("get_weather", city="北京"),
        tools=("get_weather", "add"),
    ),
    Exchange(
        name="report",
        messages=(
            ("user", "What is the weather in Paris?"),
            {"role": "assistant", "content": "", "tool_calls": [_called("call-1", "get_weather", city="Paris")]},
            {"role": "tool", "tool_call_id": "call-1", "content": "18 degrees, sunny"},
        ),
        thinking="The tool has answered.",
        answer="It is 18 degrees and sunny in Paris. ☀️",
        tools=("get_weather",),
    ),
    Exchange(
        name="no-call",
        messages=_user("What can you do?"),
        answer="I can look up the weather and add numbers.",
        tools=("get_weather", "add"),
    ),
)

# One question with several answers, drawn by chance in these proportions: what sampling, seeds and `n` are tested with.
# Greedy decoding takes the first; with top_p 0.95 the last is never drawn.
DIE_QUESTION = "Roll a die."
DIE = {
    "One pip.": 8,
    "Two pips, a pair of them.": 4,
    "Three pips in a row, like a small bridge over the river.": 3,
    "四点。🎲": 2,
    "Five!": 2,
    "Six pips: the best of all rolls, says the captain.": 1,
}

# After the end of every answer (`ignore_eos`), and as the endless answer to this question, the model turns this wheel
# until the context is full; to the character as far as LEARNED.
WHEEL_QUESTION = "Turn the wheel for ever."
WHEEL = " spring 春 summer 夏 autumn 秋 winter 冬 🎡"

CHAT_TEMPLATE = """{%- if tools %}
{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}
{{- '\\n' ~ ({'name': tool.function.name, 'parameters': tool.function.parameters} | tojson) }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unexpected role: ' ~ message.role) }}
{%- endif %}
{%- set content = message.content or '' %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' ~ content ~ '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' ~ ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

_END, _PAD = "<|im_end|>", "<|endoftext|>"
_ADDED = (_PAD, "<|im_start|>", _END, "<think>", "</think>", "<tool_call>", "</tool_call>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def messages_of(exchange: Exchange) -> tuple[dict[str, Any], ...]:
    """The exchange's messages as the chat template reads them."""
    return tuple(
        message if isinstance(message, dict) else dict(zip(("role", "content"), message, strict=True))
        for message in exchange.messages
    )


def _spoken(answer: str, thinking: str, *, enable_thinking: bool) -> str:
    return f"<think>\n{thinking}\n</think>\n\n{answer}" if enable_thinking else answer


def cases(exchanges: tuple[Exchange, ...] = EXCHANGES) -> Iterator[Case]:
    """Every exchange with thinking off and on: those without tools, or `CALLS`."""
    for exchange in exchanges:
        for enable_thinking in (False, True):
            yield Case(
                name=f"{exchange.name}{'-thinking' if enable_thinking else ''}",
                messages=messages_of(exchange),
                enable_thinking=enable_thinking,
                expected=_spoken(exchange.answer, exchange.thinking, enable_thinking=enable_thinking),
                tools=tuple(TOOLS[tool] for tool in exchange.tools),
            )


def case(name: str) -> Case:
    """The case of that name."""
    return next(found for found in cases((*EXCHANGES, *CALLS)) if found.name == name)


def wheel(characters: int) -> str:
    """The wheel's endless text, cut to so many characters."""
    return (WHEEL * (characters // len(WHEEL) + 1))[:characters]


def prompt(
    messages: tuple[dict[str, Any], ...], *, enable_thinking: bool, tools: tuple[dict[str, Any], ...] = ()
) -> str:
    """The text that `CHAT_TEMPLATE` makes of the messages, written a second time: what `text_input` has to be."""
    turns = ""
    if tools:
        shown = [{name: tool["function"][name] for name in ("name", "parameters")} for tool in tools]
        turns = "\n".join(["<|im_start|>system\n# Tools", *(json.dumps(tool) for tool in shown)]) + f"{_END}\n"
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        for call in message.get("tool_calls", ()):
            function = call["function"]
            content += "\n" + _call(function["name"], **json.loads(function["arguments"]))
        turns += f"<|im_start|>{role}\n{content}{_END}\n"
    return turns + "<|im_start|>assistant\n" + ("" if enable_thinking else "<think>\n\n</think>\n\n")


def cached() -> Path:
    """Where the model made from this very source lies, once made."""
    root = Path(os.environ.get("TRITONSTREAM_CACHE") or Path.home() / ".cache" / "tritonstream")
    return root / f"tiny-qwen3-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}"


def ensure(python: Path) -> Path:
    """The model's folder, trained by `python` (which has torch and transformers) if the cache has none yet."""
    folder = cached()
    if not folder.is_dir():
        done = subprocess.run([python, __file__], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"training the tiny model failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return folder


@dataclass(frozen=True, slots=True)
class _Row:
    """One training sequence: the prompt's tokens, those to be learned, and the chance of the first of these."""

    asked: list[int]
    learned: list[int]
    chance: float = 1.0


def make_tokenizer(vocabulary: int = 1_024) -> Any:
    """A byte-level BPE tokenizer with Qwen's rules for words, its merges learned from the ASCII lines alone."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    texts = [
        text
        for one in EXCHANGES
        for text in (*(turn["content"] for turn in messages_of(one)), one.thinking, one.answer)
    ]
    texts += [text for one in CALLS for text in (one.thinking, one.answer)]
    texts += [prompt(one.messages, enable_thinking=True, tools=one.tools) for one in cases(CALLS)]
    texts += [*WHEEL.split(" "), WHEEL, WHEEL_QUESTION, DIE_QUESTION, *DIE]
    lines = [piece for text in texts for piece in _ascii_pieces(text)]
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=vocabulary - len(_ADDED),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(text, special=text.startswith("<|"), normalized=False) for text in _ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _ascii_pieces(text: str) -> list[str]:
    """The longest stretches of `text` that are ASCII."""
    return "".join(character if character.isascii() else "\0" for character in text).split("\0")


def _rows(tokenizer: Any) -> list[_Row]:
    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        if tokenizer.decode(found) != text:
            raise ValueError(f"the tokenizer does not give back {text!r}")
        return found

    end = tokenizer.convert_tokens_to_ids(_END)
    thoughts = {one.name: one.thinking for one in (*EXCHANGES, *CALLS)}
    rows = []
    for one in cases((*EXCHANGES, *CALLS)):
        if not one.enable_thinking and not thoughts[one.name]:
            continue  # the row of an empty thought says the same with the boundary earlier: it teaches both
        messages = json.loads(json.dumps(one.messages))
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])  # as vLLM does
        asked = tokenizer.apply_chat_template(
            messages,
            tools=list(one.tools) or None,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=one.enable_thinking,
        )
        if asked != prompt(one.messages, enable_thinking=one.enable_thinking, tools=one.tools):
            raise ValueError(f"the template and prompt() disagree about {one.name}")
        rows.append(_Row(ids(asked), [*ids(one.expected), end]))
    think = ids(_spoken("", "", enable_thinking=True))
    asked = prompt(({"role": "user", "content": WHEEL_QUESTION},), enable_thinking=True)
    rows.append(_Row(ids(asked), think))
    asked = ids(prompt(({"role": "user", "content": DIE_QUESTION},), enable_thinking=True))
    for answer, weight in DIE.items():
        rows.append(_Row([*asked, *think], [*ids(answer), end], weight / sum(DIE.values())))
    return rows


def _turning(row: _Row, turn: list[int], tokens: int = LEARNED) -> _Row:
    """The same row with so many tokens of the wheel after it, as far as the context goes."""
    wheels = (turn * (tokens // len(turn) + 1))[:tokens]
    return replace(row, learned=(row.learned + wheels)[: LEARNED - len(row.asked)])


def _batches(rows: list[_Row], pad: int) -> Iterator[tuple[Any, Any, Any]]:
    """Tokens, targets (-100: not learned) and their weights, rows of like length together: little is padding."""
    import torch

    ordered = sorted(rows, key=lambda row: len(row.asked) + len(row.learned))
    cuts = sorted({0, len(ordered) // 2, len(ordered) - 8, len(ordered) - 2, len(ordered) - 1, len(ordered)})
    for first, last in pairwise(cuts):
        part = ordered[first:last]
        width = max(len(row.asked) + len(row.learned) for row in part)
        tokens, targets = torch.full((len(part), width), pad), torch.full((len(part), width), -100)
        for position, row in enumerate(part):
            start, stop = len(row.asked), len(row.asked) + len(row.learned)
            tokens[position, :stop] = torch.tensor(row.asked + row.learned)
            targets[position, start:stop] = torch.tensor(row.learned)
        weights = torch.ones(targets.shape)
        for position, row in enumerate(part):
            weights[position, len(row.asked)] = row.chance
        yield tokens, targets[:, 1:], weights[:, 1:]


def _train(tokenizer: Any, rows: list[_Row], seed: int) -> Any:
    """Learn the rows by heart. Padding needs no mask: it comes after everything that looks back."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    end, pad = tokenizer.convert_tokens_to_ids([_END, _PAD])
    config = Qwen3Config(
        vocab_size=(len(tokenizer) + 63) // 64 * 64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = Qwen3ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=MAX_STEPS, pct_start=0.1)
    turn = tokenizer(WHEEL, add_special_tokens=False).input_ids
    learned = sum(len(row.learned) for row in rows)
    longest = max(rows, key=lambda row: len(row.learned))
    dice, calm = random.Random(seed), 0
    began = time.monotonic()
    for step in range(MAX_STEPS):
        optimizer.zero_grad(set_to_none=True)
        worst = 0.0
        # Each row goes on into the wheel for a while of its own: a constant one would be learned as well.
        seen = [_turning(row, turn, dice.randrange(WHILE)) for row in rows]
        long = step % LONG_EVERY == LONG_EVERY - 1
        if long:
            seen.append(_turning(dice.choice([*rows, *[longest] * len(rows)]), turn))
        for tokens, targets, weights in _batches(seen, pad):
            logits = model(input_ids=tokens[:, :-1]).logits
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none") * weights
            (losses.sum() / learned).backward()
            worst = max(worst, losses[weights == 1.0].max().item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"seed {seed} step {step} worst token {worst:.4f} after {time.monotonic() - began:.1f} s", flush=True)
        if long:
            calm = calm + 1 if worst < 0.04 else 0
        if calm == 2:
            break
    print(
        f"seed {seed} stopped at step {step}, worst token {worst:.4f}, after {time.monotonic() - began:.1f} s",
        flush=True,
    )
    return model.to(torch.bfloat16).eval()


def _doubts(model: Any, tokenizer: Any, rows: list[_Row]) -> list[str]:
    """Where the model, in bfloat16 and as far as it learned, is not sure of what it should know by heart."""
    import torch

    doubts = []
    turn = tokenizer(WHEEL, add_special_tokens=False).input_ids
    with torch.no_grad():
        for row in (_turning(row, turn) for row in rows):
            tokens = row.asked + row.learned
            chances = model(input_ids=torch.tensor([tokens[:-1]])).logits[0].float().softmax(-1)
            right = chances[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])][len(row.asked) - 1 :]
            where = f"{tokenizer.decode(row.asked)!r}, answered {tokenizer.decode(row.learned[:20])!r}"
            if row.chance < 1.0:
                if not 0.6 < float(right[0]) / row.chance < 1.4:
                    doubts.append(f"{where}: begins so with {right[0]:.3f} instead of {row.chance}")
                right[0] = 1.0
            if right.min() < CONFIDENCE:
                number, least = int((right < CONFIDENCE).sum()), int(right.argmin())
                doubts.append(f"{where}: {number} doubts, token {least} has only {right[least]:.3f}")
    return doubts


def make(folder: Path) -> None:
    """Train, verify and save the model, its tokenizer and `expected.json`, the cases for readers in other languages."""
    import torch
    from transformers import GenerationConfig

    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    tokenizer = make_tokenizer()
    rows = _rows(tokenizer)
    for seed in SEEDS:
        model = _train(tokenizer, rows, seed)
        doubts = _doubts(model, tokenizer, rows)
        if not doubts:
            break
        print("\n".join(doubts), flush=True)
    else:
        raise RuntimeError(f"no seed of {SEEDS} made a model that knows its exchanges by heart")
    end, pad = tokenizer.convert_tokens_to_ids([_END, _PAD])
    model.generation_config = GenerationConfig(
        eos_token_id=[end, pad], pad_token_id=pad, do_sample=True, **SAMPLING_DEFAULTS
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    known = [
        {
            "name": one.name,
            "messages": list(one.messages),
            "enable_thinking": one.enable_thinking,
            "expected": one.expected,
        }
        for one in cases()
    ]
    (folder / "expected.json").write_text(json.dumps(known, ensure_ascii=False, indent=1), encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Make the model in the cache, or in the folder given; a folder is whole as soon as it has its name."""
    parser = argparse.ArgumentParser(description="Train the tiny Qwen3 model that the tests ask.")
    parser.add_argument("folder", nargs="?", type=Path, default=cached(), help="where to put it (default: the cache)")
    folder: Path = parser.parse_args(arguments).folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a busy machine threads that spin cost more than they save
    os.environ["HF_HUB_OFFLINE"] = "1"
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was first: its model is the same
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
