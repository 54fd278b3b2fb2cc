"""A request refuses nonsense where it is made."""

from __future__ import annotations

from typing import Any

import pytest
from tritonstream import InvalidRequest, Message, Request, Sampling, ToolCall
from tritonstream.request import as_request


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": ""}, "model must be the name of a model, got ''"),
        ({"prompt": []}, "prompt must be a text or a list of at least one message"),
        ({"prompt": b"bytes"}, "prompt must be a text"),
        ({"prompt": ["hi"]}, r"prompt\[0\] must be a Message or a mapping, got 'hi'"),
        ({"prompt": [{"role": "user"}]}, r"prompt\[0\]: content must be a text or a list of text parts, got None"),
        ({"prompt": [{"content": "hi"}]}, r"prompt\[0\]: role must be a text, got None"),
        ({"deadline": 0}, "deadline must be above 0 and at most 86400 seconds, got 0"),
        ({"deadline": -1.0}, "deadline"),
        ({"deadline": float("nan")}, "deadline"),
        ({"deadline": 86_401}, "got 86401"),
        ({"priority": 2**31}, "priority must be a whole number within ±2147483647, got 2147483648"),
        ({"priority": 1.5}, "priority"),
        ({"cache_salt": ""}, "cache_salt must not be empty"),
        ({"tools": [{}]}, "tools is for the messages of a chat; the prompt is a text"),
        ({"lora_name": ""}, "lora_name must not be empty"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs is for the messages of a chat"),
    ],
)
def test_nonsense_is_refused(values: dict[str, Any], message: str) -> None:
    """The message names the field and the value."""
    with pytest.raises(InvalidRequest, match=message):
        Request(**{"prompt": "Hi", "model": "m", **values})


def test_a_message_needs_role_and_content() -> None:
    """Both are checked where the message is made."""
    with pytest.raises(InvalidRequest, match="role"):
        Message(role="", content="x")
    with pytest.raises(InvalidRequest, match="content"):
        Message(role="user", content=[])
    assert Message(role="user", content="").content == ""
    calls = Message(role="assistant", tool_calls=(ToolCall("a", "f", "{}"),))
    assert calls.content is None


def test_the_messages_are_taken_over_as_they_were() -> None:
    """A list that grows later does not change the request."""
    messages = [Message(role="user", content="Hi")]
    request = Request(prompt=messages, model="m")
    messages.clear()
    assert request.prompt == (Message(role="user", content="Hi"),)


def test_a_prompt_becomes_a_request_and_a_request_takes_other_fields() -> None:
    """What the clients' methods take comes to the same."""
    made = as_request("Hi", model="m", sampling=Sampling(n=2))
    assert made == Request(prompt="Hi", model="m", sampling=Sampling(n=2))
    assert as_request(made) is made
    assert as_request(made, deadline=3).deadline == 3
    with pytest.raises(InvalidRequest, match="model is missing"):
        as_request("Hi")
