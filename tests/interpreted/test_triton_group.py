"""Grouping by Triton against the reference, in the interpreter."""

import pytest
import torch
from vc_attention.group.blocks import removed_energy
from vc_attention.group.reference import assign, chain, group_reference, update
from vc_attention.group.triton import _assign, _update, group_triton, refusal
from vc_attention.group.triton import chain as chain_triton
from vc_attention.testing import clustered_qkv, random_qkv


def values(tokens, head_dim=64, heads=2, dtype=torch.bfloat16, seed=0):
    return random_qkv((1, heads, tokens, head_dim), seed=seed, dtype=dtype)[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "clusters", "step"), [(1, 1, 1), (130, 7, 1), (300, 64, 1), (300, 65, 4)])
def test_one_round_equals_the_reference(tokens, clusters, step, dtype):
    v = values(tokens, dtype=dtype)
    points = v[0, :, :clusters].float() * 1.01
    labels = _assign(v, points, step)
    moved = points.clone()
    _update(v, moved, labels, step)
    for head in range(2):
        sample = v[0, head, ::step]
        expected = assign(sample, points[head])
        assert torch.equal(labels[head].long(), expected)
        torch.testing.assert_close(moved[head], update(sample, expected, points[head]), rtol=1e-6, atol=1e-6)


def test_of_equal_centroids_the_first_wins():
    v = (values(50) * 4).round()  # whole numbers: every order of additions gives the same score
    points = v[0, :, :1].float().repeat(1, 70, 1)
    assert (_assign(v, points, 1) == 0).all()


def test_chain_equals_the_reference():
    points = values(70)[0].float()
    expected = torch.stack([chain(head, torch.bfloat16) for head in points])
    assert torch.equal(chain_triton(points.bfloat16().float()), expected)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("warm", [False, True])
def test_grouping_equals_the_reference(head_dim, warm):
    v = clustered_qkv((2, 12, 16), heads=2, head_dim=head_dim, dtype=torch.bfloat16)[2]
    start = group_reference(v, None, 8, 1)[1] if warm else None
    permutation, centroids = group_triton(v, start, 8, 2)
    expected, expected_centroids = group_reference(v, start, 8, 2)
    assert permutation.dtype == torch.int32
    assert torch.equal(permutation.sort(-1).values, torch.arange(384, dtype=torch.int32).expand_as(permutation))
    assert (removed_energy(v, expected) - removed_energy(v, permutation)).abs().max() < 1e-3
    torch.testing.assert_close(centroids, expected_centroids, rtol=1e-5, atol=1e-5)


def test_views_and_runs_are_equal():
    v = values(200, heads=3)
    expected = group_triton(v, None, 5, 1)
    for view in (v.transpose(1, 2).contiguous().transpose(1, 2), torch.nn.functional.pad(v, (3, 2))[..., 3:-2]):
        assert all(torch.equal(one, other) for one, other in zip(group_triton(view, None, 5, 1), expected, strict=True))


@pytest.mark.parametrize("dim", range(3))
def test_strides_beyond_two_to_the_31(dim):
    # Batches, heads or tokens 2^31 elements apart, in memory of which few pages are touched.
    v = random_qkv((2, 2, 2, 64), dtype=torch.bfloat16)[2]
    strides = [8 * 64, 4 * 64, 64]
    strides[dim] = 2**31
    far = torch.empty(2**31 + 2**14, dtype=torch.bfloat16).as_strided(v.shape, (*strides, 1)).copy_(v)
    expected = group_triton(v, None, 2, 1)
    assert all(torch.equal(one, other) for one, other in zip(group_triton(far, None, 2, 1), expected, strict=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy on infinity
def test_not_finite_values_still_give_a_permutation_and_finite_centroids():
    v = values(150)
    v[0, 0, 0], v[0, 0, 70], v[0, 1, 149, 3] = torch.nan, torch.inf, -torch.inf
    permutation, centroids = group_triton(v, None, 6, 2)
    assert torch.equal(permutation.sort(-1).values, torch.arange(150, dtype=torch.int32).expand_as(permutation))
    assert centroids.isfinite().all()


def test_what_is_refused():
    assert "float32" in refusal(values(3, dtype=torch.float32), 1)
    assert "head_dim 64 and 128, not 96" in refusal(values(3, 96), 1)
    assert refusal(values(3), 1) is None
