"""A number is a row: one JSON object a line, appended to benchmarks/results/<gpu>.jsonl."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def environment() -> dict:
    """What every row of a run shares: when, which code, which machine."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **_code(),
        "gpu": torch.cuda.get_device_name(),
        "driver": _nvidia_smi("driver_version"),
        "power_limit_w": float(_nvidia_smi("power.limit")),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _code() -> dict:
    """The commit, and whether files differ from it.

    A copy without git names its commit in VC_BENCH_COMMIT, with "-dirty" behind it where files differ.
    """
    named = os.environ.get("VC_BENCH_COMMIT")
    if named:
        return {"commit": named.removesuffix("-dirty"), "dirty": named.endswith("-dirty")}
    return {"commit": _git("rev-parse", "--short", "HEAD"), "dirty": bool(_git("status", "--porcelain"))}


def device_uuid() -> str:
    """Of torch's first device, which CUDA_VISIBLE_DEVICES may have made another than NVML's first."""
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def stem(gpu: str) -> str:
    """What a result file of a card is called, without an ending."""
    return gpu.lower().replace(" ", "-")


def append(rows: list[dict], path: Path) -> None:
    """Add rows to a result file; nothing is ever rewritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict]:
    """All rows of a result file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else "unknown"


def _nvidia_smi(field: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "-i", device_uuid()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
