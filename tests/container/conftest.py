"""The images, built from the checkout on a Debian made here, and everything of docker/compose.yaml up on the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import debian, docker, tiny_qwen3
from tests.support.docker import GATEWAY, SERVER, STANDIN, Build, Docker, NoDocker, Project
from tests.support.servers import TINY as MODEL
from tools.environment import ROOT
from tools.server import free_port

HERE = Path(__file__).parent
PORTS = ("HTTP", "GRPC", "METRICS", "GATEWAY", "PROMETHEUS", "ALERTMANAGER", "GRAFANA")


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
def base(daemon: Docker) -> str:
    """An image of Debian, made on this machine."""
    try:
        docker.program("docker-compose")
        return daemon.bring(debian.archive(tiny_qwen3.cached().parent / "containers"))
    except (debian.NoBase, NoDocker) as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def build(daemon: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """Builds an image from the checkout: its name, its Dockerfile, its arguments."""
    with debian.pip_settings(tmp_path_factory.mktemp("pip")) as settings:

        def made(name: str, dockerfile: Path, arguments: Mapping[str, str]) -> None:
            daemon.build(name, dockerfile, arguments, settings)

        yield made


@pytest.fixture(scope="session")
def images(daemon: Docker, base: str, build: Build) -> Docker:
    """The two images of the project, and the stand-ins for those of others."""
    build(GATEWAY, ROOT / "docker" / "gateway.Dockerfile", {"GATEWAY_BASE_IMAGE": base})
    build(SERVER, ROOT / "docker" / "Dockerfile", {"BASE_IMAGE": base})
    build(STANDIN, HERE / "standin.Dockerfile", {"BASE_IMAGE": base})
    return daemon


@pytest.fixture(scope="session")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model, which other users may read."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_model, folder / MODEL)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="session")
def project(images: Docker, models: Path) -> Iterator[Project]:
    """`docker compose up --wait` with the tiny model mounted; down again after the tests."""
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
