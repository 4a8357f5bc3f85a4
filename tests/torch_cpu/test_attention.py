"""The attention call on the CPU: against exact attention, at any length and head dim, and on inputs that broke others.

Limits on quantization error are measured once on the reference (30 November 2026, torch 2.13) and given a tenth to a
quarter of room; they are part of the contract. Implementation faults are caught by test_recurrence.
"""

import math

import pytest
import torch
import vc_attention
from vc_attention import UnsupportedCall, group_values
from vc_attention.attend.exact import exact_attention
from vc_attention.testing import clustered_qkv, random_qkv, relative_l2, worst_row_cosine

# Settings, and limits: relative L2 on normal inputs, worst head's cosine, worst row's cosine.
# Measured at 1,023 tokens, D 128: int8 expcast 0.0423 0.9991 0.9982, int8 exp2 0.0376 0.9993 0.9985,
# e4m3 expcast 0.0556 0.9984 0.9962, e4m3 exp2 0.0521 0.9986 0.9963, nvfp4 0.191 0.981 0.954.
# Worst of all lengths and head dims below: 0.0441 0.9990 0.9968, 0.0395 0.9991 0.9975, 0.0575 0.9983 0.9917,
# 0.0541 0.9985 0.9925, 0.20 0.979 0.93.
SETTINGS = {
    "int8 expcast": ({"mode": "8-bit", "qk_format": "int8", "probabilities": "expcast"}, 0.048, 0.998, 0.995),
    "int8 exp2": ({"mode": "8-bit", "qk_format": "int8", "probabilities": "exp2"}, 0.043, 0.998, 0.995),
    "e4m3 expcast": ({"mode": "8-bit", "qk_format": "e4m3", "probabilities": "expcast"}, 0.063, 0.997, 0.989),
    "e4m3 exp2": ({"mode": "8-bit", "qk_format": "e4m3", "probabilities": "exp2"}, 0.058, 0.997, 0.989),
    "nvfp4": ({"mode": "4-bit"}, 0.215, 0.975, 0.92),
}
ALL = list(SETTINGS)
MODES = ["int8 expcast", "nvfp4"]


def attention(name, q, k, v, **arguments):
    return vc_attention.attention(q, k, v, implementation="reference", **SETTINGS[name][0], **arguments)


def head_cosine(output, expected) -> float:
    """Smallest cosine of a head's whole output."""
    one, two = output.double().flatten(2), expected.double().flatten(2)
    return torch.nn.functional.cosine_similarity(one, two, dim=-1).min().item()


def check_normal(name, output, q, k, v, scale=None):
    """Hold an output on normal inputs to the limits of its settings."""
    _, error, head, row = SETTINGS[name]
    expected = exact_attention(q, k, v, scale)
    assert output.isfinite().all()
    assert relative_l2(output, expected) < error
    assert head_cosine(output, expected) > head
    assert worst_row_cosine(output, expected) > row


# Oracle


def test_exact_attention_is_softmax_written_out():
    q, k, v = random_qkv((1, 2, 7, 8))
    k, v = k[:, :, :5], v[:, :, :5]
    expected = torch.zeros(1, 2, 7, 8, dtype=torch.float64)
    for h in range(2):
        for i in range(7):
            weights = [math.exp((q[0, h, i].double() @ k[0, h, j].double()).item() * 8**-0.5) for j in range(5)]
            for j in range(5):
                expected[0, h, i] += weights[j] / sum(weights) * v[0, h, j].double()
    torch.testing.assert_close(exact_attention(q, k, v), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_exact_attention_does_not_see_the_order_of_keys(seed):
    # P'V' = PV (method, section 1, point 2).
    q, k, v = (x.double() for x in random_qkv((1, 2, 600, 16), seed=seed))
    order = torch.randperm(600, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(exact_attention(q, k[:, :, order], v[:, :, order]), exact_attention(q, k, v))


# Lengths, head dims, scale


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tokens", [1, 2, 3, 15, 31, 63, 64, 65, 77, 127, 128, 129, 257, 1023])
def test_every_length(name, tokens):
    q, k, v = random_qkv((1, 2, tokens, 64), seed=tokens)
    check_normal(name, attention(name, q, k, v), q, k, v)


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 300), (300, 1), (129, 77), (77, 129), (65, 512), (257, 15), (200, 193)]
)
def test_query_and_key_lengths_differ(name, queries, keys):
    q, k, v = random_qkv((2, 2, 512, 64))
    q, k, v = q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]
    output = attention(name, q, k, v, grouping=group_values(v))
    assert output.shape == q.shape
    check_normal(name, output, q, k, v)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("queries", [1, 200])
