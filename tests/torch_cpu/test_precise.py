"""The precise 8-bit mode: its reference, the specification of its Hopper kernel, and who is served."""

import dataclasses
import math

import pytest
import torch
from vc_attention import attention, guard, support
from vc_attention.arch import EIGHT_BIT, PRECISE
from vc_attention.attend import precise_cuda as attend_host
from vc_attention.attend import run_cuda
from vc_attention.attend.precise import CUBIC, attend_precise, probability
from vc_attention.attend.reference import CODES_PER_NAT, attend8_precise
from vc_attention.attend.settings import resolve
from vc_attention.dispatch import Call, choose
from vc_attention.errors import InvalidArgument, UnsupportedCall
from vc_attention.group import cuda as group_host
from vc_attention.group.reference import group_reference
from vc_attention.quantize import cuda as prepare_host
from vc_attention.quantize.hopper import KEY_ORDER, decoded_means, hopper_operands
from vc_attention.quantize.operands import Operands8Precise, ScaledRows
from vc_attention.quantize.precise import decoded_value_blocks, precise_operands
from vc_attention.quantize.reference import quantize8_precise
from vc_attention.testing import clustered_qkv, quantization_error, random_qkv, relative_l2

D, BLOCK = 128, 128
SCALE = D**-0.5
DTYPES = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
RANDOM_LIMIT = 1.8e-2  # the promise of the mode on normal inputs; measured 1.56e-2 at 75,600 tokens
SHORT_LIMIT = 1.9e-2  # 33 rows over a few keys scatter: at most 1.81e-2 for the lengths below


