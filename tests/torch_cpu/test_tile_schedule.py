"""Which cluster of the 8-bit attention kernel works on what: kernels/attend/tile_schedule.py."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vc_attention.attend.tile_schedule import (
    COMBINE,
    LEAST_GAIN,
    MOST_PARTS,
    START,
    TileSchedule,
    split,
    tile_schedule,
)

CLUSTERS = 66  # of an H200


def tiles_of(schedule, tiles):
    """Lengths of a split pair's parts."""
    return [min(schedule.part_tiles, tiles - i * schedule.part_tiles) for i in range(schedule.parts)]


def finish(lengths, clusters):
    """When the last of ``lengths`` ends, each given to the cluster that is free first: in single steps of time."""
    left, waiting, time = [0] * clusters, list(lengths), 0
    while waiting or any(left):
        for i, remaining in enumerate(left):
            if not remaining and waiting:
                left[i] = waiting.pop(0) + START
        left = [max(remaining - 1, 0) for remaining in left]
        time += 1
    return time


@pytest.mark.parametrize(
    ("heads", "tokens", "split_pairs", "lengths"),
    [
        (12, 32768, 18, [76, 76, 76, 28]),
        (12, 32760, 18, [76, 76, 76, 28]),
        (12, 16384, 42, [88, 40]),
        (40, 16384, 0, []),
        (8, 75600, 0, []),
        (40, 75600, 0, []),  # 179.4 rounds
        (16, 111600, 0, []),
        (11, 33792, 0, []),  # 22 whole rounds
    ],
)
def test_the_last_round_is_split_where_it_matters(heads, tokens, split_pairs, lengths):
    schedule = tile_schedule(heads, tokens, tokens, CLUSTERS)
    assert schedule.whole_pairs + schedule.split_pairs == heads * -(-tokens // 256)
    assert schedule.split_pairs == split_pairs
    assert tiles_of(schedule, -(-tokens // 128)) == lengths


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 3000), st.integers(1, 9000), st.integers(1, 9))
def test_a_split_pays_and_its_parts_are_the_keys(heads, q_tokens, kv_tokens, clusters):
    schedule = tile_schedule(heads, q_tokens, kv_tokens, clusters)
    pairs, tiles = heads * schedule.q_tile_pairs, -(-kv_tokens // 128)
    assert schedule.whole_pairs + schedule.split_pairs == pairs
    assert schedule.clusters == schedule.whole_pairs + schedule.split_pairs * schedule.parts
    if not schedule.split_pairs:
        assert (schedule.parts, schedule.part_tiles) == (0, 0)
        return
    lengths = tiles_of(schedule, tiles)
    assert sum(lengths) == tiles
    assert min(lengths) > 0
    assert 2 <= len(lengths) <= MOST_PARTS
    assert schedule.part_tiles % 4 == 0
    in_order = [length for length in lengths for _ in range(schedule.split_pairs)]
    whole = -(-pairs // clusters) * (tiles + START)
    saved = tiles + START - finish(in_order, clusters) - COMBINE
    assert saved >= LEAST_GAIN * whole


def test_split_by_hand():
    assert split(3, 300, 4200, 0, 0) == TileSchedule(q_tile_pairs=2, whole_pairs=6)
    schedule = split(3, 300, 4200, split_pairs=4, part_tiles=12)  # 33 key tiles
    assert schedule == TileSchedule(q_tile_pairs=2, whole_pairs=2, split_pairs=4, part_tiles=12, parts=3)
    assert (schedule.all_parts, schedule.clusters) == (12, 14)
    assert tiles_of(schedule, 33) == [12, 12, 9]
