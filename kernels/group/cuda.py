"""Host side of csrc/group_sm90.cu: V-Smooth grouping on a Hopper GPU, without waiting for it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ..attend.validation import dtype_name
from ..cuda_driver import Kernel, launch
from ..kernel_arguments import alignment_bytes, pointers, strides
from ..nvrtc import Source
from .sampling import sample_step

SOURCE = Path(__file__).parents[1] / "csrc" / "group_sm90.cu"
HEAD_DIM = 128
SEGMENT = 128  # as in the source
MOST_CLUSTERS = 512
WIDE_FROM = 256  # clusters above which `assign_wide` runs


class _Params(ctypes.Structure):
    """struct Params of the source."""

    _fields_ = (
        ("v", ctypes.c_void_p),
        *((f"v_{axis}", ctypes.c_int64) for axis in ("b", "h", "s")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("previous", "centroids", "rounded", "half_norm", "labels", "histogram", "start", "count"),
                *("permutation", "partial"),
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in ("B", "H", "S", "C", "n", "step", "chunk", "chunks", "segments", "slots", "heads_first")
        ),
    )


def build(dtype: torch.dtype, row_alignment_bytes: int) -> Source:
    """The source for inputs of one dtype (bf16 or fp16) and one alignment of their rows (16, 8, 4 or 2 bytes)."""
    return Source(SOURCE, "sm_90a", (f"-DINPUT_FP16={int(dtype == torch.float16)}", f"-DVEC={row_alignment_bytes}"))


def refusal(v: Tensor, clusters: int) -> str | None:
    """Why this kernel does not group ``v`` [B, H, S, D]; None if it does."""
    batch, heads, tokens, head_dim = v.shape
    if v.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16, float16, not {dtype_name(v.dtype)}"
    if head_dim != HEAD_DIM:
        return f"serves head_dim {HEAD_DIM}, not {head_dim}"
    if clusters > MOST_CLUSTERS:
        return f"makes up to {MOST_CLUSTERS} clusters, not {clusters}"
    if batch * heads * max(tokens, clusters) >= 2**31:
        return "serves B * H * S below 2^31"
    return None


def group_cuda(v: Tensor, centroids: Tensor | None, clusters: int, iterations: int) -> tuple[Tensor, Tensor]:
    """What ``group_reference`` computes. NaN in ``v`` still gives a permutation and finite centroids."""
    if v.stride(-1) != 1:
        v = v.contiguous()
    batch, heads, tokens, _ = v.shape
    rows, clusters = batch * heads, clusters if centroids is None else centroids.shape[2]
    sampled = -(-tokens // sample_step(tokens))
    chunk = 1024 if clusters <= 128 else 2048  # more centroids in shared memory: more tokens per load of them
    slots = -(-sampled // SEGMENT) + clusters

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=v.device)

    permutation = new(batch, heads, tokens, dtype=torch.int32)
    result = new(batch, heads, clusters, HEAD_DIM)
    scratch = {
        "rounded": new(rows, clusters, HEAD_DIM, dtype=v.dtype),
        "half_norm": new(rows, clusters),
        "labels": new(rows, tokens, dtype=torch.int16),
        "histogram": new(rows, -(-tokens // chunk), clusters, dtype=torch.int32),
        "start": new(rows, clusters, dtype=torch.int32),
        "count": new(rows, clusters, dtype=torch.int32),
        "partial": new(rows, slots, HEAD_DIM),
    }
    previous = None if centroids is None else centroids.float().contiguous()

    def params(count: int, step: int) -> _Params:
        return _Params(
            **pointers(v=v, previous=previous, centroids=result, permutation=permutation, **scratch),
            **strides("v", v),
            B=batch,
            H=heads,
            S=tokens,
            C=clusters,
            n=count,
            step=step,
            chunk=chunk,
            chunks=-(-count // chunk),
            segments=-(-count // SEGMENT),
            slots=slots,
            heads_first=v.stride(1) < v.stride(2),
        )

    source = build(v.dtype, alignment_bytes(v))

    def run(kernel: str, arguments: _Params, blocks: int, threads: int, shared_bytes: int = 0) -> None:
        launch(Kernel(source, kernel, shared_bytes), v.device, (blocks, 1, 1), threads, [arguments])

    def assign_and_sort(arguments: _Params) -> None:
        wide = clusters > WIDE_FROM
        centroid_bytes = 1024 + -(-clusters // 64) * 64 * 264
        chunks = rows * arguments.chunks
        run("assign_wide" if wide else "assign", arguments, chunks, 512 if wide else 256, centroid_bytes)
        run("scan", arguments, rows, 512)
        run("scatter", arguments, chunks, 256, 8 * clusters * 4)

    sample, everything = params(sampled, sample_step(tokens)), params(tokens, 1)
    run("init", everything, -(-rows * clusters // 4), 128)
    for _ in range(iterations):
        assign_and_sort(sample)
        run("segment_sum", sample, -(-rows * sample.segments // 4), 128)
        run("update", sample, rows * clusters, 128)
    if previous is None:
        run("chain", everything, rows, 512)
    assign_and_sort(everything)
    return permutation, result
