"""NVFP4 of whole operands with less error than "largest to 6" has: nothing of it costs the attention kernel time.

Two means, both of the preparation alone:

- A group's scale is the one of a few that leaves the smallest squared error (``SCALE_STEPS``).
- Queries and keys: what a score loses is ``e C e^T``, with ``e`` the rounding error of a row and ``C`` the covariance
  of the rows it is multiplied with. Groups of 16 channels are rounded one after the other, and each is first moved so
  that it cancels as much as it can of what the groups before it cost (the rule of GPTQ, Frantar et al. 2022,
  arXiv:2210.17323, by groups): ``y_g = x_g - sum_{h < g} e_h W_hg``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import (
    E2M1_MAX,
    NVFP4,
    NVFP4_GROUP,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    positive,
)
from ..group.blocks import BLOCK
from .rotation import rotate

# Codes from the one that maps the largest to 6; the first of equals is taken. Relative RMS error of normal numbers:
# 0.0952 with 0 alone, 0.0878 with 0 and 5 (largest to 4), 0.0819 with these, 0.0814 with all from -2 to 6.
SCALE_STEPS = (0, -1, 1, 4, 5)
TOP_CODE = 126  # 448
SAMPLED_BLOCKS = 16
# Share of the mean variance added to each channel's. 0.03 to 0.1 make no difference; more loses what feedback brings.
DAMPING = 0.1


def closest_nvfp4(x: Tensor, scale: Tensor) -> NVFP4:
    """NVFP4 along the last dimension of ``x`` [..., N] under ``scale``, broadcastable to [..., 1]; best scale each."""
    codes, group_scales = round_groups(split_groups((x.float() * (1 / scale)).contiguous()))
    return NVFP4(codes.flatten(-2)[..., : x.shape[-1]], group_scales.squeeze(-1), scale)


def fed_back_nvfp4(x: Tensor, scale: Tensor, weights: Tensor) -> NVFP4:
    """The same for rows ``x`` [B, H, S, D] with each group's error fed into the groups behind it.

    Args:
        weights: of `feedback`.
    """
    rest = split_groups(x.float() * (1 / scale))
    made = []
    for index in range(rest.shape[-2]):
        group = rest[..., index, :].contiguous()
        codes, group_scale = round_groups(group)
        made.append((codes, group_scale))
        error = decode_e2m1(codes) * decode_e4m3(group_scale) - group
        rows = weights[:, :, index * NVFP4_GROUP : (index + 1) * NVFP4_GROUP]
        rest = rest - (error.half().double() @ rows.double()).float().view_as(rest)
    codes, scales = (torch.stack(parts, dim=-2) for parts in zip(*made, strict=True))
    return NVFP4(codes.flatten(-2)[..., : x.shape[-1]], scales.squeeze(-1), scale)


def split_groups(x: Tensor) -> Tensor:
    """[..., ceil(N / 16), 16] of ``x`` [..., N], the last group filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % NVFP4_GROUP)).unflatten(-1, (-1, NVFP4_GROUP))


def round_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., 16] and UE4M3 scale bits [..., 1] of ``groups`` [..., 16]: the scale with the least squared error."""
    at_6 = encode_e4m3(groups.abs().amax(-1, keepdim=True) * (1 / E2M1_MAX))
    best, least = at_6, squared_error(groups, at_6)
    for step in SCALE_STEPS[1:]:
        bits = (at_6.int() + step).clamp(0, TOP_CODE).to(torch.uint8)
        error = squared_error(groups, bits)
        best, least = torch.where(error < least, bits, best), torch.minimum(error, least)
    return encode_groups(groups, best), best


def squared_error(groups: Tensor, scale_bits: Tensor) -> Tensor:
    """[..., 1]: what rounding ``groups`` [..., 16] costs under scales [..., 1]."""
    rounded = decode_e2m1(encode_groups(groups, scale_bits)) * decode_e4m3(scale_bits)
    return (rounded - groups).square().sum(-1, keepdim=True)


def encode_groups(groups: Tensor, scale_bits: Tensor) -> Tensor:
    """E2M1 bits of ``groups`` [..., 16] under scales [..., 1]; a group whose scale is zero is stored as zeros."""
    scale = decode_e4m3(scale_bits)
    return encode_e2m1(torch.where(scale > 0, groups * (1 / scale), 0.0))  # no zeros with the sign of what is lost


def query_feedback(k: Tensor) -> Tensor:
    """Weights for rounding rotated queries: `feedback` of keys ``k`` [B, H, S_kv, D] without their mean."""
    rows = sampled_blocks(k).flatten(2, 3)
    return feedback(rows - rows.mean(2, keepdim=True))


def key_feedback(q: Tensor) -> Tensor:
    """Weights for rounding rotated keys: `feedback` of queries ``q`` [B, H, S_q, D] without their block means."""
    blocks = sampled_blocks(q)
    return feedback((blocks - blocks.mean(3, keepdim=True)).flatten(2, 3))


def sampling(tokens: int) -> tuple[int, int]:
    """How many blocks of ``tokens`` are sampled, and at what spacing: up to 16 at equal spacing."""
    blocks = max(1, tokens // BLOCK)
    step = -(-blocks // SAMPLED_BLOCKS)
    return -(-blocks // step), step


def sampled_blocks(x: Tensor) -> Tensor:
    """float32 [B, H, n, 128, D]: the sampled blocks of ``x`` [B, H, S, D]; all of less than a block."""
    blocks = x.shape[2] // BLOCK
    if blocks == 0:
        return x.unsqueeze(2).float()
    _, step = sampling(x.shape[2])
    return x[:, :, : blocks * BLOCK].unflatten(2, (blocks, BLOCK))[:, :, ::step].float()


def feedback(rows: Tensor) -> Tensor:
    """float16 [B, H, D', D']: weights of errors for rows that are multiplied with ``rows`` [B, H, N, D], rotated.

    D' is D, filled up to whole groups. With ``C = U U^T``, U upper triangular, and ``B`` the 16 x 16 blocks on its
    diagonal, ``W = 1 - B U^-1``; it is zero but right of those blocks. The weights only steer a rounding: no finite
    choice of them makes an operand wrong, and rows that overflow steer nothing.
    """
    rows = rows / positive(rows.abs().amax((2, 3), keepdim=True))
    covariance = rotate(rotate(rows.transpose(2, 3) @ rows).transpose(2, 3)).double()
    level = positive(covariance.diagonal(dim1=2, dim2=3).mean(2))
    short = -rows.shape[3] % NVFP4_GROUP
    covariance = torch.nn.functional.pad(covariance, (0, short, 0, short))
    size = covariance.shape[3]
    eye = torch.eye(size, dtype=torch.float64, device=rows.device)
    damped = covariance + (DAMPING * level)[:, :, None, None] * eye
    upper = torch.linalg.cholesky_ex(damped.flip(2, 3))[0].flip(2, 3)
    inverse = torch.linalg.solve_triangular(upper, eye, upper=True)
    groups = (-1, NVFP4_GROUP)
    own = upper.unflatten(3, groups).unflatten(2, groups).diagonal(dim1=2, dim2=4).movedim(-1, 2)
    weights = eye - (own @ inverse.unflatten(2, groups)).flatten(2, 3)
    group = torch.arange(size, device=rows.device) // NVFP4_GROUP
    weights = torch.where(group[:, None] < group, weights, 0.0)
    return weights.nan_to_num(0.0, 0.0, 0.0).half().nan_to_num(0.0, 0.0, 0.0)
