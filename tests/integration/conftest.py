"""Channels to the server that the tests share; at the end of the session nothing of any server may be left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.servers import NARROW
from tests.support.wire import Wire, connect

__all__ = ["NARROW"]


@pytest.fixture(scope="session", autouse=True)
def checked(nothing_left: set[Path]) -> None:
    """Check at the end of the session that nothing of the servers is left."""


@pytest.fixture
async def wire(triton: servers.Triton) -> AsyncIterator[Wire]:
    """A channel to the tiny model; after the test its engine must be idle again."""
    async with connect(triton.grpc, servers.TINY) as opened:
        yield opened


@pytest.fixture
async def narrow(triton: servers.Triton) -> AsyncIterator[Wire]:
    """A channel to the model that takes one request at a time."""
    async with connect(triton.grpc, NARROW) as opened:
        yield opened
