"""The 4-bit Triton kernels in Triton's interpreter: the source that a card compiles, instructions emulated."""

import dataclasses
import math
import weakref

import pytest
import torch
from vc_attention import UnsupportedCall
from vc_attention.attend import own_block, triton4
from vc_attention.attend.reference import attend4
from vc_attention.attend.run_triton4 import run
from vc_attention.attend.self_test4 import operand_fault
from vc_attention.attend.settings import resolve
from vc_attention.attend.triton4 import attend_own_block, attend_triton4, launches
from vc_attention.quantize.reference import quantize4
from vc_attention.quantize.triton4 import KEY_ORDER, lay_out, prepare4
from vc_attention.testing import random_qkv, relative_l2

# Same arithmetic in another order of additions; measured at most 2e-7 but for huge logits.
SAME_OPERANDS = 1e-6
# In the own block a probability here and there is rounded to 16 bit the other way, by 2^-8 of itself; measured 6e-6.
SAME_OWN_BLOCK = 2e-5
WHOLE_CALL = 5e-4  # rounding the output to fp16 is 2.1e-4; the interpreter rounds to bf16 towards zero
CODES = ("q", "q_scales", "k", "k_scales", "v", "v_scales")
# Queries, keys, D, dtype, means removed, grouped; and the branch.
CASES = [
    (1, 1, 64, torch.bfloat16, True, False),  # one token
    (1, 130, 128, torch.float16, True, True),  # one query, its own block mean; keys beyond a block
    (128, 128, 64, torch.float16, True, False),  # whole blocks
    (130, 129, 64, torch.bfloat16, False, True),  # query rows beyond a block, sums by the product with ones
    (40, 300, 128, torch.bfloat16, True, True),  # three tiles, the last one short
    (77, 33, 128, torch.float16, False, False),  # one short tile
    (31, 272, 64, torch.bfloat16, True, False),  # groups of 16 that are all padding
    # Self-attention of more than a block: its own keys in 16 bit.
    (129, 129, 64, torch.bfloat16, True, True),  # a last block of one row
    (192, 192, 128, torch.float16, False, False),  # of one half, sums by the product with ones
    (256, 256, 64, torch.bfloat16, False, True),  # whole blocks
    (300, 300, 128, torch.bfloat16, True, False),  # a first tile that is all own keys
]


def inputs(queries, keys, head_dim, dtype=torch.bfloat16, batch=1, heads=1, seed=0):
    """Normal q, k, v; values and queries with an offset."""
    q, k, v = random_qkv((batch, heads, max(queries, keys), head_dim), seed=seed, dtype=dtype)
    return q[:, :, :queries] + 0.5, k[:, :, :keys], v[:, :, :keys] + 0.7


