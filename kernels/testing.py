"""Inputs and error measures for tests and benchmarks.

Two kinds of error are kept apart, because they have different causes and limits:
quantization error compares an output with exact attention; implementation error compares it with the reference
recurrence on the same quantized operands, where only the order of additions may differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attend.exact import exact_attention
from .attend.reference import attend4, attend8
from .quantize.operands import Operands4, Operands8


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|`` over all elements, in float64."""
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm()).item()


def worst_row_cosine(actual: Tensor, expected: Tensor) -> float:
    """Smallest cosine between rows (last dimension) of the two tensors, in float64."""
    return torch.nn.functional.cosine_similarity(actual.double(), expected.double(), dim=-1).min().item()


def quantization_error(output: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> float:
    """Relative L2 error of ``output`` [B, H, S_q, D] against exact attention of q, k, v (layout BHSD)."""
    return relative_l2(output, exact_attention(q, k, v, scale))


def implementation_error(
    output: Tensor, operands: Operands8 | Operands4, scale: float, probabilities: str = "expcast"
) -> float:
    """Relative L2 error of ``output`` [B, H, S_q, D] against the reference recurrence on the same operands."""
    if isinstance(operands, Operands8):
        return relative_l2(output, attend8(operands, scale, probabilities))
    return relative_l2(output, attend4(operands, scale))


def random_qkv(shape: tuple[int, int, int, int], seed: int = 0, dtype=torch.float32, device="cpu"):
    """Normal q, k, v of ``shape`` [B, H, S, D], made on the CPU so that every device gets the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float32).to(device, dtype) for _ in range(3)]


def clustered_qkv(
    grid: tuple[int, int, int],
    heads: int = 1,
    head_dim: int = 128,
    classes: int = 48,
    outlier_share: float = 0.08,
    seed: int = 0,
    dtype=torch.float32,
    device="cpu",
):
    """q, k, v [1, heads, T*Y*X, head_dim] like a video layer's: objects, and a few tokens with large values.

    Each token of the ``grid`` (frames, rows, columns) belongs to a class, laid out in smooth regions. Its value is
    the class centre plus noise; classes chosen with ``outlier_share`` carry a few channels about 12 times larger.
    Queries and keys follow smooth fields and the class, so attention is neither uniform nor purely local.
    """
    generator = torch.Generator().manual_seed(seed)
    made = [_clustered_head(grid, head_dim, classes, outlier_share, generator) for _ in range(heads)]
    return [torch.stack(parts).unsqueeze(0).to(device, dtype) for parts in zip(*made, strict=True)]


def _clustered_head(grid, head_dim, classes, outlier_share, generator):
    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    label = _smooth_fields(classes, grid, 3, normal).argmax(1)
    centres = normal(classes, head_dim)
    offsets = torch.zeros(classes, head_dim, dtype=torch.float32)
    for index in torch.nonzero(torch.rand(classes, generator=generator) < outlier_share).flatten():
        channels = torch.randperm(head_dim, generator=generator)[:6]
        offsets[index, channels] = normal(len(channels)) * 12
    tokens = len(label)
    v = (centres * 0.8 + offsets)[label] + normal(tokens, head_dim)
    place = _smooth_fields(head_dim, grid, 6, normal) * 1.4 + centres[label] * 0.3
    q = place + normal(tokens, head_dim) * 0.6
    k = place + normal(tokens, head_dim) * 0.6 + normal(head_dim)
    return q, k, v


def _smooth_fields(count: int, grid, passes: int, normal) -> Tensor:
    """[tokens, count]: random fields over the grid, averaged with their neighbours, unit variance."""
    field = normal(count, *grid)
    for _ in range(passes):
        neighbours = [field.roll(step, dim) for dim in (1, 2, 3) for step in (1, -1)]
        field = (field + sum(neighbours)) / 7
    return (field / field.std(dim=(1, 2, 3), keepdim=True)).flatten(1).T
