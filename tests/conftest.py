"""Rooms that need something a machine may lack: a missing thing skips by name, or fails where REQUIRE names it.

``REQUIRE=cuda,two-gpus,comfy,browser pytest`` turns the skips of those rooms into failures, so that green never means
"skipped".
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


def missing_triton() -> str | None:
    """Why tests marked ``triton`` cannot run here; None when they can."""
    from vc_attention.triton_support import why_missing

    return why_missing()


def find_sanitizer() -> str | None:
    """compute-sanitizer, which CUDA's installers do not put on the PATH."""
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def missing_sanitizer() -> str | None:
    """Why tests marked ``sanitizer`` cannot run here; None when they can."""
    if find_sanitizer() is None:
        return "needs compute-sanitizer, which is neither on the PATH nor in /usr/local/cuda/bin"
    return None


def missing_second_gpu() -> str | None:
    """Why tests marked ``two_gpus`` cannot run here; None when they can."""
    reason = missing_cuda()
    if reason is not None:
        return reason
    import torch

    count = torch.cuda.device_count()
    return f"needs two CUDA devices; torch sees {count}" if count < 2 else None


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


ROOMS = {  # marker: what REQUIRE calls it, and what may be missing
    "gpu": ("cuda", missing_cuda),
    "triton": ("cuda", missing_triton),
    "sanitizer": ("cuda", missing_sanitizer),
    "two_gpus": ("two-gpus", missing_second_gpu),
    "comfy": ("comfy", missing_comfy),
    "browser": ("browser", missing_browser),
}


def required() -> set[str]:
    """What REQUIRE names: "cuda", "two-gpus", "comfy", "browser"."""
    names = {name.strip() for name in os.environ.get("REQUIRE", "").replace(",", " ").split()}
    known = {thing for thing, _ in ROOMS.values()}
    if not names <= known:
        raise pytest.UsageError(f"REQUIRE names {sorted(names - known)}; it knows {sorted(known)}")
    return names


def pytest_configure(config):
    required()


def pytest_runtest_setup(item):
    lacking = [
        (thing, reason)
        for marker, (thing, missing) in ROOMS.items()
        if item.get_closest_marker(marker) is not None and (reason := missing()) is not None
    ]
    for thing, reason in lacking:
        if thing in required():
            pytest.fail(f"REQUIRE={thing}: {reason}", pytrace=False)
    if lacking:
        pytest.skip(lacking[0][1])
