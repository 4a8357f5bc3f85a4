"""Host side of csrc/prepare_sm90.cu: from q, k, v to the operands of the Hopper kernels, in three launches."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda_driver import Kernel, Launch, launch_all
from ..group.blocks import BLOCK
from ..kernel_arguments import Scratch, alignment_bytes, pointers, strides
from ..nvrtc import Source
from .hopper import HEAD_DIM, MEANS_GROUP, HopperOperands
from .precise import PreciseOperands

SOURCE = Path(__file__).parents[1] / "csrc" / "prepare_sm90.cu"
# As in the source, which explains them:
KEY_CHUNK, VALUE_CHUNK, WRITE_ROWS, VALUE_BLOCKS = 512, 8, 256, 4
THREADS, FINISH_THREADS = 128, 1024


class _Params(ctypes.Structure):
    """struct Params of csrc/prepare_params_sm90.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("q", "k", "v") for axis in ("b", "h", "s")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("permutation", "q8", "q_scale", "k8", "k_scale", "v8", "v_scale", "means", "flag"),
                *("key_partial", "value_partial", "key_mean", "block_mean", "k_block_scale"),
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


class _Sizes(NamedTuple):
    """Counts of one call; ``rows`` is B * H."""

    rows: int
    q_padded: int
    blocks: int
    slots: int
    key_chunks: int
    value_chunks: int


@cache  # two dtypes, four alignments, two modes
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
        scale: softmax scale, 0 or more.
        permutation: contiguous int32 [B, H, S_kv], the token at each position of the order; None keeps the sequence.
        demean: False takes all block means as zero.
    """
    sizes = _sizes(q, k)
    outputs = {
        **_query_and_key_codes(sizes, q.device),
        "v8": _empty(q.device, torch.uint8, sizes.rows, HEAD_DIM, sizes.blocks * BLOCK),
        "v_scale": _empty(q.device, torch.float32, sizes.rows, HEAD_DIM),
        "means": _empty(q.device, torch.float16, sizes.rows, HEAD_DIM, sizes.slots),
    }
    flags = _launch(sizes, q, k, v, scale, outputs, permutation=permutation, demean=demean)
    return HopperOperands(**outputs, kv_length=k.shape[2], flags=flags)


def prepare_precise(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> PreciseOperands:
    """Operands of one call of the precise kernel; as ``prepare``. ``v`` is only looked at, and handed on."""
    sizes = _sizes(q, k)
    outputs = {
        **_query_and_key_codes(sizes, q.device),
        "k_block_scale": _empty(q.device, torch.float32, sizes.rows, sizes.blocks),
    }
    flags = _launch(sizes, q, k, v, scale, outputs, precise=True)
    return PreciseOperands(**outputs, v=v, flags=flags)


def _sizes(q: Tensor, k: Tensor) -> _Sizes:
    batch, heads, q_tokens, _ = q.shape
    tokens = k.shape[2]
    blocks = _ceil(tokens, BLOCK)
    return _Sizes(
        rows=batch * heads,
        q_padded=_ceil(q_tokens, BLOCK) * BLOCK,
        blocks=blocks,
        slots=_ceil(blocks, MEANS_GROUP) * MEANS_GROUP,
        key_chunks=_ceil(tokens, KEY_CHUNK),
        value_chunks=_ceil(blocks, VALUE_CHUNK),
    )


def _query_and_key_codes(sizes: _Sizes, device) -> dict[str, Tensor]:
    return {
        "q8": _empty(device, torch.int8, sizes.rows, sizes.q_padded, HEAD_DIM),
        "q_scale": _empty(device, torch.float32, sizes.rows, sizes.q_padded),
        "k8": _empty(device, torch.int8, sizes.rows, sizes.blocks * BLOCK, HEAD_DIM),
    }


def _launch(
    sizes: _Sizes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    outputs: dict[str, Tensor],
    *,
    permutation: Tensor | None = None,
    demean: bool = False,
    precise: bool = False,
) -> Tensor:
    """Fill ``outputs``; returns the flags."""
    batch, heads, q_tokens, _ = q.shape
    flags = _empty(q.device, torch.int32, 1)
    scratch = _scratch(sizes, q.device, precise)
    params = _Params(
        **pointers(q=q, k=k, v=v, permutation=permutation, flag=flags, **outputs),
        **scratch.addresses,
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        B=batch,
        H=heads,
        S_q=q_tokens,
        S_kv=k.shape[2],
        S_q_pad=sizes.q_padded,
        S_kv_pad=sizes.blocks * BLOCK,
        NB=sizes.blocks,
        NB16=sizes.slots,
        key_chunks=sizes.key_chunks,
        value_chunks=sizes.value_chunks,
        q_heads_first=_heads_are_neighbours(q),
        k_heads_first=_heads_are_neighbours(k),
        # A gather touches single rows in any case, so then the order of the outputs decides.
        gather_heads_first=permutation is None and _heads_are_neighbours(v),
        demean=demean,
        score_scale=8 * math.log2(math.e) * scale,
    )
    source = build(q.dtype, alignment_bytes(q, k, v), precise)
    steps = (
        ("stats", sizes.rows * (sizes.key_chunks + sizes.value_chunks), THREADS, False),
        ("finish", 2 * sizes.rows, FINISH_THREADS, True),
        ("write", sizes.rows * _write_blocks(sizes, precise), THREADS, True),
    )
    arguments = [params]
    launch_all(
        q.device,
        [Launch(Kernel(source, name), (grid, 1, 1), threads, arguments, joins) for name, grid, threads, joins in steps],
    )
    return flags


def _scratch(sizes: _Sizes, device, precise: bool) -> Scratch:
    rows = 4 * HEAD_DIM * sizes.rows
    if precise:
        of_values = {"value_partial": 4 * sizes.rows * sizes.value_chunks}
    else:
        of_values = {"value_partial": rows * sizes.value_chunks * 2, "block_mean": rows * sizes.blocks}
    keys = {"k_scale": 4 * sizes.rows, "key_partial": rows * sizes.key_chunks * 3, "key_mean": rows}
    return Scratch(device, **keys, **of_values)


def _write_blocks(sizes: _Sizes, precise: bool) -> int:
    """Blocks of ``write`` for one head."""
    queries_and_keys = _ceil(sizes.blocks * BLOCK, WRITE_ROWS) + _ceil(sizes.q_padded, WRITE_ROWS)
    if precise:
        return queries_and_keys
    return queries_and_keys + _ceil(sizes.blocks, VALUE_BLOCKS) + sizes.slots // MEANS_GROUP


def _heads_are_neighbours(x: Tensor) -> bool:
    """Whether the heads of a token lie closer together than the tokens of a head."""
    return x.stride(1) < x.stride(2)


def _empty(device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
