"""E4M3, E2M1, NVFP4 and ExpCast, bit for bit against formulas written here from the formats' definitions."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vc_attention import formats
from vc_attention.formats import (
    NVFP4,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    expcast,
    group_maxima,
    nvfp4_scale,
    positive,
    quantize_nvfp4,
)

LOG2_E = math.log2(math.e)


def e4m3_value(code: int) -> float:
    """The E4M3 number of a byte: 1 sign, 4 exponent bits (bias 7), 3 mantissa bits; exponent 0 is subnormal."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * 2.0 ** (exponent - 7) * (1 + mantissa / 8)


def nearest_even(magnitudes: torch.Tensor, table: list[float]) -> torch.Tensor:
    """Index of the nearest entry of an ascending ``table``, ties to the even index, saturating; float64 throughout."""
    entries = torch.tensor(table, dtype=torch.float64)
    midpoints = (entries[1:] + entries[:-1]) / 2
    above = torch.bucketize(magnitudes, midpoints, right=True)  # a tie counts as above
    at_or_above = torch.bucketize(magnitudes, midpoints, right=False)  # a tie counts as below
    return torch.where(above % 2 == 0, above, at_or_above)


E4M3_POSITIVE = [e4m3_value(code) for code in range(127)]
E2M1_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 bit patterns of a 16-bit float."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


# E4M3


