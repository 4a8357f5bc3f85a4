"""Attention on quantized operands in plain torch, tile by tile as the kernels do it: what `attend_triton` computes."""

from __future__ import annotations

import torch
from torch import Tensor
from vc_attention.formats import CODES_PER_OCTAVE, LOG2_SCALE, decode_e4m3, expcast
from vc_attention.group.blocks import BLOCK, expand_blocks

from .formats import Formats
from .operands import Operands, nvfp4_numbers, round_e4m3

NVFP4_TOP = 448.0 * 6.0
U8_TOP = 255.0
LOWEST = -3e38  # maximum of a tile that is a row's own block
EXPCAST_GAIN = 1.0093  # mean of what ExpCast stores over what it stands for, over an octave


def attend_torch(operands: Operands, formats: Formats) -> Tensor:
    """[B, H, S_q, D] float32."""
    queries, keys = operands.q.float(), operands.k.float()
    maximum, row_sum, output = first_state(operands, formats)
    bias = None if operands.bias is None else expand_blocks(operands.bias, queries.shape[2])
    exact_sums = sums_exactly(operands, formats)
    for index, start in enumerate(range(0, keys.shape[2], BLOCK)):
        tile = slice(start, start + BLOCK)
        scores = queries @ keys[:, :, tile].transpose(2, 3)
        scores = scores * operands.q_scale[..., None] * operands.k_scale[:, :, None, tile]
        if bias is not None:
            scores = scores + bias[..., tile]
        if operands.own is not None:
            own = operands.own.of_queries[:, None] == operands.own.of_keys[:, :, None, tile]
            scores = scores.masked_fill(own, -torch.inf)
        highest = tile_maximum(scores, formats.probabilities)
        old, maximum = maximum, torch.maximum(maximum, highest)
        alpha, tile_weight = torch.exp2(old - maximum), 1.0
        if formats.probabilities == "u8 per tile":
            exact, decoded = probabilities(scores - highest, "u8")
            tile_weight = torch.exp2(highest - maximum)
        else:
            exact, decoded = probabilities(scores - maximum, formats.probabilities)
        decoded = decoded.to(operands.v.dtype).float()
        weights = (exact if exact_sums else decoded).sum(-1, keepdim=True) * tile_weight
        block = slice(index, index + 1)
        product = (decoded @ operands.v[:, :, tile].float()) * operands.v_scale[:, :, block] * tile_weight
        if operands.means is not None:
            product = product + weights * operands.means[:, :, block]
        output = output * alpha + product
        row_sum = row_sum * alpha + weights
    return output / row_sum


def first_state(operands: Operands, formats: Formats) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, row sum and output before the first tile: nothing seen, or the own block."""
    if operands.own is None:
        output = torch.zeros_like(operands.q, dtype=torch.float32)
        row_sum = output[..., :1]
        return torch.full_like(row_sum, -torch.inf), row_sum, output
    total = operands.own.total.unsqueeze(3)
    maximum = tile_maximum(total, formats.probabilities)
    row_sum = sum_of_one(operands, formats) * torch.exp2(total - maximum)
    return maximum, row_sum, operands.own.output * row_sum


def sums_exactly(operands: Operands, formats: Formats) -> bool:
    """Whether the denominator adds probabilities before they are rounded."""
    return formats.exact_sums or (formats.probabilities == "nvfp4" and operands.means is not None)


def sum_of_one(operands: Operands, formats: Formats) -> float:
    """What stands for the exponential of the maximum in a row sum, on average over the roundings."""
    tops = {"expcast": 2.0**LOG2_SCALE, "e4m3": 2.0**LOG2_SCALE, "nvfp4": NVFP4_TOP, "16-bit": 1.0}
    top = tops.get(formats.probabilities, U8_TOP)
    return top * EXPCAST_GAIN if formats.probabilities == "expcast" and not sums_exactly(operands, formats) else top


def tile_maximum(scores: Tensor, kind: str) -> Tensor:
    """Row maxima [.., 1] of a tile; on the grid of E4M3 codes for ExpCast."""
    largest = scores.amax(-1, keepdim=True).clamp_min(LOWEST)
    return torch.ceil(largest * CODES_PER_OCTAVE) / CODES_PER_OCTAVE if kind == "expcast" else largest


def probabilities(u: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Exact and stored ``2^u`` in the format's own scale, for ``u <= 0``."""
    if kind == "expcast":
        return torch.exp2(u + LOG2_SCALE), decode_e4m3(expcast(u))
    if kind == "e4m3":
        exact = torch.exp2(u + LOG2_SCALE)
        return exact, round_e4m3(exact)
    if kind == "u8":
        exact = U8_TOP * torch.exp2(u)
        return exact, exact.round()
    if kind == "nvfp4":
        exact = NVFP4_TOP * torch.exp2(u)
        return exact, nvfp4_numbers(exact)
    exact = torch.exp2(u)
    return exact, exact
