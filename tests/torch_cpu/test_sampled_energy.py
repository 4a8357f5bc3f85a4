"""The block energy measured on sampled heads is the energy, however the tensor lies and whatever is in it."""

from __future__ import annotations

import pytest
import torch
from vc_attention import Grouping, InvalidArgument, group_values, sampled_removed_energy
from vc_attention.group.blocks import removed_energy
from vc_attention.testing import clustered_qkv


@pytest.fixture
def call():
    """Values of [2, 6, 2048, 64] in clear clusters, and their grouping."""
    _, _, v = clustered_qkv((8, 16, 16), heads=6, head_dim=64, seed=3)
    v = torch.cat([v, v.flip(2)])
    return v, group_values(v, clusters=16, implementation="reference")


def sequence_order(v) -> Grouping:
    order = torch.arange(v.shape[2], dtype=torch.int32).expand(v.shape[:3])
    return Grouping(order, v[:, :, :1].float())


def test_all_heads_give_the_full_figure(call):
    v, grouping = call
    expected = removed_energy(v, grouping.permutation)[0].mean()
    assert sampled_removed_energy(v, grouping, heads=6).item() == pytest.approx(expected.item(), rel=1e-6)
    assert sampled_removed_energy(v, grouping, heads=99).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_sample_is_the_evenly_spaced_heads(call):
    v, grouping = call
    expected = removed_energy(v, grouping.permutation)[0, [1, 4]].mean()
    assert sampled_removed_energy(v, grouping, heads=2).item() == pytest.approx(expected.item(), rel=1e-6)


def test_grouping_removes_more_than_sequence_order(call):
    v, grouping = call
    grouped, plain = sampled_removed_energy(v, grouping).item(), sampled_removed_energy(v, sequence_order(v)).item()
    assert plain + 0.1 < grouped < 1


def test_bshd_gives_the_same_number(call):
    v, grouping = call
    strided = v.transpose(1, 2).contiguous()
    assert torch.equal(
        sampled_removed_energy(strided, grouping, layout="BSHD"), sampled_removed_energy(v, grouping, layout="BHSD")
    )


def test_nothing_is_left_of_constant_values():
    ones = torch.ones(1, 2, 300, 64, dtype=torch.bfloat16)
    assert sampled_removed_energy(ones, sequence_order(ones)).item() == 1
    assert sampled_removed_energy(0 * ones, sequence_order(ones)).item() == 1


def test_values_that_are_not_finite_raise_nothing(call):
    v, grouping = call
    v = v.clone()
    v[0, :, 0, 0] = float("inf")
    assert not sampled_removed_energy(v, grouping).isfinite()


@pytest.mark.parametrize("heads", [0, -1, 1.5])
def test_wrong_heads_are_named(call, heads):
    with pytest.raises(InvalidArgument, match="heads must be a whole number"):
        sampled_removed_energy(*call, heads=heads)


def test_a_grouping_of_other_tokens_is_refused(call):
    v, grouping = call
    with pytest.raises(InvalidArgument, match=r"\[2, 6, 2000\], got one for \[2, 6, 2048\]"):
        sampled_removed_energy(v[:, :, :2000], grouping)
    with pytest.raises(InvalidArgument, match="grouping must be a Grouping from group_values, got NoneType"):
        sampled_removed_energy(v, None)
    with pytest.raises(InvalidArgument, match="grouping must be on v's device cpu, got meta"):
        sampled_removed_energy(v, Grouping(grouping.permutation.to("meta"), grouping.centroids))
    with pytest.raises(InvalidArgument, match="int32 permutation, got float32"):
        sampled_removed_energy(v, Grouping(grouping.permutation.float(), grouping.centroids))
