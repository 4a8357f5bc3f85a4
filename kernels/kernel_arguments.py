"""Tensors as the fields of a kernel's parameter structure. Layout of every tensor here: [B, H, S, D]."""

from __future__ import annotations

import torch
from torch import Tensor

WIDEST_LOAD_BYTES = 16
SCRATCH_ALIGNMENT_BYTES = 256


class Scratch:
    """Arrays that live for one call, in one allocation.

    Attributes:
        addresses: of each array by field name, multiples of 256.
    """

    def __init__(self, device, **sizes_bytes: int):
        starts, end = {}, 0
        for name, size in sizes_bytes.items():
            starts[name] = end
            end += -(-size // SCRATCH_ALIGNMENT_BYTES) * SCRATCH_ALIGNMENT_BYTES
        self._memory = torch.empty(end, dtype=torch.uint8, device=device)
        self.addresses = {name: self._memory.data_ptr() + start for name, start in starts.items()}


def pointers(**tensors: Tensor | None) -> dict[str, int | None]:
    """Addresses by field name; null for None."""
    return {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


def strides(name: str, tensor: Tensor) -> dict[str, int]:
    """``{name}_b``, ``{name}_h`` and ``{name}_s``: strides in elements."""
    return {f"{name}_{axis}": stride for axis, stride in zip("bhs", tensor.stride(), strict=False)}


def contiguous(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy if it is not contiguous or does not start at a multiple of 16 bytes."""
    if tensor.is_contiguous() and tensor.data_ptr() % WIDEST_LOAD_BYTES == 0:
        return tensor
    # Its own contiguous() would hand back one that begins in between.
    return tensor.clone(memory_format=torch.contiguous_format)


def alignment_bytes(*tensors: Tensor) -> int:
    """Largest of 16, 8, 4 and 2 bytes to which every row of every tensor is aligned."""
    bits = WIDEST_LOAD_BYTES
    for tensor in tensors:
        bits |= tensor.data_ptr()
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            if size > 1:
                bits |= stride * tensor.element_size()
    return bits & -bits
