"""Host side of csrc/attention_sm90.cu: the 8-bit attention kernel for H100 and H200."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..cuda_driver import Kernel, Launch, launch_all
from ..group.blocks import BLOCK
from ..kernel_arguments import Scratch
from ..nvrtc import Source
from ..quantize.hopper import HEAD_DIM, MEANS_GROUP, HopperOperands
from ..quantize.precise import PreciseOperands
from ..tensor_map import SWIZZLE_32, SWIZZLE_128, tensor_map
from .tile_schedule import CLUSTER, TileSchedule, tile_schedule

SOURCE = Path(__file__).parents[1] / "csrc" / "attention_sm90.cu"
THREADS, COMBINE_THREADS, SHARED_BYTES = 384, 128, 190 * 1024  # as in the sources
WARP = 32


def attend_cuda(
    operands: HopperOperands,
    out: Tensor,
    *,
    means: bool = True,
    probabilities: str = "expcast",
    schedule: TileSchedule | None = None,
) -> None:
    """Write attention of the operands to ``out``, on its device and torch's current stream, without synchronizing.

    Args:
        out: [B, H, S_q, 128], bf16 or fp16, last dimension contiguous, the address and all other strides even.
        means: False leaves the block means out (operands that were not demeaned).
        probabilities: "expcast" or "exp2", an exponential and a cast: the same operands, half again the time.
        schedule: which query rows have their keys split; None: ``schedule_for``.
    """
    schedule = schedule or schedule_for(operands, out)
    parts = _parts(schedule, out.device)  # alive until all is launched
    common = [*_pointers_and_sizes(operands, out), _schedule_argument(schedule, parts)]
    source = build(out.dtype, means, probabilities)
    attend = Kernel(source, "attention_fwd_kernel", SHARED_BYTES)
    blocks = schedule.clusters * CLUSTER
    launches = [Launch(attend, (blocks, 1, 1), THREADS, [*_maps(operands, out, means), *common])]
    if parts is not None:
        combine = Kernel(source, "attention_combine_kernel")
        blocks = schedule.split_pairs * CLUSTER * BLOCK * WARP // COMBINE_THREADS  # a warp for each query row
        launches.append(Launch(combine, (blocks, 1, 1), COMBINE_THREADS, common, joins=True))
    launch_all(out.device, launches)


def schedule_for(operands: HopperOperands, out: Tensor) -> TileSchedule:
    """The schedule that is fastest on ``out``'s device."""
    batch, heads, q_tokens, _ = out.shape
    clusters = torch.cuda.get_device_properties(out.device).multi_processor_count // CLUSTER
    return tile_schedule(batch * heads, q_tokens, operands.kv_length, clusters)


@cache  # two dtypes, two switches
def build(dtype: torch.dtype, means: bool, probabilities: str = "expcast") -> Source:
    """The source for outputs of one dtype (bf16 or fp16), with or without block means and ExpCast."""
    switches = {"MEANS": means, "OUT_HALF": dtype == torch.float16, "EXPCAST": probabilities == "expcast"}
    return Source(SOURCE, "sm_90a", tuple(f"-D{name}={int(value)}" for name, value in switches.items()))


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


def _maps(operands: HopperOperands, out: Tensor, means: bool) -> list:
    value_map = tensor_map(operands.v8, (BLOCK, HEAD_DIM // CLUSTER), SWIZZLE_128)
    return [
        *query_and_key_maps(operands, out.shape[2], operands.kv_length),
        value_map,
        tensor_map(operands.means, (MEANS_GROUP, HEAD_DIM), SWIZZLE_32) if means else value_map,  # or not read
    ]


def _pointers_and_sizes(operands: HopperOperands, out: Tensor) -> list:
    scales = operands.q_scale, operands.v_scale
    return pointers_and_sizes(scales, out, operands.q8.shape[1], operands.kv_length)


class _TileSchedule(ctypes.Structure):
    """``TileSchedule`` of csrc/attention_schedule_sm90.cuh."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("q_tile_pairs", "whole_pairs", "split_pairs", "part_tiles")),
        *((name, ctypes.c_void_p) for name in ("part_out_gmem", "part_row_gmem")),
    )


class _PartRow(ctypes.Structure):
    """``PartRow`` of csrc/attention_schedule_sm90.cuh."""

    _fields_ = (("row_sum", ctypes.c_float), ("offset", ctypes.c_int))


def _parts(schedule: TileSchedule, device: torch.device) -> Scratch | None:
    """Where the first kernel leaves the parts for the second one: half outputs, and a row sum and an offset each."""
    rows = schedule.all_parts * CLUSTER * BLOCK
    if not rows:
        return None
    half = torch.float16.itemsize
    return Scratch(device, part_out_gmem=rows * HEAD_DIM * half, part_row_gmem=rows * ctypes.sizeof(_PartRow))


def _schedule_argument(schedule: TileSchedule, parts: Scratch | None) -> _TileSchedule:
    sizes = (schedule.q_tile_pairs, schedule.whole_pairs, schedule.split_pairs, schedule.part_tiles)
    return _TileSchedule(*sizes, **(parts.addresses if parts else {}))
