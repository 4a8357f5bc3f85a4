"""The precise 8-bit mode: its reference, the specification of its Hopper kernel, and who is served."""

import ctypes
import dataclasses
import math
from functools import partial

import pytest
import torch
from vc_attention import attention, group_values, guard, support, tensor_map
from vc_attention.arch import EIGHT_BIT, PRECISE
from vc_attention.attend import precise_cuda as attend_host
from vc_attention.attend import run_cuda
from vc_attention.attend.precise import LIMIT, TOP, attend_precise
from vc_attention.attend.reference import CODES_PER_NAT, attend8_precise
from vc_attention.attend.settings import resolve
from vc_attention.dispatch import Call, choose
from vc_attention.errors import InvalidArgument, UnsupportedCall
from vc_attention.group import cuda as group_host
from vc_attention.quantize import cuda as prepare_host
from vc_attention.quantize.hopper import hopper_operands
from vc_attention.quantize.operands import Operands8Precise, ScaledRows
from vc_attention.quantize.precise import precise_operands
from vc_attention.quantize.reference import quantize8_precise
from vc_attention.testing import clustered_qkv, quantization_error, random_qkv, relative_l2

D, BLOCK = 128, 128
SCALE = D**-0.5
DTYPES = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
RANDOM_LIMIT = 1.35e-2  # on normal inputs; 1.18e-2 at 75,600 tokens
SHORT_LIMIT = 1.5e-2  # 33 rows over a few keys scatter


