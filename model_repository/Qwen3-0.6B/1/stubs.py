"""The stubs that share one engine: which of them starts it, where they meet, and what each one knows of it.

Read by model.py and engine.py. Triton runs one stub process for each instance of the model (`instance_group` count).
Python's interpreter lock bounds what one of them can pass on; N pass on N times as much of what one engine makes. The
first to come starts the engine, the others join it, through sockets in a folder that only this user may enter. Standard
library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from .contract import ServingError

_OPEN, _STEP, _LOAD, _FIELDS = 0, 1, 2, 3  # of each stub, as doubles: 8 bytes, which are written in one piece
POLL_SECONDS = 0.1


class Stubs:
    """This stub among those of its model. What it notes here is seen by all of them."""

    def __init__(self, count: int = 1, meeting: str = "") -> None:
        """Be one of `count`; `meeting` names what they all have in common, and nobody else has."""
        self.count = count
        self.index = 0  # in the order of their coming
        self.folder: Path | None = None
        self._board = memoryview(bytearray(8 * _FIELDS)).cast("d")
        if count > 1:
            # A link, for it is made in one step, by one of them. It goes when the last has come: what is loaded later
            # under the same name has another engine.
            key = hashlib.sha256(meeting.encode()).hexdigest()[:16]
            self._link = Path(tempfile.gettempdir(), f"tritonstream-{os.getuid()}-{key}")
            self._meet()

    @classmethod
    def of_instance(cls, args: dict[str, str]) -> Stubs:
        """Read Triton's arguments of `initialize`; raises ServingError for groups that cannot share an engine."""
        groups = json.loads(args["model_config"])["instance_group"]
        if len(groups) != 1:
            raise ServingError(f"instance_group: all instances share one engine: give one group, not {len(groups)}")
        server = os.getppid()
        started = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[19]  # ids are used again
        meeting = f"{server} {started} {args['model_name']} {args['model_version']}"
        return cls(int(groups[0]["count"]), meeting)

    @property
    def first(self) -> bool:
        """Whether this stub starts the engine."""
        return self.index == 0

    @property
    def paths(self) -> list[Path]:
        """What is on the disk because of them."""
        return [self.folder, self._link] if self.folder is not None else []

    def addresses(self, index: int) -> dict[str, str]:
        """Where the engine hears a stub, and where that stub hears the engine: ZeroMQ endpoints."""
        return {f"{way}_address": f"ipc://{self.folder}/{way}-{index}" for way in ("input", "output")}

    def announce(self, engine: list[int]) -> None:
        """Tell the others that the engine is up, and the ids of its processes."""
        if self.folder is not None:
            written = self.folder / "engine.new"
            written.write_text(json.dumps(engine))
            written.rename(self.folder / "engine")

    def give_up(self) -> None:
        """Tell the others that there will be no engine, or none any more."""
        if self.folder is not None and self.first:
            self._unlink()
            shutil.rmtree(self.folder, ignore_errors=True)

    def join(self) -> list[int]:
        """Wait for the first stub's engine; returns the ids of its processes. Raises ServingError if it gave up."""
        assert self.folder is not None
        while True:
            with contextlib.suppress(FileNotFoundError):
                engine: list[int] = json.loads((self.folder / "engine").read_text())
                return engine
            if not self.folder.exists():
                raise ServingError("the model's first instance could not start the engine: the log says why")
            time.sleep(POLL_SECONDS)

    def note_open(self, requests: int) -> None:
        """Note how many requests this stub waits for the engine with."""
        if requests and self.idle:  # the engine had nothing to do until now
            self.note_step(load=False)
        self._board[self.index * _FIELDS + _OPEN] = requests

    def note_step(self, *, load: bool) -> None:
        """Note that the engine gave this stub something now; `load` says that its load was with it."""
        now = time.monotonic()  # the same clock in every process
        self._board[self.index * _FIELDS + _STEP] = now
        if load:
            self._board[self.index * _FIELDS + _LOAD] = now

    @property
    def idle(self) -> bool:
        """Whether nobody waits for the engine."""
        return not any(self._all(_OPEN))

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the engine last gave anybody anything while somebody waits for it; 0 when nobody does."""
        return 0.0 if self.idle else max(0.0, time.monotonic() - max(self._all(_STEP)))

    @property
    def speaks(self) -> bool:
        """Whether this stub is the one that knows the engine's load best: vLLM tells it to one of them each step."""
        if self.idle:
            return self.first
        loads = self._all(_LOAD)
        return loads.index(max(loads)) == self.index

    def _all(self, field: int) -> list[float]:
        return [float(value) for value in self._board[field::_FIELDS]]

    def _meet(self) -> None:
        """Found the folder, or find it."""
        while self.folder is None:
            founded = Path(tempfile.mkdtemp(prefix="tritonstream-"))
            (founded / "board").write_bytes(bytes(8 * _FIELDS * self.count))
            try:
                self._link.symlink_to(founded)
                self.folder = founded
            except FileExistsError:
                shutil.rmtree(founded)
                with contextlib.suppress(FileNotFoundError):  # the last one has just come, or the first has given up
                    if self._link.lstat().st_uid != os.getuid():
                        raise ServingError(f"{self._link} is another user's: remove it") from None
                    self._enter(self._link.readlink())
        with (self.folder / "board").open("r+b") as file:
            shared: Any = mmap.mmap(file.fileno(), 0)
        self._board = memoryview(shared).cast("d")

    def _enter(self, folder: Path) -> None:
        for index in range(1, self.count):
            with contextlib.suppress(FileExistsError):
                (folder / str(index)).touch(exist_ok=False)
                self.folder, self.index = folder, index
                break
        if self.index == self.count - 1:
            self._unlink()

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._link.readlink() == self.folder:
                self._link.unlink()
