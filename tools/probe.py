"""Whether a server, or a gateway, can answer now: exits with 0, or with 1 and the reason. The containers' health check.

`tools.serve` watches the engines with it. Run as a script: standard library only, so that it costs some 50 ms of a CPU.

    probe.py http://127.0.0.1:8000/v2/health/ready http://127.0.0.1:8002/metrics    # a server
    probe.py http://127.0.0.1:9000/health/ready                                     # a gateway, which asks its server

Triton goes on to call itself ready when an engine has died or hangs; the served model's own metrics know better.
"""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

SECONDS = 4.0
STALL_SECONDS = 30.0  # as the gateway's --stall
_GAUGE = re.compile(r"^tritonstream:(engine_alive|engine_stalled_seconds)\{(.*)\} (\S+)$", re.MULTILINE)
_MODEL = re.compile(r'\bmodel="([^"]*)"')
# What is asked is on this machine: no proxy that the environment names is between.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(url: str) -> str:
    """Return a page. Raises OSError, in words, when it cannot be had or its status is not 200."""
    try:
        with _OPENER.open(url, timeout=SECONDS) as answer:
            return str(answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(300).decode(errors="replace").strip()
        raise OSError(f"{url} answers {error.code} {said}".rstrip()) from error
    except OSError as error:
        raise OSError(f"{url} does not answer: {getattr(error, 'reason', error)}") from error


def dead(page: str) -> list[str]:
    """Names of the models whose engine has died, by the page of the metrics port."""
    return [
        _name(labels) for gauge, labels, value in _GAUGE.findall(page) if gauge == "engine_alive" and float(value) == 0
    ]


def stalled(page: str) -> list[str]:
    """Names of the models whose engine has work and made no progress for STALL_SECONDS."""
    return [
        _name(labels)
        for gauge, labels, value in _GAUGE.findall(page)
        if gauge == "engine_stalled_seconds" and float(value) > STALL_SECONDS
    ]


def _name(labels: str) -> str:
    found = _MODEL.search(labels)
    return found[1] if found else labels


def refusal(ready: str, metrics: str = "") -> str:
    """Say why no request could be answered now; empty when one could."""
    try:
        fetch(ready)
        page = fetch(metrics) if metrics else ""
    except OSError as error:
        return str(error)
    if names := dead(page):
        return f"the engine is dead: {', '.join(names)}"
    if names := stalled(page):
        return f"the engine has made no progress for more than {STALL_SECONDS:.0f} s: {', '.join(names)}"
    return ""


def main(arguments: Sequence[str]) -> int:
    """Probe and say; returns the exit code."""
    if len(arguments) not in (1, 2):
        print("usage: probe.py READY_URL [METRICS_URL]", file=sys.stderr)
        return 2
    why = refusal(*arguments)
    print(why or "ready")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
