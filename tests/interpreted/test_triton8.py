"""The 8-bit Triton kernels against the reference on the same operands, at sizes an interpreter can bear."""

import itertools

import pytest
import torch
from vc_attention.attend.reference import attend8
from vc_attention.attend.run_triton8 import run
from vc_attention.attend.settings import Settings
from vc_attention.attend.triton8 import attend_triton8
from vc_attention.errors import UnsupportedCall
from vc_attention.quantize.reference import quantize8
from vc_attention.quantize.triton8 import from_reference, prepare8, to_reference
from vc_attention.testing import clustered_qkv, random_qkv, relative_l2

SCALE = 0.1
FORMATS = ("int8", "e4m3")
PROBABILITIES = ("expcast", "exp2")
# Queries, keys: one token, a short tile, a full one, one more, several with a short one behind.
LENGTHS = ((1, 1), (1, 127), (129, 128), (2, 129), (130, 300))
# Sums of at most 300 products in float32 against float64: (300)^0.5 / 2 roundings of 6e-8 each.
FP32_LIMIT = 5e-7
MEAN_LIMIT = 2**-16  # a block mean is two bf16 numbers


def inputs(q_tokens, tokens, head_dim, dtype=torch.bfloat16, batch=1, heads=2, seed=0):
    q, k, v = random_qkv((batch, heads, max(q_tokens, tokens), head_dim), seed=seed, dtype=dtype)
    return q[:, :, :q_tokens], k[:, :, :tokens], v[:, :, :tokens]


def shuffled(v, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(v.shape[2], generator=generator) for _ in range(v.shape[0] * v.shape[1])]
    return torch.stack(rows).view(v.shape[:3]).to(torch.int32)


def attended(operands, q, scale, probabilities):
    """Output in float32, from the kernel on the reference's operands, into poison."""
    out = torch.full(q.shape, torch.nan)
    attend_triton8(from_reference(operands, scale), out, probabilities)
    return out


def check(output, operands, scale, probabilities):
    """Hold the kernel's float32 output to the reference's on the same operands.

    Both round a score three times, in another order. Where it falls on the other side of a tie between two codes, a
    weight changes by an eighth at most; that happens to a share of 2 * 3 * 2^-24 times the score. So most rows agree
    to float32 sums, and all together to an eighth of the root of that share.
    """
    expected = attend8(operands, scale, probabilities)
    assert output.isfinite().all()
    rows = (output - expected).norm(dim=-1) / expected.norm(dim=-1)
    limit = FP32_LIMIT + (0 if operands.means is None else MEAN_LIMIT)
    assert rows.median() < limit
    scores = operands.q.dequantize() @ operands.k.dequantize().transpose(2, 3) * (scale * 11.6)
    share = 6 * 2**-24 * max(scores.abs().max().item(), 64)
    assert relative_l2(output, expected) < limit + share**0.5 / 8


@pytest.mark.parametrize("probabilities", PROBABILITIES)
@pytest.mark.parametrize("qk_format", FORMATS)
@pytest.mark.parametrize(("q_tokens", "tokens"), LENGTHS)
@pytest.mark.parametrize("demean", [True, False])
def test_attention_equals_the_reference_on_its_operands(q_tokens, tokens, qk_format, probabilities, demean):
    q, k, v = inputs(q_tokens, tokens, 64)
    operands = quantize8(q, k, v + 2, shuffled(v), qk_format, demean)
    output = attended(operands, q, SCALE, probabilities)
    check(output, operands, SCALE, probabilities)


@pytest.mark.parametrize("scale", [-0.1, 0.0, 1e-3, 3.0])
@pytest.mark.parametrize(("qk_format", "probabilities"), [("int8", "expcast"), ("e4m3", "exp2")])
def test_attention_with_any_softmax_scale(scale, qk_format, probabilities):
    q, k, v = inputs(3, 140, 128)
    operands = quantize8(q, k, v, None, qk_format, True)
    output = attended(operands, q, scale, probabilities)
    check(output, operands, scale, probabilities)


