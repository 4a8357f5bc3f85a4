"""Host side of csrc/attention_sm90.cu: the 8-bit attention kernel for H100 and H200."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..cuda_driver import Kernel, launch
from ..group.blocks import BLOCK
from ..nvrtc import Source
from ..quantize.hopper import HEAD_DIM, MEANS_GROUP, HopperOperands
from ..quantize.precise import PreciseOperands
from ..tensor_map import SWIZZLE_32, SWIZZLE_128, tensor_map

SOURCE = Path(__file__).parents[1] / "csrc" / "attention_sm90.cu"
CLUSTER, THREADS, SHARED_BYTES = 2, 384, 190 * 1024  # as in the source


def attend_cuda(operands: HopperOperands, out: Tensor, *, means: bool = True, probabilities: str = "expcast") -> None:
    """Write attention of the operands to ``out``, on its device and torch's current stream, without synchronizing.

    Args:
        out: [B, H, S_q, 128], bf16 or fp16, last dimension contiguous, the address and all other strides even.
        means: False leaves the block means out (operands that were not demeaned).
        probabilities: "expcast" or "exp2", an exponential and a cast: the same operands, half again the time.
    """
    kernel = Kernel(build(out.dtype, means, probabilities), "attention_fwd_kernel", SHARED_BYTES)
    launch(kernel, out.device, attention_grid(out), THREADS, _arguments(operands, out, means))


@cache  # two dtypes, two switches
def build(dtype: torch.dtype, means: bool, probabilities: str = "expcast") -> Source:
    """The source for outputs of one dtype (bf16 or fp16), with or without block means and ExpCast."""
    switches = {"MEANS": means, "OUT_HALF": dtype == torch.float16, "EXPCAST": probabilities == "expcast"}
    return Source(SOURCE, "sm_90a", tuple(f"-D{name}={int(value)}" for name, value in switches.items()))


def attention_grid(out: Tensor) -> tuple[int, int, int]:
    """Query tiles in whole clusters, and heads."""
    batch, heads, q_tokens, _ = out.shape
    return -(-q_tokens // (BLOCK * CLUSTER)) * CLUSTER, batch * heads, 1


def query_and_key_maps(operands: HopperOperands | PreciseOperands, q_tokens: int, kv_tokens: int) -> list:
    """Maps of q8 and k8 with the real lengths: what lies behind them is padding, and TMA delivers zeros for it."""
    q8, k8 = operands.q8, operands.k8
    return [
        tensor_map(q8, (HEAD_DIM, 64), SWIZZLE_128, (HEAD_DIM, q_tokens, len(q8))),
        tensor_map(k8, (HEAD_DIM, BLOCK // CLUSTER), SWIZZLE_128, (HEAD_DIM, kv_tokens, len(k8))),
    ]


def pointers_and_sizes(pointers: tuple[Tensor, ...], out: Tensor, q_rows: int, kv_tokens: int) -> list:
    """What follows the maps: addresses, the last of them the output's; its strides; S_q, S_q_pad, S_kv and H."""
    _, heads, q_tokens, _ = out.shape
    return [
        *(ctypes.c_uint64(tensor.data_ptr()) for tensor in (*pointers, out)),
        *(ctypes.c_int64(stride) for stride in out.stride()[:3]),
        *(ctypes.c_int(size) for size in (q_tokens, q_rows, kv_tokens, heads)),
    ]


def _arguments(operands: HopperOperands, out: Tensor, means: bool) -> list:
    value_map = tensor_map(operands.v8, (BLOCK, HEAD_DIM // CLUSTER), SWIZZLE_128)
    return [
        *query_and_key_maps(operands, out.shape[2], operands.kv_length),
        value_map,
        tensor_map(operands.means, (MEANS_GROUP, HEAD_DIM), SWIZZLE_32) if means else value_map,  # or not read
        *pointers_and_sizes((operands.q_scale, operands.v_scale), out, operands.q8.shape[1], operands.kv_length),
    ]
