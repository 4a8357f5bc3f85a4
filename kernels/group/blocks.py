"""Permutation of key and value tokens and the means of 128-token blocks (paper, section 3.2).

``V'_j = 1 mu_j^T + R_j``: the residual is taken against the mean *as stored* in 16 bit, so the pair is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128


@dataclass(frozen=True)
class ValueBlocks:
    """Values split into block means and residuals.

    Attributes:
        residual: [B, H, S, D] float32.
        means: [B, H, ceil(S / 128), D], bf16 or fp16; None where no means were removed.
    """

    residual: Tensor
    means: Tensor | None

    def restore(self) -> Tensor:
        """[B, H, S, D] float32: the values the pair stands for."""
        if self.means is None:
            return self.residual
        return self.residual + expand_blocks(self.means, self.residual.shape[2]).float()


def permute_tokens(x: Tensor, permutation: Tensor | None) -> Tensor:
    """``x[b, h, permutation[b, h]]`` for ``x`` [B, H, S, D]; ``x`` itself without a permutation."""
    if permutation is None:
        return x
    return x.gather(2, permutation.long().unsqueeze(-1).expand_as(x))


def expand_blocks(per_block: Tensor, tokens: int) -> Tensor:
    """[B, H, N, X] per block of 128 -> [B, H, tokens, X] per token."""
    return per_block.repeat_interleave(BLOCK, dim=2)[:, :, :tokens]


def block_sums(x: Tensor) -> Tensor:
    """[B, H, ceil(S / 128), D] float64: sum over each block of ``x`` [B, H, S, D]."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % BLOCK))
    return padded.unflatten(2, (-1, BLOCK)).sum(3, dtype=torch.float64)


def block_sizes(tokens: int, device) -> Tensor:
    """[ceil(S / 128)] int64: tokens in each block; only the last may be short."""
    return (tokens - torch.arange(0, tokens, BLOCK, device=device)).clamp_max(BLOCK)


def block_means(x: Tensor) -> Tensor:
    """[B, H, ceil(S / 128), D] float32: mean over the real rows of each block of ``x`` [B, H, S, D]."""
    return (block_sums(x) / block_sizes(x.shape[2], x.device)[:, None]).float()


def demean(v: Tensor) -> ValueBlocks:
    """Split ``v`` [B, H, S, D] into block means, stored in ``v``'s 16-bit dtype (bf16 for fp32), and residuals."""
    stored = torch.bfloat16 if v.dtype == torch.float32 else v.dtype
    means = block_means(v).to(stored)
    return ValueBlocks(v.float() - expand_blocks(means, v.shape[2]).float(), means)


def keep_means(v: Tensor) -> ValueBlocks:
    """The same pair with nothing removed: the values as residual."""
    return ValueBlocks(v.float(), None)


def removed_energy(v: Tensor, permutation: Tensor | None = None) -> Tensor:
    """[B, H]: share of ``sum |v|^2`` that the block means take away (paper, figure 4)."""
    values = permute_tokens(v, permutation).float()
    left = demean(values).residual.square().sum((2, 3))
    return 1 - left / values.square().sum((2, 3)).clamp_min(torch.finfo(torch.float32).tiny)
