"""A small case that the Triton grouping must get right on a card before its first real call."""

from __future__ import annotations

from ..testing import clustered_qkv
from .check import CLUSTERS, ITERATIONS, grouping_fault
from .triton import HEAD_DIMS, group_triton


def self_test(device, dtype) -> str | None:
    """Group values of ``dtype`` on ``device``: None, or what is wrong and by how much."""
    for head_dim in HEAD_DIMS:
        _, _, v = clustered_qkv((3, 24, 33), heads=2, head_dim=head_dim, dtype=dtype, device=device)
        permutation, _ = group_triton(v, None, CLUSTERS, ITERATIONS)
        fault = grouping_fault(v, permutation)
        if fault is not None:
            return f"head_dim {head_dim}: {fault}"
    return None
