"""What the client's tests share: a scripted server, and both clients in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.client.reader import Reader
from tests.unit.client.scripted import ScriptedTriton


@pytest.fixture
def triton() -> Iterator[ScriptedTriton]:
    """A server that answers "Hello world" until it is told otherwise."""
    with ScriptedTriton() as server:
        yield server


@pytest.fixture(params=["async", "sync"])
def reader(request: pytest.FixtureRequest) -> Reader:
    """Either client, in turn: what the two do must be the same."""
    return Reader(request.param)
