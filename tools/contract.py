"""The served model's wire contract, loaded by path: its folder is called `1`, which Python cannot import by name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

MODEL = Path(__file__).resolve().parent.parent / "model_repository" / "Qwen3-0.6B"


def load(model: Path = MODEL, module: str = "contract") -> ModuleType:
    """Return a module of a model folder, `1/contract.py` where none is named; its relative imports work."""
    folder = model / "1"
    name = f"model_in_{abs(hash(folder.resolve())):x}"
    if name not in sys.modules:
        if not (folder / f"{module}.py").is_file():
            raise ImportError(f"{folder / module}.py does not exist")
        package = sys.modules[name] = ModuleType(name, "A model folder.")
        package.__path__ = [str(folder)]
    return importlib.import_module(f"{name}.{module}")