def random_order(k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(k.shape[:3], generator=generator).argsort(-1).int()


def attended(operands, like, dtype=torch.float32):
    """What the kernel writes into memory full of NaN."""
    out = torch.full_like(like, float("nan"), dtype=dtype, memory_format=torch.contiguous_format)
    attend_triton4(operands, out)
    return out


def whole_call(q, k, v, order=None, demean=True, scale=0.1, own_block=True):
    out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    run(q, k, v, order, scale, resolve("4-bit", "auto", "auto", demean, "cpu", own_block), out)
    return out


@pytest.mark.parametrize(("queries", "keys", "head_dim", "dtype", "demean", "grouped"), CASES)
def test_attention_equals_the_reference_on_its_operands(queries, keys, head_dim, dtype, demean, grouped):
    q, k, v = inputs(queries, keys, head_dim, dtype)
    specified = quantize4(q, k, v, random_order(k) if grouped else None, demean, own_block=True)
    expected = attend4(specified, head_dim**-0.5)
    limit = SAME_OPERANDS if specified.own is None else SAME_OWN_BLOCK
    assert relative_l2(attended(lay_out(specified, head_dim**-0.5), q), expected) < limit


@pytest.mark.parametrize(("queries", "keys", "head_dim", "dtype", "demean", "grouped"), CASES)
def test_preparation_gives_the_references_operands(queries, keys, head_dim, dtype, demean, grouped):
    q, k, v = inputs(queries, keys, head_dim, dtype, seed=1)
    order = random_order(k) if grouped else None
    expected = lay_out(quantize4(q, k, v, order, demean, own_block=True), 0.1)
    actual = prepare4(q, k, v, scale=0.1, permutation=order, demean=demean, own_block=True)
    assert (actual.own is None) == (expected.own is None) == (queries != keys or keys <= 128)
    assert operand_fault(actual, expected, code_limit=1e-3) is None
    if demean:
        torch.testing.assert_close(actual.means, expected.means, rtol=1e-6, atol=0)
    else:
        assert actual.means is None
    assert (actual.v == expected.v).all()
    assert int(actual.flags) == 0


def test_whole_call_equals_the_reference():
    q, k, v = inputs(20, 150, 128, torch.float16, batch=2, heads=2)
    order = random_order(k)
    expected = attend4(quantize4(q, k, v, order, True), 0.1)
    assert relative_l2(whole_call(q, k, v, order), expected) < WHOLE_CALL


@pytest.mark.parametrize(("dtype", "head_dim", "tokens"), [(torch.bfloat16, 64, 129), (torch.float16, 128, 300)])
def test_the_own_block_equals_its_specification(dtype, head_dim, tokens):
    q, k, v = inputs(tokens, tokens, head_dim, dtype, heads=2)
    specified = quantize4(q, k, v, random_order(k), True, own_block=True)
    operands = lay_out(specified, 0.1)
    output = torch.full_like(q, float("nan"), dtype=torch.float32)
    seen = attend_own_block(operands, output) * operands.score_scale[:, None]
    log_sum, expected = own_block.attend_own_block(specified, 0.1, slice(None))
    torch.testing.assert_close(seen[:, :tokens], log_sum[0, :, :, 0], rtol=0, atol=1e-5)
    assert relative_l2(output, expected) < SAME_OWN_BLOCK


@pytest.mark.parametrize("grouped", [True, False])
def test_the_bias_leaves_out_the_keys_of_the_own_block_and_padding(grouped):
    q, k, v = inputs(300, 300, 64)
    order = random_order(k) if grouped else None
    operands = prepare4(q, k, v, scale=0.1, permutation=order, own_block=True)
    bias = triton4.score_bias(operands, range(1), range(1, 3))  # as in a launch of some blocks
    tokens = torch.arange(384) if order is None else torch.nn.functional.pad(order[0, 0], (0, 84), value=300)
    tokens = tokens.unflatten(0, (-1, 32))[:, list(KEY_ORDER)].flatten()
    left_out = (tokens // 128 == torch.arange(1, 3)[:, None]) | (tokens >= 300)
    assert torch.equal(bias[0] == -torch.inf, left_out)
    assert bias[0][~left_out].isfinite().all()


@pytest.mark.parametrize("tokens", [128, 150])
def test_without_own_keys_among_others_the_switch_changes_nothing(tokens):
    q, k, v = inputs(tokens, tokens, 64)
    cross = (q[:, :, 1:], k, v)
    assert torch.equal(whole_call(*cross), whole_call(*cross, own_block=False))
    same = torch.equal(whole_call(q, k, v), whole_call(q, k, v, own_block=False))
    assert same == (tokens == 128)


@pytest.mark.parametrize("octaves", [1e-3, 30.0, 3e5])
@pytest.mark.parametrize("nearest", ["own keys", "other keys"])
def test_one_part_far_above_the_other_is_the_output(nearest, octaves):
    # A query of block 0 points along one channel, a key of block 0 along or against it: scores differ by the octaves.
    q, k, v = inputs(200, 200, 64)
    sign = 1 if nearest == "own keys" else -1
    block = torch.where(torch.arange(200) < 128, 1.0, -1.0)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 3] = block * (octaves * math.log(2) / 0.2) ** 0.5
    k[..., 3] = sign * q[..., 3]
    output = whole_call(q, k, v).float()
    expected = attend4(quantize4(q, k, v, None, True, own_block=True), 0.1)
    assert output.isfinite().all()
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    if octaves >= 30:
        means = torch.stack([x.float().mean(2)[0, 0] for x in (v[:, :, :128], v[:, :, 128:])])
        torch.testing.assert_close(output[0, 0, [0, 199]], means if sign > 0 else means.flip(0), rtol=5e-2, atol=5e-2)


def test_output_in_memory_that_kernels_cannot_write():
    q, k, v = inputs(140, 140, 64)
    memory = torch.full((1, 1, 140, 67), float("nan"), dtype=q.dtype)
    run(q, k, v, None, 0.1, resolve("4-bit", "auto", "auto", True, "cpu"), memory[..., 1:65])
    assert torch.equal(memory[..., 1:65], whole_call(q, k, v))
    assert memory[..., [0, 65, 66]].isnan().all()


@pytest.mark.parametrize("scale", [-0.1, 0.0, 1e-30])
@pytest.mark.parametrize("tokens", [40, 140])
def test_any_softmax_scale(scale, tokens):
    q, k, v = inputs(tokens, tokens, 64, torch.float16)
    expected = attend4(quantize4(q, k, v, None, True, own_block=True), scale)
    assert relative_l2(whole_call(q, k, v, scale=scale), expected) < WHOLE_CALL


def test_strides_of_every_input_and_of_the_output():
    q, k, v = inputs(140, 140, 64, batch=1, heads=2)
    expected = whole_call(q, k, v)
    joined = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not joined[0].is_contiguous()
    out = torch.full((1, 140, 2, 64), float("nan"), dtype=q.dtype).transpose(1, 2)
    run(*joined, None, 0.1, resolve("4-bit", "auto", "auto", True, "cpu"), out)
    assert torch.equal(out, expected)
    odd = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v)]  # rows not aligned to 16 bytes
    assert torch.equal(whole_call(*odd), expected)


