"""Says what a long step does and for how long it has been at it: one line that changes, or one every 15 s in a log.

Standard library only: the environment's builder uses it before anything is installed.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

LOG_EVERY_SECONDS = 15.0


class Progress:
    """Writes to `stream`: `say` lines that stay, `update` a line that the next one takes the place of."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._doing = ""
        self._shown = float("-inf")

    def say(self, text: str) -> None:
        """Write a line that stays."""
        clear = "\r\033[K" if self._terminal else ""
        print(f"{clear}{text}", file=self._stream, flush=True)

    def update(self, doing: str, detail: str = "") -> None:
        """Show how a step goes on. In a log only a new `doing` is written at once; its details every 15 s."""
        line = f"{doing}: {detail}" if detail else doing
        if self._terminal:
            print(f"\r\033[K{line[:160]}", end="", file=self._stream, flush=True)
        elif doing != self._doing or time.monotonic() - self._shown >= LOG_EVERY_SECONDS:
            print(line, file=self._stream, flush=True)
            self._doing, self._shown = doing, time.monotonic()
