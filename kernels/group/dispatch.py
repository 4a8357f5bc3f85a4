"""Which implementation groups values. Unlike attention, ``auto`` may use the reference: it runs once in many calls."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..arch import family
from ..attend.validation import dtype_name, require_finite
from ..dispatch import AUTO, IMPLEMENTATIONS
from ..errors import UnsupportedCall
from ..guard import why_cuda_is_unavailable


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

    require_finite({"v": v})
    return group_reference(v, centroids, clusters, iterations)


def _why_not_cuda(v: Tensor, clusters: int) -> str | None:
    families = next(row.families for row in IMPLEMENTATIONS if row.name == "cuda")
    name = family(v.device)
    if name not in families:
        return f"runs on {', '.join(families)}, not on {name}"
    from .cuda import refusal

    return refusal(v, clusters) or why_cuda_is_unavailable(v.device, dtype_name(v.dtype))