def test_launches_cut_by_scratch_memory_change_nothing(monkeypatch):
    q, k, v = inputs(300, 300, 64)
    operands = prepare4(q, k, v, scale=0.1, own_block=True)
    expected = attended(operands, q)
    monkeypatch.setattr(triton4, "BIAS_BYTES", 2 * 384 * 4)  # two query blocks of one head
    assert [len(blocks) for _, blocks in launches(1, 3, 3)] == [2, 1]
    assert torch.equal(attended(operands, q), expected)


def test_one_bias_is_held_at_a_time(monkeypatch):
    q, k, v = inputs(300, 130, 64)
    operands = prepare4(q, k, v, scale=0.1)
    make, made, held = triton4.score_bias, [], []

    def watched(*arguments):
        held.append(sum(bias() is not None for bias in made))
        bias = make(*arguments)
        made.append(weakref.ref(bias))
        return bias

    monkeypatch.setattr(triton4, "BIAS_BYTES", 256 * 4)  # one query block
    monkeypatch.setattr(triton4, "score_bias", watched)
    attended(operands, q)
    assert held == [0, 0, 0]
    assert made[-1]() is None


def test_launches_cover_every_head_and_block_once():
    covered = [(h, b) for heads, blocks in launches(40, 591, 591) for h in heads for b in blocks]
    assert sorted(covered) == [(h, b) for h in range(40) for b in range(591)]
    assert [len(heads) for heads, _ in launches(40, 591, 591)] == [3] * 13 + [1]  # 536 MB of bias
    assert len(list(launches(1, 4000, 4000))) > 1  # one head whose bias is 8 GB


