"""The precise kernel and its preparation on a GPU: against their specifications and against exact attention."""

import dataclasses

import pytest
import torch
from vc_attention import attention, group_values, guard
from vc_attention.arch import PRECISE
from vc_attention.attend.precise import attend_precise
from vc_attention.attend.precise_cuda import attend_precise_cuda
from vc_attention.errors import UnsupportedCall
from vc_attention.quantize.cuda import prepare_precise
from vc_attention.quantize.precise import VALUE_LIMIT, precise_operands
from vc_attention.testing import clustered_qkv, quantization_error, relative_l2

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
D, BLOCK = 128, 128
SCALE = D**-0.5
DTYPES = (torch.bfloat16, torch.float16)
SPECIFICATION_LIMIT = {torch.bfloat16: 2.5e-3, torch.float16: 1e-3}  # rounding the output is 1.65e-3 and 2.1e-4
EXACT_LIMIT = 1.35e-2
SHORT_LIMIT = 1.5e-2
LENGTHS = (*range(1, 131), 255, 257, 640, 1023, 4095, 4096, 4097, 32760)
Q_LENGTHS = (1, 257, 64, 129, 15, 640, 128, 63, 200, 2, 255, 1000, 65)


def inputs(batch, heads, q_tokens, tokens, dtype=torch.bfloat16, seed=0, offset=0.0):
    generator = torch.Generator().manual_seed(seed)

    def normal(length):
        return torch.randn(batch, heads, length, D, generator=generator).to(DEVICE, dtype)

    return normal(q_tokens), normal(tokens), normal(tokens) + offset


def ran(operands, like):
    """What the kernel writes into memory full of NaN."""
    out = torch.full_like(like, float("nan"), memory_format=torch.contiguous_format)
    attend_precise_cuda(operands, out)
    return out


def specified(operands, like):
    return attend_precise(operands, like.shape[2]).reshape(like.shape)


