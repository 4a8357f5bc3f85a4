"""The 4-bit Triton kernels on a GPU: on Blackwell as they are, on any other card with their instructions emulated."""

import pytest
import torch
from vc_attention import group_values
from vc_attention.attend import self_test4, triton4
from vc_attention.attend.exact import exact_attention
from vc_attention.attend.own_block import attend_own_block
from vc_attention.attend.reference import attend4
from vc_attention.attend.run_triton4 import run
from vc_attention.attend.self_test4 import operand_fault, self_test
from vc_attention.attend.settings import resolve
from vc_attention.attend.triton4 import attend_triton4
from vc_attention.errors import UnsupportedCall
from vc_attention.quantize.reference import quantize4
from vc_attention.quantize.triton4 import lay_out, prepare4
from vc_attention.testing import clustered_qkv, random_qkv, relative_l2

from .conftest import compilations

pytestmark = [pytest.mark.gpu, pytest.mark.triton]

DEVICE = torch.device("cuda")
SCALE = 0.1
# float32 output on the same operands. A probability on the other side of a rounding tie moves by half of itself at
# most; scores are float32, so about one in 10^5 does.
SAME_OPERANDS = 1e-3
OUTPUT_ROUNDING = 2e-3  # of the output to bf16: 1.7e-3
# Of a whole call with so many rows that ties do not show, in bf16.
WHOLE_CALL = 4e-3
LENGTHS = (*range(1, 131), 255, 257, 640, 1023, 4095, 4096, 4097, 32760)
QUERY_LENGTHS = (1, 257, 64, 129, 15, 128, 63, 200)
# Self-attention of more than a block, whose own keys are attended to in 16 bit: a last block of one row, of half a
# block and one more or less, whole blocks, several, and more rows than the reference takes at once.
OWN_LENGTHS = (129, 130, 191, 192, 193, 255, 256, 257, 640, 1000, 4097)
# D, dtype, grouped, means removed. Another pair of D and dtype is a dozen kernels to compile, 16 s for D = 128.
OWN_KINDS = (
    (128, torch.bfloat16, True, True),
    (64, torch.float16, False, True),
    (128, torch.bfloat16, False, False),
    (64, torch.float16, True, False),
)
OWN_SUM = 1e-4  # octaves
LIMIT_S = 240  # a first test compiles some twenty kernels


def inputs(queries, keys, head_dim=128, dtype=torch.bfloat16, batch=1, heads=2, seed=0):
    q, k, v = random_qkv((batch, heads, max(queries, keys), head_dim), seed=seed, dtype=dtype, device=DEVICE)
    return q[:, :, :queries] + 0.5, k[:, :, :keys], v[:, :, :keys] + 0.7


