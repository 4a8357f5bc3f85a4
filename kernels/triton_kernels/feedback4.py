"""Weights of the 4-bit feedback (quantize/nvfp4.py): covariances of sampled blocks, and their elimination by groups.

Two kernels: the first takes a block of 128 rows of a head, the second a head.
"""

import triton
import triton.language as tl

from .prepare4 import BLOCK, GROUP, product, rotated
from .rows import Rows, load_rows

MOST_WEIGHT = tl.constexpr(60000.0)  # half ends at 65504


@triton.jit(do_not_specialize=["heads", "tokens", "samples", "step", "stride_b", "stride_h", "stride_s", "factor"])
def covariance_kernel(
    p_x,  # [B, heads, tokens, D]
    p_scale: "*fp32",  # [BH]: a unit in which covariances of rows are far from the ends of float32
    p_covariances: "*fp32",  # out [BH, samples, D, D]: their symmetric part is that of rotated rows without their mean
    p_means: "*fp32",  # out [BH, samples, D]
    heads: tl.int32,
    tokens: tl.int32,
    samples: tl.int32,
    step: tl.int32,  # a block of so many is sampled
    stride_b: tl.int64,
    stride_h: tl.int64,
    stride_s: tl.int64,
    factor: tl.float32,
    D: tl.constexpr,
    EMULATE: tl.constexpr,
):
    i_head, i_sample = tl.program_id(0) // samples, tl.program_id(0) % samples
    token = i_sample * step * BLOCK + tl.arange(0, BLOCK)
    mask = token < tokens
    rows = load_rows(Rows(p_x, heads, tokens, stride_b, stride_h, stride_s), i_head, token, mask, D)
    turned = rotated(rows, factor, D, EMULATE) * (1.0 / tl.load(p_scale + i_head))
    mean = tl.sum(turned, axis=0) / tl.minimum(tokens, BLOCK).to(tl.float32)
    turned = tl.where(mask[:, None], turned - mean[None, :], 0.0)
    high = turned.to(tl.float16)
    twice_low = (2.0 * (turned - high.to(tl.float32))).to(tl.float16)
    place = i_head.to(tl.int64) * samples + i_sample
    o_channel = tl.arange(0, D)
    tl.store(p_means + place * D + o_channel, mean)
    covariance = tl.dot(tl.trans(high), twice_low, tl.zeros([D, D], tl.float32))
    covariance = tl.dot(tl.trans(high), high, covariance)
    tl.store(p_covariances + place * (D * D) + o_channel[:, None] * D + o_channel[None, :], covariance)


@triton.jit(do_not_specialize=["tokens", "samples", "damping"])
def feedback_kernel(
    p_covariances: "*fp32",  # [BH, samples, D, D]
    p_means: "*fp32",  # [BH, samples, D]
    p_feedback: "*fp16",  # out [BH, D, D]
    tokens: tl.int32,
    samples: tl.int32,
    damping: tl.float32,
    D: tl.constexpr,
    BETWEEN: tl.constexpr,  # whether the means of blocks differ from each other, or are removed one by one
    SAMPLES: tl.constexpr,  # at least ``samples``
):
    """Gauss-Jordan inversion in place, from the last channel on.

    Once all groups behind a group are eliminated, its rows hold minus their weights in the columns of those.
    """
    i_head = tl.program_id(0).to(tl.int64)
    o_channel = tl.arange(0, D)
    o_matrix = o_channel[:, None] * D + o_channel[None, :]
    matrix = tl.zeros([D, D], tl.float32)
    for i_sample in range(SAMPLES):
        p_matrix = p_covariances + (i_head * samples + i_sample) * (D * D)
        matrix += tl.load(p_matrix + o_matrix, mask=(o_matrix >= 0) & (i_sample < samples), other=0.0)
    matrix = 0.5 * (matrix + tl.trans(matrix))
    if BETWEEN:
        o_sample = tl.arange(0, SAMPLES)
        real = (o_sample < samples)[:, None]
        means = tl.load(p_means + (i_head * samples + o_sample)[:, None] * D + o_channel[None, :], mask=real, other=0.0)
        means = tl.where(real, means - (tl.sum(means, axis=0) / samples)[None, :], 0.0)
        count = tl.minimum(tokens, BLOCK).to(tl.float32)
        matrix = product(tl.trans(means * count), means, matrix, True)
    diagonal = o_channel[:, None] == o_channel[None, :]
    level = tl.sum(tl.sum(tl.where(diagonal, matrix, 0.0), axis=1), axis=0) / D
    matrix += tl.where(diagonal, damping * tl.where(level > 1e-37, level, 1.0), 0.0)
    of_row, of_column = o_channel[:, None] // GROUP, o_channel[None, :] // GROUP
    p_feedback += i_head * (D * D) + o_matrix
    tl.store(p_feedback, tl.zeros([D, D], tl.float16), mask=of_row >= of_column)
    for i_step in range(D - GROUP):
        pivot = D - 1 - i_step
        at_row, at_column = o_channel[:, None] == pivot, o_channel[None, :] == pivot
        row = tl.sum(tl.where(at_row, matrix, 0.0), axis=0)
        column = tl.sum(tl.where(at_column, matrix, 0.0), axis=1)
        inverse = 1.0 / tl.sum(tl.where(o_channel == pivot, row, 0.0), axis=0)
        row = tl.where(o_channel == pivot, inverse, row * inverse)
        column = tl.where(o_channel == pivot, 0.0, column)
        kept = tl.where(at_row | at_column, 0.0, matrix)
        matrix = tl.where(at_row, row[None, :], kept - column[:, None] * row[None, :])
        if pivot % GROUP == 0:
            weights = tl.where(tl.abs(matrix) < MOST_WEIGHT, -matrix, 0.0)
            mask = (of_row == pivot // GROUP - 1) & (of_column > of_row)
            tl.store(p_feedback, weights.to(tl.float16), mask=mask)
