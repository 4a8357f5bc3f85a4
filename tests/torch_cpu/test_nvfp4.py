"""NVFP4 by the best of a few scales, and with errors fed into the channels behind: less error, same format."""

import pytest
import torch
from vc_attention.formats import E4M3_MAX, decode_e4m3, nvfp4_scale, quantize_nvfp4
from vc_attention.group.blocks import block_means
from vc_attention.quantize.nvfp4 import (
    SAMPLED_BLOCKS,
    SCALE_STEPS,
    closest_nvfp4,
    encode_groups,
    fed_back_nvfp4,
    feedback,
    key_feedback,
    query_feedback,
    round_groups,
    sampled_blocks,
    squared_error,
)
from vc_attention.quantize.reference import quantize4
from vc_attention.quantize.rotation import rotate
from vc_attention.testing import clustered_qkv, random_qkv, relative_l2


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(*shape, seed=0):
    """Rows whose channels share eight directions."""
    return normal(*shape[:-1], 8, seed=seed) @ normal(8, shape[-1], seed=seed + 1) + 0.3 * normal(*shape, seed=seed + 2)


def least_of_all(groups):
    """[n]: squared error under the best of the codes that may be tried, one group and one code after the other."""
    errors = []
    for group in groups:
        at_6 = int((group.abs().max() / 6).to(torch.float8_e4m3fn).view(torch.uint8))
        tried = [min(max(at_6 + step, 0), 126) for step in SCALE_STEPS]
        bits = torch.tensor(tried, dtype=torch.uint8).unsqueeze(1)
        errors.append(squared_error(group.expand(len(tried), -1), bits).min())
    return torch.stack(errors)


@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])  # scales below the smallest, normal, saturated
def test_a_group_takes_the_scale_with_the_least_squared_error(size):
    groups = normal(64, 16) * size
    groups[0] = 0
    codes, bits = round_groups(groups)
    torch.testing.assert_close(squared_error(groups, bits).squeeze(1), least_of_all(groups), rtol=0, atol=0)
    assert torch.equal(codes, encode_groups(groups, bits))
    assert decode_e4m3(bits).max() <= E4M3_MAX
    assert (codes[0] & 7 == 0).all()


def test_the_best_scale_takes_a_seventh_off_the_error():
    x = normal(512, 128)
    scale = nvfp4_scale(x, (0, 1))
    at_6, closest = (relative_l2(made(x, scale).dequantize(), x) for made in (quantize_nvfp4, closest_nvfp4))
    assert at_6 == pytest.approx(0.0952, abs=5e-4)
    assert closest == pytest.approx(0.0819, abs=5e-4)


@pytest.mark.parametrize("size", [1, 16, 40, 128])
def test_shapes_of_any_length(size):
    x = normal(1, 2, 3, size)
    scale = nvfp4_scale(x, (2, 3))
    weights = feedback(normal(1, 2, 50, size, seed=1))
    for made in (closest_nvfp4(x, scale), fed_back_nvfp4(x, scale, weights)):
        assert made.codes.shape == x.shape
        assert made.group_scales.shape == (1, 2, 3, -(-size // 16))
        assert relative_l2(made.dequantize(), x) < 0.2


def test_without_feedback_rows_are_rounded_as_they_are():
    x = normal(1, 1, 40, 64)
    scale = nvfp4_scale(x, (2, 3))
    fed, closest = fed_back_nvfp4(x, scale, torch.zeros(1, 1, 64, 64)), closest_nvfp4(x, scale)
    assert torch.equal(fed.codes, closest.codes)
    assert torch.equal(fed.group_scales, closest.group_scales)


def test_feedback_is_the_least_squares_correction_of_the_groups_behind():
    """Given the error of the first group, the others are moved by what cancels most of it in ``e C e^T``."""
    rows = correlated(1, 1, 400, 48)
    weights = feedback(rows)[0, 0].double()
    scaled = rotate(rows[0, 0] / rows.abs().max()).double()
    covariance = scaled.T @ scaled
    covariance += 0.1 * covariance.diagonal().mean() * torch.eye(48, dtype=torch.float64)
    own, behind = covariance[:16, 16:], covariance[16:, 16:]
    torch.testing.assert_close(weights[:16, 16:], own @ torch.linalg.inv(behind), rtol=1e-3, atol=1e-4)
    groups = torch.arange(48) // 16
    assert (weights[groups[:, None] >= groups] == 0).all()


def test_feedback_lowers_the_error_of_the_products_and_not_that_of_the_rows():
    k, q = correlated(1, 2, 256, 128), correlated(1, 2, 512, 128, seed=9)
    scale = nvfp4_scale(k, (2, 3))
    closest, fed = closest_nvfp4(k, scale).dequantize(), fed_back_nvfp4(k, scale, feedback(q)).dequantize()
    products = [rotate(q) @ x.transpose(2, 3) for x in (k, closest, fed)]
    assert relative_l2(products[2], products[0]) < 0.5 * relative_l2(products[1], products[0])
    assert relative_l2(fed, k) > relative_l2(closest, k)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, float("nan"), float("inf")])
def test_feedback_of_odd_rows_is_finite(value):
    weights = feedback(torch.full((1, 1, 5, 32), value))
    assert weights.shape == (1, 1, 32, 32)
    assert weights.isfinite().all()


def test_feedback_is_made_of_some_whole_blocks():
    x = normal(1, 1, 128 * 40 + 5, 16)
    blocks = sampled_blocks(x)
    assert blocks.shape == (1, 1, 14, 128, 16)
    assert blocks.shape[2] <= SAMPLED_BLOCKS
    assert torch.equal(blocks[0, 0, 1], x[0, 0, 3 * 128 : 4 * 128])
    assert torch.equal(sampled_blocks(x[:, :, :7])[0, 0, 0], x[0, 0, :7])


def test_means_that_are_removed_exactly_do_not_steer_the_rounding():
    q, k, _ = random_qkv((1, 1, 256, 64))
    torch.testing.assert_close(key_feedback(q + 30), key_feedback(q), rtol=0, atol=2e-4)
    torch.testing.assert_close(query_feedback(k + 30), query_feedback(k), rtol=0, atol=2e-4)


def test_rounded_values_keep_the_mean_of_a_block():
    q, k, v = clustered_qkv((2, 10, 15), head_dim=64)
    operands = quantize4(q, k, v, None, True)
    stored = block_means(operands.residual.dequantize().transpose(2, 3)) + operands.means
    torch.testing.assert_close(stored, block_means(v), rtol=0, atol=1e-6)
