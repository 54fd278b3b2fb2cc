"""The watch: whose metrics it reads, on which page, and what it makes of memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadtests.kit import watch
from loadtests.kit.watch import Watch


@contextmanager
def page(*texts: str) -> Iterator[str]:
    """Serve a metrics page that says these, one after the other; yields its URL."""
    left = list(texts)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(left.pop(0).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


def test_the_queue_is_read_where_it_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """A gateway's page knows of no queue; the one behind it does, and from then on only that is asked."""
    told = [
        f'{watch.QUEUE}_sum{{model="m"}} {total}\n{watch.QUEUE}_count{{model="m"}} {count}\n'
        for total, count in ((1, 2), (4, 5))
    ]
    with page("gateway_requests 1\n") as gateway, page(*told) as triton:
        looking = Watch(urls=(gateway, triton), model="m", pid=None)
        assert looking.look().count == 0  # what was before the test is not its
        queued = looking.look()
    assert (queued.count, queued.mean) == (3, 1.0)
    assert not caplog.records


def test_a_page_without_a_queue_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """By its address, and with what to do."""
    with page("other 1\n", "other 1\n") as url:
        looking = Watch(urls=(url,), model="", pid=None)
        assert looking.look().count == looking.look().count == 0
    (record,) = caplog.records
    assert f"{url} does not show {watch.QUEUE}" in record.message
    assert "--metrics-url" in record.message


def test_memory_grows_from_the_second_quarter_on() -> None:
    """The first quarter is warm-up; outliers do not count."""
    assert watch.growth([10, 50, 100, 100, 900, 105, 110, 110]) == pytest.approx(0.1)
    assert watch.growth([100, 200]) is None


def test_a_metric_is_the_models_own() -> None:
    """Of several models on one page only the one that is asked counts; without a name, all."""
    page = (
        "# TYPE q counter\n"
        'q_sum{model="a",version="1"} 2.5\nq_sum{model="b",version="1"} 4\nq_summary{model="a"} 9\nother 1\n'
    )
    assert watch.read(page, "q_sum", "a") == 2.5
    assert watch.read(page, "q_sum", "") == 6.5
    assert watch.read(page, "nothing", "") is None