def test_one_key_gives_its_value(name, queries):
    # The weight is 1; what is left of the value after its stored mean is one number per channel, at full scale.
    q, k, v = random_qkv((1, 2, 200, 64))
    output = attention(name, q[:, :, :queries], k[:, :, :1], v[:, :, :1])
    torch.testing.assert_close(output, v[:, :, :1].expand_as(output), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 112, 128])
def test_every_head_dim(name, head_dim):
    q, k, v = random_qkv((1, 2, 257, head_dim), seed=head_dim)
    check_normal(name, attention(name, q, k, v), q, k, v)


@pytest.mark.parametrize("head_dim", [1, 8, 16, 32, 40, 48, 160, 192, 256])
def test_other_head_dims_of_the_reference(head_dim):
    q, k, v = random_qkv((1, 2, 200, head_dim), seed=head_dim)
    output = attention("int8 expcast", q, k, v)
    assert output.isfinite().all()
    assert relative_l2(output, exact_attention(q, k, v)) < 0.055  # measured 0.044 at D 16


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("scale", [0.02, 0.3, -0.1, 1])
def test_scale_is_used(name, scale):
    q, k, v = random_qkv((1, 2, 257, 64))
    q = q * 0.125 / max(0.125, abs(scale))  # same reach of scores as with the default
    output = attention(name, q, k, v, scale=scale)
    check_normal(name, output, q, k, v, scale)


@pytest.mark.parametrize("name", MODES)
def test_default_scale_is_of_the_true_head_dim(name):
    # B065: a head dim of 72 padded to 128 must not change the scale.
    q, k, v = random_qkv((1, 2, 200, 72))
    assert torch.equal(attention(name, q, k, v), attention(name, q, k, v, scale=72**-0.5))
    assert not torch.equal(attention(name, q, k, v), attention(name, q, k, v, scale=128**-0.5))


@pytest.mark.parametrize("name", ALL)
def test_scale_zero_is_the_mean_of_the_values(name):
    q, k, v = random_qkv((1, 2, 300, 64))
    expected = v.double().mean(2, keepdim=True).expand_as(v)
    # Error of one value, 2.6 % or 9.5 %, averaged over 300.
    limit = 4 * (0.095 if name == "nvfp4" else 0.026) / 300**0.5
    assert (attention(name, q, k, v, scale=0.0) - expected).abs().max() < limit


@pytest.mark.parametrize("name", ALL)
def test_limits_on_values_and_scores_like_a_video_layers(name):
    # Measured: 0.0265, 0.0257, 0.0387, 0.0380, 0.1217 and head cosines 0.9996, 0.9996, 0.9992, 0.9992, 0.991.
    limits = {"int8 expcast": 0.031, "int8 exp2": 0.030, "e4m3 expcast": 0.045, "e4m3 exp2": 0.044, "nvfp4": 0.14}
    q, k, v = clustered_qkv((8, 8, 16), heads=2)
    for grouping in (None, group_values(v)):
        output = attention(name, q, k, v, grouping=grouping)
        expected = exact_attention(q, k, v)
        assert relative_l2(output, expected) < limits[name]
        assert head_cosine(output, expected) > (0.985 if name == "nvfp4" else 0.998)


# Means are restored


def exact_values():
    """Whole-number values, exact with and without block means, and q, k whose top key lies in the first tile.

    Values are at most 14 (four bits) and reach 14 per channel; residuals reach 7; block means are -7, 0, 7: scales are
    2^-5 and 2^-6, all codes are exact. Probabilities are within three octaves: sums are whole numbers below 2^24.
    """
    generator = torch.Generator().manual_seed(0)
    residual = torch.randint(-3, 4, (1, 2, 384, 64), generator=generator).float()
    for start in range(0, 384, 128):
        block = residual[:, :, start : start + 128]
        block[:, :, 64:] = -block[:, :, :64]
        block[:, :, 5], block[:, :, 69] = 7, -7
    mean = torch.tensor([7.0, 0.0, -7.0]).repeat_interleave(128)[:, None]
    q, k, _ = random_qkv((1, 2, 384, 64))
    q = q.abs() * 0.25
    k = k * 0.25
    k[:, :, 3] = 0.6
    return q, k, residual + mean


