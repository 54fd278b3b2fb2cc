"""replies.py: what the engine pushes goes out in order, joined when the senders are behind, with one final response."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.support import served

contract = served.module("contract")
replies = served.module("replies")
SOON = 30.0  # seconds; a busy machine can stand still for some


class Line:
    """A way back to a caller that notes what is sent, and can be held up or cut."""

    def __init__(self, order: list[str] | None = None, name: str = "") -> None:
        self.order = order  # what is sent on several lines, by name
        self.name = name
        self.sent: list[tuple[dict[str, list[Any]], bool]] = []
        self.errors: list[Any] = []
        self.open = threading.Event()  # sends wait until it is set
        self.open.set()
        self.left = False
        self.asked = 0
        self.broken = False

    def send(self, tensors: list[tuple[str, Any]], *, final: bool) -> None:
        """Note a response."""
        assert self.open.wait(SOON)
        if self.broken:
            raise RuntimeError("shared memory is gone")
        self.sent.append(({name: array.tolist() for name, array in tensors}, final))
        if self.order is not None:
            self.order.append(self.name)

    def fail(self, error: Any) -> None:
        """Note the error."""
        if self.broken:
            raise RuntimeError("shared memory is gone")
        self.errors.append(error)

    def gone(self) -> bool:
        """Say whether the caller left."""
        self.asked += 1
        return self.left

    @property
    def texts(self) -> list[bytes]:
        """The text of each response."""
        return [text for tensors, _ in self.sent for text in tensors["text_output"]]

    @property
    def finals(self) -> int:
        """How many responses were final."""
        return sum(final for _, final in self.sent) + len(self.errors)


class Office:
    """A post office and what it reports."""

    def __init__(self, senders: int = replies.SENDERS) -> None:
        self.left: list[Any] = []
        self.closed: list[tuple[Any, Any]] = []
        self.office = replies.PostOffice(
            on_left=self.left.append,
            on_closed=lambda box, error: self.closed.append((box, error)),
            senders=senders,
        )

    def open(self, line: Line, **request: Any) -> Any:
        """Open the mailbox of a request."""
        mailbox = self.office.open(line)
        mailbox.request = contract.Request(**{"prompt": "p", "stream": True} | request)
        return mailbox


@pytest.fixture
def office() -> Iterator[Office]:
    """A post office whose threads are gone afterwards."""
    opened = Office()
    yield opened
    opened.office.close()


@pytest.fixture
def one_sender() -> Iterator[Office]:
    """A post office with a single sender: what it sends has one order."""
    opened = Office(senders=1)
    yield opened
    opened.office.close()


def soon(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.001)


def hold(office: Office) -> Line:
    """Keep a sender of the office busy: with a response that goes out when the line is opened."""
    line = Line()
    line.open.clear()
    mailbox = office.open(line)
    mailbox.push([delta("held")], final=False)
    soon(lambda: not mailbox._waiting)
    return line


def started(office: Office, order: list[str], name: str) -> Any:
    """Open the mailbox of a request whose caller has had its first token."""
    line = Line(order, name)
    mailbox = office.open(line)
    mailbox.push([delta("first")], final=False)
    soon(lambda: len(line.sent) == 1 and not mailbox._queued)
    return mailbox


def delta(text: str, **values: Any) -> Any:
    """A delta of one token."""
    return contract.Delta(**{"index": 0, "text": text, "num_output_tokens": 1, "num_input_tokens": 3} | values)


def test_each_token_is_sent_at_once_when_nobody_is_behind(office: Office) -> None:
    """Nothing waits for what comes after it."""
    line = Line()
    mailbox = office.open(line)
    for number, text in enumerate("abc", start=1):
        mailbox.push([delta(text)], final=False)
        soon(functools.partial(lambda expected: len(line.sent) == expected, number))
    mailbox.push([delta("d", finish_reason="stop")], final=True)
    soon(lambda: len(office.closed) == 1)
    assert line.texts == [b"a", b"b", b"c", b"d"]
    assert [final for _, final in line.sent] == [False, False, False, True]


def test_tokens_join_while_a_send_takes_its_time(office: Office) -> None:
    """What gathers meanwhile goes out as one response, in order, with its tokens counted."""
    line = Line()
    line.open.clear()
    mailbox = office.open(line, returns=frozenset({"return_num_output_tokens"}))
    mailbox.push([delta("0")], final=False)
    soon(lambda: not mailbox._waiting)  # a sender has it and is held up
    for number in range(1, 50):
        mailbox.push([delta(f",{number}")], final=False)
    line.open.set()
    soon(lambda: len(line.sent) == 2)
    assert line.texts == [b"0", b"".join(b",%d" % number for number in range(1, 50))]
    assert [tensors["num_output_tokens"] for tensors, _ in line.sent] == [[1], [49]]


def test_tokens_join_while_every_sender_is_busy_with_others(office: Office) -> None:
    """Whoever's turn has not come gets all that gathered in one response, in order, and the next token by itself."""
    busy = [hold(office) for _ in range(replies.SENDERS)]
    lines = [Line() for _ in range(20)]
    boxes = [office.open(line, returns=frozenset({"return_num_output_tokens"})) for line in lines]
    for number in range(50):
        for box in boxes:
            box.push([delta(f"{number},")], final=False)
    assert not any(line.sent for line in lines)
    for line in busy:
        line.open.set()
    soon(lambda: all(line.sent for line in lines))
    soon(lambda: not any(box._queued for box in boxes))
    for box in boxes:
        box.push([delta("end", finish_reason="stop")], final=True)
    soon(lambda: all(line.finals == 1 for line in lines))
    for line in lines:
        assert line.texts == [b"".join(b"%d," % number for number in range(50)), b"end"]
        assert [tensors["num_output_tokens"] for tensors, _ in line.sent] == [[50], [1]]


