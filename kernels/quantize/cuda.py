"""Host side of csrc/prepare_sm90.cu: from q, k, v to the operands of the Hopper attention kernel, in three launches."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from ..cuda_driver import Kernel, launch
from ..group.blocks import BLOCK
from ..kernel_arguments import alignment_bytes, pointers, strides
from ..nvrtc import Source
from .hopper import HEAD_DIM, MEANS_GROUP, HopperOperands
from .precise import PreciseOperands

SOURCE = Path(__file__).parents[1] / "csrc" / "prepare_sm90.cu"
KEY_CHUNK, VALUE_CHUNK, WRITE_ROWS, VALUE_BLOCKS = 512, 8, 256, 4  # as in the source


class _Params(ctypes.Structure):
    """struct Params of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("q", "k", "v") for axis in ("b", "h", "s")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("permutation", "q8", "q_scale", "k8", "k_scale", "v8", "v_scale", "means", "flag"),
                *("key_partial", "value_partial", "key_mean", "block_mean"),
                *("k_block_scale", "v_block_scale", "block_range"),
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("B", "H", "S_q", "S_kv", "S_q_pad", "S_kv_pad", "NB", "NB16", "key_chunks", "value_chunks"),
                *("q_heads_first", "k_heads_first", "gather_heads_first", "demean"),
            )
        ),
        ("score_scale", ctypes.c_float),
    )


def build(dtype: torch.dtype, row_alignment_bytes: int, precise: bool = False) -> Source:
    """The source for inputs of one dtype (bf16 or fp16) and one alignment of their rows (16, 8, 4 or 2 bytes)."""
    switches = (f"-DINPUT_FP16={int(dtype == torch.float16)}", f"-DVEC={row_alignment_bytes}")
    return Source(SOURCE, "sm_90a", (*switches, *(("-DPRECISE=1",) if precise else ())))


def prepare(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, permutation: Tensor | None = None, demean: bool = True
) -> HopperOperands:
    """Operands of one call, on the tensors' device and torch's current stream, without synchronizing.

    Args:
        q: [B, H, S_q, 128], k, v: [B, H, S_kv, 128]; bf16 or fp16, last dimension contiguous, any other strides.
        scale: softmax scale.
        permutation: contiguous int32 [B, H, S_kv], the token at each position of the order; None keeps the sequence.
        demean: False takes all block means as zero.
    """
    return _prepare(HopperOperands, q, k, v, scale, permutation, demean)


def prepare_precise(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, permutation: Tensor | None = None, demean: bool = True
) -> PreciseOperands:
    """Operands of one call of the precise kernel; as ``prepare``."""
    return _prepare(PreciseOperands, q, k, v, scale, permutation, demean)


def _prepare(kind, q: Tensor, k: Tensor, v: Tensor, scale: float, permutation: Tensor | None, demean: bool):
    precise = kind is PreciseOperands
    batch, heads, q_tokens, _ = q.shape
    tokens, rows = k.shape[2], batch * heads
    blocks, q_pad = _ceil(tokens, BLOCK), _ceil(q_tokens, BLOCK) * BLOCK
    slots = _ceil(blocks, MEANS_GROUP) * MEANS_GROUP
    key_chunks, value_chunks = _ceil(tokens, KEY_CHUNK), _ceil(blocks, VALUE_CHUNK)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    # Written by the kernels, and what the attention kernel reads.
    outputs = {
        "q8": new(rows, q_pad, HEAD_DIM, dtype=torch.int8),
        "q_scale": new(rows, q_pad),
        "k8": new(rows, blocks * BLOCK, HEAD_DIM, dtype=torch.int8),
        "v8": new(rows, HEAD_DIM, blocks * BLOCK, dtype=torch.int8 if precise else torch.uint8),
        "v_scale": new(rows, HEAD_DIM),
        "means": new(rows, HEAD_DIM, slots, dtype=torch.float16),
    }
    scratch = {
        "k_scale": new(rows),
        "key_partial": new(rows, key_chunks, 3, HEAD_DIM),
        "value_partial": new(rows, value_chunks, 2, HEAD_DIM),
        "key_mean": new(rows, HEAD_DIM),
        "block_mean": new(rows, blocks, HEAD_DIM),
    }
    if precise:
        outputs |= {"k_block_scale": new(rows, blocks), "v_block_scale": new(rows, blocks, HEAD_DIM)}
        scratch |= {"block_range": new(rows, blocks, 2, HEAD_DIM)}
    flags = torch.zeros(1, dtype=torch.int32, device=q.device)
    operands = kind(**outputs, kv_length=tokens, flags=flags)
    params = _Params(
        **pointers(q=q, k=k, v=v, permutation=permutation, flag=flags, **outputs, **scratch),
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        B=batch,
        H=heads,
        S_q=q_tokens,
        S_kv=tokens,
        S_q_pad=q_pad,
        S_kv_pad=blocks * BLOCK,
        NB=blocks,
        NB16=slots,
        key_chunks=key_chunks,
        value_chunks=value_chunks,
        q_heads_first=_heads_are_neighbours(q),
        k_heads_first=_heads_are_neighbours(k),
        # A gather touches single rows in any case, so then the order of the outputs decides.
        gather_heads_first=permutation is None and _heads_are_neighbours(v),
        demean=demean,
        score_scale=8 * math.log2(math.e) * scale,
    )
    source = build(q.dtype, alignment_bytes(q, k, v), precise)
    write_blocks = (
        _ceil(blocks * BLOCK, WRITE_ROWS)
        + _ceil(blocks, VALUE_BLOCKS)
        + _ceil(q_pad, WRITE_ROWS)
        + slots // MEANS_GROUP
    )
    for kernel, grid, threads in (
        ("stats", rows * (key_chunks + value_chunks), 128),
        ("finish", 2 * rows, 1024),
        ("write", rows * write_blocks, 128),
    ):
        launch(Kernel(source, kernel), q.device, (grid, 1, 1), threads, [params])
    return operands


def _heads_are_neighbours(x: Tensor) -> bool:
    """Whether the heads of a token lie closer together than the tokens of a head."""
    return x.stride(1) < x.stride(2)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
