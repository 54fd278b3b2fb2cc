"""Triton's own HTTP endpoints: generate and generate_stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support import tiny_qwen3
from tests.support.servers import Triton
from tests.support.tiny_qwen3 import Case, case

CAPITAL = case("capital")
TEXT = tiny_qwen3.prompt(CAPITAL.messages, enable_thinking=False)
NAMES = ("capital", "emoji", "marks", "poem-zh", "spaces", "code")


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """An HTTP client."""
    with httpx.Client(timeout=30, trust_env=False) as client:
        yield client


def chat(one: Case) -> str:
    """The `chat` input: JSON inside JSON, for Triton knows texts only."""
    return json.dumps({"messages": list(one.messages), "chat_template_kwargs": one.template_kwargs})


def streamed(http: httpx.Client, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of generate_stream."""
    with http.stream("POST", url, json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line.removeprefix("data:")) for line in answer.iter_lines() if line.startswith("data:")]


@pytest.mark.parametrize("name", NAMES)
def test_generate(triton: Triton, http: httpx.Client, name: str) -> None:
    """One JSON object with the whole answer."""
    answer = http.post(triton.url("generate"), json={"chat": chat(case(name))})
    assert answer.status_code == 200, answer.text
    assert answer.json()["text_output"] == case(name).answer
    assert answer.json()["model_name"] == triton.model


@pytest.mark.parametrize("name", NAMES)
def test_generate_stream(triton: Triton, http: httpx.Client, name: str) -> None:
    """Server-sent events that put together are the answer, each of them whole characters."""
    events = streamed(http, triton.url("generate_stream"), {"chat": chat(case(name)), "stream": True})
    assert len(events) > 3
    assert "".join(event.get("text_output", "") for event in events) == case(name).answer
    assert "".join(event.get("reasoning_output", "") for event in events) == case(name).reasoning


def test_the_prompt_is_echoed_as_vllm_backend_does(triton: Triton, http: httpx.Client) -> None:
    """Unless it is excluded."""
    echoed = http.post(triton.url("generate"), json={"text_input": TEXT})
    excluded = http.post(triton.url("generate"), json={"text_input": TEXT, "exclude_input_in_output": True})
    assert echoed.json()["text_output"] == TEXT + CAPITAL.expected
    assert excluded.json()["text_output"] == CAPITAL.expected


@pytest.mark.parametrize("parameters", [{"parameters": {"max_tokens": 2, "temperature": 0}}, {"max_tokens": 2}])
def test_sampling_values_ride_as_parameters(triton: Triton, http: httpx.Client, parameters: dict[str, Any]) -> None:
    """In `parameters`, or beside the inputs, as Triton's documentation shows."""
    body = {"text_input": TEXT, "exclude_input_in_output": True, "return_num_output_tokens": True, **parameters}
    answer = http.post(triton.url("generate"), json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["num_output_tokens"] == 2
    assert CAPITAL.expected.startswith(answer.json()["text_output"])


def test_everything_that_may_be_asked_for(triton: Triton, http: httpx.Client) -> None:
    """The extra outputs come as JSON fields."""
    flags = {
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_cumulative_logprob": True,
        "return_logprobs": True,
    }
    found = http.post(triton.url("generate"), json={"chat": chat(CAPITAL), **flags}).json()
    assert found["finish_reason"] == "stop"
    assert found["num_output_tokens"] == len(json.loads(found["logprobs"]))
    assert found["cumulative_logprob"] > -1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text_input": TEXT, "max_tokens": 0}, "max_tokens"),
        ({"text_input": TEXT, "sampling_parameters": "[]"}, "sampling_parameters must be a JSON object"),
        ({"text_input": TEXT, "chat": chat(CAPITAL)}, "exactly one of text_input and chat"),
        ({"chat": "{}"}, "chat.messages must be a list"),
        ({"text_input": TEXT, "temprature": 1}, "did you mean temperature?"),
    ],
)
def test_an_error_is_a_client_error(triton: Triton, http: httpx.Client, body: dict[str, Any], words: str) -> None:
    """400 with the message, and the next request is answered."""
    answer = http.post(triton.url("generate"), json=body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]
    assert http.post(triton.url("generate"), json={"chat": chat(CAPITAL)}).json()["text_output"] == CAPITAL.expected


def test_an_error_in_a_stream(triton: Triton, http: httpx.Client) -> None:
    """It is told in the answer, whatever its form, and the connection ends."""
    body = {"text_input": TEXT, "stream": True, "max_tokens": 0}
    answer = http.post(triton.url("generate_stream"), json=body)
    assert "max_tokens" in answer.text


def test_an_unknown_model(triton: Triton, http: httpx.Client) -> None:
    """Triton's own answer."""
    answer = http.post(triton.url("generate", model="Nobody"), json={"text_input": "a"})
    assert answer.status_code in (400, 404)
    assert "Nobody" in answer.text


def test_the_model_tells_its_tensors(triton: Triton, http: httpx.Client) -> None:
    """Triton's metadata shows the contract's tables."""
    from tests.support import served

    contract = served.module("contract")
    found = http.get(triton.url("").rstrip("/")).json()
    for kind, specs in (("inputs", contract.INPUTS), ("outputs", contract.OUTPUTS)):
        told = [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in found[kind]]
        assert told == [(spec.name, spec.data_type, [spec.dim]) for spec in specs]
