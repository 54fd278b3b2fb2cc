"""What the alerts and the dashboard of deploy/monitoring ask of the metrics: names, and labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from tools.environment import ROOT

FOLDER = ROOT / "deploy" / "monitoring"
_METRIC = re.compile(r"\b((?:vllm|tritonstream):\w+|tritonstream_gateway_\w+)(?:\{([^}]*)\})?")
_BY = re.compile(r"\bby \(([^)]*)\)")
_SHOWN = re.compile(r"\{\{\s*(?:\$labels\.)?([a-z_]\w*)\s*\}\}")
_MATCHER = re.compile(r'(\w+)=~?"([^"]*)"')
SCRAPED = frozenset({"job", "instance"})  # Prometheus puts these on everything


@dataclass(frozen=True, slots=True)
class Query:
    """A metric that is asked for, the labels that it must have, and for some of these the values that are asked for."""

    where: str
    metric: str
    labels: frozenset[str]
    values: tuple[tuple[str, str], ...] = ()


def queries() -> Iterator[Query]:
    """Everything that is asked."""
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        yield from _read(f"alert {rule['alert']}", rule["expr"], " ".join(rule["annotations"].values()))
    dashboard = json.loads((FOLDER / "grafana" / "tritonstream.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield from _read(f"panel {panel['title']}", target["expr"], target["legendFormat"])


def _read(where: str, expression: str, shown: str) -> Iterator[Query]:
    by = {label.strip() for labels in _BY.findall(expression) for label in labels.split(",")}
    wanted = by | set(_SHOWN.findall(shown))
    for metric, matchers in _METRIC.findall(expression):
        values = tuple(
            (label, value) for label, alternatives in _MATCHER.findall(matchers) for value in alternatives.split("|")
        )
        yield Query(where, metric, frozenset(wanted | {label for label, _ in values}) - SCRAPED, values)
