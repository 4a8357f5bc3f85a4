"""Which implementation groups values. Unlike attention, ``auto`` may use the reference: it runs once in many calls."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..arch import family
from ..dispatch import AUTO
from ..errors import UnsupportedCall
from ..guard import why_cuda_is_unavailable

CUDA_FAMILIES = ("sm_90",)


def choose_group(v: Tensor, clusters: int, implementation: str) -> Callable:
    """The function that groups ``v`` [B, H, S, D]; UnsupportedCall if a named one does not serve it."""
    if implementation == "reference":
        return _reference
    reason = _why_not_cuda(v, clusters)
    if reason is None:
        from .cuda import group_cuda

        return group_cuda
    if implementation == AUTO:
        return _reference
    raise UnsupportedCall({implementation: reason})


def _reference(v: Tensor, centroids: Tensor | None, clusters: int, iterations: int) -> tuple[Tensor, Tensor]:
    from .reference import group_reference

    if not bool(v.isfinite().all()):
        raise UnsupportedCall({"reference": "v holds NaN or infinity"})
    return group_reference(v, centroids, clusters, iterations)


def _why_not_cuda(v: Tensor, clusters: int) -> str | None:
    name = family(v.device)
    if name not in CUDA_FAMILIES:
        return f"runs on {', '.join(CUDA_FAMILIES)}, not on {name}"
    from .cuda import refusal

    return refusal(v, clusters) or why_cuda_is_unavailable(v.device, str(v.dtype).removeprefix("torch."))
