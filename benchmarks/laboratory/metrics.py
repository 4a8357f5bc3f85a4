"""How close renders are, for many clips at once on a GPU: the node pack's PSNR, SSIM and FLIP, batched.

Clips are [N, F, 3, H, W] from 0 to 1, not rounded to bytes, so that a very small difference still has a number.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

NODES = Path(__file__).resolve().parents[2] / "nodes"
FLIP_REACH = 20  # pixels that FLIP's filters look across, rounded up
FRAMES_AT_ONCE = 512
LPIPS_FRAMES_AT_ONCE = 64


def _node_module(name: str):
    """A file of nodes/, loaded by its path: that folder's parent must not be on ``sys.path``."""
    spec = importlib.util.spec_from_file_location(f"vc_attention_nodes_{name}", NODES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_flip, _metrics = _node_module("flip"), _node_module("metrics")


def compare(reference: Tensor, other: Tensor) -> dict[str, list[float]]:
    """Every measure of every clip; LPIPS only where its weights are on this machine."""
    measures = {"psnr": psnr, "ssim": ssim, "flip": flip}
    if lpips_network() is not None:
        measures["lpips"] = lpips
    return {name: measure(reference, other).tolist() for name, measure in measures.items()}


def psnr(reference: Tensor, other: Tensor) -> Tensor:
    """[N] dB over all frames of a clip; 120 for equal clips."""
    error = (reference.double() - other.double()).square().mean((1, 2, 3, 4))
    return -10 * torch.log10(error.clamp_min(1e-12))


def ssim(reference: Tensor, other: Tensor) -> Tensor:
    """[N]: ``nodes/metrics.py``'s SSIM, batched."""
    return _by_frame(_ssim_frames, reference, other, FRAMES_AT_ONCE)


def _ssim_frames(a: Tensor, b: Tensor) -> Tensor:
    luma = torch.tensor(_metrics.LUMA, dtype=torch.float32, device=a.device)
    a, b = (torch.einsum("nchw,c->nhw", x * _metrics.PEAK, luma).double() for x in (a, b))
    offset = torch.arange(_metrics.WINDOW) - _metrics.WINDOW // 2
    kernel = torch.exp(-(offset.double() ** 2) / (2 * _metrics.WINDOW_SIGMA**2))
    weights = (kernel / kernel.sum()).tolist()

    def blur(x: Tensor) -> Tensor:
        # Sums of shifted frames: a convolution of one channel in float64 has no fast path.
        for dim in (1, 2):
            length = x.shape[dim] - len(weights) + 1
            x = sum(weight * x.narrow(dim, start, length) for start, weight in enumerate(weights))
        return x

    c1, c2 = (0.01 * _metrics.PEAK) ** 2, (0.03 * _metrics.PEAK) ** 2
    mean_a, mean_b = blur(a), blur(b)
    variance_a, variance_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
    covariance = blur(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * covariance + c2) / (variance_a + variance_b + c2)
    return (luminance * structure).mean((1, 2))


def flip(reference: Tensor, other: Tensor) -> Tensor:
    """[N]: mean of ``nodes/flip.py``'s map over all frames of a clip."""
    return _by_frame(_flip_frames, reference, other, FRAMES_AT_ONCE)


def _flip_frames(a: Tensor, b: Tensor) -> Tensor:
    """Many frames in one picture, each in a border of its own edge pixels, which is what its filters see anyway."""
    count, _, height, width = a.shape
    sheets = [F.pad(x, (FLIP_REACH,) * 4, mode="replicate").transpose(0, 1).flatten(1, 2) for x in (a, b)]
    error = _flip.flip(*sheets).unflatten(0, (count, -1))
    return error[:, FLIP_REACH:-FLIP_REACH, FLIP_REACH:-FLIP_REACH].mean((1, 2))


def lpips(reference: Tensor, other: Tensor) -> Tensor:
    """[N]: LPIPS (AlexNet), where `lpips_network` is not None."""
    network = lpips_network().to(reference.device)
    return _by_frame(lambda a, b: network(2 * a - 1, 2 * b - 1).flatten(), reference, other, LPIPS_FRAMES_AT_ONCE)


@cache
def lpips_network():
    """The network of the ``lpips`` package if it and AlexNet's weights are here; nothing is downloaded."""
    weights = Path(torch.hub.get_dir()) / "checkpoints"
    if importlib.util.find_spec("lpips") is None or not list(weights.glob("alexnet-*.pth")):
        return None
    import lpips

    return lpips.LPIPS(net="alex", verbose=False).eval().requires_grad_(False)


def _by_frame(measure, reference: Tensor, other: Tensor, at_once: int) -> Tensor:
    frames = (clips.flatten(0, 1).float().split(at_once) for clips in (reference, other))
    values = torch.cat([measure(a, b) for a, b in zip(*frames, strict=True)])
    return values.view(reference.shape[:2]).mean(1)


def latent_error(reference: Tensor, other: Tensor) -> list[float]:
    """Relative L2 difference of each clip's latents [N, ...]."""
    return ((other - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)).tolist()
