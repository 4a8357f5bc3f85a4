"""Attention on quantized operands on a GPU, one pass: a flash attention in 16 bit with the roundings of every format.

One program computes 128 query rows of one head. Its products are those of the low-bit kernels (see `operands`), its
time is that of a 16-bit kernel: it is made to measure renders, not to be fast.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from vc_attention.triton_kernels.nvfp4 import decode_ue4m3, round_to_integer, round_ue4m3

from .attend_torch import LOWEST, first_state, sums_exactly
from .formats import PROBABILITY_FORMATS, Formats
from .nvfp4_triton import nvfp4_groups
from .operands import Operands

BLOCK = 128
LOWEST_MAXIMUM = tl.constexpr(LOWEST)
P_16BIT, P_E4M3, P_EXPCAST, P_U8, P_U8_TILE, P_NVFP4 = (tl.constexpr(i) for i in range(len(PROBABILITY_FORMATS)))


@triton.jit
def stored_probabilities(u, FORMAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Exact and stored 2^u in the format's own scale."""
    if FORMAT == P_EXPCAST:
        exact = tl.exp2(u + 8.0)
        code = tl.minimum(round_to_integer(tl.maximum(8.0 * (u + 8.0) + 55.65, 0.0)), 120.0)
        stored = decode_ue4m3(code.to(tl.int32))
    elif FORMAT == P_E4M3:
        exact = tl.exp2(u + 8.0)
        stored = round_ue4m3(exact)
    elif FORMAT == P_U8 or FORMAT == P_U8_TILE:  # noqa: SIM109 (Triton)
        exact = 255.0 * tl.exp2(u)
        stored = round_to_integer(exact)
    elif FORMAT == P_NVFP4:
        exact = 2688.0 * tl.exp2(u)
        groups = tl.reshape(exact, (ROWS, COLUMNS // 16, 16))
        stored = tl.reshape(nvfp4_groups(groups, tl.max(groups, 2)[:, :, None]), (ROWS, COLUMNS))
    else:
        exact = tl.exp2(u)
        stored = exact
    return exact, stored


@triton.jit
def attend_fwd_kernel(
    q, k, v,  # [rows, S, D] bf16 or fp16
    q_scale, k_scale,  # [rows, S] float32
    bias,  # [rows, query blocks, S_kv] float32
    v_scale, means,  # [rows, key blocks, D] float32
    q_own,  # [S_q] int32, own block of a query
    k_own,  # [rows, S_kv] int32, of a key
    maximum, row_sum,  # [rows, S_q] float32, where the recurrence starts
    out,  # [rows, S_q, D] float32: its start, then the output
    S_q, S_kv,
    FORMAT: tl.constexpr, EXACT_SUMS: tl.constexpr, BIAS: tl.constexpr, MEANS: tl.constexpr, OWN: tl.constexpr,
    KV_BLOCKS: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    i_block = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    o_q = i_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    o_kv = tl.arange(0, BLOCK_KV)
    o_d = tl.arange(0, D)
    m_q = o_q < S_q
    b_q = tl.load(q + (i_row * S_q + o_q[:, None]) * D + o_d, mask=m_q[:, None], other=0.0)
    b_q_scale = tl.load(q_scale + i_row * S_q + o_q, mask=m_q, other=0.0)
    if OWN:
        b_q_own = tl.load(q_own + o_q, mask=m_q, other=-1)
    b_max = tl.load(maximum + i_row * S_q + o_q, mask=m_q, other=0.0)
    b_sum = tl.load(row_sum + i_row * S_q + o_q, mask=m_q, other=1.0)
    b_out = tl.load(out + (i_row * S_q + o_q[:, None]) * D + o_d, mask=m_q[:, None], other=0.0)
    for i_tile in range(0, KV_BLOCKS):
        o_key = i_tile * BLOCK_KV + o_kv
        m_key = o_key < S_kv
        p_tile = (i_row * S_kv + o_key) * D
        b_k = tl.load(k + p_tile[None, :] + o_d[:, None], mask=m_key[None, :], other=0.0)
        b_k_scale = tl.load(k_scale + i_row * S_kv + o_key, mask=m_key, other=0.0)
        b_s = tl.dot(b_q, b_k) * b_q_scale[:, None] * b_k_scale[None, :]
        if BIAS:
            p_bias = bias + (i_row * tl.cdiv(S_q, BLOCK_KV) + i_block * BLOCK_Q // BLOCK_KV) * S_kv
            b_s += tl.load(p_bias + o_key, mask=m_key, other=0.0)[None, :]
        b_s = tl.where(m_key[None, :], b_s, float("-inf"))
        if OWN:
            b_k_own = tl.load(k_own + i_row * S_kv + o_key, mask=m_key, other=-1)
            b_s = tl.where(b_q_own[:, None] == b_k_own[None, :], float("-inf"), b_s)
        b_tile_max = tl.maximum(tl.max(b_s, 1), LOWEST_MAXIMUM)
        if FORMAT == P_EXPCAST:
            b_tile_max = tl.ceil(b_tile_max * 8.0) * 0.125
        b_new_max = tl.maximum(b_max, b_tile_max)
        b_alpha = tl.exp2(b_max - b_new_max)
        b_max = b_new_max
        b_base = b_tile_max if FORMAT == P_U8_TILE else b_max
        b_tile_weight = tl.exp2(b_base - b_max)  # 1 but for P_U8_TILE
        b_exact, b_p = stored_probabilities(b_s - b_base[:, None], FORMAT, BLOCK_Q, BLOCK_KV)
        b_weight = tl.sum(b_exact if EXACT_SUMS else b_p, 1) * b_tile_weight
        b_v = tl.load(v + p_tile[:, None] + o_d[None, :], mask=m_key[:, None], other=0.0)
        p_block = (i_row * KV_BLOCKS + i_tile) * D + o_d
        b_part = tl.dot(b_p.to(v.dtype.element_ty), b_v) * tl.load(v_scale + p_block)[None, :]
        b_part *= b_tile_weight[:, None]
        if MEANS:
            b_part += b_weight[:, None] * tl.load(means + p_block)[None, :]
        b_out = b_out * b_alpha[:, None] + b_part
        b_sum = b_sum * b_alpha + b_weight
    b_out = b_out / b_sum[:, None]
    tl.store(out + (i_row * S_q + o_q[:, None]) * D + o_d, b_out, mask=m_q[:, None])


def attend_triton(operands: Operands, formats: Formats) -> Tensor:
    """What `attend_torch` computes: [B, H, S_q, D] float32."""
    q, k, v, q_scale, k_scale = (
        x.contiguous() for x in (operands.q, operands.k, operands.v, operands.q_scale, operands.k_scale)
    )
    maximum, row_sum, out = (x.contiguous() for x in first_state(operands, formats))
    demeaned, own = operands.means is not None, operands.own
    blocks, rows = triton.cdiv(q.shape[2], BLOCK), q.shape[0] * q.shape[1]
    attend_fwd_kernel[(blocks, rows)](
        q, k, v, q_scale, k_scale,
        q_scale if operands.bias is None else operands.bias.contiguous(),
        operands.v_scale.contiguous(),
        operands.means.contiguous() if demeaned else operands.v_scale,
        q_scale if own is None else own.of_queries, k_scale if own is None else own.of_keys,
        maximum, row_sum, out, q.shape[2], k.shape[2],
        FORMAT=PROBABILITY_FORMATS.index(formats.probabilities),
        EXACT_SUMS=sums_exactly(operands, formats), BIAS=operands.bias is not None, MEANS=demeaned, OWN=own is not None,
        KV_BLOCKS=triton.cdiv(k.shape[2], BLOCK), D=q.shape[3], BLOCK_Q=BLOCK, BLOCK_KV=BLOCK,
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return out
