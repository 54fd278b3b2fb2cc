"""Charts of the streaming measures: a page beside locust's web UI, and a section in its HTML report.

Read by session.py. Locust's own charts show one aggregated latency and cannot be given more lines, so these are ours:
SVG in plain HTML, made anew for each look.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locust.env import Environment

from loadtests.kit import report
from loadtests.kit.ledger import Ledger

WIDTH, HEIGHT, LEFT, BOTTOM = 560, 170, 56, 20
COLORS = ("#1f77b4", "#d62728", "#2ca02c")
PAGE, SECTION = "/streaming", 'id="streaming"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart: lines of the timeline by key, each value times `factor`."""

    title: str
    keys: tuple[str, ...]
    factor: float = 1.0


CHARTS = (
    Chart(title="TTFT, ms", keys=("ttft_p50", "ttft_p95"), factor=1e3),
    Chart(title="Inter-token latency, ms", keys=("itl_p50", "itl_p95"), factor=1e3),
    Chart(title="Total time, ms", keys=("total_p50", "total_p95"), factor=1e3),
    Chart(title="Tokens/s, all requests", keys=("tokens_per_s",)),
    Chart(title="Tokens/s, one request", keys=("tokens_per_s_p50", "tokens_per_s_p95")),
    Chart(title="Requests/s", keys=("offered", "completed", "failed")),
    Chart(title="Queue time at the server, ms", keys=("queue_p50",), factor=1e3),
    Chart(title="Lateness of the generator, ms", keys=("lateness_p50", "lateness_p95"), factor=1e3),
)


def fragment(ledger: Ledger) -> str:
    """All charts, and where the generator was at its limit, as HTML."""
    points = report.timeline(ledger)
    drawn = "".join(_svg(chart, points) for chart in CHARTS)
    limits = "".join(f"<p><b>{report.LIMIT} {html.escape(limit)}</b></p>" for limit in report.limits(ledger))
    return f'<section {SECTION} style="font:13px sans-serif;padding:1em"><h2>Streaming</h2>{limits}{drawn}</section>'


def _svg(chart: Chart, points: Sequence[dict[str, float]]) -> str:
    lines = {
        key: [(point["second"], point[key] * chart.factor) for point in points if key in point] for key in chart.keys
    }
    top = max((value for line in lines.values() for _, value in line), default=0.0) or 1.0
    span = max((point["second"] for point in points), default=0.0) or 1.0

    def at(second: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - 8) * second / span
        return f"{x:.1f},{HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 12) * value / top:.1f}"

    body = "".join(
        f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="'
        f'{" ".join(at(second, value) for second, value in line)}"/>'
        for color, line in zip(COLORS, lines.values(), strict=False)
    )
    legend = " ".join(
        f'<span style="color:{color}">{html.escape(key)}</span>' for color, key in zip(COLORS, lines, strict=False)
    )
    axis = f'<path d="M{LEFT},12V{HEIGHT - BOTTOM}H{WIDTH - 8}" stroke="#999" fill="none"/>'
    marks = (
        f'<text x="{LEFT - 4}" y="18" text-anchor="end">{top:,.4g}</text>'
        f'<text x="{LEFT - 4}" y="{HEIGHT - BOTTOM}" text-anchor="end">0</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 4}" text-anchor="end">{span:.0f} s</text>'
    )
    return (
        f'<figure style="display:inline-block;margin:8px"><figcaption><b>{html.escape(chart.title)}</b> {legend}'
        f'</figcaption><svg width="{WIDTH}" height="{HEIGHT}" font-size="11" fill="#555">{axis}{marks}{body}</svg>'
        "</figure>"
    )


def append(environment: Environment, ledger: Ledger) -> None:
    """Add the charts to the HTML report that locust has written, if it was asked for one."""
    options = environment.parsed_options
    if options is not None and options.html_file and (file := Path(options.html_file)).exists():
        page = file.read_text(encoding="utf-8")
        if SECTION not in page:
            file.write_text(_into(page, ledger), encoding="utf-8")


def _into(page: str, ledger: Ledger) -> str:
    before, end, after = page.rpartition("</body>")
    return before + fragment(ledger) + end + after if end else page + fragment(ledger)


def show(web_ui: Any, ledger: Callable[[], Ledger]) -> None:
    """Add a page of charts to locust's web UI, a link to it on every page, and the charts to the report it offers."""

    @web_ui.app.route(f"{web_ui.web_base_path}{PAGE}" if getattr(web_ui, "web_base_path", "") else PAGE)
    @web_ui.auth_required_if_enabled
    def streaming() -> str:
        refresh = '<meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>Streaming</title>'
        return f"<!doctype html><html><head>{refresh}</head><body>{fragment(ledger())}</body></html>"

    @web_ui.app.after_request
    def link(response: Any) -> Any:
        if response.mimetype != "text/html" or response.status_code != 200 or response.direct_passthrough:
            return response
        page = response.get_data(as_text=True)
        if "is_report" in page:
            response.set_data(_into(page, ledger()))
        elif '<div id="root">' in page:
            style = "position:fixed;right:12px;bottom:12px;z-index:9999;font:14px sans-serif"
            response.set_data(
                page.replace("</body>", f'<a href="{PAGE[1:]}" style="{style}">Streaming charts</a></body>')
            )
        return response
