"""The files of deploy/monitoring, held against their own programs where Debian's packages are installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support import monitoring
from tests.support.monitoring import FOLDER
from tools.environment import ROOT

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
needs_amtool = pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not installed")


def checked(*command: str) -> str:
    """Run a checker; returns what it says, and fails with it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_reads_its_files(tmp_path: Path) -> None:
    """The configuration, with the rules where its container has them."""
    text = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus", str(FOLDER)), encoding="utf-8")
    assert "rule files found" in checked("promtool", "check", "config", str(tmp_path / "prometheus.yml"))


@needs_promtool
def test_the_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """And not before: played through with series of their metrics."""
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    shutil.copy(FOLDER / "alerts.test.yml", tmp_path)
    checked("promtool", "test", "rules", str(tmp_path / "alerts.test.yml"))


@needs_amtool
def test_alertmanager_reads_its_file() -> None:
    """Nobody is told by default: that is said in it."""
    assert "SUCCESS" in checked("amtool", "check-config", str(FOLDER / "alertmanager.yml"))


def test_every_alert_says_what_and_how_bad() -> None:
    """A name, a severity, a summary and what to do."""
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_dashboard_is_grafanas_and_asks_the_provisioned_source() -> None:
    """Every panel has a place, a title and a query of the datasource that is provisioned."""
    dashboard = json.loads((FOLDER / "grafana" / "tritonstream.json").read_text(encoding="utf-8"))
    (source,) = yaml.safe_load((FOLDER / "grafana" / "datasource.yml").read_text(encoding="utf-8"))["datasources"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) > 10
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {source["uid"]}


def test_queries_are_found() -> None:
    """What the live test asks about is what is written: every file has some, and none is passed over."""
    asked = {query.metric for query in monitoring.queries()}
    assert {"tritonstream:engine_alive", "vllm:time_to_first_token_seconds_bucket"} <= asked
    assert "tritonstream_gateway_rejected_total" in asked


def test_the_reasons_that_are_asked_for_are_the_gateways() -> None:
    """A label's value that nobody writes would be an alert that never fires."""
    documented = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
    values = {value for query in monitoring.queries() for label, value in query.values if label == "reason"}
    assert len(values) == 4
    for value in values:
        assert f" {value}," in documented or f" {value} " in documented, value