def test_a_first_token_does_not_queue_behind_the_next_tokens_of_others(one_sender: Office) -> None:
    """It goes ahead of all but one of those that have had something."""
    order: list[str] = []
    others = [started(one_sender, order, f"other {number}") for number in range(100)]
    held = hold(one_sender)
    for other in others:
        other.push([delta("more")], final=False)
    one_sender.open(Line(order, "newcomer")).push([delta("first")], final=False)
    order.clear()
    held.open.set()
    soon(lambda: len(order) == 101)
    assert order.index("newcomer") <= 1
    order.remove("newcomer")
    assert order == [f"other {number}" for number in range(100)]


def test_first_tokens_starve_nobody(one_sender: Office) -> None:
    """However many newcomers there are, every so many of their replies one of an older request goes out."""
    order: list[str] = []
    others = [started(one_sender, order, f"other {number}") for number in range(3)]
    held = hold(one_sender)
    for number in range(100):
        one_sender.open(Line(order, f"newcomer {number}")).push([delta("first")], final=False)
    for other in others:
        other.push([delta("more")], final=False)
    order.clear()
    held.open.set()
    soon(lambda: len(order) == 103)
    period = replies.FIRSTS_IN_A_ROW + 1
    for number in range(3):
        assert order.index(f"other {number}") < period * (number + 1)
    assert [name for name in order if "newcomer" in name] == [f"newcomer {number}" for number in range(100)]


def test_choices_join_each_for_itself(office: Office) -> None:
    """One response has at most one element for a choice."""
    line = Line()
    line.open.clear()
    mailbox = office.open(line, sampling={"n": 2})
    mailbox.push([delta("a", index=0)], final=False)
    soon(lambda: not mailbox._waiting)
    for text in "xyz":
        mailbox.push([delta(text.upper(), index=1), delta(text, index=0)], final=False)
    line.open.set()
    soon(lambda: len(line.sent) == 2)
    tensors, _ = line.sent[1]
    assert dict(zip(tensors["index"], tensors["text_output"], strict=True)) == {0: b"xyz", 1: b"XYZ"}


def test_half_a_character_waits_for_the_other_half(office: Office) -> None:
    """A token without text makes no response of its own; its count is not lost."""
    line = Line()
    mailbox = office.open(line, returns=frozenset({"return_num_output_tokens"}))
    mailbox.push([delta("")], final=False)
    mailbox.push([delta("")], final=False)
    time.sleep(0.05)
    assert not line.sent
    mailbox.push([delta("好")], final=False)
    soon(lambda: len(line.sent) == 1)
    assert line.sent[0][0] == {"text_output": ["好".encode()], "num_output_tokens": [3]}


def test_a_choice_that_ends_without_text_is_told(office: Office) -> None:
    """Its finish reason is worth a response."""
    line = Line()
    mailbox = office.open(line, sampling={"n": 2}, returns=frozenset({"return_finish_reason"}))
    mailbox.push([delta("", index=1, finish_reason="stop")], final=False)
    soon(lambda: len(line.sent) == 1)
    assert line.sent[0] == ({"text_output": [b""], "index": [1], "finish_reason": [b"stop"]}, False)


def test_an_error_comes_after_the_text_before_it(office: Office) -> None:
    """And is the one final response."""
    line = Line()
    line.open.clear()
    mailbox = office.open(line)
    mailbox.push([delta("a")], final=False)
    soon(lambda: not mailbox._waiting)
    mailbox.push([delta("b")], final=False)
    error = contract.Unavailable("dead")
    mailbox.fail(error)
    line.open.set()
    soon(lambda: len(office.closed) == 1)
    assert line.texts == [b"a", b"b"]
    assert [final for _, final in line.sent] == [False, False]
    assert line.errors == [error]
    assert office.closed == [(mailbox, error)]


def test_an_error_alone(office: Office) -> None:
    """Nothing is sent besides."""
    line = Line()
    mailbox = office.open(line)
    mailbox.fail(contract.InvalidRequest("no"))
    soon(lambda: len(office.closed) == 1)
    assert line.finals == 1
    assert not line.sent
    assert office.office.open_requests == 0


