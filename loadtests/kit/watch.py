"""What the server says of itself while it is loaded: how long requests queued, and how its memory grew.

Read by session.py, on gevent, where the test is led (locust's master, or the only process).
"""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import dataclass, field
from urllib.request import urlopen

import psutil

from loadtests.kit.histogram import Histogram

log = logging.getLogger(__name__)

QUEUE = "vllm:request_queue_time_seconds"
MEMORY = "process_resident_memory_bytes"  # of vLLM's own server; Triton's page has none
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read(page: str, name: str, model: str) -> float | None:
    """The sum of a metric's samples, those of `model` where one is named and they say whose they are; None without."""
    found: float | None = None
    for line in page.splitlines():
        if not line.startswith(name) or (sample := _SAMPLE.match(line)) is None or sample[1] != name:
            continue
        labels = dict(_LABEL.findall(sample[2] or ""))
        whose = {labels[label] for label in ("model", "model_name") if label in labels}
        if not model or not whose or any(model == one or one.endswith(f"/{model}") for one in whose):
            found = (found or 0.0) + float(sample[3])
    return found


@dataclass(slots=True, kw_only=True)
class Watch:
    """One server, asked once a second. `memory` holds bytes by second since the first look.

    Of the pages at `urls` it is the first one that tells of a queue.
    """

    urls: tuple[str, ...]
    model: str
    pid: int | None
    memory: list[int] = field(default_factory=list)
    _waited: tuple[float, float] | None = None
    _told: bool = False

    def look(self) -> Histogram:
        """Look once; returns the queue time of the requests that left the queue since: their mean, once for each."""
        page, queued = self._page(), Histogram()
        total, count = (read(page, f"{QUEUE}_{part}", self.model) for part in ("sum", "count"))
        if total is not None and count is not None:
            if self._waited is not None and count > self._waited[1]:
                number = count - self._waited[1]
                queued.add((total - self._waited[0]) / number, round(number))
            self._waited = total, count
        memory = self._tree() if self.pid is not None else read(page, MEMORY, "")
        if memory:
            self.memory.append(round(memory))
        return queued

    def _page(self) -> str:
        said = []
        for url in self.urls:
            try:
                with urlopen(url, timeout=5) as answer:
                    page = str(answer.read().decode(errors="replace"))
            except OSError as error:
                said.append(f"{url} cannot be read ({error})")
                continue
            if QUEUE in page:
                self.urls = (url,)
                return page
            said.append(f"{url} does not show {QUEUE}")
        if said and not self._told:
            log.warning("no queue time: %s; --metrics-url names the page that does", ", ".join(said))
            self._told = True
        return ""

    def _tree(self) -> int:
        """What the process and its children hold in memory; 0 when it is gone."""
        held = 0
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(self.pid)
            for process in (top, *top.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    held += process.memory_info().rss
        return held


def growth(memory: list[int]) -> float | None:
    """By what share memory grew: the last quarter's median over the second one's, the first being its warm-up."""
    quarter = len(memory) // 4
    if quarter < 1:
        return None
    early, late = sorted(memory[quarter : 2 * quarter]), sorted(memory[-quarter:])
    return late[len(late) // 2] / early[len(early) // 2] - 1.0
