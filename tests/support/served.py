"""The model folder's own modules, imported as Triton imports them: as a package, without vLLM and without Triton."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "model_repository" / "Qwen3-0.6B" / "1"
_PACKAGE = "served_model"


def module(name: str) -> ModuleType:
    """Import `name`.py of the model folder; its relative imports work."""
    if _PACKAGE not in sys.modules:
        package = ModuleType(_PACKAGE, "The model folder.")
        package.__path__ = [str(FOLDER)]
        sys.modules[_PACKAGE] = package
    return importlib.import_module(f"{_PACKAGE}.{name}")
