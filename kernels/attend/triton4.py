"""Host side of triton_kernels/attention4.py and own_block4.py: 4-bit attention from operands.

It runs in launches of bounded scratch memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..arch import family
from ..group.blocks import BLOCK
from ..quantize.triton4 import TritonOperands4, emulates, score_bias
from ..triton_support import LaunchSettings, is_interpreted, launch, word_strides

# The bias of all heads grows with S^2 / 128: 7 GB at 75,600 tokens and 40 heads. It is made for as many heads, or query
# blocks of one head, as fit here. 512 MiB are three heads then, 10.4 waves of programs on an RTX 5090.
BIAS_BYTES = 512 << 20
# Triton 3.6 lowers the scaled 4-bit product for sm_120 alone. ``arch`` steers that lowering and nothing behind it: PTX
# and machine code are for the device.
SETTINGS = {
    "sm_120": LaunchSettings(num_warps=8, num_stages=3),
    "sm_121": LaunchSettings(num_warps=8, num_stages=3, arch="sm120"),
}
EMULATED = SETTINGS["sm_120"]
OWN_BLOCK = LaunchSettings(num_warps=4, num_stages=1)
OWN_BLOCK_ROWS = 64  # two programs a block: one is its own half of the keys, the other half is the rest


def attend_triton4(operands: TritonOperands4, out: Tensor) -> None:
    """Write attention of the operands to ``out`` [B, H, S_q, D], bf16, fp16 or fp32, last dimension contiguous."""
    from ..triton_kernels.attention4 import attention4_fwd_kernel

    q_blocks, kv_blocks = operands.q_blocks, operands.kv_blocks
    means = operands.means
    seen = None if operands.own is None else attend_own_block(operands, out)
    settings = SETTINGS.get(family(out.device), EMULATED)
    for heads, blocks in launches(operands.q.shape[0], q_blocks, kv_blocks):
        bias = score_bias(operands, heads, blocks)
        launch(
            attention4_fwd_kernel,
            out.device,
            len(heads) * len(blocks),
            operands.q,
            operands.q_scales,
            operands.k,
            operands.k_scales,
            operands.v,
            operands.v_scales,
            operands.v_scale,
            operands.v_scale if means is None else means,
            operands.score_scale,
            bias,
            bias if seen is None else seen,
            out,
            heads.start,
            blocks.start,
            len(blocks),
            out.shape[1],
            operands.q_tokens,
            q_blocks,
            kv_blocks,
            *bias.stride()[:2],
            *word_strides(out),
            D=out.shape[3],
            MEANS=means is not None,
            OWN=seen is not None,
            EMULATE=emulates(out.device),
            STAGES=settings.num_stages,
            settings=settings,
        )
        del bias  # before the next is made: one at a time is what BIAS_BYTES bounds


def attend_own_block(operands: TritonOperands4, out: Tensor) -> Tensor:
    """Attend to the keys of each query's own block in 16 bit: the output goes to ``out`` [B, H, S, D].

    Returns:
        float32 [BH, NQ * 128]: log2 of a row's sum of exponentials, in units of ``q k^T`` of the operands.
    """
    from ..triton_kernels.own_block4 import own_block4_fwd_kernel

    own, blocks = operands.own, operands.q_blocks
    seen = torch.empty(operands.q.shape[:2], dtype=torch.float32, device=out.device)
    launch(
        own_block4_fwd_kernel,
        out.device,
        seen.numel() // OWN_BLOCK_ROWS,
        own.q,
        own.k,
        own.v,
        operands.q,
        operands.q_scales,
        own.q_scale,
        own.q_means,
        own.key_mean,
        own.octaves,
        operands.score_scale,
        seen,
        out,
        out.shape[1],
        operands.q_tokens,
        blocks,
        own.sign,
        *word_strides(own.q),
        *word_strides(own.k),
        *word_strides(own.v),
        *word_strides(out),
        D=out.shape[3],
        EMULATE=is_interpreted(),
        ROWS=OWN_BLOCK_ROWS,
        settings=OWN_BLOCK,
    )
    return seen


def launches(heads: int, q_blocks: int, kv_blocks: int) -> Iterator[tuple[range, range]]:
    """Ranges of heads and of query blocks that cover the call, each with a bias of at most BIAS_BYTES or one block."""
    row_bytes = kv_blocks * BLOCK * torch.float32.itemsize
    block_step = min(q_blocks, max(1, BIAS_BYTES // row_bytes))
    head_step = max(1, BIAS_BYTES // (row_bytes * q_blocks))
    for head in range(0, heads, head_step):
        for block in range(0, q_blocks, block_step):
            yield range(head, min(head + head_step, heads)), range(block, min(block + block_step, q_blocks))
