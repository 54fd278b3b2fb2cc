"""The images, built from the checkout on a Debian made here, and everything of docker/compose.yaml up on the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import debian, docker, tiny_qwen3
from tests.support.docker import Docker, NoDocker, Project
from tests.support.servers import TINY as MODEL
from tools.environment import ROOT
from tools.server import free_port

HERE = Path(__file__).parent
PORTS = ("HTTP", "GRPC", "METRICS", "GATEWAY", "PROMETHEUS", "ALERTMANAGER", "GRAFANA")
SERVER, GATEWAY, STANDIN = "tritonstream-test-server", "tritonstream-test-gateway", "tritonstream-test-standin"


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    """A Docker daemon: the one that runs, or one for these tests. After them there is as little in it as before."""
    try:
        with docker.daemon(tmp_path_factory.mktemp("docker"), tiny_qwen3.cached().parent / "docker") as running:
            before = running.left()
            yield running
            assert running.left() == before
    except NoDocker as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def images(daemon: Docker, tmp_path_factory: pytest.TempPathFactory) -> Docker:
    """The two images of the project, and the stand-ins for those of others."""
    try:
        docker.program("docker-compose")
        base = daemon.bring(debian.archive(tiny_qwen3.cached().parent / "containers"))
    except (debian.NoBase, NoDocker) as missing:
        pytest.skip(str(missing))
    with debian.pip_settings(tmp_path_factory.mktemp("pip")) as settings:
        daemon.build(GATEWAY, ROOT / "docker" / "gateway.Dockerfile", {"GATEWAY_BASE_IMAGE": base}, settings)
        daemon.build(SERVER, ROOT / "docker" / "Dockerfile", {"BASE_IMAGE": base}, settings)
        daemon.build(STANDIN, HERE / "standin.Dockerfile", {"BASE_IMAGE": base}, settings)
    return daemon


@pytest.fixture(scope="session")
def project(images: Docker, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """`docker compose up --wait` with the tiny model mounted; down again after the tests."""
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_model, models / MODEL)
    for path in (models, *models.rglob("*")):  # another user reads it
        path.chmod(0o755 if path.is_dir() else 0o644)
    variables = {f"{name}_PORT": str(free_port()) for name in PORTS}
    variables |= {"MODELS": str(models), "MODEL": f"/models/{MODEL}"}
    files = [ROOT / "docker" / "compose.yaml", ROOT / "docker" / "compose.cpu.yaml", HERE / "compose.test.yaml"]
    started = Project(images, files, "tritonstream-test", variables)
    try:
        done = started.compose("--profile", "cache", "up", "--wait", "--no-build", check=False, timeout=600)
        assert done.returncode == 0, done.stderr + started.logs()
        yield started
    finally:
        print(started.logs())
        started.compose("--profile", "cache", "down", "--volumes", "--timeout", "60")
