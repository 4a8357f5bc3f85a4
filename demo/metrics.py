"""How close two clips are: the node pack's own PSNR and SSIM."""

from __future__ import annotations

import pack

_metrics = pack.load("metrics")
psnr, ssim = _metrics.psnr, _metrics.ssim
