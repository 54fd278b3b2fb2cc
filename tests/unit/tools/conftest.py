"""A model repository whose one model answers at once, and starts a child to be left behind: no engine, no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.server import SHARED_MEMORY

CONFIG = """
name: "echo"
backend: "python"
max_batch_size: 0
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_MODEL count: 1 } ]
"""

MODEL = '''
"""Echoes its input; starts a child in a session of its own, as an engine's worker may be, with shared memory."""

import subprocess
import sys

import triton_python_backend_utils as pb_utils

CHILD = """
import time
from multiprocessing import resource_tracker, shared_memory
region = shared_memory.SharedMemory(create=True, size=64)
resource_tracker.unregister(region._name, "shared_memory")
print(region.name, flush=True)
time.sleep(600)
"""


class TritonPythonModel:
    def initialize(self, args):
        self.child = subprocess.Popen(
            ["python3", "-c", CHILD], start_new_session=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        with open(args["model_repository"] + "/region", "wb") as note:
            note.write(self.child.stdout.readline().strip())

    def execute(self, requests):
        texts = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text", text)]) for text in texts]
'''


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the model `echo`."""
    version = tmp_path / "repository" / "echo" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL, encoding="utf-8")
    (version.parent / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
    return version.parent.parent


@pytest.fixture
def region(repository: Path) -> Iterator[Callable[[], Path]]:
    """Tells where in /dev/shm the model's child put its region, once the model is there; removes it after the test."""

    def find() -> Path:
        return SHARED_MEMORY / (repository / "echo" / "region").read_text(encoding="utf-8")

    yield find
    with contextlib.suppress(FileNotFoundError):
        find().unlink()