@pytest.mark.parametrize("probabilities", ["expcast", "exp2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_means_equal_undemeaned_values_in_exact_arithmetic(probabilities, dtype):
    q, k, v = (x.to(dtype) for x in exact_values())
    name = f"int8 {probabilities}"
    assert torch.equal(attention(name, q, k, v), attention(name, q, k, v, demean=False))
    # ... and the case is not hollow: other values do differ.
    assert not torch.equal(attention(name, q, k, v + 0.3), attention(name, q, k, v + 0.3, demean=False))


def test_restored_means_equal_undemeaned_values_in_4_bit_with_equal_weights():
    # E2M1 holds 0, 3 and 6 exactly: values 3 +- 3 about a mean of 3.
    v = torch.tensor([0.0, 6.0]).repeat(128)[:, None].expand(256, 64)[None, None]
    q, k, _ = random_qkv((1, 1, 256, 64))
    one, two = attention("nvfp4", q * 0, k, v), attention("nvfp4", q * 0, k, v, demean=False)
    torch.testing.assert_close(one, torch.full_like(one, 3.0), rtol=1e-6, atol=0)
    torch.testing.assert_close(two, one, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("demean", [True, False])
def test_equal_values_come_back_whatever_the_weights(name, demean):
    # The weights of a row sum to one: numerator and denominator use the same decoded probabilities (method 1.5).
    q, k, _ = random_qkv((1, 2, 300, 64))
    v = torch.full((1, 2, 300, 64), 3.0)
    output = attention(name, q * 2, k, v, demean=demean)
    torch.testing.assert_close(output, v, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_means_help_where_values_have_an_offset(name):
    q, k, v = random_qkv((1, 2, 512, 64))
    v = v + 5
    expected = exact_attention(q, k, v)
    with_means = relative_l2(attention(name, q, k, v), expected)
    without = relative_l2(attention(name, q, k, v, demean=False), expected)
    assert with_means < 0.5 * without


# Order of tokens


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("seed", range(2))
def test_any_grouping_gives_the_same_attention(name, seed):
    q, k, v = random_qkv((1, 2, 400, 64), seed=seed)
    order = torch.stack([torch.randperm(400, generator=torch.Generator().manual_seed(i + 9)) for i in range(2)])
    grouping = vc_attention.Grouping(order[None].to(torch.int32), torch.zeros(1, 2, 1, 64))
    check_normal(name, attention(name, q, k, v, grouping=grouping), q, k, v)


@pytest.mark.parametrize("name", MODES)
def test_a_grouping_is_the_same_as_ordering_keys_and_values_oneself(name):
    q, _, v = random_qkv((1, 2, 400, 64))
    k = (random_qkv((1, 2, 400, 64), seed=1)[1] * 8).round()
    k[:, :, 399] -= k.sum(2)  # mean zero: the sum over tokens does not depend on their order
    grouping = group_values(v)
    index = grouping.permutation.long()[..., None].expand_as(v)
    inside = attention(name, q * 0.1, k, v, grouping=grouping)
    before = attention(name, q * 0.1, k.gather(2, index), v.gather(2, index))
    if name == "nvfp4":  # other keys are sampled to say how queries are rounded
        assert relative_l2(inside, before) < 0.06
    else:
        assert torch.equal(inside, before)


@pytest.mark.parametrize("name", MODES)
def test_queries_of_a_block_in_another_order_give_the_rows_in_that_order(name):
    q, k, v = random_qkv((1, 2, 128, 64))
    q = (q * 8).round()  # block means of whole numbers do not depend on the order
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    one, two = attention(name, q, k, v, scale=0.02), attention(name, q[:, :, order], k, v, scale=0.02)
    torch.testing.assert_close(two, one[:, :, order], rtol=1e-5, atol=1e-6)


# Samples and heads by themselves


@pytest.mark.parametrize(
    ("name", "dtype", "threads"),
    [*((name, dtype, 1) for name in ALL for dtype in (torch.float32, torch.bfloat16)), (MODES[0], torch.float32, 2)],
)
def test_batch_rows_and_heads_are_the_same_alone_bit_for_bit(name, dtype, threads, request):
    # B071: sample 1 is a hundred times larger and offset; no scale or mean may be shared.
    if threads == 2:
        request.getfixturevalue("two_threads")
    q, k, v = random_qkv((2, 3, 300, 64))
    for x in (q, k, v):
        x[1] = x[1] * 100 + 30
    q, k, v = (x.to(dtype) for x in (q, k, v))
    grouping = group_values(v)
    together = attention(name, q, k, v, grouping=grouping)
    for b in range(2):
        row = slice(b, b + 1)
        alone = attention(name, q[row], k[row], v[row], grouping=grouping.select(row))
        assert torch.equal(alone, together[row])
        for h in range(3):
            part = vc_attention.Grouping(grouping.permutation[row, h : h + 1], grouping.centroids[row, h : h + 1])
            one = attention(name, *(x[row, h : h + 1] for x in (q, k, v)), grouping=part)
            assert torch.equal(one[0, 0], together[b, h])


@pytest.mark.parametrize("name", MODES)
def test_two_runs_are_equal_bit_for_bit(name, two_threads):
    q, k, v = random_qkv((2, 2, 700, 64))
    assert torch.equal(attention(name, q, k, v), attention(name, q.clone(), k.clone(), v.clone()))


# Dtypes, layouts, views


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_output_has_the_inputs_dtype_shape_and_is_contiguous(name, dtype, layout):
    q, k, v = random_qkv((2, 3, 40, 64), dtype=dtype)
    output = attention(name, q, k, v, layout=layout)
    assert output.dtype == dtype
    assert output.shape == q.shape
    assert output.is_contiguous()
    assert output.device == q.device


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize(("dtype", "demean"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)])
def test_16_bit_inputs_are_the_same_numbers_in_fp32(name, dtype, demean):
    # Not fp16 with means: those are stored in fp16, means of fp32 values in bf16.
    q, k, v = random_qkv((1, 2, 257, 64), dtype=dtype)
    in_fp32 = attention(name, q.float(), k.float(), v.float(), demean=demean, own_block=False)
    assert torch.equal(attention(name, q, k, v, demean=demean, own_block=False), in_fp32.to(dtype))
    # Probabilities of the own block are rounded to the dtype of the values.
    in_fp32 = attention(name, q.float(), k.float(), v.float(), demean=demean)
    assert relative_l2(attention(name, q, k, v, demean=demean), in_fp32.to(dtype)) < 2e-3


def views(q, k, v):
    """The same q, k, v [B, H, S, D] in other memory, by name: views, layout."""
    batch, heads, tokens, head_dim = q.shape
    bshd = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    fused = torch.stack(bshd, 2)  # [B, S, 3, H, D]
    joined = torch.cat([x.flatten(2) for x in bshd], 2)  # [B, S, 3 H D]
    stacked = torch.stack([q, k, v])
    padded = []
    for x in (q, k, v):
        around = torch.full((batch + 1, heads + 2, tokens + 9, head_dim + 16), torch.nan, dtype=x.dtype)
        around[1:, 1:-1, 4:-5, 8:-8] = x
        padded.append(around[1:, 1:-1, 4:-5, 8:-8])
    return {
        "transposed": ([x.transpose(1, 2) for x in bshd], "BHSD"),
        "bshd": (bshd, "BSHD"),
        "bshd of bhsd": ([x.transpose(1, 2) for x in (q, k, v)], "BSHD"),
        "fused [B, S, 3, H, D]": ([x.transpose(1, 2) for x in fused.unbind(2)], "BHSD"),
        "chunks of [B, S, 3 H D]": (
            [x.view(batch, tokens, heads, head_dim) for x in joined.chunk(3, -1)],
            "BSHD",
        ),
        "stacked [3, B, H, S, D]": (list(stacked.unbind(0)), "BHSD"),
        "offset with NaN around": (padded, "BHSD"),
        "last dimension strided": ([x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)], "BHSD"),
        "every second column": ([x.repeat_interleave(2, 3)[..., ::2] for x in (q, k, v)], "BHSD"),
    }


VIEWS = list(views(*random_qkv((1, 2, 4, 8))))


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("view", VIEWS)
def test_views_equal_contiguous_bit_for_bit(name, dtype, view):
    q, k, v = random_qkv((2, 3, 200, 64), dtype=dtype)
    expected = attention(name, q, k, v)
    tensors, layout = views(q, k, v)[view]
    output = attention(name, *tensors, layout=layout)
    assert torch.equal(output if layout == "BHSD" else output.transpose(1, 2), expected)


@pytest.mark.parametrize("name", MODES)
def test_expanded_views_equal_copies(name):
    q, k, v = random_qkv((1, 1, 200, 64))
    wide = [x.expand(2, 3, 200, 64) for x in (q, k, v)]
    assert wide[0].stride()[:2] == (0, 0)
    assert torch.equal(attention(name, *wide), attention(name, *(x.contiguous() for x in wide)))
    token = k[:, :, :1].expand(1, 1, 200, 64)
    assert torch.equal(attention(name, q, token, v), attention(name, q, token.contiguous(), v))


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_inputs_are_left_alone(name, layout):
    q, k, v = random_qkv((1, 2, 130, 64), dtype=torch.bfloat16)
    grouping = group_values(v, layout=layout)
    before = [x.clone() for x in (q, k, v, grouping.permutation, grouping.centroids)]
    output = attention(name, q, k, v, layout=layout, grouping=grouping)
    assert all(
        torch.equal(x, y) for x, y in zip((q, k, v, grouping.permutation, grouping.centroids), before, strict=True)
    )
    output.zero_()
    assert torch.equal(q, before[0])


@pytest.mark.parametrize("name", MODES)
def test_one_tensor_as_query_key_and_value(name):
    x = random_qkv((1, 2, 200, 64))[0]
    assert torch.equal(attention(name, x, x, x), attention(name, x, x.clone(), x.clone()))


# The process around a call


@pytest.mark.parametrize("name", MODES)
def test_autocast_around_the_call_changes_nothing(name):
    # A pipeline under autocast would make the reference's float32 products bf16.
    q, k, v = random_qkv((1, 2, 200, 64))
    expected = attention(name, q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(name, q, k, v), expected)


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("default", [torch.float64, torch.float16, torch.bfloat16])
def test_default_dtype_of_the_process_changes_nothing(name, default):
    q, k, v = random_qkv((1, 2, 200, 64))
    expected = attention(name, q, k, v, grouping=group_values(v))
    torch.set_default_dtype(default)
    try:
        output = attention(name, q, k, v, grouping=group_values(v))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_modes_change_nothing(guard):
    q, k, v = random_qkv((1, 2, 200, 64))
    expected = attention("int8 expcast", q, k, v)
    with guard():
        assert torch.equal(attention("int8 expcast", q, k, v), expected)


# Inputs that broke others


@pytest.mark.parametrize(
    ("name", "head", "row"),
    [("int8 expcast", 0.99, 0.98), ("int8 exp2", 0.99, 0.98), ("e4m3 expcast", 0.98, 0.90), ("nvfp4", 0.65, 0.0)],
)
def test_a_few_channels_with_most_of_the_keys_energy(name, head, row):
    # B053: 3 of 128 channels with 95 % of the energy, queries aligned to the others. 0.99 is asked of the 8-bit
    # default; measured 0.998 0.991, 0.998 0.991, 0.985 0.931, 0.731 0.171.
    q, k, v = random_qkv((1, 2, 512, 128))
    loud = [3, 40, 99]
    k[..., loud] *= (0.95 * 125 / (0.05 * 3)) ** 0.5
    q[..., loud] *= 0.02
    share = k[..., loud].square().sum() / k.square().sum()
    assert share.item() == pytest.approx(0.95, abs=0.01)
    output = attention(name, q, k, v)
    expected = exact_attention(q, k, v)
    assert head_cosine(output, expected) > head
    assert worst_row_cosine(output, expected) > row


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_an_offset_of_eight_sigma_in_the_keys(name, head_dim):
    # B096: mean removal makes it a normal input.
    q, k, v = random_qkv((1, 2, 700, head_dim))
    k = k + 8 * torch.randn(head_dim, generator=torch.Generator().manual_seed(5))
    check_normal(name, attention(name, q, k, v), q, k, v)


@pytest.mark.parametrize(
    ("name", "error"),
    [("int8 expcast", 0.055), ("int8 exp2", 0.052), ("e4m3 expcast", 0.107), ("e4m3 exp2", 0.11), ("nvfp4", 0.21)],
)
def test_an_offset_in_the_queries(name, error):
    # The rotation gathers an offset common to all channels in channel 0, 3 x 128^0.5 large; 4-bit smoothing takes it
    # out. Measured 0.048, 0.0452, 0.0945, 0.0974, 0.18.
    q, k, v = random_qkv((1, 2, 512, 128))
    q = q + 3
    assert relative_l2(attention(name, q, k, v), exact_attention(q, k, v)) < error


@pytest.mark.parametrize("name", ALL)
def test_a_value_channel_2000_times_larger_leaves_the_others(name):
    q, k, v = random_qkv((1, 2, 512, 64))
    quiet = attention(name, q, k, v)
    v[..., 7] *= 2000
    loud = attention(name, q, k, v)
    keep = [channel for channel in range(64) if channel != 7]
    torch.testing.assert_close(loud[..., keep], quiet[..., keep], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(loud[..., 7] / 2000, quiet[..., 7], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("which", ["q", "k", "k offset"])
def test_a_query_or_key_channel_2000_times_larger(name, which):
    # Scores are as large as usual: the softmax scale is taken back. "k" leaves the loud channel in charge.
    q, k, v = random_qkv((1, 2, 512, 128))
    scale = 128**-0.5
    if which == "k offset":
        k[..., 7] += 2000
    else:
        (q if which == "q" else k)[..., 7] *= 2000
        scale /= 200
    output = attention(name, q, k, v, scale=scale)
    expected = exact_attention(q, k, v, scale)
    # Measured with "q": 0.9987, 0.9989, 0.9976, 0.9980, 0.985.
    assert head_cosine(output, expected) > {"nvfp4": 0.97, "e4m3 expcast": 0.997, "e4m3 exp2": 0.997}.get(name, 0.998)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("logit", [1e3, 1e4, 6e4, 1e6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_huge_logits_pick_their_value(name, logit, dtype):
    # B070: each query has one key with a logit far above all others (one-hot directions, exact in any format).
    tokens = 64
    eye = torch.eye(tokens)[None, None]
    v = random_qkv((1, 1, tokens, 64))[2].to(dtype)
    q, k = (eye * math.sqrt(logit) * 64**0.25).to(dtype), (eye * math.sqrt(logit) * 64**0.25).to(dtype)
    output = attention(name, q, k, v)
    assert output.isfinite().all()
    error = (output.float() - v.float()).abs().amax()
    assert error < v.float().abs().amax() * (0.2 if name == "nvfp4" else 0.07)  # half a step of the value's format


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("logit", [1e3, 1e4, 6e4, 1e6, 1e12, 1e30])
def test_huge_logits_of_any_sign_stay_finite_and_inside_the_values(name, logit):
    q, k, v = random_qkv((1, 2, 300, 64))
    q = (q * math.sqrt(logit)).bfloat16()
    k = (k * math.sqrt(logit)).bfloat16()
    output = attention(name, q, k, v.bfloat16()).float()
    assert output.isfinite().all()
    assert output.abs().max() < v.abs().max() * 1.1


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("case", ["zero k", "zero q", "constant k", "tiny q and k", "equal keys of any size"])
def test_equal_scores_give_the_mean_of_the_values(name, case):
    # B063: near-zero scales.
    q, k, v = random_qkv((1, 2, 300, 64))
    if case == "zero k":
        k = k * 0
    if case == "zero q":
        q = q * 0
    if case == "constant k":
        k = torch.full_like(k, 0.1)
    if case == "tiny q and k":
        q, k = q * 1e-8, k * 1e-8
    if case == "equal keys of any size":
        k = (k[:, :, :1] * 1e4).expand_as(k)
        q = q * 1e-3
    expected = v.double().mean(2, keepdim=True).expand_as(v)
    limit = 4 * (0.095 if name == "nvfp4" else 0.026) / 300**0.5  # as with scale 0
    assert (attention(name, q, k, v) - expected).abs().max() < limit


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_zero_blocks(name, size, which):
    q, k, v = random_qkv((1, 2, 384, 64))
    {"q": q, "k": k, "v": v}[which][:, :, 128 : 128 + size] = 0
    output = attention(name, q, k, v)
    assert output.isfinite().all()
    expected = exact_attention(q, k, v)
    assert relative_l2(output, expected) < SETTINGS[name][1] * 1.1


@pytest.mark.parametrize("name", ALL)
def test_zero_values_give_exact_zeros(name):
    q, k, v = random_qkv((1, 2, 300, 64))
    assert (attention(name, q, k, v * 0) == 0).all()
    half = v.clone()
    half[..., 5] = 0
    assert (attention(name, q, k, half)[..., 5] == 0).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e8, 1e30])
def test_size_of_the_values_cancels(name, size):
    q, k, v = random_qkv((1, 2, 300, 64))
    output = attention(name, q, k, v * size)
    assert relative_l2(output.double() / size, exact_attention(q, k, v)) < SETTINGS[name][1]


@pytest.mark.parametrize(
    ("name", "head"), [("int8 expcast", 0.99), ("int8 exp2", 0.99), ("e4m3 expcast", 0.9), ("nvfp4", 0.7)]
)
def test_activations_of_fp8_weights_with_outliers(name, head):
    # B001. Limit of the 8-bit default as asked, others measured 0.936 and 0.814.
    q, k, v = (x.to(torch.float8_e4m3fn).bfloat16() for x in random_qkv((1, 2, 512, 128)))
    k[..., :4] *= 200
    v[:, 1] *= 2000
    output = attention(name, q, k, v)
    assert output.isfinite().all()
    assert head_cosine(output, exact_attention(q, k, v)) > head


@pytest.mark.parametrize(
    ("name", "head"), [("int8 expcast", 0.99), ("int8 exp2", 0.99), ("e4m3 expcast", 0.97), ("nvfp4", 0.8)]
)
def test_large_values_and_logits_to_500(name, head):
    # B016. Limit of the 8-bit default as asked, others measured 0.986 and 0.871.
    q, k, v = random_qkv((1, 2, 1000, 128))
    q, k, v = (q * 4).bfloat16(), (k * 4).bfloat16(), (v * 7000).bfloat16()
    output = attention(name, q, k, v)
    assert output.isfinite().all()
    assert head_cosine(output, exact_attention(q, k, v)) > head


@pytest.mark.parametrize("name", ALL)
def test_fp16_near_its_largest_number(name):
    # B076: |v| to 6e4, |q| and |k| to 3e3.
    q, k, v = random_qkv((1, 2, 300, 128))
    q, k = (x.clamp(-3, 3).mul(1e3).half() for x in (q, k))
    v = v.clamp(-3, 3).mul(2e4).half()
    output = attention(name, q, k, v, scale=1e-7)
    assert output.dtype == torch.float16
    assert output.isfinite().all()
    assert relative_l2(output, exact_attention(q, k, v, 1e-7)) < SETTINGS[name][1]
    assert attention(name, q, k, v).isfinite().all()
    top = torch.full_like(v, 65504.0)
    assert attention(name, q, k, top, scale=1e-7).isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_fp32_over_eight_decades_stays_finite(name):
    # B009. One scale per block cannot serve tokens 1e-4 to 1e4 large; the result must still be a mean of values.
    size = 10 ** (torch.rand(1, 1, 300, 1, generator=torch.Generator().manual_seed(1)) * 8 - 4)
    q, k, v = (x * size for x in random_qkv((1, 2, 300, 128)))
    output = attention(name, q, k, v)
    assert output.isfinite().all()
    assert (output.abs().amax(2) <= v.abs().amax(2) * 1.1).all()


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_non_finite_input_is_refused_by_name(name, argument, bad, dtype):
    tensors = dict(zip("qkv", random_qkv((2, 2, 150, 16), dtype=dtype), strict=True))
    tensors[argument][1, 1, 149, 15] = bad
    with pytest.raises(UnsupportedCall) as raised:
        attention(name, **tensors)
    assert raised.value.reasons == {"reference": f"{argument} holds NaN or infinity"}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_numbers_beyond_float32_products_are_refused_or_right(name, argument):
    tensors = dict(zip("qkv", random_qkv((1, 1, 150, 16)), strict=True))
    tensors[argument] = tensors[argument].clamp(-3, 3) * 1e38
    try:
        output = attention(name, **tensors)
    except UnsupportedCall as error:
        assert "too large" in error.reasons["reference"]  # noqa: PT017
    else:
        assert output.isfinite().all()
