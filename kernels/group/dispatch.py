"""Which implementation groups values. Unlike attention, ``auto`` may use the reference: it runs once in many calls."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..arch import family
from ..attend.validation import dtype_name, require_finite
from ..dispatch import AUTO, IMPLEMENTATIONS, ROWS_IN_INT32
from ..errors import UnsupportedCall
from ..guard import why_cuda_is_unavailable
from ..guard_triton import why_grouping_is_unavailable


def choose_group(v: Tensor, clusters: int, implementation: str) -> Callable:
    """The function that groups ``v`` [B, H, S, D]; UnsupportedCall if a named one does not serve it.

    ``auto`` takes the hand-written kernel, else Triton's, else the reference; the name of an attention by Triton takes
    Triton's.
    """
    if implementation == "reference":
        return _reference
    reason = None
    if implementation in (AUTO, "cuda"):
        reason = _why_not_cuda(v, clusters)
        if reason is None:
            from .cuda import group_cuda

            return group_cuda
    if implementation != "cuda":
        reason = _why_not_triton(v, clusters)
        if reason is None:
            from .triton import group_triton

            return group_triton
    if implementation == AUTO:
        return _reference
    raise UnsupportedCall({implementation: reason})


def _reference(v: Tensor, centroids: Tensor | None, clusters: int, iterations: int) -> tuple[Tensor, Tensor]:
    from .reference import group_reference

    require_finite({"v": v})
    return group_reference(v, centroids, clusters, iterations)


def _why_not_cuda(v: Tensor, clusters: int) -> str | None:
    reason = _why_not_family("cuda", v)
    if reason is not None:
        return reason
    from .cuda import refusal

    return refusal(v, clusters) or _why_too_large(v, clusters) or why_cuda_is_unavailable(v.device, dtype_name(v.dtype))


def _why_not_triton(v: Tensor, clusters: int) -> str | None:
    reason = _why_not_family("triton8", v)
    if reason is not None:
        return reason
    from .triton import refusal

    return (
        refusal(v, clusters)
        or _why_too_large(v, clusters)
        or why_grouping_is_unavailable(v.device, dtype_name(v.dtype))
    )


def _why_not_family(implementation: str, v: Tensor) -> str | None:
    families = next(row.families for row in IMPLEMENTATIONS if row.name == implementation)
    name = family(v.device)
    return None if name in families else f"runs on {', '.join(families)}, not on {name}"


def _why_too_large(v: Tensor, clusters: int) -> str | None:
    batch, heads, tokens, _ = v.shape
    rows = batch * heads * max(tokens, clusters)
    return None if rows <= ROWS_IN_INT32 else f"serves B * H * S up to {ROWS_IN_INT32}, not {rows}"
