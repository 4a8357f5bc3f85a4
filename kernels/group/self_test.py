"""A small case that the Triton grouping must get right on a card before its first real call."""

from __future__ import annotations

import torch

from ..testing import clustered_qkv
from .blocks import removed_energy
from .reference import group_reference
from .triton import HEAD_DIMS, group_triton

LOSS_LIMIT = 0.02  # of removed block energy, as guard.py allows


def self_test(device, dtype) -> str | None:
    """Group values of ``dtype`` on ``device``: None, or what is wrong and by how much."""
    for head_dim in HEAD_DIMS:
        _, _, v = clustered_qkv((3, 24, 33), heads=2, head_dim=head_dim, dtype=dtype, device=device)
        permutation, _ = group_triton(v, None, 16, 2)
        order = torch.arange(v.shape[2], device=device, dtype=permutation.dtype).expand_as(permutation)
        if not torch.equal(permutation.sort(-1).values, order):
            return f"head_dim {head_dim}: not a permutation"
        expected, _ = group_reference(v, None, 16, 2)
        lost = (removed_energy(v, expected) - removed_energy(v, permutation)).max().item()
        if not lost <= LOSS_LIMIT:
            return f"head_dim {head_dim}: {lost:.3f} less block energy removed, allowed {LOSS_LIMIT}"
    return None