def test_decoding_is_the_bit_formula_for_every_byte():
    decoded = decode_e4m3(torch.arange(256, dtype=torch.uint8))
    expected = torch.tensor([e4m3_value(code) for code in range(256)])
    assert decoded.dtype == torch.float32
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(decoded), torch.arange(256) >= 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encoding_is_torchs_own_cast_within_range(dtype):
    x = every_number(dtype)
    x = x[x.abs() <= 448]  # drops NaN
    assert len(x) > 30000
    assert torch.equal(encode_e4m3(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encoding_is_to_nearest_even_and_saturates(dtype):
    x = every_number(dtype)
    x = x[~x.isnan()]
    expected = nearest_even(x.double().abs(), E4M3_POSITIVE) | (torch.signbit(x).long() << 7)
    assert torch.equal(encode_e4m3(x).long(), expected)


@pytest.mark.parametrize("x", [448.0, 448.1, 464.0, 480.0, 1e30, math.inf])
def test_too_large_becomes_the_largest_finite_number(x):
    assert decode_e4m3(encode_e4m3(torch.tensor([x, -x]))).tolist() == [448.0, -448.0]


def test_nan_stays_nan():
    assert encode_e4m3(torch.tensor([math.nan, -math.nan])).bitwise_and(0x7F).tolist() == [0x7F, 0x7F]


def test_float32_ties_and_their_neighbours():
    values = torch.tensor(E4M3_POSITIVE, dtype=torch.float32)
    middle = (values[1:] + values[:-1]) / 2
    up, down = torch.nextafter(middle, middle + 1), torch.nextafter(middle, middle - 1)
    for x in (middle, up, down):
        assert torch.equal(encode_e4m3(x).long(), nearest_even(x.double(), E4M3_POSITIVE))


# E2M1


def test_e2m1_decodes_by_the_table():
    decoded = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert decoded.tolist() == [*E2M1_POSITIVE, *(-x for x in E2M1_POSITIVE)]
    assert decoded.dtype == torch.float32
    assert torch.signbit(decoded[8])


@pytest.mark.parametrize(
    ("x", "rounded"),
    [
        *[(value, value) for value in E2M1_POSITIVE],
        (0.25, 0.0),  # ties go to the even code
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (0.2501, 0.5),
        (0.7499, 0.5),
        (2.51, 3.0),
        (5.01, 6.0),
        (7.0, 6.0),
        (1e30, 6.0),
        (math.inf, 6.0),
    ],
)
def test_e2m1_rounds_by_the_table(x, rounded):
    codes = encode_e2m1(torch.tensor([x, -x]))
    assert codes.dtype == torch.uint8
    assert decode_e2m1(codes).tolist() == [rounded, -rounded]
    assert codes.tolist() == [E2M1_POSITIVE.index(rounded), E2M1_POSITIVE.index(rounded) + 8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_e2m1_is_to_nearest_even_for_every_number(dtype):
    x = every_number(dtype)
    x = x[~x.isnan()]
    expected = nearest_even(x.double().abs(), E2M1_POSITIVE) | (torch.signbit(x).long() << 3)
    assert torch.equal(encode_e2m1(x).long(), expected)


def test_e2m1_neighbours_of_ties_in_float32():
    values = torch.tensor(E2M1_POSITIVE, dtype=torch.float32)
    middle = (values[1:] + values[:-1]) / 2
    for x in (middle, torch.nextafter(middle, middle + 1), torch.nextafter(middle, middle - 1)):
        assert torch.equal(encode_e2m1(x).long(), nearest_even(x.double(), E2M1_POSITIVE))


# NVFP4

ONE = torch.ones(1, 1)


def test_nvfp4_round_trips_what_it_can_represent():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (5, 48), generator=generator, dtype=torch.uint8)
    codes[:, ::16] = 7  # each group reaches 6, so that its scale is found again
    group_scales = torch.randint(8, 127, (5, 3), generator=generator, dtype=torch.uint8)
    stored = NVFP4(codes, group_scales, torch.full((5, 1), 0.25))
    again = quantize_nvfp4(stored.dequantize(), stored.scale)
    assert torch.equal(again.codes, codes)
    assert torch.equal(again.group_scales, group_scales)
    assert torch.equal(again.dequantize(), stored.dequantize())


def test_nvfp4_dequantizes_by_its_definition():
    x = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))
    stored = quantize_nvfp4(x, nvfp4_scale(x, (1,)))
    expected = [
        [
            E2M1_POSITIVE[code & 7]
            * (-1 if code & 8 else 1)
            * e4m3_value(stored.group_scales[row, place // 16].item())
            * stored.scale[row, 0].item()
            for place, code in enumerate(stored.codes[row].tolist())
        ]
        for row in range(2)
    ]
    torch.testing.assert_close(
        stored.dequantize().double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_nvfp4_scale_lets_the_largest_group_use_the_whole_range():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    scale = nvfp4_scale(x, (1,))
    stored = quantize_nvfp4(x, scale)
    assert torch.equal(scale, x.abs().amax(1, keepdim=True) / (6 * 448))
    assert stored.group_scales.amax(1).tolist() == [126, 126, 126]  # 448
    largest = x.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(stored.dequantize().gather(1, largest), x.gather(1, largest), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(4, 256), (3, 17), (2, 1), (1, 16), (2, 2, 31)])
def test_nvfp4_error_is_bounded_by_the_group(shape):
    # Half the widest step of E2M1 is 1 of 6, under a group scale that rounding may enlarge by 1/16; clipping, where
    # rounding made it smaller by up to 1/16, costs 6/16 of a step, which is less.
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    stored = quantize_nvfp4(x, nvfp4_scale(x, (-1,)))
    assert stored.codes.shape == x.shape
    assert stored.group_scales.shape == (*shape[:-1], -(-shape[-1] // 16))
    limit = group_maxima(x).repeat_interleave(16, -1)[..., : shape[-1]] / 6 * (1 + 1 / 16)
    assert ((stored.dequantize() - x).abs() <= limit * (1 + 1e-6)).all()


def test_a_zero_group_is_stored_as_zeros_beside_others():
    x = torch.randn(2, 48, generator=torch.Generator().manual_seed(4))
    x[:, 16:32] = 0
    stored = quantize_nvfp4(x, nvfp4_scale(x, (1,)))
    assert (stored.group_scales[:, 1] == 0).all()
    assert (stored.dequantize()[:, 16:32] == 0).all()
    assert (stored.group_scales[:, [0, 2]] > 0).all()


def test_all_zeros_have_a_scale_to_divide_by():
    x = torch.zeros(2, 32)
    scale = nvfp4_scale(x, (1,))
    assert (scale == 1).all()
    assert (quantize_nvfp4(x, scale).dequantize() == 0).all()


def test_a_group_below_the_smallest_scale_is_zero_not_nan():
    x = torch.ones(1, 32)
    x[:, 16:] = 1e-9
    dequantized = quantize_nvfp4(x, nvfp4_scale(x, (1,))).dequantize()
    assert (dequantized[:, 16:] == 0).all()
    torch.testing.assert_close(dequantized[:, :16], x[:, :16], rtol=1e-6, atol=0)


def test_a_short_group_counts_its_own_numbers_only():
    x = torch.cat([torch.full((1, 16), 100.0), torch.full((1, 3), 0.5)], 1)
    assert group_maxima(x).tolist() == [[100.0, 0.5]]
    torch.testing.assert_close(quantize_nvfp4(x, nvfp4_scale(x, (1,))).dequantize(), x, rtol=1 / 16, atol=0)


def test_groups_do_not_see_each_other():
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(5))
    other = x.clone()
    other[:, 32:48] *= 0.25
    one, two = quantize_nvfp4(x, ONE * 0.01), quantize_nvfp4(other, ONE * 0.01)
    keep = [*range(32), *range(48, 64)]
    assert torch.equal(one.codes[:, keep], two.codes[:, keep])


def test_positive_replaces_only_what_cannot_be_divided_by():
    tiny = torch.finfo(torch.float32).tiny
    assert positive(torch.tensor([0.0, tiny / 2, tiny, 2 * tiny, 3.0])).tolist() == [1, 1, 1, 2 * tiny, 3]


# ExpCast. A doubling of u is sampled at 2^18 points, exact in float32.

POINTS = 1 << 18


def doubling(low: float) -> torch.Tensor:
    """``u`` in [low, low + 1), evenly spaced."""
    return low + torch.arange(POINTS, dtype=torch.float32) / POINTS


def cast_code(u: torch.Tensor) -> torch.Tensor:
    """What exponential and cast write: E4M3 of 2^(u + 8), to nearest even, from float64."""
    return nearest_even(torch.exp2(u.double() + 8), E4M3_POSITIVE)


def test_worked_example_of_the_paper():
    code = expcast(torch.tensor([-1.60]))
    assert code.tolist() == [107]
    assert decode_e4m3(code).tolist() == [88.0]
    assert cast_code(torch.tensor([-1.60])).tolist() == [107]


def test_code_formula():
    # Exact rational arithmetic; points within 1e-5 of a rounding boundary are left out, float32 may go either way.
    for step in range(-2000, 1):
        u = step / 128
        exact = 8 * (Fraction(u) + 8) + 56 + Fraction(-35, 100)
        if abs(exact % 1 - Fraction(1, 2)) > Fraction(1, 100000):
            assert expcast(torch.tensor(u)).item() == min(max(round(exact), 0), 120)


def test_codes_stay_in_range_and_keep_order():
    u = torch.cat([torch.linspace(-20, 0, 100001), torch.tensor([0.0])])
    codes = expcast(u).int()
    assert codes.dtype == torch.int32
    assert codes.max() == 120
    assert codes.min() == 0
    assert (codes[1:] >= codes[:-1]).all()
    assert expcast(torch.tensor([-1e30, -math.inf])).tolist() == [0, 0]


@pytest.mark.parametrize("low", [-1.0, -2.0, -7.0, -13.0])
def test_same_byte_as_exponential_and_cast_on_79_6_percent(low):
    # Per mantissa m the boundaries, 8 log2(1 + (2m + 1) / 16) and m + 0.5 + 0.35 codes, enclose what differs.
    differs = sum(abs(8 * math.log2(1 + (2 * m + 1) / 16) - (m + 0.85)) for m in range(8)) / 8
    assert 1 - differs == pytest.approx(0.796, abs=5e-4)
    u = doubling(low)
    distance = (expcast(u).long() - cast_code(u)).abs()
    assert (distance == 0).double().mean().item() == pytest.approx(1 - differs, abs=1e-4)
    assert distance.max() == 1


def relative_errors(codes: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return decode_e4m3(codes.to(torch.uint8)).double() / torch.exp2(u.double() + 8) - 1


@pytest.mark.parametrize("low", [-1.0, -4.0, -13.0])
def test_error_per_element(low):
    u = doubling(low)
    errors = relative_errors(expcast(u), u)
    assert -0.071 <= errors.min() < -0.069
    assert 0.074 < errors.max() <= 0.075


def test_root_mean_square_error_beside_that_of_a_cast():
    u = doubling(-3.0)
    assert relative_errors(expcast(u), u).square().mean().sqrt() == pytest.approx(0.033, abs=5e-4)
    assert relative_errors(cast_code(u), u).square().mean().sqrt() == pytest.approx(0.0265, abs=2e-4)


def test_tail_is_flushed_below_10_3_nats_a_cast_below_12_5():
    nats = -torch.arange(9.5, 13.5, 0.001)
    u = nats * LOG2_E
    ours, casts = nats[expcast(u) > 0].min(), nats[cast_code(u) > 0].min()
    assert ours == pytest.approx(-10.3, abs=0.05)
    assert casts == pytest.approx(-12.5, abs=0.05)


def test_subnormal_codes_are_never_above_the_true_value_by_more_than_a_normal_one():
    u = -14 + torch.arange(-3 * 4096, 0, dtype=torch.float32) / 4096
    codes = expcast(u)
    assert codes.max() <= 8
    assert relative_errors(codes, u).max() <= 0.075


def test_no_headroom_above_the_maximum():
    assert expcast(torch.tensor(0.07 * LOG2_E)).item() == 120  # 0.07 nat still rounds to the top code
    # Above, everything is clipped to 256: 2^8 of a score one octave up is lost, hence maxima are raised first.
    assert decode_e4m3(expcast(torch.tensor([0.08 * LOG2_E, 1.0, 50.0]))).tolist() == [256.0] * 3
    assert 8 * (0.08 * LOG2_E + 8) + 56 - 0.35 > 120.5


@pytest.mark.parametrize("rise", [1, 3, 8, 41])
def test_a_maximum_on_the_code_grid_rescales_exactly(rise):
    # alpha = 2^(-rise / 8) in the code domain is a subtraction of whole codes.
    u = -torch.arange(0, 8 * 4096, dtype=torch.float32) / 4096
    assert torch.equal(expcast(u - rise / 8).int(), (expcast(u).int() - rise).clamp_min(0))


@pytest.mark.parametrize("shift", [0.02, 0.06, 0.11])
def test_an_offset_common_to_a_row_changes_only_roundings(shift):
    u = -torch.rand(5000, generator=torch.Generator().manual_seed(6)) * 12 - 0.2
    moved = expcast(u + shift).int() - expcast(u).int()
    assert set(moved.tolist()) <= {int(8 * shift), int(8 * shift) + 1}


# Total variation of a row, method section 3


def total_variation(scores: torch.Tensor) -> tuple[float, float]:
    """Distance between softmax of a row (natural-log units) and its decoded codes over their sum; and tau."""
    u = ((scores - scores.max()).double() * LOG2_E).float()
    exact = torch.softmax(u.double() / LOG2_E, 0)
    codes = expcast(u)
    decoded = decode_e4m3(codes).double()
    underflow = exact[codes < 8].sum().item()
    return (exact - decoded / decoded.sum()).abs().sum().item() / 2, underflow


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 600),
    st.floats(0.0, 30.0),
    st.sampled_from(["normal", "uniform", "two levels", "one high"]),
)
def test_total_variation_stays_below_its_bound(seed, length, spread, kind):
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(length, generator=generator) if kind != "uniform" else torch.rand(length, generator=generator)
    if kind == "two levels":
        row = (row > 0.3).float() + row * 1e-3
    if kind == "one high":
        row[0] += 3
    distance, tau = total_variation(row * spread)
    assert distance < 0.0364 + tau


def test_total_variation_bound_is_nearly_reached():
    # Half the mass at the element with the largest error, half at the smallest: just after and before a rounding.
    u = doubling(-3.0)
    errors = relative_errors(expcast(u), u)
    high, low = u[errors.argmax()], u[errors.argmin()]
    count = round(1000 * 2 ** (high - low).item())
    row = torch.cat([torch.zeros(1), high.repeat(1000), low.repeat(count)]) / LOG2_E
    distance, tau = total_variation(row)
    assert tau == 0
    assert 0.0355 < distance < 0.0364


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0, 3.0])
def test_mean_total_variation_of_normal_rows(spread):
    # Where scores are smooth, half the mean distance of an element's error from the mean error: 1.28 %. The paper's
    # figure for its rows, with another mix of peaks and tails, is "about 1.6 %"; none of ours may be above it.
    u = doubling(-3.0)
    errors, weights = relative_errors(expcast(u), u), torch.exp2(u.double())
    mean = (errors * weights).sum() / weights.sum()
    derived = (((errors - mean).abs() * weights).sum() / weights.sum() / 2).item()
    generator = torch.Generator().manual_seed(7)
    rows = [total_variation(torch.randn(4096, generator=generator) * spread)[0] for _ in range(20)]
    measured = sum(rows) / len(rows)
    assert measured == pytest.approx(derived, rel=0.1)
    assert measured < 0.016


def test_constants_are_those_of_the_method():
    assert (formats.EXPCAST_BETA, formats.EXPCAST_TOP, formats.LOG2_SCALE) == (-0.35, 120, 8)
    assert e4m3_value(formats.EXPCAST_TOP) == 256.0
    assert e4m3_value(formats.CODE_OF_ONE) == 1.0
