"""The node pack's plain modules, for the demo.

Loaded by path: the repository's root must not be on ``sys.path``, where ``nodes/`` shadows ComfyUI's ``nodes.py``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

NODES = Path(__file__).resolve().parents[1] / "nodes"


def load(name: str) -> ModuleType:
    """``nodes/<name>.py``, which imports nothing of the pack."""
    spec = importlib.util.spec_from_file_location(f"vc_attention_{name}", NODES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
