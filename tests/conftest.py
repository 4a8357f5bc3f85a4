"""Rooms that need something a machine may lack: a missing thing skips by name, or fails where REQUIRE names it.

``REQUIRE=cuda,comfy,browser pytest`` turns the skips of those rooms into failures, so that green never means "skipped".
"""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest


def missing_cuda() -> str | None:
    """Why tests marked ``gpu`` cannot run here; None when they can."""
    try:
        import torch
    except ImportError:
        return "needs torch, which is not installed"
    if not torch.cuda.is_available():
        return f"needs a CUDA device; torch {torch.__version__} sees none"
    return None


def missing_comfy() -> str | None:
    """Why tests marked ``comfy`` cannot run here; None when they can."""
    path = os.environ.get("COMFYUI_PATH")
    if not path:
        return "needs a real ComfyUI; COMFYUI_PATH is not set"
    if not Path(path, "comfy", "samplers.py").is_file():
        return f"needs a real ComfyUI; COMFYUI_PATH={path} holds none"
    return None


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def missing_browser() -> str | None:
    """Why tests marked ``browser`` cannot run here; None when they can."""
    if importlib.util.find_spec("playwright") is None:
        return "needs playwright, which is not installed (pip install playwright; its own browsers are not needed)"
    if find_chromium() is None:
        return "needs Chromium, which is not on the PATH (apt-get install chromium)"
    return None


ROOMS = {
    "gpu": ("cuda", missing_cuda),
    "comfy": ("comfy", missing_comfy),
    "browser": ("browser", missing_browser),
}


def required() -> set[str]:
    """What REQUIRE names: "cuda", "comfy", "browser"."""
    names = {name.strip() for name in os.environ.get("REQUIRE", "").replace(",", " ").split()}
    unknown = names - {thing for thing, _ in ROOMS.values()}
    if unknown:
        raise pytest.UsageError(f"REQUIRE names {sorted(unknown)}; it knows {sorted(t for t, _ in ROOMS.values())}")
    return names


def pytest_configure(config):
    required()


def pytest_runtest_setup(item):
    for marker, (thing, missing) in ROOMS.items():
        if item.get_closest_marker(marker) is None:
            continue
        reason = missing()
        if reason is None:
            continue
        if thing in required():
            pytest.fail(f"REQUIRE={thing}: {reason}", pytrace=False)
        pytest.skip(reason)
