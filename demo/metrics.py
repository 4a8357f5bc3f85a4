"""How close two clips are: the node pack's own PSNR and SSIM.

Loaded by its path: the repository's root must not be on ``sys.path``, where ``nodes/`` shadows ComfyUI's ``nodes.py``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "vc_attention_metrics", Path(__file__).resolve().parents[1] / "nodes" / "metrics.py"
)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

psnr, ssim = _module.psnr, _module.ssim