def random_order(k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(k.shape[:3], generator=generator).argsort(-1).int().to(DEVICE)


def unwritten(like, dtype=None):
    return torch.full_like(like, float("nan"), dtype=dtype, memory_format=torch.contiguous_format)


def call(q, k, v, order=None, demean=True, scale=SCALE, out=None, own_block=True):
    out = unwritten(q) if out is None else out
    run(q, k, v, order, scale, resolve("4-bit", "auto", "auto", demean, "sm_120", own_block), out)
    return out


@pytest.mark.parametrize("index", range(len(LENGTHS)))
def test_every_length(index):
    keys = LENGTHS[index]
    grouped = index % 2 == 1
    demean = grouped or index % 3 != 2
    queries = QUERY_LENGTHS[index % len(QUERY_LENGTHS)]
    q, k, v = inputs(queries, keys, seed=index)
    order = random_order(k) if grouped else None
    specified = quantize4(q, k, v, order, demean)
    expected = attend4(specified, SCALE)
    laid_out = lay_out(specified, SCALE)
    output = unwritten(q, torch.float32)
    attend_triton4(laid_out, output)
    assert relative_l2(output, expected) < SAME_OPERANDS
    prepared = prepare4(q, k, v, scale=SCALE, permutation=order, demean=demean)
    if queries > 1 and keys > 1:  # one token is its own mean: what is left is rounding, and cancels in the output
        assert operand_fault(prepared, laid_out) is None
    rounded = unwritten(q)
    attend_triton4(prepared, rounded)
    assert torch.equal(call(q, k, v, order, demean, SCALE), rounded)
    # Ties that fall the other way round differently, not worse.
    exact = exact_attention(q, k, v, SCALE)
    assert relative_l2(rounded, exact) < 1.2 * relative_l2(expected, exact) + OUTPUT_ROUNDING


@pytest.mark.parametrize("index", range(len(OWN_LENGTHS)))
def test_self_attention_of_every_kind_of_length(index):
    tokens = OWN_LENGTHS[index]
    head_dim, dtype, grouped, demean = OWN_KINDS[index % len(OWN_KINDS)]
    q, k, v = inputs(tokens, tokens, head_dim, dtype, seed=index)
    order = random_order(k) if grouped else None
    specified = quantize4(q, k, v, order, demean, own_block=True)
    laid_out = lay_out(specified, SCALE)

    output = unwritten(q, torch.float32)
    seen = triton4.attend_own_block(laid_out, output) * laid_out.score_scale[:, None]
    log_sum, own = attend_own_block(specified, SCALE, slice(None))
    torch.testing.assert_close(seen[:, :tokens], log_sum[0, ..., 0], rtol=0, atol=OWN_SUM)
    assert relative_l2(output, own) < SAME_OPERANDS

    output = unwritten(q, torch.float32)
    attend_triton4(laid_out, output)
    expected = attend4(specified, SCALE)
    assert relative_l2(output, expected) < SAME_OPERANDS
    prepared = prepare4(q, k, v, scale=SCALE, permutation=order, demean=demean, own_block=True)
    assert operand_fault(prepared, laid_out) is None
    rounded = unwritten(q)
    attend_triton4(prepared, rounded)
    assert torch.equal(call(q, k, v, order, demean), rounded)
    exact = exact_attention(q, k, v, SCALE)
    assert relative_l2(rounded, exact) < 1.2 * relative_l2(expected, exact) + OUTPUT_ROUNDING


def test_without_own_keys_among_others_the_switch_changes_nothing():
    for queries, keys in ((128, 128), (300, 301)):
        tensors = inputs(queries, keys)
        assert torch.equal(call(*tensors), call(*tensors, own_block=False))
    tensors = inputs(300, 300)
    assert not torch.equal(call(*tensors), call(*tensors, own_block=False))


@pytest.mark.parametrize("axis", ["batch", "head", "token"])
def test_rows_of_self_attention_two_billion_elements_apart(axis, far_apart):
    tensors = inputs(300, 300, batch=2)
    assert torch.equal(call(*far_apart(axis, *tensors)), call(*tensors))


def test_the_length_of_a_long_video():
    q, k, v = inputs(300, 75600, heads=1)
    order = random_order(k)
    expected = attend4(quantize4(q, k, v, order, True), SCALE)
    assert relative_l2(call(q, k, v, order), expected) < WHOLE_CALL


def test_own_blocks_of_a_long_video():
    q, k, v = inputs(75600, 75600, heads=1)
    operands = prepare4(q, k, v, scale=SCALE, permutation=random_order(k), own_block=True)
    output = unwritten(q)
    assert triton4.attend_own_block(operands, output).isfinite().all()
    for rows in (slice(0, 128), slice(37760, 37888), slice(75520, 75600)):  # of 591 blocks the last has 80 rows
        exact = exact_attention(*(x[:, :, rows] for x in (q, k, v)), SCALE)
        assert relative_l2(output[:, :, rows], exact) < WHOLE_CALL  # whatever is added to all scores of a row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_self_test(dtype):
    assert self_test(DEVICE, dtype) is None


def test_self_test_notices_a_fault(monkeypatch):
    right = triton4.score_bias
    monkeypatch.setattr(triton4, "score_bias", lambda *arguments: right(*arguments).clamp_min(-1e30) * 0)
    assert "attention: relative error" in self_test(DEVICE, torch.bfloat16)
    monkeypatch.undo()
    sums = triton4.attend_own_block
    monkeypatch.setattr(triton4, "attend_own_block", lambda *arguments: sums(*arguments) * 0)
    assert "attention: relative error" in self_test(DEVICE, torch.bfloat16)
    monkeypatch.undo()
    prepared = self_test4.prepare4
    monkeypatch.setattr(self_test4, "prepare4", lambda q, k, v, **named: prepared(q, -k, v, **named))
    assert "preparation: k differs" in self_test(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("keys", [300, 500])
def test_strides_of_every_input_and_of_the_output(keys):
    q, k, v = inputs(300, keys, batch=2, heads=3)
    expected = call(q, k, v)
    joined = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    out = torch.full((2, 300, 3, 128), float("nan"), dtype=q.dtype, device=DEVICE).transpose(1, 2)
    assert torch.equal(call(*joined, out=out), expected)
    odd = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v)]  # rows not aligned to 16 bytes
    assert torch.equal(call(*odd), expected)
    assert torch.equal(call(q[1:], k[1:], v[1:]), expected[1:])


