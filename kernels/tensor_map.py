"""Tensor maps: what TMA, Hopper's copy engine, has to know about a tensor and the boxes it is read in."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from .cuda_driver import check, driver

NO_SWIZZLE, SWIZZLE_32, SWIZZLE_128 = 0, 1, 3  # CUtensorMapSwizzle

_DATA_TYPES = {torch.uint8: 0, torch.int8: 0, torch.float16: 6, torch.float32: 7}  # CUtensorMapDataType
_L2_PROMOTION_256 = 3
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64


def tensor_map(tensor: Tensor, box: tuple[int, int], swizzle: int, sizes: tuple[int, int, int] | None = None):
    """CUtensorMap of a contiguous 3-d tensor, to be passed to a kernel by value.

    Args:
        tensor: [z, y, x], int8, uint8, fp16 or fp32.
        box: elements along x and y; boxes are one element deep.
        swizzle: how a box lies in shared memory.
        sizes: x, y, z where they are smaller than the tensor's: the rest is out of bounds and read as zero.
    """
    # The driver wants a multiple of 64, which cuda-bindings' own object need not be.
    storage = (ctypes.c_ubyte * (_MAP_BYTES + _MAP_ALIGNMENT))()
    made = (ctypes.c_ubyte * _MAP_BYTES).from_buffer(storage, -ctypes.addressof(storage) % _MAP_ALIGNMENT)
    strides_bytes = (stride * tensor.element_size() for stride in (tensor.stride(1), tensor.stride(0)))
    error = _encode_tiled()(
        ctypes.addressof(made),
        _DATA_TYPES[tensor.dtype],
        3,
        tensor.data_ptr(),
        (ctypes.c_uint64 * 3)(*(sizes or reversed(tensor.shape))),
        (ctypes.c_uint64 * 2)(*strides_bytes),
        (ctypes.c_uint32 * 3)(*box, 1),
        (ctypes.c_uint32 * 3)(1, 1, 1),
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
