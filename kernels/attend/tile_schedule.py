"""Which cluster of csrc/attention_sm90.cu works on what.

A cluster takes a pair of neighbouring query tiles of one head. As a rule the last round of pairs leaves clusters idle.
Where it saves time, the pairs of that round are split along the keys, and a second kernel combines the parts of a row.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapreplace
from typing import NamedTuple

from ..group.blocks import BLOCK

CLUSTER = 2  # blocks, a query tile each
STEP_TILES = 4  # the kernel's ring of stages: parts begin at multiples of it
# Costs in units of one tile, about 0.7 us on an H200: filling and draining a cluster, and the second kernel.
START, COMBINE = 4, 4
MOST_PARTS = 16
LEAST_GAIN = 0.01  # share of the whole call; for less, a head keeps the bits that it has in any batch


class TileSchedule(NamedTuple):
    """What a launch does with the pairs of query tiles, which are numbered head by head.

    Attributes:
        q_tile_pairs: pairs of one head.
        whole_pairs: the first pairs, each with all keys the work of one cluster.
        split_pairs: the other pairs, each the work of ``parts`` clusters.
        part_tiles: key tiles of each part but the last of a pair, a multiple of 4; 0 if no pair is split.
        parts: parts of each split pair; 0 if there is none.
    """

    q_tile_pairs: int
    whole_pairs: int
    split_pairs: int = 0
    part_tiles: int = 0
    parts: int = 0

    @property
    def all_parts(self) -> int:
        """Parts of all split pairs together."""
        return self.split_pairs * self.parts

    @property
    def clusters(self) -> int:
        """Clusters of the launch."""
        return self.whole_pairs + self.all_parts


def tile_schedule(heads: int, q_tokens: int, kv_tokens: int, clusters: int) -> TileSchedule:
    """The fastest schedule for ``heads`` heads (of all batches together) where ``clusters`` clusters run at a time."""
    pairs, tiles = heads * query_tile_pairs(q_tokens), -(-kv_tokens // BLOCK)
    return split(heads, q_tokens, kv_tokens, *_best_split(pairs, tiles, clusters))


def split(heads: int, q_tokens: int, kv_tokens: int, split_pairs: int, part_tiles: int) -> TileSchedule:
    """The last ``split_pairs`` pairs of all heads in parts of ``part_tiles`` key tiles; 0 and 0: none."""
    q_tile_pairs = query_tile_pairs(q_tokens)
    parts = -(-kv_tokens // (part_tiles * BLOCK)) if split_pairs else 0
    return TileSchedule(q_tile_pairs, heads * q_tile_pairs - split_pairs, split_pairs, part_tiles, parts)


def query_tile_pairs(q_tokens: int) -> int:
    """Pairs of neighbouring query tiles of one head: one for each cluster."""
    return -(-q_tokens // (BLOCK * CLUSTER))


@lru_cache(maxsize=256)
def _best_split(pairs: int, tiles: int, clusters: int) -> tuple[int, int]:
    """How many pairs to split, and into parts of how many tiles: those of the last round, or none."""
    rounds, rest = divmod(pairs, clusters)
    if not rest:
        return 0, 0
    lengths = [length for length in range(STEP_TILES, tiles, STEP_TILES) if length * MOST_PARTS >= tiles]
    last_round = {length: _time(rest, tiles, length, clusters) + COMBINE for length in lengths}
    whole_round = tiles + START
    best = min(lengths, key=lambda length: (last_round[length], -length), default=None)
    if best is None or whole_round - last_round[best] < LEAST_GAIN * (rounds + 1) * whole_round:
        return 0, 0
    return rest, best


def _time(pairs: int, tiles: int, part_tiles: int, clusters: int) -> int:
    """When the last part ends, if each goes to the cluster that is free first, the long ones before the short ones."""
    long_parts, short_tiles = divmod(tiles, part_tiles)
    ends = [0] * clusters
    for length in [part_tiles] * (long_parts * pairs) + [short_tiles] * (pairs if short_tiles else 0):
        heapreplace(ends, ends[0] + length + START)
    return max(ends)
