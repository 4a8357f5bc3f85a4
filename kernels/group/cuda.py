"""Host side of csrc/group_sm90.cu: V-Smooth grouping on a Hopper GPU, without waiting for it."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..attend.validation import dtype_name
from ..cuda_driver import Kernel, Launch, launch_all
from ..kernel_arguments import Scratch, alignment_bytes, contiguous, pointers, strides
from ..nvrtc import Source
from .sampling import sample_step

SOURCE = Path(__file__).parents[1] / "csrc" / "group_sm90.cu"
HEAD_DIM = 128
# As in the source:
SEGMENT = 32
MOST_CLUSTERS = 512  # also the threads of `scan` and `chain`, one for each
WARPS = 4  # per block of `init`, `segment_sum`, `update` and `distances`
SCATTER_WARPS = 8
PRODUCT_CLUSTERS = 64
# The source has no names for these:
ALIGNMENT_BYTES = 1024  # of the centroids in the shared memory of `assign`
WIDE_FROM = 256  # clusters above which `assign_wide` runs
LEAST_CHUNK = 32 * SCATTER_WARPS  # tokens
ENOUGH_BLOCKS = 528  # two rounds of two blocks on each of 132 multiprocessors


class _Params(ctypes.Structure):
    """struct Params of the source."""

    _fields_ = (
        ("v", ctypes.c_void_p),
        *((f"v_{axis}", ctypes.c_int64) for axis in ("b", "h", "s")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("previous", "centroids", "rounded", "half_norm", "labels", "histogram", "start", "count"),
                *("permutation", "partial", "distances"),
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in ("B", "H", "S", "C", "n", "step", "chunk", "chunks", "segments", "slots", "heads_first")
        ),
    )


@cache  # two dtypes, four alignments
def build(dtype: torch.dtype, row_alignment_bytes: int) -> Source:
    """The source for inputs of one dtype (bf16 or fp16) and one alignment of their rows (16, 8, 4 or 2 bytes)."""
    return Source(SOURCE, "sm_90a", (f"-DINPUT_FP16={int(dtype == torch.float16)}", f"-DVEC={row_alignment_bytes}"))


def refusal(v: Tensor, clusters: int) -> str | None:
    """Why this kernel does not group ``v`` [B, H, S, D]; None if it does."""
    head_dim = v.shape[-1]
    if v.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16, float16, not {dtype_name(v.dtype)}"
    if head_dim != HEAD_DIM:
        return f"serves head_dim {HEAD_DIM}, not {head_dim}"
    if clusters > MOST_CLUSTERS:
        return f"makes up to {MOST_CLUSTERS} clusters, not {clusters}"
    return None


def chunk_tokens(rows: int, tokens: int, clusters: int) -> int:
    """Tokens of one block of `assign` and `scatter`, for ``rows`` heads of ``tokens`` tokens.

    More centroids in shared memory want more tokens per load of them; few heads want more blocks.
    """
    chunk = 1024 if clusters <= 128 else 2048
    while chunk > LEAST_CHUNK and rows * _ceil(tokens, chunk) < ENOUGH_BLOCKS:
        chunk //= 2
    return chunk


def group_cuda(v: Tensor, centroids: Tensor | None, clusters: int, iterations: int) -> tuple[Tensor, Tensor]:
    """What ``group_reference`` computes. NaN in ``v`` still gives a permutation and finite centroids."""
    if v.stride(-1) != 1:
        v = v.contiguous()
    batch, heads, tokens, _ = v.shape
    rows, clusters = batch * heads, clusters if centroids is None else centroids.shape[2]
    previous = None if centroids is None else contiguous(centroids.float())
    permutation = torch.empty((batch, heads, tokens), dtype=torch.int32, device=v.device)
    result = torch.empty((batch, heads, clusters, HEAD_DIM), dtype=torch.float32, device=v.device)

    step = sample_step(tokens)
    sampled = _ceil(tokens, step)
    slots = _ceil(sampled, SEGMENT) + clusters
    chunks = max(_ceil(count, chunk_tokens(rows, count, clusters)) for count in (sampled, tokens))
    scratch = Scratch(
        v.device,
        rounded=rows * clusters * HEAD_DIM * v.element_size(),
        half_norm=4 * rows * clusters,
        labels=2 * rows * tokens,
        histogram=4 * rows * chunks * clusters,
        start=4 * rows * clusters,
        count=4 * rows * clusters,
        partial=4 * rows * slots * HEAD_DIM,
        distances=4 * rows * clusters**2 if previous is None else 0,
    )
    sample = _Params(
        **pointers(v=v, previous=previous, centroids=result, permutation=permutation),
        **scratch.addresses,
        **strides("v", v),
        **dict(B=batch, H=heads, S=tokens, C=clusters, slots=slots, heads_first=v.stride(1) < v.stride(2)),
    )
    everything = _Params.from_buffer_copy(sample)
    _set_tokens(sample, sampled, step)
    _set_tokens(everything, tokens, 1)
    source = build(v.dtype, alignment_bytes(v))
    launches = [
        Launch(Kernel(source, name, shared), (blocks, 1, 1), threads, [params], joins=name != "init")
        for name, params, blocks, threads, shared in _steps(sample, everything, iterations)
    ]
    launch_all(v.device, launches)
    return permutation, result


def _set_tokens(params: _Params, count: int, step: int) -> None:
    """Make a pass look at every ``step``-th token, ``count`` of them."""
    params.n, params.step = count, step
    params.chunk = chunk_tokens(params.B * params.H, count, params.C)
    params.chunks, params.segments = _ceil(count, params.chunk), _ceil(count, SEGMENT)


def _steps(sample: _Params, everything: _Params, iterations: int) -> list[tuple[str, _Params, int, int, int]]:
    """What runs one after the other: kernel, parameters, blocks, threads, bytes of shared memory."""
    rows, clusters = sample.B * sample.H, sample.C
    steps = [("init", everything, _ceil(rows * clusters, WARPS), 32 * WARPS, 0)]
    for _ in range(iterations):
        steps += _assign_and_sort(sample)
        steps += [("segment_sum", sample, _ceil(rows * sample.segments, WARPS), 32 * WARPS, 0)]
        steps += [("update", sample, rows * clusters, 32 * WARPS, 0)]
    if not sample.previous:
        tiles = _ceil(clusters, 16) * _ceil(clusters, 64)
        steps += [("distances", everything, _ceil(rows * tiles, WARPS), 32 * WARPS, 0)]
        steps += [("chain", everything, rows, MOST_CLUSTERS, 0)]
    return steps + _assign_and_sort(everything)


def _assign_and_sort(params: _Params) -> list[tuple[str, _Params, int, int, int]]:
    rows, clusters = params.B * params.H, params.C
    assign, threads = ("assign_wide", 512) if clusters > WIDE_FROM else ("assign", 256)
    cluster_bytes = 2 * HEAD_DIM + 4 + 4  # rounded centroid, start score, count
    assign_bytes = ALIGNMENT_BYTES + _ceil(clusters, PRODUCT_CLUSTERS) * PRODUCT_CLUSTERS * cluster_bytes
    return [
        (assign, params, rows * params.chunks, threads, assign_bytes),
        ("scan", params, rows, MOST_CLUSTERS, 0),
        ("scatter", params, rows * params.chunks, 32 * SCATTER_WARPS, 4 * SCATTER_WARPS * clusters),
    ]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