# Preparation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 257, 2049, 4097])
@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
def test_operands_are_those_of_the_specification(tokens, dtype, size, poison):
    q, k, v = inputs(2, 3, tokens // 2 + 1, tokens, dtype)
    q *= size
    with poison(0xFF):
        made = prepare_precise(q, k, v, scale=SCALE)
    expected = precise_operands(q, k, v, scale=SCALE)
    for name in ("q8", "k8"):
        difference = (getattr(made, name).int() - getattr(expected, name).int()).abs()
        assert difference.max() <= 1
        assert (difference != 0).float().mean() < 1e-3
    for name in ("q_scale", "k_block_scale"):
        assert (getattr(made, name) / getattr(expected, name) - 1).abs().max() < 2e-3
    assert made.v is v
    assert int(made.flags[0]) == 0


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_narrow_loads_give_the_same_operands(offset):
    q, k, v = inputs(1, 2, 200, 300)
    wide = prepare_precise(q, k, v, scale=SCALE)
    moved = []
    for x in (q, k, v):
        memory = torch.empty(*x.shape[:3], D + offset, device=DEVICE, dtype=x.dtype)
        moved.append(memory[..., offset:].copy_(x))
    narrow = prepare_precise(*moved, scale=SCALE)
    for name in ("q8", "q_scale", "k8", "k_block_scale", "flags"):
        assert torch.equal(getattr(wide, name), getattr(narrow, name)), name
    assert torch.equal(ran(wide, q), ran(narrow, q))


def test_blocks_of_different_size_and_a_block_of_zeros():
    q, k, v = inputs(1, 1, 100, 700)
    size = torch.tensor([1.0, 0.01, 30.0, 1.0, 0.0, 5.0], device=DEVICE).repeat_interleave(BLOCK)[:700, None]
    k = (k * size).bfloat16()
    made = prepare_precise(q, k, v, scale=SCALE)
    scales = precise_operands(q, k, v, scale=SCALE).k_block_scale
    assert (made.k_block_scale / scales - 1).abs().max() < 1e-5
    assert relative_l2(ran(made, q), specified(made, q)) < SPECIFICATION_LIMIT[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [(0, 0, 0, 0), (1, 1, 1299, 127), (0, 1, 1024, 64)])
def test_a_number_that_is_not_finite_is_declined(dtype, which, bad, place):
    tensors = list(inputs(2, 2, 1300, 1300, dtype))
    tensors[which][place] = bad
    with pytest.raises(UnsupportedCall, match="NaN or infinity"):
        attention(*tensors, mode=PRECISE, implementation="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_make_finite_outputs(dtype):
    q, k, v = inputs(1, 2, 200, 1300, dtype)
    largest = min(torch.finfo(dtype).max, VALUE_LIMIT[dtype] * (1 - torch.finfo(dtype).eps / 2))
    v[:] = largest
    v[0, 0, 1299, 127] = -largest
    out = attention(q, k, v, mode=PRECISE, implementation="cuda").float()
    assert out.isfinite().all()
    assert (out[0, 1] / largest - 1).abs().max() < 1e-2


@pytest.mark.parametrize("sign", [1, -1])
def test_larger_values_are_declined(sign):
    q, k, v = inputs(1, 2, 200, 1300)
    v[0, 0, 1299, 127] = sign * VALUE_LIMIT[torch.bfloat16]
    with pytest.raises(UnsupportedCall, match=r"v bf16 numbers of 2\^81 or more"):
        attention(q, k, v, mode=PRECISE, implementation="cuda")


# The kernel


@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_length(tokens):
    q_tokens = Q_LENGTHS[tokens % len(Q_LENGTHS)]
    dtype = DTYPES[tokens % 2]
    q, k, v = inputs(1, 2, q_tokens, tokens, dtype, seed=tokens)
    operands = precise_operands(q, k, v, scale=SCALE)
    out = ran(operands, q)
    assert relative_l2(out, specified(operands, q)) < SPECIFICATION_LIMIT[dtype]
    if q_tokens >= 64:
        assert quantization_error(out, q, k, v) < (SHORT_LIMIT if tokens < 512 else EXACT_LIMIT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_video(dtype):
    q, k, v = inputs(1, 1, 75600, 75600, dtype)
    out = attention(q, k, v, mode=PRECISE, implementation="cuda")
    rows = torch.linspace(0, 75599, 512).long()
    assert out.isfinite().all()
    assert quantization_error(out[:, :, rows], q[:, :, rows], k, v) < EXACT_LIMIT


CASES = {
    "sharp": lambda q, k, v: q.mul_(4),
    "one-hot": lambda q, k, v: q.mul_(1000),
    "flat": lambda q, k, v: q.mul_(0.01),
    "zeros": lambda q, k, v: q.zero_(),
    "rising": lambda q, k, v: (
        q[..., 0].fill_(4),
        k[..., 0].copy_(torch.arange(k.shape[2], device=DEVICE) // BLOCK * 20),
    ),
    "rising slowly": lambda q, k, v: (
        q[..., 0].fill_(4),
        k[..., 0].copy_(torch.arange(k.shape[2], device=DEVICE) / 16),
    ),
    "falling": lambda q, k, v: (
        q[..., 0].fill_(4),
        k[..., 0].copy_(-(torch.arange(k.shape[2], device=DEVICE) // BLOCK) * 20),
    ),
    "one loud channel": lambda q, k, v: v[..., 5].mul_(100),
    "far from zero": lambda q, k, v: v.add_(100),
}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_inputs(name, dtype):
    q, k, v = inputs(1, 1, 200, 3000, dtype)
    CASES[name](q, k, v)
    operands = precise_operands(q, k, v, scale=SCALE)
    assert relative_l2(ran(operands, q), specified(operands, q)) < SPECIFICATION_LIMIT[dtype]


def test_a_constant_value_comes_out():
    q, k, v = inputs(1, 1, 200, 3000, torch.float16)
    v[:] = v[:, :, :1].clone()
    assert relative_l2(ran(precise_operands(q, k, v, scale=SCALE), q), v[:, :, :200]) < 1e-3


def test_clustered_values():
    q, k, v = clustered_qkv((6, 42, 60), heads=2, dtype=torch.bfloat16, device=DEVICE)
    assert quantization_error(attention(q, k, v, mode=PRECISE), q, k, v) < 1e-2


def test_garbage_in_the_padding_has_no_effect():
    q, k, v = inputs(1, 2, 200, 300)
    operands = precise_operands(q, k, v, scale=SCALE)
    q8, q_scale, k8 = operands.q8.clone(), operands.q_scale.clone(), operands.k8.clone()
    q8[:, 200:] = torch.randint(-127, 128, q8[:, 200:].shape, device=DEVICE, dtype=torch.int8)
    q_scale[:, 200:] = float("nan")
    k8[:, 300:] = torch.randint(-127, 128, k8[:, 300:].shape, device=DEVICE, dtype=torch.int8)
    longer = torch.full((1, 2, 400, D), float("nan"), device=DEVICE, dtype=v.dtype)
    longer[:, :, :300] = v
    changed = dataclasses.replace(operands, q8=q8, q_scale=q_scale, k8=k8, v=longer[:, :, :300])
    assert torch.equal(ran(changed, q), ran(operands, q))


LAYOUTS = {
    "heads inside tokens": lambda v: v.transpose(1, 2).contiguous().transpose(1, 2),
    "behind q and k": lambda v: torch.cat([v, v, v], 3)[..., 2 * D :],
    "two tokens apart": lambda v: v.repeat_interleave(2, 2)[:, :, ::2],
    "shifted by a token": lambda v: torch.cat([v[:, :, :1], v], 2)[:, :, 1:],
    "contiguous, shifted by 2 bytes": lambda v: torch.cat([v.flatten()[:1], v.flatten()])[1:].view_as(v),
    "shifted by 2 bytes": lambda v: torch.nn.functional.pad(v, (1, 7))[..., 1 : 1 + D],
    "rows of 129": lambda v: torch.nn.functional.pad(v, (0, 1))[..., :D],
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_may_lie_anywhere(layout, dtype):
    q, k, v = inputs(2, 3, 200, 300, dtype)
    operands = precise_operands(q, k, v, scale=SCALE)
    laid = LAYOUTS[layout](v)
    assert torch.equal(laid, v)
    assert torch.equal(ran(dataclasses.replace(operands, v=laid), q), ran(operands, q))


def test_one_head_of_values_for_all():
    q, k, v = inputs(2, 3, 200, 300)
    v = v[:, :1].expand_as(v)
    operands = precise_operands(q, k, v, scale=SCALE)
    assert torch.equal(ran(operands, q), ran(dataclasses.replace(operands, v=v.contiguous()), q))


@pytest.mark.parametrize("axis", ["batch", "head", "token"])
def test_strides_beyond_two_to_the_31(axis, far_apart):
    q, k, v = inputs(2, 2, 300, 300, torch.float16)
    expected = prepare_precise(q, k, v, scale=SCALE)
    *far, out = far_apart(axis, q, k, v, torch.full_like(q, float("nan")))
    made = prepare_precise(*far, scale=SCALE)
    for name in ("q8", "q_scale", "k8", "k_block_scale", "flags"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name
    attend_precise_cuda(made, out)
    assert torch.equal(out, ran(expected, q))


def test_repeats_give_the_same_bits():
    q, k, v = inputs(1, 4, 1000, 5000)
    operands = precise_operands(q, k, v, scale=SCALE)
    first = ran(operands, q)
    assert all(torch.equal(first, ran(operands, q)) for _ in range(10))


def test_a_head_gives_the_same_bits_alone():
    q, k, v = inputs(2, 3, 700, 900)
    together = attention(q, k, v, mode=PRECISE, implementation="cuda")
    alone = attention(*(x[1:, 2:] for x in (q, k, v)), mode=PRECISE, implementation="cuda")
    assert torch.equal(alone, together[1:, 2:])


def test_on_another_stream():
    q, k, v = inputs(1, 4, 1000, 5000)
    expected = attention(q, k, v, mode=PRECISE, implementation="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = attention(q, k, v, mode=PRECISE, implementation="cuda")
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, expected)


def test_a_captured_graph_follows_its_inputs():
    q, k, v = inputs(1, 2, 700, 900)
    attention(q, k, v, mode=PRECISE, implementation="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, mode=PRECISE, implementation="cuda")
    for source, target in zip(inputs(1, 2, 700, 900, seed=1), (q, k, v), strict=True):
        target.copy_(source)
    graph.replay()
    assert torch.equal(out, attention(q, k, v, mode=PRECISE, implementation="cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_the_call_by_mode(dtype, layout):
    q, k, v = inputs(2, 3, 700, 900, dtype)
    tensors = [x if layout == "BHSD" else x.transpose(1, 2) for x in (q, k, v)]
    out = attention(*tensors, mode=PRECISE, layout=layout, implementation="cuda")
    assert quantization_error(out if layout == "BHSD" else out.transpose(1, 2), q, k, v) < EXACT_LIMIT


def test_a_grouping_is_not_used():
    q, k, v = inputs(1, 2, 700, 900)
    grouping = group_values(v, clusters=16)
    with_it, without = (attention(q, k, v, mode=PRECISE, grouping=x, demean=x is None) for x in (grouping, None))
    assert torch.equal(with_it, without)


@pytest.mark.parametrize("dtype", DTYPES)
def test_self_test_passes(dtype):
    assert guard.self_test(torch.device(DEVICE), dtype, PRECISE) is None