def test_launches_cut_by_scratch_memory_change_nothing(monkeypatch):
    q, k, v = inputs(700, 700)
    expected = call(q, k, v)
    monkeypatch.setattr(triton4, "BIAS_BYTES", 4 * 768 * 4)
    assert torch.equal(call(q, k, v), expected)


def test_one_compilation_serves_every_length():
    def render(queries, keys):
        q, k, v = inputs(queries, keys)
        cold = group_values(v, implementation="triton4")
        call(q, k, v, group_values(v, cold, implementation="triton4").permutation)
        call(q, k, v)  # as after the grouping's window

    modules = ("attention4", "prepare4", "feedback4", "own_block4", "group")
    render(64, 64)
    render(200, 200)
    before = compilations(*modules)
    for queries, keys in ((1, 1), (16, 16), (128, 4096), (333, 1000), (4096, 77), (129, 129), (1024, 1024)):
        render(queries, keys)
    assert compilations(*modules) == before
    assert min(before.values()) >= 1


@pytest.mark.parametrize("logit", [1e3, 1e6, 1e12, 1e30])
def test_huge_logits_stay_finite_and_inside_the_values(logit):
    q, k, v = inputs(300, 300)
    output = call((q * logit**0.5).bfloat16(), (k * logit**0.5).bfloat16(), v).float()
    assert output.isfinite().all()
    assert output.abs().max() < v.float().abs().max() * 1.1


@pytest.mark.parametrize("case", ["zero q", "zero k", "constant q", "constant k", "zero v", "constant v", "tiny"])
@pytest.mark.parametrize("queries", [140, 150])
def test_inputs_whose_scales_vanish(case, queries):
    q, k, v = inputs(queries, 150)
    changed = {
        "zero q": (q * 0, k, v),
        "zero k": (q, k * 0, v),
        "constant q": (q[:, :, :1].expand_as(q), k, v),
        "constant k": (q, k[:, :, :1].expand_as(k), v),
        "zero v": (q, k, v * 0),
        "constant v": (q, k, v[:, :, :1].expand_as(v)),
        "tiny": (q * 1e-20, k * 1e-20, v * 1e-30),
    }[case]
    expected = attend4(quantize4(*changed, None, True, own_block=True), SCALE)
    limit = 2e-2 * changed[2].float().abs().max().item()
    torch.testing.assert_close(call(*changed).float(), expected, rtol=2e-2, atol=limit)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(argument, bad):
    tensors = {name: x.clone() for name, x in zip("qkv", inputs(150, 150), strict=True)}
    tensors[argument][0, 1, 139, 127] = bad
    with pytest.raises(UnsupportedCall) as raised:
        call(**tensors)
    assert "q, k or v holds NaN or infinity" in raised.value.reasons["triton4"]


def test_a_mean_of_any_size_under_a_residual_of_zero():
    q, k, v = inputs(300, 300)
    v = torch.full_like(v, 1e36)
    torch.testing.assert_close(call(q, k, v).float(), v.float(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("queries", [140, 300])
def test_a_captured_graph_replays_on_new_numbers(queries):
    q, k, v = inputs(queries, 300)
    order = random_order(k)
    call(q, k, v, order)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(q, k, v, order)
    fresh = inputs(queries, 300, seed=1)
    for x, new in zip((q, k, v), fresh, strict=True):
        x.copy_(new)
    graph.replay()
    assert torch.equal(output, call(*fresh, order))


def test_preparation_does_not_wait_for_the_gpu():
    tensors = inputs(150, 150)
    prepare4(*tensors, scale=SCALE, own_block=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        prepare4(*tensors, scale=SCALE, own_block=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_clustered_values_with_a_grouping():
    q, k, v = clustered_qkv((6, 24, 32), heads=2, dtype=torch.bfloat16, device=DEVICE)
    order = v.float()[..., 0].argsort(-1).int()
    specified = quantize4(q, k, v, order, True, own_block=True)
    assert relative_l2(call(q, k, v, order), attend4(specified, SCALE)) < WHOLE_CALL


@pytest.mark.two_gpus
def test_tensors_on_another_than_the_current_device():
    tensors = inputs(150, 150)
    there = [x.to("cuda:1") for x in tensors]
    with torch.cuda.device(0):
        output = call(*there)
    assert output.device == there[0].device
    assert torch.equal(output.cpu(), call(*tensors).cpu())
