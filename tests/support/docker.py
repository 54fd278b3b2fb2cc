"""Docker as the tests of the containers use it: the daemon that runs, or one of their own; images, a Compose project.

A daemon of our own has its socket and state in the tests' folder and its layers in the tests' cache, so that the second
run builds little. It touches neither the firewall nor the routes: what is asked goes through its proxies.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.environment import ROOT
from tools.server import TRAMPOLINE

START_SECONDS = 60.0
BUILD_SECONDS = 1_800.0
KEPT = "20GB"  # of layers, in the cache of a daemon of our own
LIMIT = "20000:20000"  # where the daemon's own limits are lower than the default that it asks for, no container starts

SERVER, GATEWAY, STANDIN = "tritonstream-test-server", "tritonstream-test-gateway", "tritonstream-test-standin"
Build = Callable[[str, Path, Mapping[str, str]], None]


class NoDocker(Exception):
    """No daemon runs, and none can be started here; the message says why."""


def _paths() -> list[Path]:
    return [Path(sys.executable).parent, *(Path(place) for place in os.environ["PATH"].split(os.pathsep))]


def program(name: str) -> str:
    """A program of this environment, or on PATH. Raises NoDocker."""
    found = shutil.which(name, path=os.pathsep.join(str(path) for path in _paths()))
    if found is None:
        raise NoDocker(f"there is no {name}")
    return found


def _client() -> str:
    """A docker that can build with BuildKit: newer ones need a plugin for it, which may not be there."""
    for path in _paths():
        docker = shutil.which("docker", path=str(path))
        if docker is None:
            continue
        version = subprocess.run([docker, "--version"], capture_output=True, text=True, check=False).stdout
        major = "".join(character for character in version.partition("version ")[2].partition(".")[0])
        plugin = subprocess.run([docker, "buildx", "version"], capture_output=True, check=False).returncode == 0
        if plugin or (major.isdecimal() and int(major) < 23):
            return docker
    raise NoDocker("there is no docker command that can build with BuildKit")


@dataclass(slots=True)
class Docker:
    """A daemon, and what was made there by us."""

    host: str
    client: str
    own: bool = False
    images: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of commands that talk to it."""
        return os.environ | {"DOCKER_HOST": self.host, "DOCKER_BUILDKIT": "1"}

    def run(self, *words: str, check: bool = True, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a docker command; its output is in an error's message."""
        return _run([self.client, *words], self.environment, check=check, timeout=timeout)

    def inspect(self, name: str) -> dict[str, Any]:
        """All that the daemon knows of a container, image or network."""
        (found,) = json.loads(self.run("inspect", name).stdout)
        return dict(found)

    def bring(self, archive: Path) -> str:
        """Make an image of a root file system, unless there is one of that very archive; returns its name."""
        name = f"tritonstream-test-base:{archive.stem}"
        if not self.run("image", "ls", "--quiet", name).stdout.strip():
            self.run("import", str(archive), name, timeout=BUILD_SECONDS)
            self.images.append(name)
        return name

    def build(self, name: str, dockerfile: Path, arguments: Mapping[str, str], settings: Path) -> str:
        """Build an image from the checkout, on the host's network; `settings` is pip's. Returns its name."""
        words = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        self.run(
            *("build", "--network=host", "--progress=plain", f"--secret=id=pip,src={settings}", *words),
            *("--file", str(dockerfile), "--tag", name, str(ROOT)),
            timeout=BUILD_SECONDS,
        )
        self.images.append(name)
        return name

    def clean(self) -> None:
        """Remove what was made of images: all of it, or in a daemon of our own what the next run would not use."""
        if self.own:
            self.run("image", "prune", "--force")
            self.run("builder", "prune", "--force", f"--keep-storage={KEPT}", timeout=BUILD_SECONDS)
        elif self.images:
            self.run("image", "rm", *self.images, timeout=BUILD_SECONDS)

    def left(self) -> list[str]:
        """Containers, volumes and networks that are there: all of them, but for the networks that every daemon has."""
        names = self.run("ps", "--all", "--format", "container {{.Names}}").stdout
        names += self.run("volume", "ls", "--format", "volume {{.Name}}").stdout
        networks = self.run("network", "ls", "--format", "network {{.Name}}").stdout
        builtin = {"network bridge", "network host", "network none"}
        return sorted({*names.splitlines(), *networks.splitlines()} - builtin)


@contextlib.contextmanager
def daemon(folder: Path, cache: Path) -> Iterator[Docker]:
    """The daemon that runs, or one that is started with its state in `folder` and its layers in `cache`.

    Raises NoDocker.
    """
    running = Docker(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"), _client())
    if running.run("version", check=False).returncode == 0:
        yield running
        running.clean()
        return
    if os.geteuid() != 0:
        raise NoDocker("no Docker daemon answers, and only root can start one")
    dockerd, socket, log = program("dockerd"), folder / "docker.sock", folder / "dockerd.log"
    cache.mkdir(parents=True, exist_ok=True)
    started = Docker(f"unix://{socket}", running.client, own=True)
    command = [
        *(sys.executable, "-I", "-S", "-c", TRAMPOLINE, str(os.getpid())),
        *(dockerd, "--host", started.host, "--data-root", str(cache), "--exec-root", str(folder / "exec")),
        *("--pidfile", str(folder / "pid"), "--bridge", "none", "--iptables=false", "--ip-forward=false"),
        *("--default-ulimit", f"nofile={LIMIT}", "--default-ulimit", f"nproc={LIMIT}"),
    ]
    with log.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while started.run("version", check=False).returncode != 0:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise NoDocker(f"dockerd does not start:\n{log.read_text(errors='replace')[-2_000:]}")
                time.sleep(0.2)
            yield started
            started.clean()
        finally:
            process.terminate()
            process.wait(60)
            _unmount(folder)


def _unmount(folder: Path) -> None:
    """Unmount what a daemon left mounted in its folder, which could not be removed else: its network namespace."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        place = line.split()[1]
        if Path(place).is_relative_to(folder):
            subprocess.run([program("umount"), place], check=True)


@dataclass(frozen=True, slots=True)
class Project:
    """A Compose project: its files, its name, and the variables that they are read with."""

    docker: Docker
    files: Sequence[Path]
    name: str
    variables: Mapping[str, str]

    def compose(self, *words: str, check: bool = True, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run a docker compose command."""
        files = [word for path in self.files for word in ("--file", str(path))]
        command = [program("docker-compose"), "--project-name", self.name, *files, *words]
        return _run(command, self.docker.environment | dict(self.variables), check=check, timeout=timeout)

    def container(self, service: str) -> str:
        """The id of a service's container, running or not."""
        return self.compose("ps", "--all", "--quiet", service).stdout.strip()

    def state(self, service: str) -> dict[str, Any]:
        """The daemon's word on a service's container: Status, ExitCode, Health and the like."""
        return dict(self.docker.inspect(self.container(service))["State"])

    def health(self, service: str) -> str:
        """What the last health checks came to: starting, healthy or unhealthy."""
        return str(self.state(service)["Health"]["Status"])

    def logs(self, *services: str) -> str:
        """What the services said."""
        return self.compose("logs", "--no-color", *services).stdout

    def execute(self, service: str, *words: str) -> str:
        """Run a command in a service's container; returns what it prints."""
        return self.docker.run("exec", self.container(service), *words).stdout


def _run(
    command: Sequence[str], environment: Mapping[str, str], *, check: bool, timeout: float
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=timeout, check=False
    )
    if check and done.returncode:
        shown = " ".join(command)
        raise AssertionError(f"{shown}: exit code {done.returncode}\n{done.stdout[-4_000:]}{done.stderr[-4_000:]}")
    return done