def inputs(q_tokens, tokens, heads=1, batch=1, dtype=torch.bfloat16, seed=0, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    lengths = (q_tokens, tokens, tokens)
    q, k, v = (torch.randn(batch, heads, length, D, generator=generator) for length in lengths)
    return q.to(dtype), k.to(dtype), (v + offset).to(dtype)


def random_order(batch, heads, tokens, seed=0):
    return torch.rand(batch, heads, tokens, generator=torch.Generator().manual_seed(seed)).argsort(-1).int()


def call(q, k, v, permutation=None, scale=SCALE, demean=True):
    """The whole call in plain torch, float32."""
    operands = precise_operands(q, k, v, scale=scale, permutation=permutation, demean=demean)
    return attend_precise(operands, q.shape[2], means=demean).reshape(q.shape)


# Operands


@pytest.fixture(scope="module")
def blocks():
    """Three blocks of keys and values that differ tenfold in size, the last one short; and the rotated keys."""
    q, k, v = inputs(70, 300, offset=0.5)
    size = torch.tensor([1.0, 0.1, 0.6]).repeat_interleave(BLOCK)[:300, None]
    k, v = (k * size).bfloat16(), (v * size).bfloat16()
    signs = torch.tensor([[(-1) ** bin(i & j).count("1") for j in range(D)] for i in range(D)], dtype=torch.float64)
    rotated = (k[0, 0].double() - k[0, 0].double().mean(0)) @ signs / math.sqrt(D)
    return precise_operands(q, k, v, scale=0.1), rotated, v[0, 0].double()


def test_each_block_of_keys_has_a_scale(blocks):
    operands, rotated, _ = blocks
    head = rotated.abs().max().item() / 127
    for block in range(3):
        rows = slice(block * BLOCK, min((block + 1) * BLOCK, 300))
        own = rotated[rows].abs().max().item() / 127
        scale = operands.k_block_scale[0, block].item() * head
        assert scale == pytest.approx(max(own, 0.45 * head), rel=1e-5)
        assert (operands.k8[0, rows].double() - rotated[rows] / scale).abs().max() < 0.501
    assert operands.k_block_scale[0, 1] == pytest.approx(0.45)  # a block a tenth of the size
    assert (operands.k8[0, 300:] == 0).all()


def test_each_block_and_channel_of_values_uses_all_of_int8(blocks):
    operands, _, v = blocks
    stored = decoded_means(operands)[0].double() * operands.v_scale[0].double()
    for block in range(3):
        tokens = range(block * BLOCK, min((block + 1) * BLOCK, 300))
        scale = operands.v_block_scale[0, block].double() * operands.v_scale[0].double()
        for token in tokens:
            place = token // 32 * 32 + KEY_ORDER.index(token % 32)
            code = operands.v8[0, :, place].double()
            assert ((code * scale - (v[token] - stored[block])).abs() <= 0.501 * scale).all()
        padded = operands.v8[0, :, block * BLOCK : (block + 1) * BLOCK]
        assert (padded.int().abs().amax(1) == 127).all()
    assert (decoded_value_blocks(operands)[0, 300:] == 0).all()


def test_queries_scales_and_means_are_those_of_the_fast_mode():
    q, k, v = inputs(70, 300, heads=2, offset=0.5)
    order = random_order(1, 2, 300)
    fast = hopper_operands(q, k, v, scale=SCALE, permutation=order)
    operands = precise_operands(q, k, v, scale=SCALE, permutation=order)
    for name in ("q8", "q_scale", "v_scale", "means"):
        assert torch.equal(getattr(operands, name), getattr(fast, name))


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 2049])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_and_dtypes(tokens, dtype):
    q, k, v = inputs(tokens // 2 + 1, tokens, heads=2, batch=2, dtype=dtype)
    operands = precise_operands(q, k, v, scale=SCALE)
    count = -(-tokens // BLOCK)
    assert operands.kv_length == tokens
    assert (operands.v8.dtype, tuple(operands.v8.shape)) == (torch.int8, (4, D, count * BLOCK))
    assert (operands.k_block_scale.dtype, tuple(operands.k_block_scale.shape)) == (torch.float32, (4, count))
    assert (operands.v_block_scale.dtype, tuple(operands.v_block_scale.shape)) == (torch.float32, (4, count, D))
    assert operands.k8.int().abs().max() <= 127
    assert operands.v8.int().abs().max() <= 127


def test_a_constant_block_is_its_mean():
    q, k, v = inputs(5, 300)
    v[:, :, 128:256] = 0.7
    operands = precise_operands(q, k, v, scale=SCALE, demean=True)
    assert torch.isfinite(operands.v_block_scale).all()
    restored = (decoded_value_blocks(operands) + decoded_means(operands).repeat_interleave(BLOCK, 1)[:, :384])[
        0, 128:256
    ]
    assert relative_l2(restored * operands.v_scale[0], v[0, 0, 128:256]) < 5e-4


# Probabilities


def test_the_polynomial_is_exp2_in_254ths():
    t = torch.linspace(0, 1, 2049, dtype=torch.float64).half().double()
    exact = 254 * torch.exp2(9.2 * (t - 1))
    whole = probability(t)
    assert ((whole - exact).abs() <= 0.5 + 0.01 * exact).all()
    assert (whole.diff() >= 0).all()
    assert (whole[0], whole[-1]) == (0, 254)
    assert tuple(torch.tensor(CUBIC).half().tolist()) == CUBIC


# The recurrence against a loop


def half(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).half().item()


def whole_number(units: int, octaves: float) -> tuple[int, float]:
    """The probability of a score ``units`` below the maximum of its tile, as the kernel's half arithmetic makes it.

    And how far, in octaves, the maximum itself lies below a probability of 254.
    """
    slope = half(min(octaves * 1024 / 9.2, 1024.0))
    u_max = math.floor(1024 / slope)
    t = half(max(u_max - units, 0) * slope / 1024)
    y = CUBIC[0]
    for coefficient in CUBIC[1:]:
        y = half(y * t + coefficient)
    return round(half(half(y * y) ** 2) ** 2), 9.2 * (1 - u_max * slope / 1024)


def looped(operands, q_tokens):
    """One head by loops: one row and one key at a time, tiles against the largest of their maxima, sums in float64."""
    q8, k8 = operands.q8[0].double(), operands.k8[0].double()
    values = decoded_value_blocks(operands)[0].double()
    means = decoded_means(operands)[0].double()
    out = torch.zeros(q_tokens, D, dtype=torch.float64)
    for row in range(q_tokens):
        tiles = []
        for block, first in enumerate(range(0, operands.kv_length, BLOCK)):
            keys = range(first, min(first + BLOCK, operands.kv_length))
            octaves = operands.q_scale[0, row].item() * operands.k_block_scale[0, block].item() / 8
            scores = [math.floor((q8[row] @ k8[key]).item() / 256) for key in keys]
            highest = max(scores)
            made = [whole_number(highest - score, octaves) for score in scores]
            p = torch.tensor([number for number, _ in made], dtype=torch.float64)
            weighted = p @ values[keys.start : keys.stop] + p.sum() * means[block]
            tiles.append(((highest + 0.5) * octaves + made[0][1], p.sum(), weighted))
        top = max(tile[0] for tile in tiles)
        weights = [2.0 ** (tile[0] - top) for tile in tiles]
        total = sum(weight * tile[1] for weight, tile in zip(weights, tiles, strict=True))
        out[row] = sum(weight * tile[2] for weight, tile in zip(weights, tiles, strict=True)) / total
    return out * operands.v_scale[0].double()


def rising_keys(q, k):
    """Every tile above the one before by more octaves than the headroom."""
    q[..., 0] = 4.0
    k[..., 0] = (torch.arange(k.shape[2]) // BLOCK * 20.0).to(k.dtype)


@pytest.mark.parametrize(
    ("q_tokens", "tokens", "change"),
    [(1, 1, None), (5, 2, None), (17, 130, None), (9, 300, None), (5, 700, rising_keys), (3, 2200, None)],
)
def test_recurrence_is_the_loop(q_tokens, tokens, change):
    q, k, v = inputs(q_tokens, tokens)
    if change:
        change(q, k)
    operands = precise_operands(q, k, v, scale=SCALE)
    # What the loop leaves out: weighted row sums in half, for the means and the denominator.
    assert relative_l2(attend_precise(operands, q_tokens)[0], looped(operands, q_tokens)) < 5e-4


def test_reference_is_the_loop():
    q, k, v = inputs(7, 300, heads=2)
    operands = quantize8_precise(q, k, v, None, True)
    result = attend8_precise(operands, SCALE)
    for head in range(2):
        for row in range(7):
            total, weighted = 0.0, torch.zeros(D, dtype=torch.float64)
            codes = []
            for key in range(300):
                dot = (operands.q.codes[0, head, row].double() @ operands.k.codes[0, head, key].double()).item()
                scale = operands.q.scale[0, head, row].item() * operands.k.scale[0, head, key].item()
                codes.append(dot * scale * SCALE * CODES_PER_NAT)
            for block, first in enumerate(range(0, 300, BLOCK)):
                keys = range(first, min(first + BLOCK, 300))
                highest = max(codes[key] for key in keys)
                weight = 2.0 ** ((highest - max(codes)) / 8)
                for key in keys:
                    p = weight * round(255 * 2.0 ** ((codes[key] - highest) / 8))
                    residual = (
                        operands.residual[0, head, key].double() * operands.residual_scale[0, head, block].double()
                    )
                    weighted += p * (residual + operands.means[0, head, block].double())
                    total += p
            # A probability that lies on a rounding tie in float32 may fall the other way.
            assert relative_l2(result[0, head, row], weighted / total) < 1e-3


def test_reference_operands_name_their_formats():
    q, k, v = inputs(5, 300, offset=3.0)
    operands = quantize8_precise(q, k, v, None, True)
    assert isinstance(operands, Operands8Precise)
    assert isinstance(operands.q, ScaledRows)
    assert operands.residual.dtype == operands.k.codes.dtype == torch.int8
    assert tuple(operands.residual_scale.shape) == (1, 1, 3, D)
    assert (operands.residual.int().abs().amax() == 127).all()
    whole = quantize8_precise(q, k, v, None, False)
    assert whole.means is None
    step = whole.residual_scale.repeat_interleave(BLOCK, 2)[:, :, :300]
    assert ((whole.residual * step - v.float()).abs() <= 0.501 * step).all()


# Against exact attention


@pytest.mark.parametrize("tokens", [*range(1, 131), 257, 1023, 4097])
def test_random_inputs_are_within_the_promise(tokens):
    q, k, v = inputs(33, tokens, seed=tokens)
    assert quantization_error(call(q, k, v), q, k, v) < (SHORT_LIMIT if tokens < 512 else RANDOM_LIMIT)


@pytest.mark.parametrize(("q_tokens", "tokens"), [(1, 500), (500, 1), (129, 300), (300, 129)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_lengths_of_queries_and_dtypes(q_tokens, tokens, dtype):
    q, k, v = inputs(q_tokens, tokens, heads=2, batch=2, dtype=dtype)
    assert quantization_error(call(q, k, v), q, k, v) < RANDOM_LIMIT


def test_a_third_of_the_error_of_the_fast_mode():
    from vc_attention.attend.hopper import attend_hopper

    q, k, v = inputs(64, 4096)
    fast = attend_hopper(hopper_operands(q, k, v, scale=SCALE), 64).view_as(q)
    assert quantization_error(call(q, k, v), q, k, v) < 0.42 * quantization_error(fast, q, k, v)


@pytest.mark.parametrize("demean", [True, False])
def test_grouped_values_by_name(demean):
    q, k, v = clustered_qkv((2, 24, 33), heads=2, dtype=torch.bfloat16)
    order = group_reference(v, None, 16, 4)[0]
    error = quantization_error(call(q[:, :, :99], k, v, order, demean=demean), q[:, :, :99], k, v)
    assert error < 1.8e-2


CASES = {
    "sharp, 4 times": (lambda q, k, v: q.mul_(4), 3.5e-2),
    "one-hot, 40 times": (lambda q, k, v: q.mul_(40), 8e-2),
    "flat": (lambda q, k, v: q.mul_(0.01), RANDOM_LIMIT),
    "queries are zero": (lambda q, k, v: q.zero_(), RANDOM_LIMIT),
    "keys are zero": (lambda q, k, v: k.zero_(), RANDOM_LIMIT),
    "rising": (lambda q, k, v: rising_keys(q, k), 8e-2),
    "keys with a mean": (lambda q, k, v: k.add_(7), RANDOM_LIMIT),
    "one loud value": (lambda q, k, v: v[:, :, 17].mul_(30), 3e-2),
    "one loud channel": (lambda q, k, v: v[..., 5].mul_(300), 2.5e-2),
    "values far from zero": (lambda q, k, v: v.add_(100), 1e-3),
}


@pytest.mark.parametrize("name", list(CASES))
def test_other_inputs_stay_close(name):
    change, limit = CASES[name]
    q, k, v = inputs(48, 1500)
    change(q, k, v)
    assert quantization_error(call(q, k, v), q, k, v) < limit


def test_a_constant_value_comes_out():
    q, k, v = inputs(33, 700)
    v[:] = torch.randn(D, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert relative_l2(call(q, k, v), v[:, :, :33]) < 5e-4


def test_garbage_in_the_padding_has_no_effect():
    q, k, v = inputs(70, 300)
    operands = precise_operands(q, k, v, scale=SCALE)
    generator = torch.Generator().manual_seed(1)
    q8, q_scale, k8 = operands.q8.clone(), operands.q_scale.clone(), operands.k8.clone()
    q8[:, 70:] = torch.randint(-127, 128, (58, D), generator=generator, dtype=torch.int8)
    q_scale[:, 70:] = float("nan")
    k8[:, 300:] = torch.randint(-127, 128, (84, D), generator=generator, dtype=torch.int8)
    changed = dataclasses.replace(operands, q8=q8, q_scale=q_scale, k8=k8)
    assert torch.equal(attend_precise(changed, 70), attend_precise(operands, 70))


# The call by name and who is served


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_reference_serves_the_mode_by_name(dtype, head_dim):
    q, k, v = random_qkv((1, 2, 700, head_dim), dtype=dtype)
    assert support(q, k, v, mode=PRECISE, implementation="reference").mode == PRECISE
    out = attention(q, k, v, mode=PRECISE, implementation="reference")
    assert out.dtype == dtype
    assert quantization_error(out, q, k, v) < RANDOM_LIMIT


def test_settings_of_the_mode():
    for family in ("sm_89", "sm_90", "sm_120", "cpu"):
        chosen = resolve(PRECISE, "auto", "auto", True, family)
        assert (chosen.qk_format, chosen.probabilities, chosen.value_format) == ("int8", "linear", "int8")
        assert resolve("auto", "auto", "auto", True, family).mode != PRECISE
    assert resolve(EIGHT_BIT, "auto", "auto", True, "sm_90").value_format == "e4m3"


@pytest.mark.parametrize(
    ("mode", "formats"),
    [
        (PRECISE, {"qk_format": "e4m3"}),
        (PRECISE, {"probabilities": "expcast"}),
        (EIGHT_BIT, {"probabilities": "linear"}),
    ],
)
def test_formats_of_another_mode_are_refused(mode, formats):
    with pytest.raises(InvalidArgument):
        attention(*random_qkv((1, 1, 8, 64), dtype=torch.bfloat16), mode=mode, implementation="reference", **formats)


@pytest.mark.parametrize("family", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_other_cards_decline_with_one_sentence(family):
    with pytest.raises(UnsupportedCall) as caught:
        choose(Call(family, PRECISE, "bfloat16", 128), "cuda")
    assert "\n" not in caught.value.reasons["cuda"]


def test_the_hopper_kernels_serve_the_mode():
    assert choose(Call("sm_90", PRECISE, "bfloat16", 128), "auto").name == "cuda"


# The host code and the guard, with plain torch in place of the kernels


def stand_in_prepare(*tensors, **arguments):
    return dataclasses.replace(precise_operands(*tensors, **arguments), flags=torch.zeros(1, dtype=torch.int32))


def stand_in_attend(operands, out, *, means=True):
    out.copy_(attend_precise(operands, out.shape[2], means=means).view_as(out))


@pytest.mark.parametrize("demean", [True, False])
def test_the_mode_runs_its_own_kernels(demean, monkeypatch):
    monkeypatch.setattr(run_cuda, "prepare_precise", stand_in_prepare)
    monkeypatch.setattr(run_cuda, "attend_precise_cuda", stand_in_attend)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    q, k, v = inputs(70, 300, heads=2)
    order = random_order(1, 2, 300)
    out = torch.full_like(q, float("nan"))
    run_cuda.run(q, k, v, order, 0.1, resolve(PRECISE, "auto", "auto", demean, "sm_90"), out)
    assert torch.equal(out, call(q, k, v, order, 0.1, demean).to(q.dtype))


@pytest.fixture
def sound(monkeypatch):
    monkeypatch.setattr(prepare_host, "prepare_precise", precise_operands)
    monkeypatch.setattr(group_host, "group_cuda", group_reference)
    monkeypatch.setattr(attend_host, "attend_precise_cuda", stand_in_attend)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "pretended")
    monkeypatch.setattr(torch.cuda, "device", lambda *_: torch.no_grad())


@pytest.mark.parametrize("dtype", DTYPES)
def test_self_test_passes_for_sound_kernels(dtype, sound):
    assert guard.self_test(CPU, dtype, PRECISE) is None


@pytest.mark.parametrize("field", ["q8", "k8", "v8", "q_scale", "k_block_scale", "v_scale", "v_block_scale", "means"])
def test_self_test_sees_a_fault_in_every_operand(field, sound, monkeypatch):
    def faulty(*tensors, **arguments):
        operands = precise_operands(*tensors, **arguments)
        value = getattr(operands, field).clone()
        value[0, 5] = value[0, 7] if value.dtype == torch.int8 else value[0, 7] * 1.02
        return dataclasses.replace(operands, **{field: value})

    monkeypatch.setattr(prepare_host, "prepare_precise", faulty)
    assert guard.self_test(CPU, torch.bfloat16, PRECISE).startswith(f"preparation: {field} differs")


@pytest.mark.parametrize("change", [lambda out: out.mul_(1.02), lambda out: out[:, :, -1].fill_(float("nan"))])
def test_self_test_sees_a_fault_in_the_output(change, sound, monkeypatch):
    def faulty(operands, out, **_):
        stand_in_attend(operands, out)
        change(out)

    monkeypatch.setattr(attend_host, "attend_precise_cuda", faulty)
    assert guard.self_test(CPU, torch.bfloat16, PRECISE).startswith("attention: ")