def test_the_prompt_is_echoed_once(office: Office) -> None:
    """Before the text of the one response that asked for it."""
    line = Line()
    mailbox = office.open(line, prompt="once ", stream=False, echo=True)
    mailbox.push([delta("upon", finish_reason="stop")], final=True)
    soon(lambda: len(office.closed) == 1)
    assert line.texts == [b"once upon"]


def test_many_mailboxes_keep_their_order(office: Office) -> None:
    """A hundred requests pushed to from several threads: each has its texts in order and one final response."""
    lines = [Line() for _ in range(100)]
    boxes = [office.open(line) for line in lines]

    def push(part: list[Any]) -> None:
        for number in range(100):
            for box in part:
                box.push([delta(f"{number},")], final=number == 99)

    threads = [threading.Thread(target=push, args=(boxes[first::4],)) for first in range(4)]
    for thread in threads:
        thread.start()
    soon(lambda: len(office.closed) == 100)
    for thread in threads:
        thread.join()
    whole = "".join(f"{number}," for number in range(100)).encode()
    assert {b"".join(line.texts) for line in lines} == {whole}
    assert {line.finals for line in lines} == {1}


def test_a_caller_who_left_is_reported(office: Office) -> None:
    """Within the watch's period or two, though nothing is sent to it: it may be queued still."""
    line = Line()
    mailbox = office.open(line)
    line.left = True
    soon(lambda: mailbox in office.left)


def test_callers_are_asked_seldom(office: Office) -> None:
    """Each question is a round trip to the server."""
    line = Line()
    began = time.monotonic()
    office.open(line)
    soon(lambda: line.asked == 5)
    assert time.monotonic() - began > 3.5 * replies.WATCH_SECONDS


def test_tokens_for_nobody_are_counted(office: Office) -> None:
    """From when the caller was last known to be there."""
    line = Line()
    mailbox = office.open(line)
    mailbox.push([delta("a")], final=False)
    asked = line.asked
    soon(lambda: line.asked > asked)
    soon(lambda: mailbox.unseen == 0)
    line.left = True
    soon(lambda: mailbox in office.left)
    mailbox.push([delta("b"), delta("c", index=1)], final=False)
    assert mailbox.unseen == 2


def test_nobody_is_asked_about_after_the_end(office: Office) -> None:
    """What Triton gave for the reply is gone by then."""
    line = Line()
    mailbox = office.open(line)
    mailbox.push([delta("a", finish_reason="stop")], final=True)
    soon(lambda: len(office.closed) == 1)
    asked = line.asked
    time.sleep(3 * replies.WATCH_SECONDS)
    assert line.asked == asked


def test_the_line_is_let_go_at_the_end(office: Office) -> None:
    """At once: Triton's sender, kept by a cycle until the garbage collector comes, outlives the memory it points to."""
    line = Line()
    known = weakref.ref(line)
    mailbox = office.open(line)
    mailbox.job = [mailbox]
    gc.disable()
    try:
        mailbox.push([delta("a", finish_reason="stop")], final=True)
        soon(lambda: len(office.closed) == 1)
        del line
        assert known() is None
    finally:
        gc.enable()


def test_a_line_that_breaks_ends_its_request_alone(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    """It is reported once as left and once as closed; others go on."""
    broken, sound = Line(), Line()
    broken.broken = True
    mailbox, other = office.open(broken), office.open(sound)
    mailbox.push([delta("a")], final=False)
    soon(lambda: mailbox in office.left)
    mailbox.fail(replies.LEFT)  # what the engine does when it is told
    other.push([delta("b", finish_reason="stop")], final=True)
    soon(lambda: any(box is other for box, _ in office.closed))
    time.sleep(0.05)
    assert sound.texts == [b"b"]
    assert [box for box, _ in office.closed].count(mailbox) == 1
    assert office.office.open_requests == 0
    assert "could not be sent" in caplog.text


def test_closing_sends_what_waits() -> None:
    """Nothing is lost when the server leaves in order."""
    opened, line = Office(), Line()
    mailbox = opened.open(line)
    mailbox.push([delta("a", finish_reason="stop")], final=True)
    opened.office.close()
    assert line.texts == [b"a"]
    assert line.finals == 1


def test_summaries_count_the_whole_choice(office: Office) -> None:
    """However its tokens were joined."""
    import json

    line = Line()
    mailbox = office.open(line, returns=frozenset({"return_summary"}))
    for text in ("a", "b", ""):
        mailbox.push([delta(text)], final=False)
    mailbox.push([delta("c", finish_reason="length")], final=True)
    soon(lambda: len(office.closed) == 1)
    (summary,) = [tensors["summary"] for tensors, _ in line.sent if "summary" in tensors]
    assert json.loads(summary[0])["num_output_tokens"] == 4
    assert all(not earlier[1] for earlier, _ in pairwise(line.sent))
