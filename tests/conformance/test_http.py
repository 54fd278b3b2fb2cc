"""The bytes on the wire, seen by curl: events, statuses, headers, the smaller endpoints."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.request
from typing import Any

import pytest

from tests.conformance.conftest import STALL_SECONDS, Start
from tests.support import metrics, servers
from tests.support.metrics import eventually
from tests.support.servers import NARROW, TINY
from tests.support.tiny_qwen3 import case
from tools.gateway import GatewayProcess

CAPITAL = case("capital")
BODY: dict[str, Any] = {
    "model": TINY,
    "messages": list(CAPITAL.messages),
    "temperature": 0,
    "enable_thinking": False,
}


def curl(url: str, *words: str, body: Any = None) -> tuple[int, dict[str, str], str]:
    """Ask with the real curl; returns status, headers and body."""
    sent = [] if body is None else ["-d", body if isinstance(body, str) else json.dumps(body)]
    command = ["curl", "-sSN", "-i", "--max-time", "60", *words, *sent, url]
    answer = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    head, _, rest = answer.partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), rest


def events(text: str) -> list[str]:
    """The data of each event, with comments as they are."""
    return [one.removeprefix("data: ") for one in text.split("\n\n") if one]


def test_a_stream_is_events_that_end_with_done(front: GatewayProcess) -> None:
    """Each event is one line of JSON; the first has the role, then come texts, and [DONE] is the last."""
    status, headers, text = curl(f"{front.url}/v1/chat/completions", body=BODY | {"stream": True})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(text)
    assert done == "[DONE]"
    first, *others = (json.loads(chunk) for chunk in chunks)
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in others) == CAPITAL.answer
    assert {one["object"] for one in others} == {"chat.completion.chunk"}


def test_a_slow_prompt_is_bridged_by_comments(start: Start, triton: servers.Triton) -> None:
    """While the model reads, comments keep the connection; the answer is whole all the same."""
    own = start("--keep-alive", "0.05")
    body = BODY | {"model": NARROW, "stream": True, "messages": [{"role": "user", "content": "a " * 400}]}
    _, _, text = curl(f"{own.url}/v1/chat/completions", body=body | {"max_tokens": 2})
    comment, *rest = events(text)
    assert comment.startswith(": ")
    assert rest[-1] == "[DONE]"
    with triton.engine_paused(TINY):  # after a comment, what fails is one error event
        late = start("--keep-alive", "0.05", "--request-timeout", "1")
        status, _, text = curl(f"{late.url}/v1/chat/completions", body=BODY | {"stream": True})
    assert status == 200
    assert events(text)[-1].startswith("event: error\ndata: ")
    error = json.loads(events(text)[-1].partition("data: ")[2])["error"]
    assert error["code"] == "timeout"


def test_statuses(front: GatewayProcess) -> None:
    """What cannot be answered says so in OpenAI's shape, with the field."""
    chat = f"{front.url}/v1/chat/completions"
    for path, words, body, status, code in (
        (chat, (), "{", 400, "invalid_request"),
        (chat, (), BODY | {"messages": []}, 400, "invalid_request"),
        (chat, (), BODY | {"n": "many"}, 400, "invalid_request"),
        (chat, (), BODY | {"logit_bias": {"x": 1}}, 400, "invalid_request"),
        (chat, (), {"messages": BODY["messages"]}, 400, "invalid_request"),  # two models are served: which one?
        (chat, (), BODY | {"model": "nobody"}, 404, "model_not_found"),
        (chat, ("-X", "DELETE"), None, 405, "method_not_allowed"),
        (f"{front.url}/v1/nothing", (), None, 404, "not_found"),
        (f"{front.url}/v1/models/nobody", (), None, 404, "model_not_found"),
        (f"{front.url}/v1/completions", (), {"model": TINY, "prompt": [1, 2]}, 400, "invalid_request"),
        (f"{front.url}/v1/completions", (), {"model": TINY, "prompt": "a", "suffix": "b"}, 400, "invalid_request"),
    ):
        found, headers, text = curl(path, *words, body=body)
        error = json.loads(text)["error"]
        assert (found, error["code"]) == (status, code), text
        assert headers["content-type"] == "application/json"
        assert error["message"]


