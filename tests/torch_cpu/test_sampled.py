"""The error measured on sampled rows is the error, wherever it sits and however the tensors lie."""

from __future__ import annotations

import pytest
import torch
from vc_attention import InvalidArgument, sampled_error
from vc_attention.attend.exact import exact_attention
from vc_attention.testing import random_qkv, relative_l2


@pytest.fixture
def call():
    q, k, v = random_qkv((2, 3, 257, 64), seed=5)
    return q, k, v, exact_attention(q, k, v).float()


def test_an_exact_output_has_no_error(call):
    q, k, v, exact = call
    assert sampled_error(q, k, v, exact).item() < 1e-5


def test_a_known_error_is_measured(call):
    q, k, v, exact = call
    noisy = exact + 0.1 * exact.norm() / exact.numel() ** 0.5 * torch.randn(exact.shape)
    assert sampled_error(q, k, v, noisy).item() == pytest.approx(relative_l2(noisy, exact), rel=0.1)
    assert sampled_error(q, k, v, 2 * exact).item() == pytest.approx(1.0, rel=1e-4)


def test_one_bad_head_of_one_clip_is_seen(call):
    q, k, v, exact = call
    wrong = exact.clone()
    wrong[1, 2] = wrong[1, 2].roll(1, 0)
    assert sampled_error(q, k, v, wrong).item() > 0.3


def test_bshd_and_strides_give_the_same_number(call):
    q, k, v, exact = call
    wrong = exact * 1.25
    expected = sampled_error(q, k, v, wrong)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v, wrong)]
    torch.testing.assert_close(sampled_error(*turned, layout="BSHD"), expected)
    views = [x.transpose(1, 2) for x in (q, k, v, wrong)]
    torch.testing.assert_close(sampled_error(*views, layout="BSHD"), expected)


def test_the_scale_is_the_calls_own(call):
    q, k, v, _ = call
    sharp = exact_attention(q, k, v, scale=0.5).float()
    assert sampled_error(q, k, v, sharp, scale=0.5).item() < 1e-5
    assert sampled_error(q, k, v, sharp).item() > 0.1


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 1000])
def test_rows_are_spread_over_the_whole_call_and_inside_it(tokens):
    q, k, v = random_qkv((1, 1, tokens, 64), seed=tokens)
    wrong = exact_attention(q, k, v).float()
    wrong[:, :, : (tokens + 1) // 2] += 1.0  # the first half only
    shared = sampled_error(q, k, v, wrong).item()
    assert shared > 0.5
    assert sampled_error(q, k, v, wrong, rows=10**6).item() == pytest.approx(shared, rel=0.5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_output_is_infinitely_wrong(call, poison):
    q, k, v, exact = call
    exact[0, 1] = poison
    assert sampled_error(q, k, v, exact).item() == float("inf")


def test_16_bit_tensors_are_measured_in_32_bit(call):
    q, k, v, exact = (x.bfloat16() for x in call)
    error = sampled_error(q, k, v, exact)
    assert error.dtype == torch.float32
    assert error.item() < 1e-2


def test_wrong_arguments_are_named(call):
    q, k, v, exact = call
    shape = r"output must have shape \[B, H, S, D\] = \[2, 3, 257, 64\], got \(2, 3, 256, 64\)"
    with pytest.raises(InvalidArgument, match=shape):
        sampled_error(q, k, v, exact[:, :, :256])
    with pytest.raises(InvalidArgument, match="output must have q's dtype float32, got bfloat16"):
        sampled_error(q, k, v, exact.bfloat16())
    with pytest.raises(InvalidArgument, match="output must be on q's device cpu, got meta"):
        sampled_error(q, k, v, exact.to("meta"))
    with pytest.raises(InvalidArgument, match="rows must be a whole number from 1, got 0"):
        sampled_error(q, k, v, exact, rows=0)
    with pytest.raises(InvalidArgument, match="k must have shape"):
        sampled_error(q, k[:, :2], v, exact)
