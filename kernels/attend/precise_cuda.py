"""Host side of csrc/attention_precise_sm90.cu: the precise 8-bit attention kernel for H100 and H200."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..cuda_driver import Kernel, launch
from ..group.blocks import BLOCK
from ..kernel_arguments import contiguous
from ..nvrtc import Source
from ..quantize.hopper import HEAD_DIM
from ..quantize.precise import PreciseOperands
from ..tensor_map import SWIZZLE_128, fits_tensor_map, tensor_map
from .cuda import THREADS, pointers_and_sizes, query_and_key_maps
from .tile_schedule import CLUSTER, query_tile_pairs

SOURCE = Path(__file__).parents[1] / "csrc" / "attention_precise_sm90.cu"
SHARED_BYTES = 210 * 1024  # as in the source


def attend_precise_cuda(operands: PreciseOperands, out: Tensor) -> None:
    """Write attention of the operands to ``out``, on its device and torch's current stream, without synchronizing.

    Args:
        operands: v may have any strides; where TMA cannot read it as it lies, it is copied.
        out: [B, H, S_q, 128], v's dtype, last dimension contiguous, the address and all other strides even.
    """
    kernel = Kernel(build(out.dtype), "attention_precise_fwd_kernel", SHARED_BYTES)
    v = operands.v if fits_tensor_map(operands.v) else contiguous(operands.v)
    launch(kernel, out.device, _grid(out), THREADS, _arguments(operands, v, out))


@cache  # two dtypes
def build(dtype: torch.dtype) -> Source:
    """The source for probabilities, values and outputs of one dtype, bf16 or fp16."""
    return Source(SOURCE, "sm_90a", (f"-DOUT_HALF={int(dtype == torch.float16)}",))


def _grid(out: Tensor) -> tuple[int, int, int]:
    """Query tiles in whole clusters, and heads."""
    batch, heads, q_tokens, _ = out.shape
    return query_tile_pairs(q_tokens) * CLUSTER, batch * heads, 1


def _arguments(operands: PreciseOperands, v: Tensor, out: Tensor) -> list:
    kv_tokens = v.shape[2]
    return [
        *query_and_key_maps(operands, out.shape[2], kv_tokens),
        tensor_map(v, (HEAD_DIM // CLUSTER, BLOCK), SWIZZLE_128),
        *pointers_and_sizes((operands.q_scale, operands.k_block_scale), out, operands.q8.shape[1], kv_tokens),
    ]
