"""What every GPU grouping must fulfil on a card before its first real call."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import removed_energy
from .reference import group_reference

CLUSTERS, ITERATIONS = 16, 2
LOSS_LIMIT = 0.02  # of removed block energy


def grouping_fault(v: Tensor, permutation: Tensor) -> str | None:
    """What is wrong with a cold grouping of v [B, H, S, D] into 16 clusters in 2 iterations; None if nothing is."""
    order = torch.arange(v.shape[2], device=v.device, dtype=permutation.dtype).expand_as(permutation)
    if not torch.equal(permutation.sort(-1).values, order):
        return "not a permutation"
    expected, _ = group_reference(v, None, CLUSTERS, ITERATIONS)
    lost = (removed_energy(v, expected) - removed_energy(v, permutation)).max().item()
    return None if lost <= LOSS_LIMIT else f"{lost:.3f} less block energy removed, allowed {LOSS_LIMIT}"
