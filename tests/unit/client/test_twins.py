"""The two clients cannot drift apart: the same names, arguments, defaults and words."""

from __future__ import annotations

import inspect

import pytest
from tritonstream import AsyncClient, AsyncStream, Client, Stream

_TWINS = [(AsyncClient, Client), (AsyncStream, Stream)]
_SPELLING = {
    "AsyncClient": "Client",
    "AsyncStream": "Stream",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "async with": "with",
    "async for": "for",
    "any task of the same loop": "any thread",
    "one task": "one thread",
}


def _plain(text: str) -> str:
    for name, twin in _SPELLING.items():
        text = text.replace(name, twin)
    return text


def _members(kind: type) -> dict[str, str]:
    """Return what a class offers: for each public name, its signature and its documentation."""
    found = {}
    for name, member in vars(kind).items():
        if inspect.isfunction(member) and (not name.startswith("_") or name.startswith("__")):
            found[_plain(name)] = _plain(f"{inspect.signature(member)}\n{inspect.getdoc(member)}")
    return found


@pytest.mark.parametrize(("asynchronous", "blocking"), _TWINS)
def test_public_methods_are_equal(asynchronous: type, blocking: type) -> None:
    """Names, signatures and docstrings differ only in the words for waiting."""
    assert _members(asynchronous) == _members(blocking)


@pytest.mark.parametrize(("asynchronous", "blocking"), _TWINS)
def test_what_waits_in_one_is_a_coroutine_in_the_other(asynchronous: type, blocking: type) -> None:
    """The blocking twin has no coroutine; the asynchronous one makes coroutines of exactly what talks to the server."""
    waits = {name for name, member in vars(asynchronous).items() if inspect.iscoroutinefunction(member)}
    assert not any(inspect.iscoroutinefunction(member) for member in vars(blocking).values())
    public = {name for name in waits if not name.startswith("_")}
    expected = {"close", "generate", "server_live", "server_ready", "model_ready", "models"}
    assert public == (expected if asynchronous is AsyncClient else set())
