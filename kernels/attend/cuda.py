"""Host side of csrc/attention_sm90.cu: the 8-bit attention kernel for H100 and H200."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..cuda_driver import Kernel, check, driver, launch
from ..group.blocks import BLOCK
from ..nvrtc import Source
from ..quantize.hopper import HEAD_DIM, MEANS_GROUP, HopperOperands

SOURCE = Path(__file__).parents[1] / "csrc" / "attention_sm90.cu"
CLUSTER, THREADS, SHARED_BYTES = 2, 384, 162 * 1024  # as in the source
MOST_HEADS = 65535  # B * H is the grid's second dimension

_UINT8, _FLOAT16 = 0, 6  # CUtensorMapDataType
_SWIZZLE_32, _SWIZZLE_128 = 1, 3  # CUtensorMapSwizzle
_L2_PROMOTION_256 = 3
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64


def attend_cuda(operands: HopperOperands, out: Tensor, *, means: bool = True) -> None:
    """Write attention of the operands to ``out``, on its device and torch's current stream, without synchronizing.

    Args:
        out: [B, H, S_q, 128], bf16 or fp16, last dimension contiguous, the address and all other strides even.
        means: False leaves the block means out (operands that were not demeaned).
    """
    batch, heads, q_tokens, _ = out.shape
    grid = (-(-q_tokens // (BLOCK * CLUSTER)) * CLUSTER, batch * heads, 1)
    kernel = Kernel(build(out.dtype, means), "attention_fwd_kernel", SHARED_BYTES)
    launch(kernel, out.device, grid, THREADS, _arguments(operands, out, means))


def build(dtype: torch.dtype, means: bool) -> Source:
    """The source for outputs of one dtype (bf16 or fp16), with or without block means."""
    return Source(SOURCE, "sm_90a", (f"-DMEANS={int(means)}", f"-DOUT_HALF={int(dtype == torch.float16)}"))


def _arguments(operands: HopperOperands, out: Tensor, means: bool) -> list:
    _, heads, q_tokens, _ = out.shape
    q8, k8, v8 = operands.q8, operands.k8, operands.v8
    value_map = _tensor_map(v8, _UINT8, _sizes(v8), (BLOCK, HEAD_DIM // CLUSTER), _SWIZZLE_128)
    means_map = value_map  # not read
    if means:
        box = (MEANS_GROUP, HEAD_DIM)
        means_map = _tensor_map(operands.means, _FLOAT16, _sizes(operands.means), box, _SWIZZLE_32)
    return [
        # The real lengths: what lies behind them is padding, and TMA delivers zeros for it.
        _tensor_map(q8, _UINT8, (HEAD_DIM, q_tokens, len(q8)), (HEAD_DIM, 64), _SWIZZLE_128),
        _tensor_map(k8, _UINT8, (HEAD_DIM, operands.kv_length, len(k8)), (HEAD_DIM, BLOCK // CLUSTER), _SWIZZLE_128),
        value_map,
        means_map,
        ctypes.c_uint64(operands.q_scale.data_ptr()),
        ctypes.c_uint64(operands.v_scale.data_ptr()),
        ctypes.c_uint64(out.data_ptr()),
        *(ctypes.c_int64(stride) for stride in out.stride()[:3]),
        ctypes.c_int(q_tokens),
        ctypes.c_int(q8.shape[1]),
        ctypes.c_int(operands.kv_length),
        ctypes.c_int(heads),
    ]


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    return tuple(reversed(tensor.shape))


def _tensor_map(tensor: Tensor, data_type: int, sizes: tuple[int, ...], box: tuple[int, int], swizzle: int):
    """CUtensorMap of a contiguous 3-d tensor, sizes innermost first; boxes are one element deep.

    Sizes may be smaller than the tensor's: then the rest is out of bounds and read as zero.
    """
    # The driver wants a multiple of 64, which cuda-bindings' own object need not be.
    storage = (ctypes.c_ubyte * (_MAP_BYTES + _MAP_ALIGNMENT))()
    tensor_map = (ctypes.c_ubyte * _MAP_BYTES).from_buffer(storage, -ctypes.addressof(storage) % _MAP_ALIGNMENT)
    strides_bytes = (stride * tensor.element_size() for stride in (tensor.stride(1), tensor.stride(0)))
    error = _encode_tiled()(
        ctypes.addressof(tensor_map),
        data_type,
        3,
        tensor.data_ptr(),
        (ctypes.c_uint64 * 3)(*sizes),
        (ctypes.c_uint64 * 2)(*strides_bytes),
        (ctypes.c_uint32 * 3)(*box, 1),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        0,
        swizzle,
        _L2_PROMOTION_256,
        0,
    )
    check((error,))
    return tensor_map


@lru_cache(maxsize=1)
def _encode_tiled():
    """The driver's cuTensorMapEncodeTiled, to be called with memory of our own."""
    address, _ = check(driver().cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, 0))
    pointer, uint, enum = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
    return ctypes.CFUNCTYPE(enum, pointer, enum, uint, *[pointer] * 5, *[enum] * 4)(address)