def inputs(q_tokens, tokens, heads=1, batch=1, dtype=torch.bfloat16, seed=0, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    lengths = (q_tokens, tokens, tokens)
    q, k, v = (torch.randn(batch, heads, length, D, generator=generator) for length in lengths)
    return q.to(dtype), k.to(dtype), (v + offset).to(dtype)


def call(q, k, v, scale=SCALE):
    """The whole call in plain torch, float32."""
    return attend_precise(precise_operands(q, k, v, scale=scale), q.shape[2]).reshape(q.shape)


# Operands


@pytest.fixture(scope="module")
def blocks():
    """Three blocks of keys that differ in size, the last one short; and the rotated keys."""
    q, k, v = inputs(70, 300)
    k = (k * torch.tensor([1.0, 0.1, 0.6]).repeat_interleave(BLOCK)[:300, None]).bfloat16()
    signs = torch.tensor([[(-1) ** bin(i & j).count("1") for j in range(D)] for i in range(D)], dtype=torch.float64)
    rotated = (k[0, 0].double() - k[0, 0].double().mean(0)) @ signs / math.sqrt(D)
    return precise_operands(q, k, v, scale=0.1), rotated


def test_each_block_of_keys_has_a_scale(blocks):
    operands, rotated = blocks
    head = rotated.abs().max().item() / 127
    for block in range(3):
        rows = slice(block * BLOCK, min((block + 1) * BLOCK, 300))
        own = rotated[rows].abs().max().item() / 127
        scale = operands.k_block_scale[0, block].item() * head
        assert scale == pytest.approx(own, rel=1e-5)
        assert (operands.k8[0, rows].double() - rotated[rows] / scale).abs().max() < 0.501
        assert operands.k8[0, rows].int().abs().max() == 127
    assert (operands.k8[0, 300:] == 0).all()


def test_a_block_of_equal_keys_has_the_smallest_scale():
    q, k, v = inputs(5, 300)
    k[:, :, 128:256] = 0
    k -= k.float().mean(2, keepdim=True).bfloat16()
    k[:, :, 128:256] = k[:, :, :1] * 1e-6
    scales = precise_operands(q, k, v, scale=SCALE).k_block_scale[0]
    assert scales.max() == 1
    assert 2.0**-10 <= scales[1] < 0.02


def test_queries_are_those_of_the_fast_mode_and_values_are_the_callers():
    q, k, v = inputs(70, 300, heads=2, offset=0.5)
    fast, operands = (make(q, k, v, scale=4 * SCALE) for make in (hopper_operands, precise_operands))
    for name in ("q8", "q_scale"):
        assert torch.equal(getattr(operands, name)[:, :70], getattr(fast, name)[:, :70])
    assert operands.v is v


def test_small_queries_use_all_of_int8():
    q, k, v = inputs(70, 300)
    operands = precise_operands(q * 0.02, k, v, scale=SCALE)
    assert (operands.q8[0, :70].int().abs().amax(1) >= 126).all()
    assert (operands.q_scale[0, :70] < 0.16).all()


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 2049])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_and_dtypes(tokens, dtype):
    q, k, v = inputs(tokens // 2 + 1, tokens, heads=2, batch=2, dtype=dtype)
    operands = precise_operands(q, k, v, scale=SCALE)
    count = -(-tokens // BLOCK)
    assert (operands.k8.dtype, tuple(operands.k8.shape)) == (torch.int8, (4, count * BLOCK, D))
    assert (operands.k_block_scale.dtype, tuple(operands.k_block_scale.shape)) == (torch.float32, (4, count))
    assert operands.k8.int().abs().max() <= 127


# The recurrence against a loop


def looped(operands, q_tokens):
    """One head by loops: one row and one key at a time, all in float64; probabilities relative to the row's largest."""
    q8, k8, v = operands.q8[0].double(), operands.k8[0].double(), operands.v[0, 0].double()
    keys = len(v)
    out = torch.zeros(q_tokens, D, dtype=torch.float64)
    for row in range(q_tokens):
        octaves = []
        for key in range(keys):
            unit = operands.q_scale[0, row].item() / 2048 * operands.k_block_scale[0, key // BLOCK].item()
            octaves.append((q8[row] @ k8[key]).item() * unit)
        highest = math.ceil(max(octaves))  # a whole octave: the 16-bit rounding below is then that of any reference
        p = [2.0 ** (octave - highest) for octave in octaves]
        rounded = torch.tensor(p, dtype=torch.float64).to(operands.v.dtype).double()
        out[row] = rounded @ v / sum(p)
    return out


def rising_keys(q, k):
    """Every tile above the one before by more octaves than the headroom."""
    q[..., 0] = 4.0
    k[..., 0] = (torch.arange(k.shape[2]) // BLOCK * 20.0).to(k.dtype)


@pytest.mark.parametrize(
    ("q_tokens", "tokens", "change"),
    [(1, 1, None), (5, 2, None), (17, 130, None), (9, 300, None), (5, 700, rising_keys), (3, 2200, None)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_recurrence_is_the_loop(q_tokens, tokens, change, dtype):
    q, k, v = inputs(q_tokens, tokens, dtype=dtype)
    if change:
        change(q, k)
    operands = precise_operands(q, k, v, scale=SCALE)
    # An exponential that lies on a tie of the 16-bit numbers may fall the other way.
    limit = 5e-4 if dtype == torch.bfloat16 else 2e-4
    assert relative_l2(attend_precise(operands, q_tokens)[0], looped(operands, q_tokens)) < limit


def test_no_probability_overflows_a_half():
    assert torch.finfo(torch.float16).max >= 2.0**LIMIT
    q, k, v = inputs(5, 1300, dtype=torch.float16)
    q[..., 0] = 4.0
    for octaves in (LIMIT - TOP - 0.5, LIMIT - TOP + 0.5, 2 * LIMIT):  # from tile to tile
        k[..., 0] = torch.arange(1300) // BLOCK * (octaves * math.log(2) / (4 * SCALE))
        assert quantization_error(call(q, k, v), q, k, v) < 0.1  # INT8 alone: keys are one channel


def test_reference_is_the_loop():
    q, k, v = inputs(7, 300, heads=2)
    operands = quantize8_precise(q, k, v)
    result = attend8_precise(operands, SCALE)
    for head in range(2):
        for row in range(7):
            codes = []
            for key in range(300):
                dot = (operands.q.codes[0, head, row].double() @ operands.k.codes[0, head, key].double()).item()
                scale = operands.q.scale[0, head, row].item() * operands.k.scale[0, head, key].item()
                codes.append(dot * scale * SCALE * CODES_PER_NAT)
            p, values = [2.0 ** ((code - max(codes)) / 8) for code in codes], v[0, head].double()
            # The loop does not round probabilities.
            assert relative_l2(result[0, head, row], torch.tensor(p).double() @ values / sum(p)) < 2e-3


def test_reference_operands_name_their_formats():
    q, k, v = inputs(5, 300, offset=3.0)
    operands = quantize8_precise(q, k, v)
    assert isinstance(operands, Operands8Precise)
    assert isinstance(operands.q, ScaledRows)
    assert operands.q.codes.dtype == operands.k.codes.dtype == torch.int8
    assert operands.v is v


# Against exact attention


@pytest.mark.parametrize("tokens", [*range(1, 131), 257, 1023, 4097])
def test_random_inputs_are_within_the_promise(tokens):
    q, k, v = inputs(33, tokens, seed=tokens)
    assert quantization_error(call(q, k, v), q, k, v) < (SHORT_LIMIT if tokens < 512 else RANDOM_LIMIT)


@pytest.mark.parametrize(("q_tokens", "tokens"), [(1, 500), (500, 1), (129, 300), (300, 129)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_lengths_of_queries_and_dtypes(q_tokens, tokens, dtype):
    q, k, v = inputs(q_tokens, tokens, heads=2, batch=2, dtype=dtype)
    assert quantization_error(call(q, k, v), q, k, v) < SHORT_LIMIT


def test_a_third_of_the_error_of_the_fast_mode():
    from vc_attention.attend.hopper import attend_hopper

    q, k, v = inputs(64, 4096)
    fast = attend_hopper(hopper_operands(q, k, v, scale=SCALE), 64).view_as(q)
    assert quantization_error(call(q, k, v), q, k, v) < 0.33 * quantization_error(fast, q, k, v)


def test_clustered_values():
    q, k, v = clustered_qkv((2, 24, 33), heads=2, dtype=torch.bfloat16)
    assert quantization_error(call(q[:, :, :99], k, v), q[:, :, :99], k, v) < 1e-2


CASES = {
    "sharp, 4 times": (lambda q, k, v: q.mul_(4), 3.5e-2),
    "one-hot, 40 times": (lambda q, k, v: q.mul_(40), 8e-2),
    "flat": (lambda q, k, v: q.mul_(0.01), 3e-3),
    "queries are zero": (lambda q, k, v: q.zero_(), 2e-3),
    "keys are zero": (lambda q, k, v: k.zero_(), 2e-3),
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
    assert quantization_error(out, q, k, v) < SHORT_LIMIT


def test_the_mode_has_no_use_for_a_grouping_or_means():
    q, k, v = random_qkv((1, 2, 300, D), dtype=torch.bfloat16)
    out = attention(q, k, v, mode=PRECISE, implementation="reference")
    settings = {"grouping": group_values(v, clusters=4), "demean": False}
    assert torch.equal(attention(q, k, v, mode=PRECISE, implementation="reference", **settings), out)


def test_settings_of_the_mode():
    for family in ("sm_89", "sm_90", "sm_120", "cpu"):
        chosen = resolve(PRECISE, "auto", "auto", True, family)
        assert (chosen.qk_format, chosen.probabilities) == ("int8", "exp2")
        assert resolve("auto", "auto", "auto", True, family).mode != PRECISE


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


def stand_in_prepare(*tensors, refused=False, **arguments):
    flags = torch.tensor([int(refused)], dtype=torch.int32)
    return dataclasses.replace(precise_operands(*tensors, **arguments), flags=flags)


def stand_in_attend(operands, out):
    out.copy_(attend_precise(operands, out.shape[2]).view_as(out))


@pytest.mark.parametrize("demean", [True, False])
def test_the_mode_runs_its_own_kernels_in_sequence_order(demean, monkeypatch):
    monkeypatch.setattr(run_cuda, "prepare_precise", stand_in_prepare)
    monkeypatch.setattr(run_cuda, "attend_precise_cuda", stand_in_attend)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    q, k, v = inputs(70, 300, heads=2)
    order = torch.rand(1, 2, 300).argsort(-1).int()
    out = torch.full_like(q, float("nan"))
    run_cuda.run(q, k, v, order, 0.1, resolve(PRECISE, "auto", "auto", demean, "sm_90"), out)
    assert torch.equal(out, call(q, k, v, 0.1).to(q.dtype))


def test_the_mode_says_what_it_refuses(monkeypatch):
    monkeypatch.setattr(run_cuda, "prepare_precise", partial(stand_in_prepare, refused=True))
    monkeypatch.setattr(run_cuda, "attend_precise_cuda", stand_in_attend)
    q, k, v = inputs(70, 300)
    with pytest.raises(UnsupportedCall) as caught:
        run_cuda.run(q, k, v, None, 0.1, resolve(PRECISE, "auto", "auto", True, "sm_90"), torch.empty_like(q))
    assert caught.value.reasons == {"cuda": "q, k or v holds NaN or infinity, or v bf16 numbers of 2^81 or more"}


LAYOUTS = {
    "contiguous": lambda v: v,
    "heads inside tokens": lambda v: v.transpose(1, 2).contiguous().transpose(1, 2),
    "behind q and k": lambda v: torch.cat([v, v, v], 3)[..., 2 * D :],
    "one head for all": lambda v: v[:, :1].expand_as(v),
    "two tokens apart": lambda v: v.repeat_interleave(2, 2)[:, :, ::2],
    "shifted by a token": lambda v: torch.cat([v[:, :, :1], v], 2)[:, :, 1:],
    "contiguous, shifted by 2 bytes": lambda v: torch.cat([v.flatten()[:1], v.flatten()])[1:].view_as(v),
    "shifted by 4 bytes": lambda v: torch.nn.functional.pad(v, (2, 6))[..., 2 : 2 + D],
    "rows of 132": lambda v: torch.nn.functional.pad(v, (0, 4))[..., :D],
}
COPIED = ("one head for all", "contiguous, shifted by 2 bytes", "shifted by 4 bytes", "rows of 132")


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_values_are_read_where_they_lie_if_tma_can(layout, monkeypatch):
    """What the driver is told about v, for the kernel's arguments."""
    told = []

    def encode(made, kind, rank, address, sizes, strides_bytes, box, *_):
        told.append((kind, rank, address, tuple(sizes), tuple(strides_bytes), tuple(box)))
        return 0

    launched = []
    monkeypatch.setattr(tensor_map, "_encode_tiled", lambda: encode)
    monkeypatch.setattr(tensor_map, "check", lambda result: None)
    tensor_map._encoded.cache_clear()
    monkeypatch.setattr(attend_host, "launch", lambda *arguments: launched.append(arguments))
    q, k, v = inputs(300, 200, heads=3, batch=2)
    laid = LAYOUTS[layout](v)
    assert torch.equal(laid, v) or layout == "one head for all"
    out = torch.empty_like(q)
    attend_host.attend_precise_cuda(dataclasses.replace(precise_operands(q, k, v, scale=SCALE), v=laid), out)
    tensor_map._encoded.cache_clear()
    assert [x[1] for x in told] == [3, 3, 4]
    assert [x[3] for x in told[:2]] == [(D, 300, 6), (D, 200, 6)]
    kind, _, address, sizes, strides_bytes, box = told[2]
    assert (kind, sizes, box) == (9, (D, 200, 3, 2), (64, 128, 1, 1))
    assert (address == laid.data_ptr()) == (layout not in COPIED)
    assert address % 16 == 0
    expected = v if layout in COPIED else laid
    assert strides_bytes == tuple(2 * stride for stride in expected.stride()[2::-1])
    assert all(stride % 16 == 0 for stride in strides_bytes)
    _, device, grid, threads, arguments = launched[0]
    assert (grid, threads) == ((4, 6, 1), 384)
    assert [type(x) for x in arguments[3:]] == [ctypes.c_uint64] * 3 + [ctypes.c_int64] * 3 + [ctypes.c_int] * 4
    assert [x.value for x in arguments[-4:]] == [300, 384, 200, 3]


def test_a_dimension_of_one_element_may_have_any_stride(monkeypatch):
    v = torch.zeros(999, dtype=torch.float16).as_strided((1, 1, 3, D), (7, 5, 136, 1))
    assert tensor_map.fits_tensor_map(v)
    assert not tensor_map.fits_tensor_map(v.as_strided((1, 2, 3, D), (7, 5, 136, 1)))
    assert not tensor_map.fits_tensor_map(v.as_strided((1, 1, 3, D), (7, 5, 136, 2)))


@pytest.fixture
def sound(monkeypatch):
    """Plain torch in place of the kernels; the mode's self-test has no need of a grouping."""
    monkeypatch.setattr(prepare_host, "prepare_precise", precise_operands)
    monkeypatch.setattr(group_host, "group_cuda", None)
    monkeypatch.setattr(attend_host, "attend_precise_cuda", stand_in_attend)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "pretended")
    monkeypatch.setattr(torch.cuda, "device", lambda *_: torch.no_grad())


@pytest.mark.parametrize("dtype", DTYPES)
def test_self_test_passes_for_sound_kernels(dtype, sound):
    assert guard.self_test(CPU, dtype, PRECISE) is None


@pytest.mark.parametrize("field", ["q8", "k8", "q_scale", "k_block_scale"])
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
    def faulty(operands, out):
        stand_in_attend(operands, out)
        change(out)

    monkeypatch.setattr(attend_host, "attend_precise_cuda", faulty)
    assert guard.self_test(CPU, torch.bfloat16, PRECISE).startswith("attention: ")
