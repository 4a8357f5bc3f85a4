"""Permutation, block means and residuals (method, section 1, points 2 and 3)."""

import pytest
import torch
from vc_attention.group.blocks import (
    BLOCK,
    block_sizes,
    block_sums,
    demean,
    expand_blocks,
    keep_means,
    permute_tokens,
    removed_energy,
)

LENGTHS = [1, 2, 127, 128, 129, 200, 256, 257]


def values(tokens, dtype=torch.float32, seed=0, shape=(2, 3), head_dim=16):
    return (torch.randn(*shape, tokens, head_dim, generator=torch.Generator().manual_seed(seed)) * 3 + 1).to(dtype)


def loop_means(v: torch.Tensor) -> torch.Tensor:
    """float64 means over the real rows of each block of 128."""
    blocks = [v[:, :, start : start + 128].double() for start in range(0, v.shape[2], 128)]
    return torch.stack([block.sum(2) / block.shape[2] for block in blocks], 2)


def test_block_is_128_tokens_and_a_mean_costs_an_eighth_of_a_bit():
    assert BLOCK == 128
    means = demean(values(256, torch.bfloat16)).means
    assert means.element_size() * 8 * means.numel() / values(256).numel() == 0.125


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_pair_is_exact_for_16_bit_values(dtype, tokens):
    v = values(tokens, dtype)
    blocks = demean(v)
    assert blocks.residual.dtype == torch.float32
    assert torch.equal(blocks.restore(), v.float())


@pytest.mark.parametrize("tokens", LENGTHS)
def test_pair_is_exact_to_one_rounding_for_fp32_values(tokens):
    v = values(tokens)
    blocks = demean(v)
    # One float32 rounding of v - mu and one of the sum: 2^-24 of each operand's size.
    limit = 2**-24 * (blocks.residual.abs() + v.abs())
    assert ((blocks.restore() - v).abs() <= limit).all()


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)],
)
def test_means_are_stored_in_16_bit(dtype, stored):
    blocks = demean(values(300, dtype))
    assert blocks.means.dtype == stored
    assert blocks.means.shape == (2, 3, 3, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_means_are_over_real_rows_only(dtype, tokens):
    v = values(tokens, dtype)
    means = demean(v).means
    # Half a step of the stored format (2^-8 or 2^-11 of the size), and 2^-20 of |v| for the float32 sum.
    step = 2**-8 if means.dtype == torch.bfloat16 else 2**-11
    expected = loop_means(v)
    limit = step * expected.abs() + 2**-20 * v.double().abs().amax()
    assert ((means.double() - expected).abs() <= limit).all()


def test_residual_is_against_the_stored_mean_not_the_true_one():
    v = torch.full((1, 1, 3, 1), 1.0)
    v[0, 0, 0] = 1.01  # mean 1.00333 is stored as 1.0 in bf16
    blocks = demean(v)
    assert blocks.means.item() == 1.0
    assert torch.equal(blocks.residual, v - 1.0)


def test_a_constant_block_leaves_nothing():
    v = torch.full((1, 1, 200, 4), 2.5, dtype=torch.bfloat16)
    v[:, :, 128:] = -7.0
    blocks = demean(v)
    assert (blocks.residual == 0).all()
    assert blocks.means[0, 0, :, 0].tolist() == [2.5, -7.0]


def test_fp16_near_its_largest_number_stays_finite():
    v = torch.full((1, 1, 130, 4), 65504.0, dtype=torch.float16)
    v[:, :, ::2] = 65000.0
    v[0, 0, :, 1] *= -1
    v[0, 0, 1::2, 2] = -65504.0
    v[0, 0, 5, 3] = -65504.0
    blocks = demean(v)
    assert blocks.means.isfinite().all()
    assert blocks.residual.isfinite().all()
    assert blocks.residual.abs().max() > 65504  # needs more than fp16
    assert torch.equal(blocks.restore(), v.float())


@pytest.mark.parametrize("tokens", LENGTHS)
def test_keeping_means_leaves_the_values(tokens):
    v = values(tokens, torch.bfloat16)
    blocks = keep_means(v)
    assert blocks.means is None
    assert torch.equal(blocks.residual, v.float())
    assert torch.equal(blocks.restore(), v.float())


@pytest.mark.parametrize("tokens", LENGTHS)
def test_sums_and_sizes_of_blocks(tokens):
    v = values(tokens)
    sizes = block_sizes(tokens, v.device)
    assert sizes.tolist() == [min(128, tokens - start) for start in range(0, tokens, 128)]
    torch.testing.assert_close(block_sums(v).double() / sizes[:, None], loop_means(v), rtol=1e-5, atol=1e-5)


def test_expanding_gives_each_token_its_blocks_number():
    per_block = torch.tensor([10.0, 20.0]).reshape(1, 1, 2, 1)
    assert expand_blocks(per_block, 130).flatten().tolist() == [10.0] * 128 + [20.0] * 2


def test_permuting_is_a_gather_per_batch_and_head():
    v = values(50)
    generator = torch.Generator().manual_seed(1)
    order = torch.stack([torch.randperm(50, generator=generator) for _ in range(6)]).reshape(2, 3, 50).to(torch.int32)
    permuted = permute_tokens(v, order)
    for b in range(2):
        for h in range(3):
            for i in range(50):
                assert torch.equal(permuted[b, h, i], v[b, h, order[b, h, i]])
    assert torch.equal(permute_tokens(v.transpose(1, 2).contiguous().transpose(1, 2), order), permuted)
    assert permute_tokens(v, None) is v


def test_removed_energy_is_the_share_of_the_means():
    v = values(300).double()
    means = loop_means(v.bfloat16())
    energy = sum(
        (v[:, :, j * 128 : (j + 1) * 128] - means[:, :, j : j + 1]).square().sum((2, 3)) for j in range(3)
    ) / v.square().sum((2, 3))
    torch.testing.assert_close(removed_energy(v.float()).double(), 1 - energy, rtol=0, atol=1e-3)


def test_removed_energy_of_sorted_and_of_alternating_values():
    alternating = torch.ones(1, 1, 256, 8)
    alternating[:, :, 1::2] = -1
    order = torch.cat([torch.arange(0, 256, 2), torch.arange(1, 256, 2)]).reshape(1, 1, 256)
    assert removed_energy(alternating).item() == 0
    assert removed_energy(alternating, order).item() == 1


def test_inputs_are_left_alone():
    v = values(130)
    before = v.clone()
    demean(v)
    keep_means(v)
    assert torch.equal(v, before)