def test_unknown_fields_are_named_and_harmless(front: GatewayProcess) -> None:
    """Never an error: the reply names what had no effect."""
    odd = {"frobnicate": 1, "store": True, "metadata": {"a": "b"}, "functions": [], "zz": None}
    status, headers, text = curl(f"{front.url}/v1/chat/completions", body=BODY | odd)
    assert status == 200
    assert headers["x-ignored-fields"] == "frobnicate, functions"
    assert json.loads(text)["choices"][0]["message"]["content"] == CAPITAL.answer


async def test_readiness_is_the_engines(front: GatewayProcess, triton: servers.Triton) -> None:
    """Ready while the engine makes progress; not when it hangs with work to do, though the gateway lives."""

    def ready() -> int:
        return curl(f"{front.url}/health/ready")[0]

    assert ready() == 200
    with triton.engine_paused(TINY):
        asking = asyncio.create_task(asyncio.to_thread(curl, f"{front.url}/v1/chat/completions", body=BODY))
        try:
            await eventually(lambda: ready() == 503, "a stalled engine is noticed")
            reason = json.loads(curl(f"{front.url}/health/ready")[2])["reason"]
            assert "no progress" in reason
            assert curl(f"{front.url}/health")[0] == 200
        finally:
            triton.engine_core(TINY).resume()
        _, _, said = await asking
    assert json.loads(said)["choices"][0]["message"]["content"] == CAPITAL.answer
    await eventually(lambda: ready() == 200, f"ready again, though it stood still for {STALL_SECONDS} s")


def test_metrics_count_over_all_workers(front: GatewayProcess) -> None:
    """Requests by route and status, first tokens, tokens; no label comes from a caller."""
    names = "tritonstream_gateway_"

    def value(name: str, **labels: str) -> float:
        page = metrics.scrape(f"{front.url}/metrics", names)
        return sum(sample.value for sample in page.find(names + name, **labels))

    route = {"route": "/v1/chat/completions"}
    before = [value("requests_total", **route, status="200"), value("first_token_seconds_count", **route)]
    for _ in range(8):
        curl(f"{front.url}/v1/chat/completions", body=BODY)
        curl(f"{front.url}/no/such/path")
    assert [value("requests_total", **route, status="200"), value("first_token_seconds_count", **route)] == [
        one + 8 for one in before
    ]
    assert value("tokens_total", kind="completion") >= 64
    assert value("open_requests") == 0
    assert value("rejected_total", reason="not_found") >= 8
    page = metrics.scrape(f"{front.url}/metrics", names)
    routes = {sample.labels["route"] for sample in page.samples if "route" in sample.labels}
    assert routes <= {
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "other"),
        *("/health", "/health/ready", "/metrics", "/version", "/openapi.json", "/docs"),
    }


def test_prompts_are_not_logged(front: GatewayProcess, start: Start) -> None:
    """A line for a request has no word of it; --log-prompts writes them, for it was asked to."""
    secret = "swordfish-1234"
    body = BODY | {"messages": [{"role": "user", "content": secret}], "max_tokens": 1}
    curl(f"{front.url}/v1/chat/completions", body=body)
    curl(f"{front.url}/v1/chat/completions", body=body | {"temperature": -1})
    log = front.log.read_text()
    assert "POST /v1/chat/completions 200" in log
    assert secret not in log
    own = start("--log-prompts")
    curl(f"{own.url}/v1/chat/completions", body=body)
    assert secret in own.log.read_text()


def test_cors_is_off_and_can_be_had(front: GatewayProcess, start: Start) -> None:
    """No origin is allowed unless it is named."""
    origin = ("-H", "Origin: https://chat.example")
    assert "access-control-allow-origin" not in curl(f"{front.url}/v1/models", *origin)[1]
    own = start("--cors-origin", "https://chat.example")
    assert curl(f"{own.url}/v1/models", *origin)[1]["access-control-allow-origin"] == "https://chat.example"
    other = ("-H", "Origin: https://evil.example")
    assert "access-control-allow-origin" not in curl(f"{own.url}/v1/models", *other)[1]


@pytest.mark.parametrize("path", ["/openapi.json", "/docs", "/version", "/health"])
def test_pages(front: GatewayProcess, path: str) -> None:
    """The smaller pages answer."""
    with urllib.request.urlopen(front.url + path, timeout=30) as answer:
        assert answer.status == 200
        assert answer.read()
