"""The arithmetic of csrc/attention_sm90.cu in plain torch, on the same operands.

Exact where the kernel is exact: scores, codes, running maxima, and where each warp takes a new maximum. Sums that the
tensor cores make with fewer bits are float32 here, so outputs agree to about 3e-4 before they are rounded.

What differs from the general reference (attend/reference.py): the maximum is stale. Codes are made against the old one,
which stands at code 114, and a warp raises it only when a code passes 126; the first of a long row mostly stands lower,
so that it may grow. The output is kept in half, divided by a power of two of the row sum; what came after the last
flush is added in float32. Rows whose keys are split (attend/tile_schedule.py) have a maximum in each part; their parts
are weighed in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..group.blocks import BLOCK
from ..quantize.hopper import HEAD_DIM, MEANS_GROUP, HopperOperands, decoded_means, decoded_values
from .tile_schedule import CLUSTER, TileSchedule

MAX_CODE = 114
LAST_CODE = 126  # E4M3 448; 127 would be NaN
# Code of a probability that is rounded to zero, by how the probabilities are made: exact ones keep subnormals.
FIRST_CODE = {"expcast": 0, "exp2": -25}
SHORT_TILES = 32  # up to here the first maximum stands where later ones do
ROOM = 45 / 256  # share of its code by which the first maximum of a longer row stands lower: at 94 with ExpCast
NO_MAX_YET = 20000
PADDING_SCORE = -16384
WARP_ROWS = 16
TINY = 2.0**-126


def attend_hopper(
    operands: HopperOperands,
    q_tokens: int,
    *,
    means: bool = True,
    probabilities: str = "expcast",
    schedule: TileSchedule | None = None,
) -> Tensor:
    """Attention of the operands: float32 [BH, q_tokens, 128].

    Args:
        means: False leaves the block means out.
        probabilities: "expcast" (the code is the E4M3 byte) or "exp2" (exponential of the unrounded code, cast).
        schedule: which query rows have their keys split; None: none.
    """

    def over(tiles: range) -> _Part:
        return _Rows(operands, q_tokens, FIRST_CODE[probabilities], tiles).run(means)

    tiles = operands.k8.shape[1] // BLOCK
    out = over(range(tiles)).out
    if schedule is not None and schedule.split_pairs:
        starts = range(0, tiles, schedule.part_tiles)
        parts = [over(range(tiles)[start : start + schedule.part_tiles]) for start in starts]
        out = torch.where(_split_rows(schedule, out), _combine(parts, operands.q_scale), out)
    return (out * operands.v_scale[:, None])[:, :q_tokens]


class _Part(NamedTuple):
    """What the keys of a run of tiles give.

    Attributes:
        out: [BH, rows, 128] in units of v_scale.
        row_sum: [BH, rows], of the probabilities, in units of 2^(-offset * q_scale / 8).
        offset: [BH, rows].
    """

    out: Tensor
    row_sum: Tensor
    offset: Tensor


def _combine(parts: list[_Part], q_scale: Tensor) -> Tensor:
    out, row_sum, offset = (torch.stack(field) for field in zip(*parts, strict=True))
    weights = row_sum * torch.exp2((offset.amin(0) - offset) * q_scale * 0.125)
    return (out.half().float() * weights[..., None]).sum(0) / weights.sum(0)[..., None]


def _split_rows(schedule: TileSchedule, out: Tensor) -> Tensor:
    """[BH, rows, 1]: whether a row belongs to a split pair of query tiles."""
    heads, rows, _ = out.shape
    pair_of_head = torch.arange(rows, device=out.device) // (BLOCK * CLUSTER)
    pair = torch.arange(heads, device=out.device)[:, None] * schedule.q_tile_pairs + pair_of_head
    return (pair >= schedule.whole_pairs)[..., None]


class _Rows:
    """The recurrence over a run of key tiles for all query rows of all heads."""

    def __init__(self, operands: HopperOperands, q_tokens: int, first_code: int, tiles: range):
        self.operands = operands
        self.tiles = tiles  # begins at a multiple of four
        self.first_code = first_code  # codes below count from it
        heads, rows = operands.q_scale.shape
        device = operands.q8.device
        real = (torch.arange(rows, device=device) < q_tokens)[None, :]
        self.q = operands.q8.float() * real[..., None]
        self.scale = torch.where(real, operands.q_scale, torch.ones_like(operands.q_scale))
        max_code = MAX_CODE - first_code
        self.max_u = (max_code / self.scale).ceil()
        self.shift = ((max_code - self.max_u * self.scale) * 2.0**-24).half().double() * 2.0**24
        self.offset = torch.full_like(self.scale, NO_MAX_YET)
        self.factor = torch.ones_like(self.scale)
        self.residual = torch.zeros(heads, rows, HEAD_DIM, dtype=torch.float32, device=device)
        self.open_sums = torch.zeros(heads, rows, 4, dtype=torch.float32, device=device)
        self.row_sum = torch.zeros_like(self.scale)
        # Half values, of the tiles since the last flush; what a run leaves out of its first group of means counts as 0.
        self.sums = [torch.zeros_like(self.scale)] * (tiles.start % MEANS_GROUP)
        self.out = torch.zeros_like(self.residual)
        self.out_factor = torch.ones_like(self.row_sum)

    def run(self, means: bool) -> _Part:
        values = decoded_values(self.operands)
        mean_groups = decoded_means(self.operands).unflatten(1, (-1, MEANS_GROUP)) if means else None
        for tile in self.tiles:
            probabilities = self._probabilities(tile)
            if tile % 4 == 0 and tile > self.tiles.start:
                self._collect_sums()
            self._scale_accumulated()
            if tile % MEANS_GROUP == 0 and tile > self.tiles.start:
                self._restore_means(mean_groups, tile // MEANS_GROUP - 1)
                self._flush()
            self.residual += probabilities @ values[:, tile * BLOCK : (tile + 1) * BLOCK]
            self.open_sums[..., tile % 4] = probabilities.sum(-1)
        self._collect_sums()
        self._restore_means(mean_groups, self.tiles[-1] // MEANS_GROUP)
        out = self.out * self.out_factor[..., None] + self.residual
        return _Part(out / self.row_sum[..., None], self.row_sum, self.offset)

    def _probabilities(self, tile: int) -> Tensor:
        codes = self._codes(tile)
        if self.first_code == 0:
            return codes.round().clamp_min(0).to(torch.uint8).view(torch.float8_e4m3fn).float()
        return torch.exp2((codes + self.first_code - 56) / 8).clamp_max(448).to(torch.float8_e4m3fn).float()

    def _codes(self, tile: int) -> Tensor:
        place = torch.arange(tile * BLOCK, (tile + 1) * BLOCK, device=self.q.device)
        padding = place >= self.operands.kv_length
        keys = self.operands.k8[:, tile * BLOCK : (tile + 1) * BLOCK].float() * ~padding[:, None]
        scores = (self.q @ keys.transpose(1, 2)).div(256).floor() + PADDING_SCORE * padding
        last_code = LAST_CODE - self.first_code
        overflows = (self._convert(scores).round() > last_code).any(-1).unflatten(-1, (-1, WARP_ROWS)).any(-1)
        if tile > self.tiles.start:
            self._raise_maximum(scores.amax(-1), overflows.repeat_interleave(WARP_ROWS, 1), self.max_u)
        else:
            everywhere = torch.ones_like(self.scale, dtype=torch.bool)
            self._raise_maximum(scores.amax(-1), everywhere, self.max_u - self._room(scores))
        return self._convert(scores)

    def _room(self, scores: Tensor) -> Tensor:
        """By how much lower a row's first maximum stands: ROOM in a long row, if each eighth of keys is near."""
        if len(self.tiles) <= SHORT_TILES:
            return torch.zeros_like(self.scale)
        of_eighths = scores.unflatten(-1, (-1, 8)).amax(-2)
        near = 4 * (of_eighths.amax(-1) - of_eighths.amin(-1)) <= self.max_u
        return (self.max_u * ROOM).floor() * near

    def _convert(self, scores: Tensor) -> Tensor:
        u = (scores + self.offset[..., None]).clamp(0, 1023).double()
        return u * self.scale[..., None].double() + self.shift[..., None]

    def _raise_maximum(self, highest: Tensor, where: Tensor, place: Tensor) -> None:
        offset = torch.where(where, torch.minimum(self.offset, place - highest), self.offset)
        factor = torch.exp2((offset - self.offset) * self.scale * 0.125)
        self.offset, self.factor = offset, torch.where(factor < TINY, torch.zeros_like(factor), factor)

    def _scale_accumulated(self) -> None:
        self.residual *= self.factor[..., None]
        self.open_sums *= self.factor[..., None]
        self.row_sum *= self.factor
        self.out_factor = self.out_factor * self.factor
        self.sums = [(sums * self.factor).half().float() for sums in self.sums]

    def _collect_sums(self) -> None:
        rounded = self.open_sums.half().float()
        self.sums += list(rounded.unbind(-1))
        self.row_sum += rounded.sum(-1)
        self.open_sums.zero_()

    def _restore_means(self, mean_groups: Tensor | None, group: int) -> None:
        if mean_groups is not None:
            missing = [torch.zeros_like(self.row_sum)] * (MEANS_GROUP - len(self.sums))
            self.residual += torch.stack(self.sums + missing, -1) @ mean_groups[:, group]
        self.sums = []

    def _flush(self) -> None:
        power = 2 ** torch.frexp(self.row_sum)[1].float() / 2
        factor = 2 * torch.where(self.row_sum < TINY, torch.full_like(power, TINY / 2), power)
        kept = self.out * (self.out_factor / factor).half().float()[..., None]
        self.out = (kept + (self.residual / factor[..., None]).half().float()).half().float()
        self.out_factor = factor
        self.residual.zero_()
