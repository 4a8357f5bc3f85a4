"""Grouping by Triton on a GPU: against the reference, at video lengths, twice the same, chosen where it should be."""

import pytest
import torch
from vc_attention import group_values
from vc_attention.group import dispatch
from vc_attention.group.blocks import removed_energy
from vc_attention.group.cuda import group_cuda
from vc_attention.group.reference import group_reference
from vc_attention.group.triton import group_triton
from vc_attention.testing import clustered_qkv

pytestmark = [pytest.mark.gpu, pytest.mark.triton]

# Tokens that lie as near to two centroids may fall to either; half of what the self-test allows.
ENERGY_LIMIT = 0.01


def is_permutation(permutation):
    order = torch.arange(permutation.shape[2], device="cuda", dtype=torch.int32)
    return torch.equal(permutation.sort(-1).values, order.expand_as(permutation))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("grid", "clusters"), [((1, 1, 1), 1), ((1, 3, 43), 5), ((4, 32, 33), 64), ((4, 32, 33), 300)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_grouping_equals_the_reference(grid, clusters, head_dim, dtype):
    v = clustered_qkv(grid, heads=2, head_dim=head_dim, dtype=dtype, device="cuda")[2]
    permutation, centroids = group_triton(v, None, clusters, 2)
    assert is_permutation(permutation)
    expected, _ = group_reference(v, None, clusters, 2)
    assert (removed_energy(v, expected) - removed_energy(v, permutation)).max() < ENERGY_LIMIT
    again, same = group_triton(v.transpose(1, 2).contiguous().transpose(1, 2), None, clusters, 2)
    assert torch.equal(again, permutation)
    assert torch.equal(same, centroids)
    warm, _ = group_triton(v, centroids, clusters, 1)
    assert is_permutation(warm)


def test_long_sequences_lose_no_energy_against_the_hand_written_kernel():
    v = clustered_qkv((21, 45, 80), heads=2, dtype=torch.bfloat16, device="cuda")[2]  # 75,600 tokens
    energies = [removed_energy(v, group(v, None, 256, 4)[0]).mean() for group in (group_triton, group_cuda)]
    assert abs(energies[0] - energies[1]) < ENERGY_LIMIT


@pytest.mark.parametrize("axis", ["batch", "head", "token"])
def test_strides_beyond_two_to_the_31(axis, far_apart):
    v = clustered_qkv((3, 10, 10), heads=4, dtype=torch.float16, device="cuda")[2].unflatten(1, (2, 2))[0]
    far = far_apart(axis, v)[0]
    start = None
    for _ in range(2):  # cold, warm
        made, expected = (group_triton(x, start, 6, 2) for x in (far, v))
        assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))
        start = expected[1]


def test_not_finite_values_still_give_a_permutation():
    v = clustered_qkv((1, 10, 100), heads=2, dtype=torch.bfloat16, device="cuda")[2]
    v[0, 0, 0], v[0, 0, 70], v[0, 1, 149, 3] = torch.nan, torch.inf, -torch.inf
    permutation, centroids = group_triton(v, None, 6, 2)
    assert is_permutation(permutation)
    assert centroids.isfinite().all()


def test_auto_takes_triton_where_there_is_no_hand_written_kernel(monkeypatch):
    v = clustered_qkv((1, 10, 100), heads=2, dtype=torch.bfloat16, device="cuda")[2]
    monkeypatch.setattr(dispatch, "family", lambda device: "sm_120")
    assert dispatch.choose_group(v, 4, "auto") is group_triton
    assert dispatch.choose_group(v, 4, "triton4") is group_triton
    assert dispatch.choose_group(v.float(), 4, "auto") is dispatch._reference
    assert is_permutation(group_values(v, clusters=4).permutation)
