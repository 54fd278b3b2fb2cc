"""The same requests to `vllm serve` and to Triton: what is asked, how each is asked, and what both must say alike.

Read by tests/integration/test_parity.py. Requests are the client's own; an answer of vLLM's server is read into the
client's own Completion, so that the two can be compared field by field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from tritonstream import (
    AsyncClient,
    Choice,
    Completion,
    InvalidRequest,
    Message,
    Request,
    Sampling,
    TokenLogprob,
    TokenLogprobs,
    ToolCall,
    Usage,
)

from tests.support import tiny_qwen3
from tests.support.tiny_qwen3 import TOOLS, case
from tools.ways import MODEL_NAME

TOLERANCE = 1e-3  # of a logprob
REFUSED = "refused"  # what stands for an answer to a request that the caller must change
GREEDY = Sampling(temperature=0, max_tokens=160)
ADAPTER = "tuned"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request under a name; `tiny` is what only the tiny model is asked: a real one takes its time."""

    name: str
    request: Request
    tiny: bool = True


def sampling(**values: Any) -> Sampling:
    """Greedy sampling with some values more."""
    return Sampling(**{"temperature": 0, "max_tokens": 160} | values)


def user(text: str) -> list[dict[str, Any]]:
    """A chat of one question."""
    return [{"role": "user", "content": text}]


def requests() -> list[Asked]:
    """All of them."""
    return [*_known(), *_strange(), *_formed(), *_called(), *_sampled(), *_drawn(), *_ended(), *_refused()]


def _ask(name: str, prompt: Any, *, tiny: bool = True, **fields: Any) -> Asked:
    return Asked(
        name=name, request=Request(prompt=prompt, model=MODEL_NAME, **{"sampling": GREEDY} | fields), tiny=tiny
    )


