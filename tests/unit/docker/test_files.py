"""What the files of docker/ say, without a Docker daemon: linted, read by the real Compose, and true of the project."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.docker import program
from tools import checks
from tools.environment import ROOT, pins

DOCKER = ROOT / "docker"
DOCKERFILES = (
    DOCKER / "Dockerfile",
    DOCKER / "gateway.Dockerfile",
    ROOT / "tests" / "container" / "standin.Dockerfile",
)
GPU = (DOCKER / "compose.yaml",)
CPU = (*GPU, DOCKER / "compose.cpu.yaml")
TESTED = (*CPU, ROOT / "tests" / "container" / "compose.test.yaml")
DRAIN_SECONDS = 30  # of tools.serve and of the gateway, where nothing else is said
USER = "10001:10001"


@cache
def services(*files: Path) -> dict[str, Any]:
    """The services of Compose files, as Compose itself reads them, those of profiles too."""
    command = [program("docker-compose"), "--profile", "*", *(word for path in files for word in ("--file", str(path)))]
    done = subprocess.run(
        [*command, "config", "--format", "json"], capture_output=True, text=True, env={"PATH": "/usr/bin"}, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout)["services"])


def seconds(text: str) -> int:
    """Compose's durations, as it prints them."""
    minutes, second = re.fullmatch(r"(?:(\d+)m)?(\d+)s", text).groups()  # type: ignore[union-attr]
    return 60 * int(minutes or 0) + int(second)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_no_complaint(dockerfile: Path) -> None:
    """What is not followed is named in the file, with the reason beside it."""
    done = subprocess.run(
        [program("hadolint"), "--no-color", str(dockerfile)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("files", [GPU, CPU, TESTED], ids=["gpu", "cpu", "tested"])
def test_compose_reads_it(files: tuple[Path, ...]) -> None:
    """All that was promised is in it, Redis on demand alone, for nothing of the project asks it yet."""
    found = services(*files)
    assert set(found) == {"triton", "gateway", "redis", "prometheus", "alertmanager", "grafana"}
    assert found["redis"]["profiles"] == ["cache"]


def test_a_gpu_is_reserved_but_for_the_cpu() -> None:
    """One for the server; the override takes the reservation away and names the base on which the CPU's vLLM comes."""
    (device,) = services(*GPU)["triton"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    server = services(*CPU)["triton"]
    assert not server.get("deploy")
    assert server["build"]["args"] == {"BASE_IMAGE": "debian:bookworm-slim", "KIND": "cpu"}


def test_a_drain_has_its_time() -> None:
    """Docker kills after the grace period: it is longer than what open requests and the engine's end are given."""
    found = services(*GPU)
    assert seconds(found["triton"]["stop_grace_period"]) > DRAIN_SECONDS + 15
    assert seconds(found["gateway"]["stop_grace_period"]) > DRAIN_SECONDS + 10


def test_shared_memory_is_enough() -> None:
    """For what the check of the machine asks, which Docker's default is not."""
    assert int(services(*GPU)["triton"]["shm_size"]) >= 2 * checks.SHARED_MEMORY_MB * 2**20


def test_everything_is_hard_to_break_out_of() -> None:
    """No capability, no new privilege, started again when it ends, on no port that the world sees; a version named."""
    for name, service in services(*GPU).items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert {port["host_ip"] for port in service.get("ports", ())} <= {"127.0.0.1"}, name
        assert "build" in service or re.search(r":v?\d+\.\d+[\w.-]*$", service["image"]), name
        assert "build" in service or service["healthcheck"]["test"], name
    assert services(*GPU)["gateway"]["read_only"]


def test_what_is_mounted_is_there() -> None:
    """Docker would make a folder of what is missing."""
    for service in services(*GPU).values():
        for volume in service.get("volumes", ()):
            if volume["type"] == "bind" and volume["target"] != "/models":
                assert Path(volume["source"]).is_file(), volume["source"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES[:2], ids=lambda path: path.name)
def test_the_last_word_is_not_roots(dockerfile: Path) -> None:
    """The image runs as 10001, and signals reach the server itself: no shell is between."""
    final = dockerfile.read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.*)$", final, re.MULTILINE) == [USER]
    assert re.search(r'^ENTRYPOINT \["\.venv/bin/python", "-m", ', final, re.MULTILINE)
    assert "HEALTHCHECK" in final


@pytest.mark.parametrize("dockerfile", DOCKERFILES[:2], ids=lambda path: path.name)
def test_packages_come_from_the_locks(dockerfile: Path) -> None:
    """Every installation is from a lock, without what the lock does not name."""
    text = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ")
    installations = re.findall(r"pip\S* (?:--python \S+ )?install [^;&]*", text)
    assert installations
    for installation in installations:
        lock = re.search(r"install --no-deps -r (requirements/\S+\.txt)", installation)
        assert lock is not None, installation
        assert pins(ROOT / lock[1])


def test_the_locks_agree() -> None:
    """The gateway's image, the launcher's packages on NVIDIA's and the server's environment have the same versions."""
    server = dict(pin.split("==") for pin in pins(ROOT / "requirements" / "server-cpu.txt"))
    for name in ("client", "gateway"):
        for package, version in (pin.split("==") for pin in pins(ROOT / "requirements" / f"{name}.txt")):
            assert server.get(package, version) == version, f"{package} of {name}.txt"


def test_one_tag_of_nvidias_image_is_meant() -> None:
    """The documents name the one that is built on."""
    (base,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", (DOCKER / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    named = re.findall(r"nvcr\.io/nvidia/tritonserver:[\w.-]+", (DOCKER / "README.md").read_text(encoding="utf-8"))
    assert set(named) == {base}


def test_an_image_is_built_from_what_is_listed_alone() -> None:
    """No environment, cache, weight or secret of a checkout gets into a layer: all is left out but some folders."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    for rule in rules:
        if rule.startswith("!"):
            assert (ROOT / rule.removeprefix("!")).is_dir()
    for dockerfile in DOCKERFILES[:2]:
        copied = re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
        for source in " ".join(copied).split():
            assert any(source.startswith(rule.removeprefix("!")) for rule in rules if rule.startswith("!")), source
