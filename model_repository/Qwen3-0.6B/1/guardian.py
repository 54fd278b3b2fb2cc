"""Kills a process group when its leader or the leader's parent dies. Run as: guardian.py LEADER PARENT [LEFT …].

The leader is Triton's stub, the parent is tritonserver. A stub that dies without having said so on this program's
standard input leaves its callers waiting for ever, and a server that still calls itself ready (seen in 2.51): then the
server goes too, so that its callers hear of it and whoever supervises it starts it again. LEFT are folders
and links that the leader would have removed had it ended as it should.

Started by engine.Guardian; standard library only. It sleeps on pidfds (Linux 5.3), so it costs nothing until then.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

GRACE_MS = 2_000  # what a leader whose parent died has to leave by itself
# Python's resource tracker leaves by itself when its last client dies, and then removes the shared memory they left.
SPARED = b"multiprocessing.resource_tracker"


def members(group: int) -> Iterator[int]:
    """Yield the processes of a process group."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()  # empty: dead, and not yet reaped
                if command and SPARED not in command and os.getpgid(int(entry.name)) == group:
                    yield int(entry.name)


def wait(leader: int, parent: int) -> None:
    """Sleep until `leader` died, or `parent` did and `leader` had its time to follow; both are pidfds."""
    poll = select.poll()
    poll.register(leader, select.POLLIN)
    poll.register(parent, select.POLLIN)
    if all(descriptor != leader for descriptor, _ in poll.poll()):
        poll.unregister(parent)
        poll.poll(GRACE_MS)


def expected() -> bool:
    """Whether the leader has said that its end is near."""
    return bool(select.select([0], [], [], 0)[0] and os.read(0, 1))


def end_server(parent: int) -> None:
    """Kill the server that a pidfd stands for; one that is a container's first process can only be asked to leave."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(parent, signal.SIGKILL)
        if not select.select([parent], [], [], 1.0)[0]:
            signal.pidfd_send_signal(parent, signal.SIGTERM)


def main(leader: int, parent: int, *left: str) -> None:
    """Wait, then kill the process group that `leader` leads until nobody is left in it, and maybe the server."""
    try:
        leader_end, parent_end = os.pidfd_open(leader), os.pidfd_open(parent)
        wait(leader_end, parent_end)
        if not expected():
            end_server(parent_end)
            for path in left:
                with contextlib.suppress(OSError):
                    os.unlink(path) if os.path.islink(path) else shutil.rmtree(path)
    except ProcessLookupError:
        pass  # one of them was gone before this began
    while victims := list(members(leader)):
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        select.select([], [], [], 0.05)  # the killed need a moment, and may have started others before


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
