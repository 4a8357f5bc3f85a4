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
        means: [B, H, ceil(S / 128), D], bf16 or fp16; zeros where no means are removed.
    """

    residual: Tensor
    means: Tensor

    def restore(self) -> Tensor:
        """[B, H, S, D] float32: the values the pair stands for."""
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
    """[B, H, ceil(S / 128), D]: sum over each block of ``x`` [B, H, S, D]."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % BLOCK))
    return padded.unflatten(2, (-1, BLOCK)).sum(3)


def block_sizes(tokens: int, device) -> Tensor:
    """[ceil(S / 128)] float32: tokens in each block; only the last may be short."""
    starts = torch.arange(0, tokens, BLOCK, device=device)
    return (tokens - starts).clamp_max(BLOCK).float()


def demean(v: Tensor) -> ValueBlocks:
    """Split ``v`` [B, H, S, D] into block means, stored in ``v``'s 16-bit dtype (bf16 for fp32), and residuals."""
    stored = torch.bfloat16 if v.dtype == torch.float32 else v.dtype
    values = v.float()
    sizes = block_sizes(v.shape[2], v.device)
    means = (block_sums(values) / sizes[:, None]).to(stored)
    return ValueBlocks(values - expand_blocks(means, v.shape[2]).float(), means)


def keep_means(v: Tensor) -> ValueBlocks:
    """The same pair with nothing removed: zero means, the values as residual."""
    batch, heads, tokens, head_dim = v.shape
    blocks = -(-tokens // BLOCK)
    return ValueBlocks(v.float(), v.new_zeros((batch, heads, blocks, head_dim), dtype=torch.bfloat16))


def removed_energy(v: Tensor, permutation: Tensor | None = None) -> Tensor:
    """[B, H]: share of ``sum |v|^2`` that the block means take away (paper, figure 4)."""
    values = permute_tokens(v, permutation).float()
    left = demean(values).residual.square().sum((2, 3))
    return 1 - left / values.square().sum((2, 3)).clamp_min(torch.finfo(torch.float32).tiny)
