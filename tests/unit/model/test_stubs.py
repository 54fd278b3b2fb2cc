"""stubs.py: several stubs and one engine; here each is an object, in the product a process."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support import served

stubs = served.module("stubs")
contract = served.module("contract")


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the stubs of a test have in common; their folder lies in the test's own."""
    monkeypatch.setattr(stubs.tempfile, "gettempdir", lambda: str(tmp_path))
    return uuid.uuid4().hex


def pair(meeting: str) -> tuple[Any, Any]:
    """The first stub, whose engine is up, and a second that joined."""
    first, second = stubs.Stubs(2, meeting), stubs.Stubs(2, meeting)
    first.announce([4711])
    second.join()
    return first, second


def arguments(*counts: int) -> dict[str, str]:
    """Triton's arguments of `initialize`."""
    groups = ", ".join(f'{{"count": {count}}}' for count in counts)
    return {
        "model_config": f'{{"instance_group": [{groups}]}}',
        "model_name": "Qwen3-0.6B",
        "model_version": "1",
    }


def test_one_alone_needs_no_folder(tmp_path: Path) -> None:
    """A model with one instance leaves nothing on the disk."""
    alone = stubs.Stubs.of_instance(arguments(1))
    assert (alone.index, alone.count, alone.folder) == (0, 1, None)
    assert alone.first
    assert alone.speaks


def test_they_are_numbered_as_they_come(meeting: str) -> None:
    """Triton may load the last instance first: whoever comes first starts the engine."""
    every = [stubs.Stubs.of_instance(arguments(3)) for _ in range(3)]
    assert [(one.index, one.first) for one in every] == [(0, True), (1, False), (2, False)]
    assert len({one.folder for one in every}) == 1


def test_only_one_is_first(meeting: str) -> None:
    """Also when all come at once."""
    every: list[Any] = []
    threads = [threading.Thread(target=lambda: every.append(stubs.Stubs(8, meeting))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.index for one in every) == list(range(8))
    assert len({one.folder for one in every}) == 1


def test_two_groups_cannot_share_an_engine() -> None:
    """Refused, with what to do."""
    with pytest.raises(contract.ServingError, match="instance_group"):
        stubs.Stubs.of_instance(arguments(1, 1))


def test_the_second_waits_for_the_firsts_engine(meeting: str) -> None:
    """It joins once that is announced, not before."""
    first, second = stubs.Stubs(2, meeting), stubs.Stubs(2, meeting)
    joined: list[list[int]] = []
    thread = threading.Thread(target=lambda: joined.append(second.join()))
    thread.start()
    assert joined == []
    first.announce([7, 8])
    thread.join(10)
    assert joined == [[7, 8]]


def test_the_second_hears_that_there_will_be_no_engine(meeting: str) -> None:
    """It does not wait for ever."""
    first, second = stubs.Stubs(2, meeting), stubs.Stubs(2, meeting)
    first.give_up()
    with pytest.raises(contract.ServingError, match="first instance"):
        second.join()


def test_nobody_else_may_enter(meeting: str) -> None:
    """Who could connect to the engine's sockets could read and forge what it says."""
    first = stubs.Stubs(2, meeting)
    assert first.folder.stat().st_mode & 0o777 == 0o700


def test_nothing_is_left_of_a_meeting(meeting: str, tmp_path: Path) -> None:
    """Neither where all came, nor where the first gave up alone."""
    pair(meeting)[0].give_up()
    stubs.Stubs(2, meeting).give_up()
    assert list(tmp_path.iterdir()) == []


def test_who_comes_later_has_another_engine(meeting: str) -> None:
    """A model that is loaded anew, while its old self still serves, does not join the old one's engine."""
    before, _ = pair(meeting)
    again, second = stubs.Stubs(2, meeting), stubs.Stubs(2, meeting)
    assert (again.index, second.index) == (0, 1)
    assert again.folder != before.folder
    before.give_up()
    assert again.folder.exists()


def test_addresses_differ(meeting: str) -> None:
    """Each stub has two of its own, short enough for a Unix socket."""
    first = stubs.Stubs(3, meeting)
    every = [address for index in range(3) for address in first.addresses(index).values()]
    assert len(set(every)) == 6


def test_they_are_idle_together(meeting: str) -> None:
    """As long as one of them waits for the engine, it has work."""
    first, second = pair(meeting)
    assert first.idle
    assert second.idle
    second.note_open(1)
    assert not first.idle
    first.note_open(2)
    second.note_open(0)
    assert not second.idle
    first.note_open(0)
    assert second.idle


def test_a_step_for_one_is_a_sign_of_life_for_all(meeting: str) -> None:
    """The engine hangs when it gives nothing to anybody, and only while somebody waits."""
    first, second = pair(meeting)
    assert first.stalled_seconds == 0
    first.note_open(1)
    began = time.monotonic()
    while first.stalled_seconds < 0.05:
        assert time.monotonic() - began < 10
    second.note_open(1)  # no sign of life: somebody waited already
    assert first.stalled_seconds >= 0.05
    stepped = time.monotonic()
    second.note_step(load=False)
    assert first.stalled_seconds <= time.monotonic() - stepped
    first.note_open(0)
    second.note_open(0)
    assert second.stalled_seconds == 0


def test_who_was_told_the_load_last_speaks(meeting: str) -> None:
    """And the first where nobody waits."""
    first, second = pair(meeting)
    assert (first.speaks, second.speaks) == (True, False)
    first.note_open(1)
    second.note_open(1)
    second.note_step(load=True)
    assert (first.speaks, second.speaks) == (False, True)
    first.note_step(load=False)
    assert (first.speaks, second.speaks) == (False, True)
    first.note_step(load=True)
    assert (first.speaks, second.speaks) == (True, False)
    second.note_step(load=True)
    first.note_open(0)
    second.note_open(0)
    assert (first.speaks, second.speaks) == (True, False)
