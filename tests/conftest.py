"""What every test may ask for: the tiny model, made once and cached, and a server around it, started once."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes, servers, tiny_qwen3

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts into the background deaf to Ctrl-C, and the programs under test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of the tiny Qwen3 model that knows tests/support/tiny_qwen3.py by heart."""
    return tiny_qwen3.ensure(Path(sys.executable))


@pytest.fixture(scope="session")
def nothing_left() -> Iterator[set[Path]]:
    """Fail the session when a process or shared memory of its servers is there after its end.

    Processes are known by a mark in their environment; what they had in /dev/shm is noted while they live.
    """
    mark = uuid.uuid4().hex
    os.environ[processes.MARK] = mark
    regions: set[Path] = set()
    yield regions
    left = processes.marked(mark)
    assert not left, f"processes were left behind:\n{processes.described(left)}"
    remaining = {region for region in regions if region.exists()}
    assert not remaining, f"shared memory was left behind: {remaining}"


@pytest.fixture(scope="session")
def triton(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, nothing_left: set[Path]
) -> Iterator[servers.Triton]:
    """The server that most tests share: the tiny model twice, once with room for many and once for one request."""
    engine = servers.ENGINE | {"model": str(tiny_model)}
    models = {servers.TINY: engine, servers.NARROW: engine | servers.NARROW_ENGINE}
    with servers.serving(tmp_path_factory.mktemp("repository"), models) as running:
        yield running
        nothing_left |= processes.shared_memory(processes.marked(os.environ[processes.MARK]))
