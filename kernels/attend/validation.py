"""What a caller may pass: the one place that checks tensors of a public call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InvalidArgument, UnsupportedCall
from .settings import LAYOUTS, check_choice

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_attention(q: Tensor, k: Tensor, v: Tensor, layout: str, scale: float | None, grouping) -> None:
    """Raise InvalidArgument unless q, k, v (and the grouping) belong to one attention call in ``layout``."""
    check_choice("layout", layout, LAYOUTS)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, layout)
    batch, heads, _, head_dim = _sizes(q, layout)
    _check_against_q("k", k, q, layout, (batch, heads, None, head_dim))
    tokens = _sizes(k, layout)[2]
    _check_against_q("v", v, q, layout, (batch, heads, tokens, head_dim))
    if scale is not None and not _is_finite_number(scale):
        raise InvalidArgument(f"scale must be a finite number or None, got {scale!r}")
    if grouping is not None:
        check_grouping(grouping, (batch, heads, tokens), v.device)


def check_tensor(name: str, tensor, layout: str) -> None:
    """Raise InvalidArgument unless ``tensor`` is a four-dimensional, non-empty tensor of a supported dtype."""
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise InvalidArgument(f"{name} must be a dense strided tensor, got a {kind} one")
    if tensor.ndim != 4:
        raise InvalidArgument(f"{name} must have shape {_shape_text(layout)}, got {tuple(tensor.shape)}")
    if 0 in tensor.shape:
        raise InvalidArgument(f"{name} must not be empty, got shape {tuple(tensor.shape)}")
    if tensor.dtype not in DTYPES:
        names = ", ".join(dtype_name(dtype) for dtype in DTYPES)
        raise InvalidArgument(f"{name} must have dtype {names}, got {dtype_name(tensor.dtype)}")


def check_output(output, q: Tensor, layout: str) -> None:
    """Raise InvalidArgument unless ``output`` may be that of a call with ``q`` in ``layout``."""
    check_tensor("output", output, layout)
    _check_against_q("output", output, q, layout, _sizes(q, layout))


def require_finite(tensors: dict[str, Tensor]) -> None:
    """Raise UnsupportedCall naming the first tensor with NaN or infinity: a shared scale would spread it."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise UnsupportedCall({"reference": f"{name} holds NaN or infinity"})


def _check_against_q(name: str, tensor: Tensor, q: Tensor, layout: str, expected) -> None:
    sizes = _sizes(tensor, layout)
    if any(want is not None and want != have for want, have in zip(expected, sizes, strict=True)):
        wanted = _in_layout(tuple("*" if want is None else str(want) for want in expected), layout)
        raise InvalidArgument(
            f"{name} must have shape {_shape_text(layout)} = [{', '.join(wanted)}], got {tuple(tensor.shape)}"
        )
    if tensor.dtype != q.dtype:
        raise InvalidArgument(f"{name} must have q's dtype {dtype_name(q.dtype)}, got {dtype_name(tensor.dtype)}")
    if tensor.device != q.device:
        raise InvalidArgument(f"{name} must be on q's device {q.device}, got {tensor.device}")


def _is_finite_number(value) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def check_grouping(grouping, expected: tuple[int, int, int], device) -> None:
    """Raise InvalidArgument unless ``grouping`` is for ``expected`` = (B, H, S_kv) tokens on ``device``."""
    permutation = getattr(grouping, "permutation", None)
    if not isinstance(permutation, Tensor):
        raise InvalidArgument(f"grouping must be a Grouping from group_values, got {type(grouping).__name__}")
    if permutation.dtype not in (torch.int32, torch.int64):
        raise InvalidArgument(f"grouping must have an int32 permutation, got {dtype_name(permutation.dtype)}")
    if tuple(permutation.shape) != expected:
        raise InvalidArgument(
            f"grouping must be for [B, H, S_kv] = {list(expected)}, got one for {list(permutation.shape)}"
        )
    if permutation.device != device:
        raise InvalidArgument(f"grouping must be on v's device {device}, got {permutation.device}")


def _sizes(tensor: Tensor, layout: str) -> tuple[int, int, int, int]:
    """(B, H, S, D) of a tensor in ``layout``."""
    return _in_layout(tuple(tensor.shape), layout)


def _in_layout(four: tuple, layout: str) -> tuple:
    """Swap the middle two for BSHD; its own inverse."""
    return four if layout == "BHSD" else (four[0], four[2], four[1], four[3])


def _shape_text(layout: str) -> str:
    return "[B, H, S, D]" if layout == "BHSD" else "[B, S, H, D]"


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``: what messages and support rows say."""
    return str(dtype).removeprefix("torch.")
