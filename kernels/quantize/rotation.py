"""Orthogonal Hadamard rotation over the head dimension: spreads outlier channels, leaves q.k unchanged."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard_matrix(size: int, device=None) -> Tensor:
    """[size, size] float64, symmetric and orthogonal.

    For a power of two this is Sylvester's matrix over sqrt(size); any other size is split into falling powers of
    two (96 = 64 + 32), each rotated on its own.
    """
    blocks = []
    while size:
        order = 1 << (size.bit_length() - 1)
        blocks.append(_sylvester(order, device))
        size -= order
    return torch.block_diag(*blocks)


def _sylvester(order: int, device) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64, device=device)
    step = torch.ones(2, 2, dtype=torch.float64, device=device)
    step[1, 1].neg_()  # a matrix of Python numbers would make the host wait for the GPU
    while matrix.shape[0] < order:
        matrix = torch.kron(step, matrix)
    return matrix / order**0.5


def rotate(x: Tensor) -> Tensor:
    """``x`` [..., D] times the Hadamard matrix of order D: float32, from products in float64.

    Float64 makes the rounded result the same for every batch size, stride and matrix library.
    """
    return (x.double() @ hadamard_matrix(x.shape[-1], x.device)).float()
