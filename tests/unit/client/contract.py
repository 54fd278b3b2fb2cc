"""The server's own contract, loaded from the model folder: what the client is held against."""

from __future__ import annotations

from typing import Any

from tests.support import served

contract: Any = served.module("contract")
