"""V-Smooth grouping for every card that Triton serves: assignment and means by its kernels, sorting by torch.

Nothing waits for the GPU. The same input gives the same result: sums have a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attend.validation import dtype_name
from ..triton_support import LaunchSettings, aligned, is_interpreted, launch, word_strides
from .sampling import sample_step

HEAD_DIMS = (64, 128)
TOKENS = 128  # of one program of the assignment, as in the kernel
ASSIGN = LaunchSettings(num_warps=8, num_stages=2)
UPDATE = LaunchSettings(num_warps=4, num_stages=1)


def refusal(v: Tensor, clusters: int) -> str | None:
    """Why these kernels do not group ``v`` [B, H, S, D]; None if they do."""
    head_dim = v.shape[-1]
    if v.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16, float16, not {dtype_name(v.dtype)}"
    if head_dim not in HEAD_DIMS:
        return f"serves head_dim {' and '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    return None


def group_triton(v: Tensor, centroids: Tensor | None, clusters: int, iterations: int) -> tuple[Tensor, Tensor]:
    """What ``group_reference`` computes. NaN in ``v`` still gives a permutation and finite centroids."""
    v = aligned(v)
    batch, heads, tokens, head_dim = v.shape
    rows = batch * heads
    warm = None if centroids is None else centroids.float().reshape(rows, -1, head_dim).clone()
    points = _cold_start(v, clusters) if warm is None else warm
    step = sample_step(tokens)
    for _ in range(iterations):
        _update(v, points, _assign(v, points, step), step)
    if warm is None:
        index = chain(points.to(v.dtype).float())
        points = points.gather(1, index[..., None].expand_as(points))
    order = _assign(v, points, 1).argsort(dim=-1, stable=True)
    return order.to(torch.int32).view(batch, heads, tokens), points.view(batch, heads, -1, head_dim)


def _cold_start(v: Tensor, clusters: int) -> Tensor:
    """[BH, C, D] float32: tokens at equal spacing, the first and the last among them."""
    places = torch.arange(clusters, device=v.device) * (v.shape[2] - 1) // max(clusters - 1, 1)
    return v[:, :, places].float().flatten(0, 1).nan_to_num(0.0, 0.0, 0.0).contiguous()


def _assign(v: Tensor, points: Tensor, step: int) -> Tensor:
    """[BH, n] int32: the cluster of every ``step``-th token."""
    from ..triton_kernels.group import assign_kernel

    rows, clusters, head_dim = points.shape
    count = -(-v.shape[2] // step)
    rounded = points.to(v.dtype)
    half_norm = rounded.float().square().sum(-1) / 2
    labels = torch.empty(rows, count, dtype=torch.int32, device=v.device)
    launch(
        assign_kernel,
        v.device,
        rows * -(-count // TOKENS),
        *(v, rounded, half_norm, labels, v.shape[1], clusters, count, step, *word_strides(v)),
        settings=ASSIGN,
        D=head_dim,
        EMULATE=is_interpreted(),
    )
    return labels


def _update(v: Tensor, points: Tensor, labels: Tensor, step: int) -> None:
    """Move ``points`` [BH, C, D] to the means of their tokens."""
    from ..triton_kernels.group import update_kernel

    rows, clusters, head_dim = points.shape
    index = labels.long()
    count = torch.zeros(rows, clusters, dtype=torch.int64, device=v.device)
    count.scatter_add_(1, index, torch.ones_like(index))
    start = count.cumsum(1) - count
    order = labels.argsort(dim=-1, stable=True)
    launch(
        update_kernel,
        v.device,
        rows * clusters,
        *(v, order, start, count, points, v.shape[1], clusters, labels.shape[1], step, *word_strides(v)),
        settings=UPDATE,
        D=head_dim,
    )


def chain(points: Tensor) -> Tensor:
    """[BH, C] int64: an order of ``points`` [BH, C, D] float32, the longest first, then the nearest of those left."""
    distance = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    current = points.square().sum(-1).argmax(-1, keepdim=True)
    order = [current]
    for _ in range(points.shape[1] - 1):
        # No way leads back: the column of a cluster that is in the order becomes infinitely far.
        distance.scatter_(2, current[..., None].expand(-1, points.shape[1], 1), torch.inf)
        row = distance.gather(1, current[..., None].expand(-1, 1, points.shape[1]))[:, 0]
        current = row.argmin(-1, keepdim=True)
        order.append(current)
    return torch.cat(order, 1)
