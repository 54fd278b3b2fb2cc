"""From OpenAI's words to ours and back: fields, errors, chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tritonstream import DeadlineExceeded, Delta, InvalidRequest, ModelNotFound, ServerError, ServerUnavailable
from tritonstream_gateway import errors, translate
from tritonstream_gateway.errors import Failure
from tritonstream_gateway.events import ChatChunks, TextChunks
from tritonstream_gateway.schema import ChatRequest, CompletionRequest
from tritonstream_gateway.settings import BadSettings, Settings

HI = [{"role": "user", "content": "Hi"}]
FIELDS = ("id-1", 7, "m")


def chat(**body: Any) -> Any:
    """The request that a chat's body becomes."""
    asked = translate.read(ChatRequest, json.dumps({"messages": HI} | body).encode())
    return translate.chat(asked, "m", 60.0)


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", 6),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 3}, "logprobs", 3),
        ({"logprobs": False}, "logprobs", None),
        ({"logit_bias": {"7": 1.5}}, "logit_bias", {7: 1.5}),
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": None, "temperature": None}, "stop", None),
        ({"seed": 3, "top_k": 4}, "top_k", 4),
    ],
)
def test_sampling(body: dict[str, Any], field: str, value: object) -> None:
    """Each of OpenAI's fields becomes vLLM's of the same meaning; null is as if it were not there."""
    assert getattr(chat(**body).sampling, field) == value


def test_thinking_and_reasoning() -> None:
    """The ecosystem's short fields become the template's; the longer way wins."""
    assert chat(enable_thinking=False).chat_template_kwargs == {"enable_thinking": False}
    both = chat(enable_thinking=False, chat_template_kwargs={"enable_thinking": True})
    assert both.chat_template_kwargs == {"enable_thinking": True}
    assert chat().include_reasoning
    assert not chat(return_reasoning=False).include_reasoning
    assert not chat(include_reasoning=False).include_reasoning


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b'{"messages": "x"}', "messages"),
        (b"{}", "messages"),
        (b'{"messages": [1]}', "messages[0]"),
        (b'{"messages": [{}], "stop": [1]}', None),
        (b'{"messages": [{}], "stream_options": {"include_usage": 7}}', "stream_options.include_usage"),
        (b'{"messages": [{}], "n": 1.5}', "n"),
        (b'{"messages": [{"role": "\xff"}]}', None),
    ],
)
def test_a_body_that_cannot_be_read(body: bytes, param: str | None) -> None:
    """It is always 400, and names the field where there is one."""
    with pytest.raises(Failure) as failure:
        translate.read(ChatRequest, body)
    assert failure.value.status == 400
    if param is not None:
        assert failure.value.param == param


def test_completions() -> None:
    """A request for each prompt; 16 tokens where none are asked for."""
    asked = translate.read(CompletionRequest, b'{"prompt": ["a", "b"], "logprobs": 2}')
    requests = translate.completions(asked, "m", 60.0)
    assert [request.prompt for request in requests] == ["a", "b"]
    assert {request.sampling.max_tokens for request in requests} == {16}
    assert {request.sampling.logprobs for request in requests} == {2}


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidRequest("temperature must be at least 0, got -1"), 400, "temperature"),
        (InvalidRequest("chat.messages[2].role must be a text"), 400, "messages[2].role"),
        (ModelNotFound("no m"), 404, "model"),
        (DeadlineExceeded("late"), 408, None),
        (ServerUnavailable("gone"), 503, None),
        (ServerError("oops"), 500, None),
        (RuntimeError("a secret"), 500, None),
    ],
)
def test_errors(error: Exception, status: int, param: str | None) -> None:
    """Each class has its status; what nobody expected says nothing of itself."""
    found = errors.failure(error)
    assert (found.status, found.param) == (status, param)
    body = json.loads(found.body())["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert "secret" not in body["message"]
    assert ("retry-after" in found.headers) == (status == 503)


@pytest.mark.parametrize("text", ['"\\\n\t\x00', "é🌕\u2028</script>", "a\ud83d".encode("utf-8", "replace").decode()])
def test_chunks_are_json_whatever_the_text(text: str) -> None:
    """Quotes, control characters, emoji and line separators come back as they were."""
    for chunks in (
        ChatChunks(*FIELDS, top=0, include_usage=False, continuous=False),
        TextChunks(*FIELDS, include_usage=False, continuous=False),
    ):
        event = chunks.events([Delta(index=0, text=text)])
        assert event.startswith(b"data: {")
        assert event.endswith(b"}\n\n")
        assert event.count(b"\n") == 2
        (choice,) = json.loads(event[6:])["choices"]
        assert (choice["text"] if "text" in choice else choice["delta"]["content"]) == text


def test_settings_cross_to_a_worker_and_refuse_nonsense() -> None:
    """What is dumped is loaded equal; a value out of bounds is named."""
    settings = Settings(workers=3, aliases={"a": "b"}, cors_origins=("https://x",))
    assert Settings.load(settings.dump()) == settings
    wrongs: tuple[dict[str, Any], ...] = (
        *({"workers": 0}, {"port": 70_000}, {"triton": "here"}, {"grace": -1}),
        {"keys": Path("/nowhere")},
    )
    for wrong in wrongs:
        with pytest.raises(BadSettings, match=next(iter(wrong))):
            Settings(**wrong)
