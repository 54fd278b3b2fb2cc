"""Mailboxes between the engine and Triton: coalescing, sender threads, the watch for callers who left.

Read by model.py. Triton's send() allocates shared memory and waits about 160 µs for the server's acknowledgement, with
the GIL released: several threads overlap that wait, and what a mailbox gains meanwhile goes out as one reply. So tokens
coalesce exactly when the senders are behind, and never otherwise. Who has nothing yet is served before who waits for
more, so that a first token does not queue behind everybody else's next one. No Triton and no vLLM here.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy.typing as npt

from .contract import Cancelled, Delta, Request, ServingError, reply

log = logging.getLogger(__name__)

SENDERS = 8  # 32 were slower than 8 on 16 cores
# is_cancelled() is a round trip like send(): 640 of them a second beside 380 tokens took the CPU seconds of stub and
# server per 1,000 tokens from 0.23 to 0.40 on two cores. So all open requests are asked once in 50 ms where they are
# few, less often where they are many, and never less than in 200 ms. One right after the other: spread over the round,
# 64 requests took 0.05 cores more, for each of them woke server and stub anew.
WATCH_SECONDS, WATCH_SECONDS_EACH, WATCH_SECONDS_MOST = 0.05, 0.006, 0.2
WATCH_SECONDS_LEAST = 0.01  # between two rounds, however long one takes
FIRSTS_IN_A_ROW = 3  # so many first replies may go ahead before one of those that go on: first tokens starve nobody


class Wire(Protocol):
    """One request's way back to its caller."""

    def send(self, tensors: list[tuple[str, npt.NDArray[Any]]], *, final: bool) -> None:
        """Send one response; blocks until the server has it."""

    def fail(self, error: ServingError) -> None:
        """Send the error as the final response."""

    def gone(self) -> bool:
        """Ask the server whether the caller has left."""


class Lanes:
    """The mailboxes that have something to send, in the order in which the senders are to take them."""

    def __init__(self) -> None:
        self._first: deque[Mailbox] = deque()  # their callers have nothing yet
        self._more: deque[Mailbox] = deque()
        # One True for each of them. A SimpleQueue is C throughout: what the engine's thread does for every token, it
        # does without the several locks of a PriorityQueue or a Condition.
        self._tickets: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._taken = 0  # two threads may count as one: the order is a preference

    def put(self, mailbox: Mailbox, *, first: bool) -> None:
        """Let a sender take it; `first`: before those whose callers wait for more."""
        (self._first if first else self._more).append(mailbox)
        self._tickets.put(True)

    def take(self) -> Mailbox | None:
        """Wait for the next one; None tells a sender to stop."""
        if not self._tickets.get():
            return None
        self._taken += 1
        yields = self._taken % (FIRSTS_IN_A_ROW + 1) == 0
        lanes = (self._more, self._first) if yields else (self._first, self._more)
        while True:  # there is one for each ticket, but another thread may take it from the lane not looked at yet
            for lane in lanes:
                try:
                    return lane.popleft()
                except IndexError:
                    continue

    def stop(self) -> None:
        """Stop one sender, once what is here now is taken."""
        self._tickets.put(False)


