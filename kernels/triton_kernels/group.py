"""The two steps of k-means that touch tokens (group/reference.py): the nearest centroid, and the mean of a cluster."""

import triton
import triton.language as tl

from .common import WORD

TOKENS: tl.constexpr = tl.constexpr(128)  # of one program of `assign`
CLUSTERS: tl.constexpr = tl.constexpr(64)  # centroids it looks at together
ROWS: tl.constexpr = tl.constexpr(32)  # tokens that `update` adds together
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=["H", "C", "n", "step", "v_b", "v_h", "v_s"])
def assign_kernel(
    v,  # [B, H, S, D] bf16 or fp16, strides in words
    centroids,  # [BH, C, D] v's dtype
    half_norm: "*fp32",  # [BH, C]
    labels: "*i32",  # out [BH, n]
    H: tl.int32, C: tl.int32, n: tl.int32, step: tl.int32, v_b: tl.int64, v_h: tl.int64, v_s: tl.int64,
    D: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """Label of every ``step``-th token: the cluster with the smallest |c|^2 / 2 - v.c, the first of equals."""
    n_blocks = tl.cdiv(n, TOKENS)
    i_head, i_block = (tl.program_id(0) // n_blocks).to(tl.int64), tl.program_id(0) % n_blocks
    o_token, o_d, o_cluster = i_block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, D), tl.arange(0, CLUSTERS)
    m_token = o_token < n
    p_v = v + (i_head // H * v_b + i_head % H * v_h) * WORD + (o_token.to(tl.int64) * step * v_s * WORD)[:, None]
    b_v = tl.load(p_v + o_d[None, :], mask=m_token[:, None], other=0.0)
    b_best = tl.full([TOKENS], float("inf"), tl.float32)
    b_label = tl.zeros([TOKENS], tl.int32)
    for i_first in range(0, C, CLUSTERS):
        m_cluster = i_first + o_cluster < C
        p_centroid = centroids + (i_head * C + i_first + o_cluster)[:, None] * D + o_d[None, :]
        b_centroid = tl.load(p_centroid, mask=m_cluster[:, None], other=0.0)
        b_norm = tl.load(half_norm + i_head * C + i_first + o_cluster, mask=m_cluster, other=float("inf"))
        if EMULATE:  # the interpreter multiplies the bits of bf16 as integers
            product = tl.dot(b_v.to(tl.float32), tl.trans(b_centroid.to(tl.float32)))
        else:
            product = tl.dot(b_v, tl.trans(b_centroid))
        b_score = b_norm[None, :] - product
        b_least = tl.min(b_score, 1)
        b_first = tl.min(tl.where(b_score == b_least[:, None], o_cluster[None, :], CLUSTERS), 1)
        m_better = (b_least < b_best) & (b_first < CLUSTERS)
        b_best = tl.where(m_better, b_least, b_best)
        b_label = tl.where(m_better, i_first + b_first, b_label)
    tl.store(labels + i_head * n + o_token, b_label, mask=m_token)


@triton.jit(do_not_specialize=["H", "C", "n", "step", "v_b", "v_h", "v_s"])
def update_kernel(
    v,  # [B, H, S, D] bf16 or fp16, strides in words
    order: "*i64",  # [BH, n] sampled tokens sorted by label
    start: "*i64",  # [BH, C] first place of each cluster in ``order``
    count: "*i64",  # [BH, C]
    centroids: "*fp32",  # in and out [BH, C, D]
    H: tl.int32, C: tl.int32, n: tl.int32, step: tl.int32, v_b: tl.int64, v_h: tl.int64, v_s: tl.int64,
    D: tl.constexpr,
):  # fmt: skip
    """Mean of one cluster's tokens, added in their order; an empty cluster, or one not finite, keeps its centroid."""
    i_cluster = tl.program_id(0).to(tl.int64)
    i_head = i_cluster // C
    o_d = tl.arange(0, D)
    n_tokens = tl.load(count + i_cluster).to(tl.int32)
    p_order = order + i_head * n + tl.load(start + i_cluster)
    p_v = v + (i_head // H * v_b + i_head % H * v_h) * WORD
    b_sum = tl.zeros([D], tl.float32)
    for i_first in range(0, n_tokens, ROWS):
        o_row = i_first + tl.arange(0, ROWS)
        m_row = o_row < n_tokens
        o_token = tl.load(p_order + o_row, mask=m_row, other=0) * step
        b_v = tl.load(p_v + (o_token * v_s * WORD)[:, None] + o_d[None, :], mask=m_row[:, None], other=0.0)
        b_sum += tl.sum(b_v.to(tl.float32), 0)
    b_mean = b_sum / tl.maximum(n_tokens, 1).to(tl.float32)
    keep = (n_tokens > 0) & (tl.max(tl.where(tl.abs(b_mean) <= LARGEST, 0, 1), 0) == 0)
    tl.store(centroids + i_cluster * D + o_d, b_mean, mask=keep & (o_d < D))
