"""Host side of csrc/attention_precise_sm90.cu: the precise 8-bit attention kernel for H100 and H200."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ..cuda_driver import Kernel, launch
from ..group.blocks import BLOCK
from ..nvrtc import Source
from ..quantize.hopper import HEAD_DIM, MEANS_GROUP
from ..quantize.precise import PreciseOperands
from ..tensor_map import NO_SWIZZLE, SWIZZLE_32, SWIZZLE_128, tensor_map

SOURCE = Path(__file__).parents[1] / "csrc" / "attention_precise_sm90.cu"
CLUSTER, THREADS, SHARED_BYTES = 2, 384, 162 * 1024  # as in the source


def attend_precise_cuda(operands: PreciseOperands, out: Tensor, *, means: bool = True) -> None:
    """Write attention of the operands to ``out``, on its device and torch's current stream, without synchronizing.

    Args:
        out: [B, H, S_q, 128], bf16 or fp16, last dimension contiguous, the address and all other strides even.
        means: False leaves the block means out (operands that were not demeaned).
    """
    batch, heads, q_tokens, _ = out.shape
    grid = (-(-q_tokens // (BLOCK * CLUSTER)) * CLUSTER, batch * heads, 1)
    kernel = Kernel(build(out.dtype, means), "attention_precise_fwd_kernel", SHARED_BYTES)
    launch(kernel, out.device, grid, THREADS, _arguments(operands, out, means))


def build(dtype: torch.dtype, means: bool) -> Source:
    """The source for outputs of one dtype (bf16 or fp16), with or without block means."""
    return Source(SOURCE, "sm_90a", (f"-DMEANS={int(means)}", f"-DOUT_HALF={int(dtype == torch.float16)}"))


def _arguments(operands: PreciseOperands, out: Tensor, means: bool) -> list:
    _, heads, q_tokens, _ = out.shape
    q8, k8 = operands.q8, operands.k8
    value_map = tensor_map(operands.v8, (BLOCK, HEAD_DIM // CLUSTER), SWIZZLE_128)
    means_map = tensor_map(operands.means, (MEANS_GROUP, HEAD_DIM), SWIZZLE_32) if means else value_map  # or not read
    return [
        # The real lengths: what lies behind them is padding, and TMA delivers zeros for it.
        tensor_map(q8, (HEAD_DIM, 64), SWIZZLE_128, (HEAD_DIM, q_tokens, len(q8))),
        tensor_map(k8, (HEAD_DIM, BLOCK // CLUSTER), SWIZZLE_128, (HEAD_DIM, operands.kv_length, len(k8))),
        value_map,
        tensor_map(operands.v_block_scale, (HEAD_DIM, 1), NO_SWIZZLE),
        means_map,
        *(ctypes.c_uint64(x.data_ptr()) for x in (operands.q_scale, operands.k_block_scale, operands.v_scale, out)),
        *(ctypes.c_int64(stride) for stride in out.stride()[:3]),
        ctypes.c_int(q_tokens),
        ctypes.c_int(q8.shape[1]),
        ctypes.c_int(operands.kv_length),
        ctypes.c_int(heads),
    ]
