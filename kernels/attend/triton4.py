"""Host side of triton_kernels/attention4.py: 4-bit attention from operands, in launches of bounded scratch memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..arch import family
from ..group.blocks import BLOCK
from ..quantize.triton4 import TritonOperands4, emulates, score_bias
from ..triton_support import LaunchSettings, launch, word_strides

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


def attend_triton4(operands: TritonOperands4, out: Tensor) -> None:
    """Write attention of the operands to ``out`` [B, H, S_q, D], bf16, fp16 or fp32, last dimension contiguous."""
    from ..triton_kernels.attention4 import attention4_fwd_kernel

    q_blocks, kv_blocks = operands.q_blocks, operands.kv_blocks
    means = operands.means
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
            EMULATE=emulates(out.device),
            STAGES=settings.num_stages,
            settings=settings,
        )
        del bias  # before the next is made: one at a time is what BIAS_BYTES bounds


def launches(heads: int, q_blocks: int, kv_blocks: int) -> Iterator[tuple[range, range]]:
    """Ranges of heads and of query blocks that cover the call, each with a bias of at most BIAS_BYTES or one block."""
    row_bytes = kv_blocks * BLOCK * torch.float32.itemsize
    block_step = min(q_blocks, max(1, BIAS_BYTES // row_bytes))
    head_step = max(1, BIAS_BYTES // (row_bytes * q_blocks))
    for head in range(0, heads, head_step):
        for block in range(0, q_blocks, block_step):
            yield range(head, min(head + head_step, heads)), range(block, min(block + block_step, q_blocks))
