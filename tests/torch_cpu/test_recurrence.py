"""The tile-by-tile recurrence on given operands, against a loop written from the method, row by row in float64.

Scores are made whole 64ths of a code, so that float32 holds them exactly and no rounding can fall the other way;
what is left between the two is the rounding of float32 sums.
"""

import math

import pytest
import torch
from vc_attention.attend import reference
from vc_attention.attend.reference import CODES_PER_NAT, attend4, attend8
from vc_attention.formats import NVFP4, decode_e4m3, encode_e4m3
from vc_attention.quantize.operands import Operands4, Operands8, ScaledRows
from vc_attention.quantize.reference import quantize4
from vc_attention.testing import random_qkv, relative_l2

BLOCK = 128
SCALE = 1 / (64 * CODES_PER_NAT)  # a dot product of codes is a score in 64ths of a code
# 300 additions of float32 numbers of one sign: 300 x 2^-24 at worst, measured below 1e-6.
SUMS = 1e-5
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def integers(low, high, *shape, seed=0):
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def operands8(tokens=300, queries=9, head_dim=16, reach=20, seed=0, dims=(1, 2)) -> Operands8:
    """Operands whose scores reach a few hundred codes; every number exact in float32."""
    q = integers(-reach, reach, *dims, queries, head_dim, seed=seed).to(torch.int8)
    k = integers(-reach, reach, *dims, tokens, head_dim, seed=seed + 1).to(torch.int8)
    ones = torch.ones(*dims, 1, 1)
    residual = encode_e4m3(torch.randn(*dims, tokens, head_dim, generator=torch.Generator().manual_seed(seed)) * 100)
    means = torch.randn(*dims, -(-tokens // BLOCK), head_dim, generator=torch.Generator().manual_seed(seed + 3))
    return Operands8(
        q=ScaledRows(q, ones.expand(*dims, queries, 1) * 2),
        k=ScaledRows(k, ones.expand(*dims, tokens, 1) / 2),
        residual=residual,
        residual_scale=torch.rand(*dims, 1, head_dim, generator=torch.Generator().manual_seed(seed + 4)) + 0.5,
        means=means.bfloat16(),
    )


def expcast_number(u: float) -> float:
    """Method, section 3: the byte, and its value as E4M3."""
    code = min(max(round(8 * (u + 8) + 56 - 0.35), 0), 120)
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)


def exp2_number(u: float) -> float:
    """Exponential, times 2^8, cast to E4M3."""
    return decode_e4m3(encode_e4m3(torch.tensor(2.0 ** (u + 8), dtype=torch.float64))).item()


def loop8(operands: Operands8, probabilities: str) -> torch.Tensor:
    """[B, H, S_q, D] float64: O <- alpha O + P R + r mu, l <- alpha l + r, one row and one key at a time."""
    q, k = operands.q.codes.double(), operands.k.codes.double()
    residual = decode_e4m3(operands.residual).double() * operands.residual_scale.double()
    output = torch.zeros(q.shape, dtype=torch.float64)
    batch, heads, queries, head_dim = q.shape
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                maximum, row_sum, row = -math.inf, 0.0, torch.zeros(head_dim, dtype=torch.float64)
                for tile, start in enumerate(range(0, k.shape[2], BLOCK)):
                    keys = k[b, h, start : start + BLOCK]
                    codes = [(q[b, h, i] @ key).item() / 64 for key in keys]
                    highest = max(codes)
                    if probabilities == "expcast":
                        highest = math.ceil(highest)  # the maximum is held on the code grid
                    raised = max(maximum, highest)
                    alpha = 2.0 ** ((maximum - raised) / 8)
                    number = expcast_number if probabilities == "expcast" else exp2_number
                    p = torch.tensor([number((code - raised) / 8) for code in codes], dtype=torch.float64)
                    r = p.sum().item()
                    row = (
                        alpha * row
                        + p @ residual[b, h, start : start + BLOCK]
                        + r * operands.means[b, h, tile].double()
                    )
                    row_sum = alpha * row_sum + r
                    maximum = raised
                output[b, h, i] = row / row_sum
    return output


def ordered(operands: Operands8, order: torch.Tensor) -> Operands8:
    """The same operands with keys (and residuals) in another order."""
    return Operands8(
        operands.q,
        ScaledRows(operands.k.codes[:, :, order], operands.k.scale[:, :, order]),
        operands.residual[:, :, order],
        operands.residual_scale,
        operands.means,
    )


def by_score(operands: Operands8, descending: bool) -> torch.Tensor:
    scores = operands.q.codes[0, 0, 0].double() @ operands.k.codes[0, 0].double().T
    return scores.argsort(descending=descending)


@pytest.mark.parametrize("probabilities", ["expcast", "exp2"])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
def test_8_bit_recurrence_is_the_loop(probabilities, tokens):
    operands = operands8(tokens)
    assert relative_l2(attend8(operands, SCALE, probabilities), loop8(operands, probabilities)) < SUMS


@pytest.mark.parametrize("probabilities", ["expcast", "exp2"])
@pytest.mark.parametrize("descending", [False, True], ids=["rising", "falling"])
@pytest.mark.parametrize("reach", [10, 60])
def test_8_bit_recurrence_with_rising_and_falling_maxima(probabilities, descending, reach):
    # reach 60: scores differ by some thousand codes, whole tiles vanish under a later maximum.
    operands = operands8(400, reach=reach)
    operands = ordered(operands, by_score(operands, descending))
    assert relative_l2(attend8(operands, SCALE, probabilities), loop8(operands, probabilities)) < SUMS


def test_a_later_tile_with_everything_hides_the_earlier_ones():
    operands = operands8(256, queries=1, dims=(1, 1))
    q = operands.q.codes
    k = operands.k.codes.clone()
    k[0, 0, 200] = torch.sign(q[0, 0, 0]) * 127
    operands = Operands8(operands.q, ScaledRows(k, operands.k.scale), *vars_of(operands))
    expected = decode_e4m3(operands.residual)[0, 0, 200] * operands.residual_scale[0, 0, 0]
    expected = expected + operands.means[0, 0, 1].float()
    torch.testing.assert_close(attend8(operands, SCALE * 16, "expcast")[0, 0, 0], expected, rtol=1e-6, atol=1e-6)


def vars_of(operands: Operands8):
    return operands.residual, operands.residual_scale, operands.means


def few_codes(tokens=300, seed=0) -> Operands8:
    """Operands in exact arithmetic: scores up to three whole octaves apart, no means, whole-number residuals."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.full((1, 1, 6, 16), 1, dtype=torch.int8)
    k = torch.zeros(1, 1, tokens, 16, dtype=torch.int8)
    k[..., 0] = torch.randint(0, 4, (1, 1, tokens), generator=generator).to(torch.int8)  # 0 to 3 octaves
    ones = torch.ones(1, 1, 1, 1)
    residual = encode_e4m3(torch.randint(-8, 9, (1, 1, tokens, 16), generator=generator).float())
    means = torch.zeros(1, 1, -(-tokens // BLOCK), 16, dtype=torch.bfloat16)
    return Operands8(
        ScaledRows(q, ones.expand(1, 1, 6, 1) * 8), ScaledRows(k, ones.expand(1, 1, tokens, 1)), residual, ones, means
    )


@pytest.mark.parametrize("probabilities", ["expcast", "exp2"])
@pytest.mark.parametrize("seed", range(5))
def test_key_order_changes_nothing_in_exact_arithmetic(probabilities, seed):
    # Octaves apart, alpha is a power of two and all sums are whole numbers below 2^24: equal to the last bit.
    operands = few_codes()
    order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
    one = attend8(operands, 1 / CODES_PER_NAT, probabilities)
    two = attend8(ordered(operands, order), 1 / CODES_PER_NAT, probabilities)
    assert torch.equal(one, two)
    assert one.abs().max() > 0


@pytest.mark.parametrize("probabilities", ["expcast", "exp2"])
@pytest.mark.parametrize("seed", range(3))
def test_key_order_changes_roundings_only(probabilities, seed):
    # No element is clipped. One that is met under another maximum is rounded in another place of the octave: its two
    # roundings, each of 3.3 % (exp2: 2.65 %) root mean square, are independent, and the output is a sum of both signs.
    operands = operands8(300, reach=6)
    none = Operands8(operands.q, operands.k, operands.residual, operands.residual_scale, operands.means * 0)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
    one, two = attend8(none, SCALE, probabilities), attend8(ordered(none, order), SCALE, probabilities)
    assert relative_l2(one, two) < 2**0.5 * (0.033 if probabilities == "expcast" else 0.0265)


@pytest.mark.parametrize("probabilities", ["expcast", "exp2"])
def test_query_order_permutes_the_output(probabilities):
    operands = operands8(300, queries=50)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    q = ScaledRows(operands.q.codes[:, :, order], operands.q.scale[:, :, order])
    permuted = Operands8(q, operands.k, *vars_of(operands))
    one, two = attend8(operands, SCALE, probabilities), attend8(permuted, SCALE, probabilities)
    torch.testing.assert_close(two, one[:, :, order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_rows_at_a_time_change_nothing(monkeypatch, rows):
    operands = operands8(300, queries=70)
    whole = attend8(operands, SCALE, "expcast")
    monkeypatch.setattr(reference, "ROWS_PER_PASS", rows)
    torch.testing.assert_close(attend8(operands, SCALE, "expcast"), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("probabilities", ["expcast", "exp2"])
def test_weights_are_never_negative_and_sum_to_one(probabilities):
    operands = operands8(300)
    ones = Operands8(
        operands.q,
        operands.k,
        encode_e4m3(torch.full((1, 2, 300, 16), 1.5)),
        torch.full((1, 2, 1, 16), 2.0),
        torch.full((1, 2, 3, 16), 4.0, dtype=torch.bfloat16),
    )
    torch.testing.assert_close(attend8(ones, SCALE, probabilities), torch.full((1, 2, 9, 16), 7.0), rtol=1e-6, atol=0)


# 4-bit


def nvfp4_numbers(x: list[float]) -> list[float]:
    """One group of 16 non-negative numbers through E2M1 with a group scale in E4M3."""
    group_scale = decode_e4m3(encode_e4m3(torch.tensor(max(x) / 6))).item()
    if group_scale == 0:
        return [0.0] * len(x)
    return [min(E2M1, key=lambda entry: (abs(entry - y / group_scale), E2M1.index(entry) % 2)) * group_scale for y in x]


def loop4(operands: Operands4, scale: float) -> torch.Tensor:
    """As ``loop8``. The row sums are those before E2M1, as attend4 documents (the method says: decoded)."""
    q, k = operands.q.dequantize().double(), operands.k.dequantize().double()
    residual = operands.residual.dequantize().transpose(2, 3).double()
    output = torch.zeros(q.shape, dtype=torch.float64)
    batch, heads, queries, head_dim = q.shape
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                maximum, row_sum, row = -math.inf, 0.0, torch.zeros(head_dim, dtype=torch.float64)
                q_mean = operands.q_means[b, h, i // BLOCK].double()
                for tile, start in enumerate(range(0, k.shape[2], BLOCK)):
                    stop = min(start + BLOCK, k.shape[2])
                    scores = k[b, h, start:stop] @ q[b, h, i] + operands.k_exact[b, h, start:stop].double() @ q_mean
                    u = (scores * scale * math.log2(math.e)).tolist()
                    raised = max(maximum, *u)
                    alpha = 2.0 ** (maximum - raised)
                    exponentials = [2.0 ** (x - raised) * 448 * 6 for x in u]
                    p = []
                    for group in range(0, len(u), 16):
                        p += nvfp4_numbers(exponentials[group : group + 16])
                    r = sum(exponentials)
                    p = torch.tensor(p, dtype=torch.float64)
                    row = alpha * row + p @ residual[b, h, start:stop] + r * operands.means[b, h, tile].double()
                    row_sum = alpha * row_sum + r
                    maximum = raised
                output[b, h, i] = row / row_sum
    return output


@pytest.mark.parametrize("tokens", [1, 15, 129, 300])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_4_bit_recurrence_is_the_loop(tokens, spread):
    q, k, v = random_qkv((1, 2, tokens, 16), seed=tokens)
    operands = quantize4(q[:, :, :9] * spread + 1, k, v, None, True)
    # A few elements of some thousand lie so near an E2M1 boundary that float32 rounds them the other way: 1e-3 of
    # the output; a fault in the recurrence is 1e-2 or more.
    assert relative_l2(attend4(operands, 0.25), loop4(operands, 0.25)) < 2e-3


def test_4_bit_uniform_weights_give_the_mean():
    q, k, v = random_qkv((1, 1, 256, 16))
    operands = quantize4(q * 0, k, v, None, True)
    expected = (operands.residual.dequantize().mean(3) + operands.means.float().mean(2))[:, :, None]
    torch.testing.assert_close(attend4(operands, 0.25), expected.expand(1, 1, 256, 16), rtol=1e-5, atol=1e-6)


def test_4_bit_group_scales_of_probabilities_use_the_whole_range():
    # A row maximum is 448 x 6: the group that holds it has the largest UE4M3 scale and decodes exactly.
    q = torch.zeros(1, 1, 1, 16)
    k = torch.zeros(1, 1, 33, 16)
    v = torch.zeros(1, 1, 33, 16)
    q[..., 0], k[0, 0, 20, 0], v[0, 0, 20] = 40.0, 10.0, 5.0
    operands = quantize4(q, k, v, None, True)
    stored = operands.residual.dequantize()[..., 20] + operands.means[:, :, 0]
    torch.testing.assert_close(stored, torch.full((1, 1, 16), 5.0), rtol=0.02, atol=0)
    torch.testing.assert_close(attend4(operands, 1.0)[:, :, 0], stored, rtol=1e-5, atol=0)
    assert isinstance(operands.q, NVFP4)
