"""What a comparison of two renders leaves behind: the strip, an animation, and one JSON file."""

from __future__ import annotations

import json
import math
import os
import platform
from importlib import metadata
from pathlib import Path

import metrics
import picture
import torch

FRAMES_SHOWN = 4
WHAT_IT_IS = (
    "A small Wan model that this project trained on drawn clips and photographs. Both rows start from the same noise."
)


def write_comparison(
    folder: Path,
    exact_latents: torch.Tensor,
    low_bit_latents: torch.Tensor,
    exact_label: str,
    low_bit_label: str,
    facts: dict,
) -> dict:
    """Write strip.png, clip.webp and result.json into ``folder``; returns what the JSON holds.

    ``facts`` is what the caller knows of the two renders; quality and versions are added.
    """
    exact, low_bit = picture.develop(exact_latents), picture.develop(low_bit_latents)
    gain = picture.difference_gain(exact, low_bit)
    difference = picture.amplified_difference(exact, low_bit, gain)
    exact, low_bit = picture.to_bytes(exact), picture.to_bytes(low_bit)

    ratio = metrics.psnr(exact, low_bit)
    similarity = metrics.ssim(exact, low_bit)
    shown_ratio = "equal" if math.isinf(ratio) else f"PSNR {ratio:.1f} dB"
    folder.mkdir(parents=True, exist_ok=True)
    picture.save_strip(
        folder / "strip.png",
        [
            (exact_label, exact),
            (f"{low_bit_label} - {shown_ratio}, SSIM {similarity:.3f}", low_bit),
            (f"Difference x {gain}, around grey", difference),
        ],
        FRAMES_SHOWN,
        WHAT_IT_IS,
    )
    picture.save_animation(folder / "clip.webp", [exact, low_bit, difference])

    result = {
        "what": WHAT_IT_IS,
        "quality": {
            "psnr_db": None if math.isinf(ratio) else round(ratio, 3),
            "ssim": round(similarity, 5),
            "latent_relative_error": round(_relative_error(exact_latents, low_bit_latents), 6),
            "difference_gain": gain,
            "frames": len(exact),
            "frame_pixels": list(exact.shape[1:3]),
        },
        **facts,
        "versions": versions(),
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
    }
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def quality_line(result: dict) -> str:
    """The measured likeness in one line."""
    quality = result["quality"]
    ratio = "no difference" if quality["psnr_db"] is None else f"PSNR {quality['psnr_db']:.2f} dB"
    return f"{ratio}, SSIM {quality['ssim']:.4f}, latents differ by {quality['latent_relative_error']:.2%}"


def versions() -> dict[str, str | None]:
    """Versions of what the result depends on; None where a package is not installed."""
    names = ("vc-attention", "torch", "diffusers", "numpy", "pillow")
    return {"python": platform.python_version(), **{name: _version(name) for name in names}}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _relative_error(reference: torch.Tensor, other: torch.Tensor) -> float:
    return float((other - reference).norm() / reference.norm())
