"""The name of a conversation: the same for all its turns, another for every other."""

from __future__ import annotations

from typing import Any

import pytest
from tritonstream import Message, Request
from tritonstream.affinity import HEADER, TEXT_CHARACTERS, conversation, named

from tests.unit.client.reader import Reader
from tests.unit.client.scripted import ScriptedTriton

SYSTEM = {"role": "system", "content": "Be brief."}
BOATS = {"role": "user", "content": "How many boats came home?"}
THREE = {"role": "assistant", "content": "Three."}
NAMES = {"role": "user", "content": "Name them."}


def name(prompt: Any, **fields: Any) -> str:
    """The name of the conversation of such a request."""
    return conversation(Request(prompt=prompt, model=fields.pop("model", "m"), **fields))


def test_all_turns_of_a_chat_have_one_name() -> None:
    """What was said later changes nothing, nor how a message is spelled."""
    first = name([SYSTEM, BOATS])
    assert name([SYSTEM, BOATS, THREE, NAMES]) == first
    assert name([SYSTEM, Message(role="user", content=BOATS["content"]), THREE, NAMES]) == first
    assert name([SYSTEM, dict(reversed(BOATS.items()))]) == first


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ([SYSTEM, NAMES], {}),
        ([BOATS], {}),
        ([{**SYSTEM, "content": "Be kind."}, BOATS], {}),
        ([SYSTEM, BOATS], {"model": "n"}),
        ([SYSTEM, BOATS], {"cache_salt": "mine"}),
        ([SYSTEM, BOATS], {"lora_name": "tuned"}),
        ("Be brief.", {}),
    ],
)
def test_what_shares_no_cache_has_another_name(prompt: Any, fields: dict[str, Any]) -> None:
    """Another beginning, another model, salt or adapter."""
    assert name(prompt, **fields) != name([SYSTEM, BOATS])


def test_a_text_that_grows_keeps_its_name() -> None:
    """From a certain length on; two that begin differently have two."""
    begun = "Once there were three boats. " * 20
    assert len(begun) > TEXT_CHARACTERS
    assert name(begun) == name(begun + "They came home.") != name("T" + begun)


def test_it_can_be_sent_whatever_was_said() -> None:
    """The name is plain ASCII, and half of a surrogate pair does no harm."""
    for content in ("船は三隻", "\N{ROCKET}", "\ud83d"):
        assert int(name([{"role": "user", "content": content}]), 16) >= 0


def test_who_names_conversations_is_heard() -> None:
    """A name among the metadata of the client's user stands, and there is only one."""
    request = Request(prompt="Hi", model="m")
    assert named((("x-key", "k"),), request) == (("x-key", "k"), (HEADER, conversation(request)))
    assert named(((HEADER, "ann"),), request) == ((HEADER, "ann"),)


async def test_it_goes_with_every_request(triton: ScriptedTriton, reader: Reader) -> None:
    """From both clients, streamed and whole."""
    await reader.stream(triton.url, [SYSTEM, BOATS])
    await reader.generate(triton.url, [SYSTEM, BOATS, THREE, NAMES])
    wanted = name([SYSTEM, BOATS], model="tiny")
    assert [call.metadata.get(HEADER) for call in triton.calls] == [wanted, wanted]