@pytest.mark.parametrize("probabilities", PROBABILITIES)
def test_one_score_far_above_all_others(probabilities):
    q, k, v = inputs(4, 200, 64)
    q, k = q * 10, k * 10  # still below the scale at which the kernel shortens a row
    operands = quantize8(q, k, v, None, "int8", True)
    output = attended(operands, q, 1.0, probabilities)
    check(output, operands, 1.0, probabilities)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("qk_format", FORMATS)
@pytest.mark.parametrize("demean", [True, False])
def test_preparation_equals_the_reference(head_dim, dtype, qk_format, demean):
    q, k, v = clustered_qkv((2, 5, 15), heads=2, head_dim=head_dim, dtype=dtype)
    q = q[:, :, :70]
    permutation = shuffled(v)
    made = prepare8(q, k, v, scale=SCALE, permutation=permutation, qk_format=qk_format, demean=demean)
    actual = to_reference(made, 70, SCALE)
    expected = quantize8(q, k, v, permutation, qk_format, demean)
    assert torch.equal(actual.residual, expected.residual)
    assert torch.equal(actual.residual_scale, expected.residual_scale)
    for one, other in ((actual.q, expected.q), (actual.k, expected.k)):
        torch.testing.assert_close(one.scale, other.scale, rtol=1e-6, atol=0)
        # Rounding ties: rotated in float32, the reference in float64.
        assert (one.codes != other.codes).float().mean() < 1e-3
        assert (one.codes.int() - other.codes.int()).abs().max() <= 1
    if demean:
        torch.testing.assert_close(actual.means, expected.means.float(), rtol=2**-16, atol=0)
    else:
        assert actual.means is None
    assert made.flags.item() == 0


def test_reference_operands_survive_the_layout_and_back():
    q, k, v = inputs(130, 300, 64)
    for qk_format, scale in itertools.product(FORMATS, (SCALE, -SCALE)):
        operands = quantize8(q, k, v, None, qk_format, True)
        back = to_reference(from_reference(operands, scale), 130, scale)
        assert torch.equal(back.q.codes, operands.q.codes)
        assert torch.equal(back.k.codes, operands.k.codes)
        assert torch.equal(back.residual, operands.residual)


def called(q, k, v, permutation=None, scale=SCALE, probabilities="expcast", out=None):
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format) if out is None else out
    run(q, k, v, permutation, scale, Settings("8-bit", "int8", probabilities, True), out)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_call_in_views_of_every_layout(dtype):
    q, k, v = inputs(65, 65, 64, dtype)
    expected = called(q, k, v)
    assert expected.isfinite().all()
    fused = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)  # [B, S, 3, H, D]
    joined = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], 2).chunk(3, -1)  # [B, S, H D] each
    around = [torch.nn.functional.pad(x, (3, 2, 1, 1), value=torch.nan)[:, :, 1:-1, 3:-2] for x in (q, k, v)]
    everywhere = {
        "fused": [x.transpose(1, 2) for x in fused.unbind(2)],
        "chunks": [x.unflatten(2, (2, 64)).transpose(1, 2) for x in joined],
        "unaligned, NaN around": around,
        "last dimension strided": [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)],
    }
    for name, views in everywhere.items():
        assert not views[0].is_contiguous(), name
        assert torch.equal(called(*views), expected), name


def test_the_call_writes_into_a_view_and_nowhere_else():
    q, k, v = inputs(130, 130, 64)
    expected = called(q, k, v)
    for memory, view in (
        (torch.full((1, 130, 2, 64), 7.0).bfloat16(), lambda x: x.transpose(1, 2)),
        (torch.full((1, 2, 132, 66), 7.0).bfloat16(), lambda x: x[:, :, 1:-1, 1:-1]),
    ):
        out = view(memory)
        called(q, k, v, out=out)
        assert torch.equal(out, expected)
        out.fill_(7.0)
        assert (memory == 7).all()