def _known() -> Iterator[Asked]:
    """English, Chinese, emoji and marks, with thinking and without, cut and budgeted, long contexts, several turns."""
    for name in ("capital", "greeting-zh", "emoji", "marks", "memory", "system", "code", "spaces"):
        for thinking in ("", "-thinking"):
            one = case(name + thinking)
            yield _ask(one.name, one.messages, chat_template_kwargs=one.template_kwargs)
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    yield _ask("thinking by default", user("What is 8 plus 5?"))
    yield _ask("no reasoning, please", user("What is 8 plus 5?"), include_reasoning=False)
    yield _ask("effort none", user("What is 8 plus 5?"), reasoning_effort="none")
    for limit in (1, 2, 5, 12):
        cut = sampling(max_tokens=limit)
        yield _ask(f"cut within the thought at {limit}", user("What is 8 plus 5?"), sampling=cut)
    budget = sampling(thinking_token_budget=4)
    yield _ask(
        "a budget for thinking", user("What is the capital of France?"), sampling=budget, chat_template_kwargs=on
    )
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]
    yield _ask("text parts", [{"role": "user", "content": parts}], chat_template_kwargs=off)
    history = [turn for _ in range(20) for turn in (*user("What is 8 plus 5?"), _assistant("8 plus 5 is 13."))]
    yield _ask("a long context", [*history, *user("你好，请介绍一下你自己。")], chat_template_kwargs=off)
    yield _ask(
        "begun",
        [*user("What is 8 plus 5?"), _assistant("8 plus 5")],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    yield _ask("no prompt for an answer", user("Hello"), add_generation_prompt=False, sampling=sampling(max_tokens=8))
    yield _ask("a text", "The fishermen", tiny=False, sampling=sampling(max_tokens=24))
    yield _ask("a text in Chinese", "你好世界", sampling=sampling(max_tokens=24))
    yield _ask("a question", user("What is the capital of France?"), tiny=False, sampling=sampling(max_tokens=24))


def _strange() -> Iterator[Asked]:
    """Texts that no chat would hold, and long ones."""
    story = case("story").expected
    texts = (
        " \n\n",
        "8 plus",
        "👨‍👩‍👧‍👦👨‍👩‍👧‍👦",
        "def f(x):\n\treturn x",
        "नमस्ते สวัสดี e\u0301",
        story[:100],
        story,
        f"{story}\n{story[:200]}",
    )
    for number, text in enumerate(texts):
        yield _ask(f"strange text {number}", text, sampling=sampling(max_tokens=48))


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _formed() -> Iterator[Asked]:
    """Answers held to a form."""
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    ming = user("Describe Ming as JSON.")
    yield _ask("json_schema", ming, tiny=False, response_format=schema, sampling=sampling(max_tokens=48), **off)
    yield _ask("json_schema after a thought", ming, response_format=schema)
    yield _ask("json_object", ming, response_format={"type": "json_object"}, **off)
    yield _ask("response_format text", ming, response_format={"type": "text"}, **off)
    choice = {"choice": ["Paris", "London"]}
    yield _ask("choice", user("What is the capital of France?"), structured_outputs=choice, **off)
    yield _ask("regex", user("What is 8 plus 5?"), structured_outputs={"regex": "[0-9]{2}"}, **off)
    grammar = {"grammar": 'root ::= "yes" | "no"'}
    yield _ask("grammar", user("Is the sea deep?"), structured_outputs=grammar, **off)
    yield _ask("json", ming, structured_outputs={"json": PERSON}, **off)


def _called() -> Iterator[Asked]:
    """Tools: called, called twice, not called, answered; chosen, required and forbidden."""
    for one in tiny_qwen3.cases(tiny_qwen3.CALLS):
        yield _ask(one.name, one.messages, tools=one.tools, chat_template_kwargs=one.template_kwargs)
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    weather, both = case("weather"), tuple(TOOLS.values())
    named = {"type": "function", "function": {"name": "get_weather"}}
    short = sampling(max_tokens=64)
    for choice in ("none", "auto", "required", named):
        name = choice if isinstance(choice, str) else "named"
        yield _ask(f"tool_choice {name}", weather.messages, tools=both, tool_choice=choice, sampling=short, **off)
    yield _ask("required after a thought", weather.messages, tools=both, tool_choice="required", sampling=short)
    two = case("weathers").messages
    yield _ask("one call at most", two, tools=both, parallel_tool_calls=False, **off)
    yield _ask("a call that is cut", two, tools=both, sampling=sampling(max_tokens=24), **off)


def _sampled() -> Iterator[Asked]:
    """Logprobs, several choices, and what changes which token comes."""
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    capital = user("What is the capital of France?")
    yield _ask("logprobs", capital, tiny=False, sampling=sampling(logprobs=3, max_tokens=12), **off)
    yield _ask("logprobs of a thought", capital, sampling=sampling(logprobs=2))
    yield _ask("logprobs, hidden thought", capital, sampling=sampling(logprobs=2), include_reasoning=False)
    yield _ask(
        "logprobs of half characters", user("Send me a family, two flags and a thumb."), sampling=sampling(logprobs=1)
    )
    yield _ask(
        "three choices", capital, tiny=False, sampling=sampling(n=3, temperature=0.2, seed=5, max_tokens=12), **off
    )
    two = sampling(n=2, temperature=0.2, seed=5)
    yield _ask("two choices of tools", case("weather").messages, tools=case("weather").tools, sampling=two)
    changed: dict[str, dict[str, Any]] = {
        "presence_penalty": {"presence_penalty": 1.5},
        "frequency_penalty": {"frequency_penalty": 1.5},
        "repetition_penalty": {"repetition_penalty": 1.3},
        "logit_bias": {"logit_bias": {40: 50.0}},
        "bad_words": {"bad_words": ["Paris"]},
        "min_tokens": {"min_tokens": 20, "max_tokens": 24},
        "allowed_token_ids": {"allowed_token_ids": [40, 41, 42], "max_tokens": 6},
        "truncate_prompt_tokens": {"truncate_prompt_tokens": 9, "truncation_side": "left", "max_tokens": 12},
        "seed": {"temperature": 1.0, "seed": 7, "min_p": 0.05},
    }
    for name, values in changed.items():
        yield _ask(name, capital, sampling=sampling(**{"max_tokens": 24} | values), **off)
    yield _ask("an adapter", capital, sampling=sampling(logprobs=2, max_tokens=16), lora_name=ADAPTER, **off)


def _drawn() -> Iterator[Asked]:
    """Answers by chance, repeated by their seed; the model's own defaults decide how."""
    die = user(tiny_qwen3.DIE_QUESTION)
    for seed in range(8):
        yield _ask(f"drawn by seed {seed}", die, sampling=Sampling(seed=seed, max_tokens=48))
    yield _ask("three drawn", die, sampling=Sampling(seed=3, n=3, temperature=1.0, max_tokens=48))


def _ended() -> Iterator[Asked]:
    """What ends an answer."""
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    capital = user("What is the capital of France?")
    yield _ask("stop", capital, tiny=False, sampling=sampling(stop=" of", max_tokens=24), **off)
    yield _ask("stop, included", capital, sampling=sampling(stop=" of France", include_stop_str_in_output=True), **off)
    yield _ask("stop within a thought", capital, sampling=sampling(stop="Europe"))
    yield _ask("stop token", capital, sampling=sampling(stop_token_ids=[40]), **off)


def _refused() -> Iterator[Asked]:
    """What the caller must change."""
    hello, tools = user("Hello"), tuple(TOOLS.values())
    yield _ask("no such tool", hello, tools=tools, tool_choice={"type": "function", "function": {"name": "fly"}})
    yield _ask("no tools", hello, tool_choice="required")
    yield _ask("no such role", [{"role": "narrator", "content": "a"}])
    yield _ask("both ends", hello, tiny=False, add_generation_prompt=True, continue_final_message=True)
    yield _ask("a broken regex", hello, tiny=False, structured_outputs={"regex": "[0-9"})
    yield _ask("no such format", hello, response_format={"type": "yaml"})
    yield _ask("too many logprobs", hello, sampling=sampling(logprobs=10_000))


async def ask_triton(client: AsyncClient, request: Request, *, stream: bool) -> Completion | str:
    """Ask through the client."""
    try:
        if not stream:
            return await client.generate(request)
        async with client.stream(request) as deltas:
            return Completion.gather([delta async for delta in deltas])
    except InvalidRequest:
        return REFUSED


async def ask_vllm(client: httpx.AsyncClient, request: Request, *, stream: bool) -> Completion | str:
    """Ask vLLM's own server."""
    path, body = spelled(request)
    if not stream:
        answer = await client.post(path, json=body)
        return REFUSED if answer.status_code == 400 else read_whole(answer.raise_for_status().json())
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=body) as streamed:
        if streamed.status_code == 400:
            return REFUSED
        streamed.raise_for_status()
        lines = [line.removeprefix("data: ") async for line in streamed.aiter_lines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    refused = [chunk["error"] for chunk in chunks if "error" in chunk]
    assert not refused or refused[0]["code"] == 400, refused
    return REFUSED if refused else read_stream(chunks)


def spelled(request: Request) -> tuple[str, dict[str, Any]]:
    """A request as vLLM's server takes it: the endpoint and the body."""
    body = {"model": request.lora_name or request.model, **request.chat_fields(), **request.sampling.given()}
    if isinstance(request.prompt, str):
        return "/v1/completions", body | {"prompt": request.prompt}
    if (logprobs := body.get("logprobs")) is not None:
        body |= {"logprobs": True, "top_logprobs": logprobs}
    messages = [turn.spelled() if isinstance(turn, Message) else dict(turn) for turn in request.prompt]
    return "/v1/chat/completions", body | {"messages": messages}


def read_whole(answer: dict[str, Any]) -> Completion:
    """Read a whole answer of vLLM's server."""
    choices = []
    for found in answer["choices"]:
        message = found.get("message") or {"content": found.get("text")}
        choices.append(
            Choice(
                index=found["index"],
                text=message["content"] or "",
                reasoning=message.get("reasoning") or "",
                tool_calls=tuple(
                    ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
                    for call in message.get("tool_calls") or ()
                ),
                finish_reason=found["finish_reason"],
                completion_tokens=0,
                logprobs=_logprobs(found) if "message" in found else None,
            )
        )
    return Completion(choices=tuple(choices), usage=_usage(answer["usage"]))


def read_stream(chunks: list[dict[str, Any]]) -> Completion:
    """Put the chunks of a streamed answer of vLLM's server together."""
    whole: dict[int, dict[str, Any]] = {}
    for found in (found for chunk in chunks for found in chunk["choices"]):
        said = whole.setdefault(found["index"], {"text": "", "reasoning": "", "calls": {}, "logprobs": None})
        delta = found.get("delta") or {"content": found.get("text")}
        said["text"] += delta.get("content") or ""
        said["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            called = said["calls"].setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
            called["id"] += call.get("id") or ""
            for name, piece in call["function"].items():
                called[name] += piece or ""
        if (more := _logprobs(found) if "delta" in found else None) is not None:
            said["logprobs"] = (said["logprobs"] or ()) + more
        said["finish_reason"] = found.get("finish_reason")
    choices = tuple(
        Choice(
            index=index,
            text=said["text"],
            reasoning=said["reasoning"],
            tool_calls=tuple(ToolCall(**said["calls"][place]) for place in sorted(said["calls"])),
            finish_reason=said["finish_reason"],
            completion_tokens=0,
            logprobs=said["logprobs"],
        )
        for index, said in sorted(whole.items())
    )
    return Completion(choices=choices, usage=_usage(chunks[-1]["usage"]))


def _usage(found: dict[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=found["prompt_tokens"],
        completion_tokens=found["completion_tokens"],
        reasoning_tokens=(found.get("completion_tokens_details") or {}).get("reasoning_tokens", 0),
    )


def _logprobs(choice: dict[str, Any]) -> tuple[TokenLogprobs, ...] | None:
    if not choice.get("logprobs"):
        return None
    return tuple(
        TokenLogprobs(
            TokenLogprob(-1, place["token"], place["logprob"], 0),
            tuple(TokenLogprob(-1, one["token"], one["logprob"], 0) for one in place["top_logprobs"]),
        )
        for place in choice["logprobs"]["content"]
    )


def differences(request: Request, ours: Completion | str, theirs: Completion | str, *, stream: bool) -> Iterator[str]:
    """Say in what two answers differ: ours, and that of vLLM's server."""
    if isinstance(ours, str) or isinstance(theirs, str):
        if ours != theirs:
            yield f"Triton: {ours!r}, vLLM: {theirs!r}"
        return
    pairs: list[tuple[str, Any, Any]] = [
        ("prompt tokens", ours.usage.prompt_tokens, theirs.usage.prompt_tokens),
        ("completion tokens", ours.usage.completion_tokens, theirs.usage.completion_tokens),
        ("choices", [one.index for one in ours.choices], [one.index for one in theirs.choices]),
    ]
    if not stream:  # vLLM counts too few where it streams half a character
        pairs.append(("reasoning tokens", ours.usage.reasoning_tokens, theirs.usage.reasoning_tokens))
    for our, their in zip(ours.choices, theirs.choices, strict=False):
        pairs += [(name, getattr(our, name), getattr(their, name)) for name in ("text", "reasoning", "finish_reason")]
        pairs.append(("calls", _calls(our), _calls(their)))
        yield from _identities(our)
        if not isinstance(request.prompt, str):
            yield from _apart(our.logprobs, their.logprobs, request.sampling.logprobs or 0)
    yield from (f"{name}: Triton {our!r}, vLLM {their!r}" for name, our, their in pairs if our != their)


def _calls(choice: Choice) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in choice.tool_calls]


def _identities(choice: Choice) -> Iterator[str]:
    identities = [call.id for call in choice.tool_calls]
    if not all(identities) or len(set(identities)) < len(identities):
        yield f"the calls' ids are {identities}"


def _apart(ours: tuple[TokenLogprobs, ...] | None, theirs: tuple[TokenLogprobs, ...] | None, top: int) -> Iterator[str]:
    if ours is None or theirs is None or len(ours) != len(theirs):
        if ours is not theirs:
            yield f"logprobs: Triton has {ours and len(ours)}, vLLM {theirs and len(theirs)}"
        return
    for place, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        pairs = [(our.chosen, their.chosen), *zip((our.chosen, *our.others)[:top], their.others, strict=True)]
        for mine, other in pairs:
            if mine.token != other.token or abs(mine.logprob - other.logprob) > TOLERANCE:
                yield f"logprobs of token {place}: Triton {mine}, vLLM {other}"