class Mailbox:
    """What one request's caller is still to be sent. The engine pushes, one sender at a time takes everything."""

    __slots__ = (
        "_asking",
        "_closed",
        "_final",
        "_lanes",
        "_lock",
        "_queued",
        "_started",
        "_totals",
        "_waiting",
        "_wire",
        "error",
        "job",
        "request",
        "unseen",
    )

    def __init__(self, wire: Wire, lanes: Lanes) -> None:
        self.request = Request(prompt="")  # until the real one is read
        self.job: Any = None  # what the engine calls the request
        self.unseen = 0  # tokens pushed since the caller was last known to be there
        self._wire = wire
        self._lanes = lanes
        self._lock = threading.Lock()  # only ever held for moments: the engine's thread takes it for every token
        self._asking = threading.Lock()  # held by the watch while it asks, and by a sender before the last send
        self._waiting: dict[int, Delta] = {}
        self._totals: dict[int, int] = {}
        self._final = False
        self.error: ServingError | None = None
        self._queued = False  # in one of the lanes, or in a sender's hands
        self._started = False  # its caller was sent something
        self._closed = False

    def push(self, deltas: list[Delta], *, final: bool) -> None:
        """Add what the choices gained. A gain without text (half a character, say) waits for the next one."""
        with self._lock:
            worth_sending = final
            for delta in deltas:
                delta.total_output_tokens = self._totals.get(delta.index, 0) + delta.num_output_tokens
                self._totals[delta.index] = delta.total_output_tokens
                waiting = self._waiting.get(delta.index)
                if waiting is None:
                    self._waiting[delta.index] = delta
                else:
                    waiting.absorb(delta)
                self.unseen += delta.num_output_tokens
                worth_sending = worth_sending or delta.says_something or delta.finish_reason is not None
            self._final = final
            if worth_sending:
                self._enqueue()

    def fail(self, error: ServingError) -> None:
        """End with an error, after the text that is already here."""
        with self._lock:
            self.error = error
            self._final = True
            self._enqueue()

    def _enqueue(self) -> None:
        if not self._queued and not self._closed:
            self._queued = True
            self._lanes.put(self, first=not self._started)

    def deliver(self) -> bool:
        """Send everything that waits, as one response. True when that ended the request. Only a sender calls this."""
        with self._lock:
            deltas, self._waiting = self._waiting, {}
            final, error = self._final, self.error
            self._started = True
        if final:
            self._shut()
        try:
            if error is None or any(delta.says_something for delta in deltas.values()):
                echo = self.request.prompt if self.request.echo and isinstance(self.request.prompt, str) else ""
                tensors = reply(deltas.values(), self.request, echo)
                self._wire.send(tensors, final=final and error is None)
            if error is not None:
                self._wire.fail(error)
        except BaseException:
            self._shut()  # nothing can be said to this caller any more
            del self._wire
            raise
        if final:
            # Kept alive by a cycle, Triton's sender would outlive the shared memory it points into.
            self.job = None
            del self._wire
            return True
        with self._lock:
            self._queued = False
            if self._final or any(delta.says_something for delta in self._waiting.values()):
                self._enqueue()
        return False

    def _shut(self) -> None:
        """Close for good: nothing more is enqueued, and the watch leaves the wire alone, whose far end goes soon."""
        with self._asking, self._lock:
            self._closed = True

    def caller_left(self) -> bool:
        """Ask whether the caller left; never while the last response is on its way."""
        with self._asking:
            if self._closed:
                return False
            if self._wire.gone():
                return True
            self.unseen = 0
            return False


class PostOffice:
    """The senders and the watch that serve every mailbox of a model."""

    def __init__(
        self,
        on_left: Callable[[Mailbox], None],
        on_closed: Callable[[Mailbox, ServingError | None], None],
        senders: int = SENDERS,
    ) -> None:
        """Start the threads.

        `on_left` hears, once or more, of a mailbox whose caller left: it is to end the request in the engine.
        `on_closed` hears once of each mailbox that is done, with the error that ended it.
        """
        self._on_left = on_left
        self._on_closed = on_closed
        self._lanes = Lanes()
        self._open: set[Mailbox] = set()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send, name=f"sender-{n}", daemon=True) for n in range(senders)]
        self._watch_thread = threading.Thread(target=self._watch, name="cancel-watch", daemon=True)
        for thread in (*self._threads, self._watch_thread):
            thread.start()

    def open(self, wire: Wire) -> Mailbox:
        """Make the mailbox of a new request; it stays open until its final response is sent."""
        mailbox = Mailbox(wire, self._lanes)
        self._open.add(mailbox)
        return mailbox

    @property
    def open_requests(self) -> int:
        """Requests whose final response is not sent yet."""
        return len(self._open)

    def close(self) -> None:
        """Send what waits, then stop the threads."""
        self._stop.set()
        for _ in self._threads:
            self._lanes.stop()
        for thread in (*self._threads, self._watch_thread):
            thread.join()

    def _send(self) -> None:
        while (mailbox := self._lanes.take()) is not None:
            try:
                done = mailbox.deliver()
            except Exception:
                log.exception("a response could not be sent")
                self._on_left(mailbox)
                done = True
            if done:
                self._open.discard(mailbox)
                self._on_closed(mailbox, mailbox.error)

    def _watch(self) -> None:
        """Ask about each open request once in a round."""
        until = 0.0
        while not self._stop.wait(max(WATCH_SECONDS_LEAST, until - time.monotonic())):
            asked = list(self._open)
            until = time.monotonic() + min(max(WATCH_SECONDS, len(asked) * WATCH_SECONDS_EACH), WATCH_SECONDS_MOST)
            for mailbox in asked:
                try:
                    if mailbox.caller_left():
                        self._on_left(mailbox)
                except Exception:
                    log.exception("a request could not be asked whether its caller left")


LEFT = Cancelled("the caller left before the answer was complete")
