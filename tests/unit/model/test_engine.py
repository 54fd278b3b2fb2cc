"""What engine.py takes from vLLM, where it can be told without an engine: the other tests ask a server."""

from __future__ import annotations

import subprocess
import sys

from tools.environment import ROOT

LIMITS = """
import inspect
from vllm.entrypoints.openai.api_server import build_async_engine_client
from tests.support import served
of_vllm = inspect.signature(build_async_engine_client).parameters["usage_context"].default
print("the same" if served.module("engine").SERVER is of_vllm else of_vllm)
"""


def test_limits_that_nobody_set_are_those_of_vllm_serve() -> None:
    """vLLM chooses them by where its engine runs; on a CPU all are one, on a large GPU 8 times another."""
    done = subprocess.run([sys.executable, "-c", LIMITS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("the same"), done.stdout + done.stderr
