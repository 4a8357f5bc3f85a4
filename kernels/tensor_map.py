"""Tensor maps: what TMA, Hopper's copy engine, has to know about a tensor and the boxes it is read in."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from .cuda_driver import check, driver

SWIZZLE_32, SWIZZLE_128 = 1, 3  # CUtensorMapSwizzle
STRIDE_BYTES = 16  # addresses and strides are multiples of it

_DATA_TYPES = {torch.uint8: 0, torch.int8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_L2_PROMOTION_256 = 3
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64


def tensor_map(tensor: Tensor, box: tuple[int, int], swizzle: int, sizes: tuple[int, ...] | None = None):
    """CUtensorMap of a tensor, to be passed to a kernel by value and not to be changed.

    Args:
        tensor: [z, y, x] or [w, z, y, x], int8, uint8, bf16, fp16 or fp32; last dimension contiguous, the address and
            the other strides multiples of 16 bytes.
        box: elements along x and y; boxes are one element deep.
        swizzle: how a box lies in shared memory.
        sizes: from x on, where they are smaller than the tensor's: the rest is out of bounds and read as zero.
    """
    sizes = sizes or tuple(reversed(tensor.shape))
    return _encoded(tensor.data_ptr(), tensor.dtype, sizes, _strides_bytes(tensor), box, swizzle)


def fits_tensor_map(tensor: Tensor) -> bool:
    """Whether TMA can read the tensor as it lies."""
    strides = _strides_bytes(tensor)
    aligned = all(place % STRIDE_BYTES == 0 for place in (tensor.data_ptr(), *strides))
    return aligned and tensor.stride(-1) == 1 and min(strides) > 0  # 0: one element for a whole dimension


def _strides_bytes(tensor: Tensor) -> tuple[int, ...]:
    """Of y, z and w; a dimension of one element may have any stride, so it gets one that TMA takes."""
    pairs = list(zip(tensor.stride(), tensor.shape, strict=True))[-2::-1]
    return tuple(STRIDE_BYTES if size == 1 else stride * tensor.element_size() for stride, size in pairs)


@lru_cache(maxsize=64)
def _encoded(address: int, dtype: torch.dtype, sizes: tuple, strides_bytes: tuple, box: tuple[int, int], swizzle: int):
    """The map of these numbers. torch's allocator hands the same addresses out again, so most calls find theirs."""
    rank = len(sizes)
    # The driver wants a multiple of 64, which cuda-bindings' own object need not be.
    storage = (ctypes.c_ubyte * (_MAP_BYTES + _MAP_ALIGNMENT))()
    made = (ctypes.c_ubyte * _MAP_BYTES).from_buffer(storage, -ctypes.addressof(storage) % _MAP_ALIGNMENT)
    error = _encode_tiled()(
        ctypes.addressof(made),
        _DATA_TYPES[dtype],
        rank,
        address,
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides_bytes),
        (ctypes.c_uint32 * rank)(*box, *[1] * (rank - 2)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        swizzle,
        _L2_PROMOTION_256,
        0,
    )
    check((error,))
    return made


@lru_cache(maxsize=1)
def _encode_tiled():
    """The driver's cuTensorMapEncodeTiled, to be called with memory of our own."""
    address, _ = check(driver().cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, 0))
    pointer, uint, enum = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
    return ctypes.CFUNCTYPE(enum, pointer, enum, uint, *[pointer] * 5, *[enum] * 4)(address)
