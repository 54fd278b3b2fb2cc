"""A Debian root file system as an image's base, for machines that no image registry is open to.

Read by tests/container. What leads to packages from here (apt's sources and settings, certificates, pip's settings) is
read from the machine when it is needed, and is in no file of the project. Needs root and debootstrap.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

SUITE = "bookworm"
SOURCES = (Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d"))
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_URI = re.compile(r"^(?:URIs:\s*|deb\s+(?:\[[^]]*\]\s+)?)(\S+)", re.MULTILINE)


class NoBase(Exception):
    """There can be no base here; the message says what is missing."""


def sources() -> dict[Path, str]:
    """The files from which apt on this machine learns where Debian's packages are."""
    files = [path for place in SOURCES for path in ([place] if place.is_file() else sorted(place.glob("*")))]
    return {
        path: text
        for path in files
        if path.suffix in (".list", ".sources") and SUITE in (text := path.read_text(encoding="utf-8"))
    }


def archive(cache: Path) -> Path:
    """The root file system as a tar file in `cache`, made there (a minute or two) where it is not yet."""
    if shutil.which("debootstrap") is None:
        raise NoBase("debootstrap is not installed")
    found = sources()
    mirror = next((match[1] for text in found.values() if (match := _URI.search(text))), None)
    if mirror is None:
        raise NoBase(f"apt knows no place of {SUITE}'s packages")
    made_of = [Path(__file__).read_bytes(), CERTIFICATES.read_bytes(), *(text.encode() for text in found.values())]
    name = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    target = cache / f"{SUITE}-{name}.tar"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    for stale in cache.glob(f"{SUITE}-*.tar*"):
        stale.unlink()
    with tempfile.TemporaryDirectory(prefix="tritonstream-base-") as folder:
        root = Path(folder)
        command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, folder, mirror]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise NoBase(f"debootstrap failed: {done.stdout[-2_000:]}")
        (root / "etc/apt/sources.list").unlink(missing_ok=True)
        for path, text in found.items():
            (root / path.relative_to("/")).write_text(text, encoding="utf-8")
        shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
        shutil.rmtree(root / "var/cache/apt/archives")
        (root / "var/cache/apt/archives/partial").mkdir(parents=True)
        partial = target.with_suffix(".tar.part")
        subprocess.run(
            ["tar", "--numeric-owner", "--one-file-system", "-C", folder, "-cf", str(partial), "."], check=True
        )
    partial.rename(target)
    return target


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def pip_settings(folder: Path) -> Iterator[Path]:
    """A pip.conf in `folder` with which a build on the host's network finds the packages that this machine's pip finds.

    A build sees no folder of this machine: those with packages are served on the loopback address meanwhile.
    """
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    given = dict(re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", shown, re.MULTILINE))
    with contextlib.ExitStack() as stack:

        def reachable(place: str) -> str:
            parts = urlsplit(place)
            if parts.scheme not in ("", "file"):
                return place
            path = Path(unquote(parts.path))
            if not path.is_dir():
                return ""
            # An index's links lead to files beside it; a folder of files is served alone.
            root = path.parent if path.name == "simple" else path
            url = stack.enter_context(_served(root))
            return f"{url}/{path.relative_to(root)}".rstrip("./") + "/"

        lines = ["[global]", f"cert = {CERTIFICATES}", "timeout = 180"]
        for name in ("index-url", "extra-index-url", "find-links"):
            places = [found for place in given.get(name, "").split() if (found := reachable(place))]
            if places:
                lines.append(f"{name} = {' '.join(places)}")
        settings = folder / "pip.conf"
        settings.write_text("\n".join(lines) + "\n", encoding="utf-8")
        yield settings


@contextlib.contextmanager
def _served(root: Path) -> Iterator[str]:
    """Serve a folder's files over HTTP on the loopback address for as long as the block lasts."""
    handler = functools.partial(_Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