@pytest.mark.parametrize("dim", range(3))
def test_strides_beyond_two_to_the_31(dim):
    # Four tensors whose batches, heads or tokens lie 2^31 elements apart, in memory of which few pages are touched.
    tensors = [x[:, :, :2] for x in inputs(2, 2, 64, batch=2)]
    expected = called(*tensors)
    strides = [8 * 64, 4 * 64, 64]
    strides[dim] = 2**31
    memory = torch.empty(2**31 + 2**14, dtype=torch.bfloat16)
    far = [memory.as_strided((2, 2, 2, 64), (*strides, 1), 2**11 * place) for place in range(4)]
    for view, x in zip(far, tensors, strict=False):
        view.copy_(x)
    assert torch.equal(called(*far[:3], out=far[3]), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy on infinity
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_numbers_are_refused(which, bad):
    tensors = inputs(3, 130, 64)
    tensors[which][0, 1, -1, 5] = bad
    with pytest.raises(UnsupportedCall, match="NaN or infinity"):
        called(*tensors)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy on infinity
@pytest.mark.parametrize("demean", [True, False])
@pytest.mark.parametrize("which", range(3))
def test_finite_numbers_that_float32_cannot_add_are_refused(which, demean):
    tensors = inputs(3, 130, 64)
    tensors[which][0, 1] = 3e38
    tensors[which][0, 1, :, 1::2] *= -1  # rotated keys have a mean of their own
    assert tensors[which].isfinite().all()
    out = torch.full_like(tensors[0], torch.nan)
    settings = Settings("8-bit", "int8", "expcast", demean)
    if which == 2 and not demean:  # nothing is added
        run(*tensors, None, SCALE, settings, out)
        assert out.isfinite().all()
        return
    with pytest.raises(UnsupportedCall, match="NaN or infinity"):
        run(*tensors, None, SCALE, settings, out)


@pytest.mark.parametrize("case", ["zero v", "constant v", "zero q", "zero k", "one loud channel"])
def test_inputs_whose_scales_are_extreme(case):
    q, k, v = inputs(5, 150, 64)
    if case == "zero v":
        v = v * 0
    if case == "constant v":
        v = torch.full_like(v, 3.0)
    if case == "zero q":
        q = q * 0
    if case == "zero k":
        k = k * 0
    if case == "one loud channel":
        v = v.clone()
        v[..., 7] *= 2000
    made = prepare8(q, k, v, scale=SCALE)
    expected = attend8(to_reference(made, 5, SCALE), SCALE, "expcast")
    output = called(q, k, v)
    torch.testing.assert_close(output.float(), expected, rtol=2**-8, atol=1e-6)
    if case in ("zero v", "constant v"):
        assert torch.equal(output, v[:, :, :5])


@pytest.mark.parametrize("logit", [1e3, 1e6, 1e12, 1e30])
@pytest.mark.parametrize("probabilities", PROBABILITIES)
@pytest.mark.parametrize("qk_format", FORMATS)
def test_huge_logits_pick_their_value(logit, probabilities, qk_format):
    size = (logit * 64**0.5) ** 0.5
    one_hot = (torch.eye(64)[None, None] * size).bfloat16()
    v = inputs(1, 64, 64, heads=1)[2]
    out = torch.full_like(v, torch.nan)
    run(one_hot, one_hot, v, None, 64**-0.5, Settings("8-bit", qk_format, probabilities, True), out)
    # One of 128 tokens is the whole output: half a step of E4M3 on what is left of it after the mean.
    assert (out.float() - v.float()).abs().max() < v.float().abs().max() * 0.07


@pytest.mark.parametrize("probabilities", PROBABILITIES)
def test_scales_too_small_for_float32_give_the_mean_of_the_values(probabilities):
    q, k, v = inputs(2, 130, 64)
    output = called(q, k * 1e-30, v, scale=0.0, probabilities=probabilities).float()
    # 130 values with an error of 2.6 % each, and their means in bf16.
    assert (output - v.float().mean(2, keepdim=True)).abs().max() < 4 * 0.026 / 130**0.5


@pytest.mark.parametrize("logit", [1e4, 1e8, 1e30])
def test_huge_logits_of_any_sign_stay_inside_the_values(logit):
    q, k, v = inputs(5, 200, 64)
    output = called((q.float() * logit**0.5).bfloat16(), (k.float() * logit**0.5).bfloat16(), v, scale=0.1).float()
    assert output.isfinite().all()
    assert output.abs().max() < v.float().abs().max() * 1.1