@pytest.mark.parametrize("logit", [1e3, 1e6, 1e12, 1e30])
@pytest.mark.parametrize("queries", [30, 150])
def test_huge_logits_stay_finite_and_inside_the_values(logit, queries):
    q, k, v = inputs(queries, 150, 64)
    output = whole_call((q * logit**0.5).bfloat16(), (k * logit**0.5).bfloat16(), v).float()
    assert output.isfinite().all()
    assert output.abs().max() < v.float().abs().max() * 1.1


@pytest.mark.parametrize("case", ["zero q", "zero k", "constant q", "constant k", "zero v", "constant v", "tiny"])
@pytest.mark.parametrize("tokens", [(40, 50), (140, 140)])
def test_inputs_whose_scales_vanish(case, tokens):
    q, k, v = inputs(*tokens, 64)
    changed = {
        "zero q": (q * 0, k, v),
        "zero k": (q, k * 0, v),
        "constant q": (q[:, :, :1].expand_as(q), k, v),
        "constant k": (q, k[:, :, :1].expand_as(k), v),
        "zero v": (q, k, v * 0),
        "constant v": (q, k, v[:, :, :1].expand_as(v)),
        "tiny": (q * 1e-20, k * 1e-20, v * 1e-30),
    }[case]
    output = whole_call(*changed)
    expected = attend4(quantize4(*changed, None, True, own_block=True), 0.1)
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2 * changed[2].float().abs().max().item())


@pytest.mark.parametrize("size", [1e36, -2e36])
def test_a_mean_of_any_size_under_a_residual_of_zero(size):
    q, k, v = inputs(40, 300, 64)
    v = torch.full_like(v, size)
    torch.testing.assert_close(whole_call(q, k, v).float(), v[:, :, :40].float(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_finite_is_refused(argument, bad):
    tensors = dict(zip("qkv", inputs(40, 50, 64), strict=True))
    tensors[argument] = tensors[argument].clone()
    tensors[argument][0, 0, 39, 63] = bad
    with pytest.raises(UnsupportedCall) as raised:
        whole_call(**tensors)
    assert "q, k or v holds NaN or infinity" in raised.value.reasons["triton4"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_products_beyond_float32_are_refused():
    q, k, v = inputs(40, 50, 64)
    with pytest.raises(UnsupportedCall):
        whole_call(q * 1e20, k * 1e20, v)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_products_of_rows_beyond_float32_are_refused_where_they_are_made():
    q, k, v = (torch.cat([x, -x] * 2, dim=2) for x in inputs(64, 64, 64))  # without means 4-bit scores alone are served
    large = q * 1e20, k * 1e20, v
    assert whole_call(*large, own_block=False).isfinite().all()
    with pytest.raises(UnsupportedCall, match="products could pass 1e37"):
        whole_call(*large)


def test_a_scale_of_zero_makes_the_size_of_products_meaningless():
    q, k, v = inputs(140, 140, 64)
    assert torch.equal(whole_call(q * 1e20, k * 1e20, v, scale=0.0), whole_call(q, k, v, scale=0.0))


def test_inputs_are_left_alone():
    q, k, v = inputs(40, 50, 64)
    before = [x.clone() for x in (q, k, v)]
    whole_call(q, k, v)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def test_the_comparison_of_operands_notices_each():
    operands = prepare4(*inputs(130, 130, 64), scale=0.1, own_block=True)
    for name in CODES:
        changed = getattr(operands, name).clone()
        changed[:, :4] ^= 1
        assert name in operand_fault(dataclasses.replace(operands, **{name: changed}), operands)
    for name in ("v_scale", "score_scale"):
        assert name in operand_fault(dataclasses.replace(operands, **{name: getattr(operands, name) * 1.001}), operands)
    for name in ("q_scale", "octaves", "q_means", "key_mean"):
        own = dataclasses.replace(operands.own, **{name: getattr(operands.own, name) * 1.001})
        assert name in operand_fault(dataclasses.replace(operands, own=own), operands)
