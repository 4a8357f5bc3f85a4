"""The 8-bit Triton kernels on a GPU: against the reference on the same operands, launches, compilations, faults."""

import dataclasses

import pytest
import torch
from vc_attention import UnsupportedCall, attention, group_values, guard_triton, support
from vc_attention.arch import family
from vc_attention.attend import self_test8, triton8
from vc_attention.attend.reference import attend8
from vc_attention.attend.self_test8 import operand_fault
from vc_attention.quantize.reference import quantize8
from vc_attention.quantize.triton8 import from_reference, prepare8, to_reference
from vc_attention.testing import clustered_qkv, quantization_error, random_qkv, relative_l2

from .conftest import compilations

pytestmark = [pytest.mark.gpu, pytest.mark.triton]

LIMIT_S = 120  # compiles some twenty kernels
SCALE = 0.09
DTYPES = (torch.bfloat16, torch.float16)
FORMATS = ("int8", "e4m3")
PROBABILITIES = ("expcast", "exp2")
LENGTHS = (*range(1, 131), 257, 1000, 4095, 4096, 4097)
# Tensor cores of sm_89 and sm_90 add E4M3 products with 14 bits, in each tile of 128 keys anew: 128 truncations of
# 2^-13 that point the same way would be 1.6e-2 of a tile's sum, independent ones 1.4e-3. With E4M3 queries and keys
# scores of some 400 codes lose 2^-13 as well, 0.05 codes: so large a share of weights lands on the neighbouring code,
# an eighth away. Measured on an H200 over all lengths: 4e-4 with INT8, 1.1e-2 with E4M3.
LIMIT = {"int8": 1.4e-3, "e4m3": 0.05**0.5 / 8}
OUTPUT_ROUNDING = {torch.bfloat16: 2**-9, torch.float16: 2**-12}


def inputs(q_tokens, tokens, head_dim=128, heads=2, dtype=torch.bfloat16, seed=0, device="cuda"):
    q, k, v = random_qkv((1, heads, max(q_tokens, tokens), head_dim), seed=seed, dtype=dtype, device=device)
    return q[:, :, :q_tokens], k[:, :, :tokens], v[:, :, :tokens]


def called(q, k, v, **arguments):
    return attention(q, k, v, mode="8-bit", implementation="triton8", scale=SCALE, **arguments)


def kernel_error(q, k, v, qk_format, probabilities):
    """Relative error of the attention kernel alone: float32 output, the reference's operands, poisoned memory."""
    operands = quantize8(q, k, v, None, qk_format, True)
    out = torch.full(q.shape, torch.nan, device=q.device)
    triton8.attend_triton8(from_reference(operands, SCALE), out, probabilities)
    assert out.isfinite().all()
    return relative_l2(out, attend8(operands, SCALE, probabilities))


@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("qk_format", FORMATS)
@pytest.mark.parametrize("probabilities", PROBABILITIES)
def test_attention_equals_the_reference_at_every_length(head_dim, qk_format, probabilities):
    for tokens in LENGTHS:
        q, k, v = inputs(1 + 37 * tokens % 300, tokens, head_dim, seed=tokens)
        error = kernel_error(q, k, v, qk_format, probabilities)
        assert error < LIMIT[qk_format], f"{tokens} keys, {q.shape[2]} queries: {error}"


@pytest.mark.parametrize("tokens", [32760, 75600])
def test_attention_equals_the_reference_at_the_length_of_a_video(tokens):
    q, k, v = inputs(tokens, tokens, heads=1)
    q = q[:, :, -300:]
    assert kernel_error(q, k, v, "int8", "expcast") < LIMIT["int8"]
    output = called(q, k, v)
    assert quantization_error(output, q, k, v, SCALE) < 4.8e-2  # the reference's own limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [128, 64])
def test_the_call_equals_the_reference_on_its_operands(dtype, head_dim):
    for tokens in (1, 127, 128, 129, 1000):
        q, k, v = clustered_qkv((1, 1, 1000), heads=2, head_dim=head_dim, dtype=dtype, device="cuda")
        q, k, v = q[:, :, :200], k[:, :, :tokens], v[:, :, :tokens]
        operands = to_reference(prepare8(q, k, v, scale=SCALE), 200, SCALE)
        expected = attend8(operands, SCALE, "expcast")
        assert relative_l2(called(q, k, v), expected) < LIMIT["int8"] + OUTPUT_ROUNDING[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("tokens", [2, 200, 4097])
def test_preparation_equals_the_reference(dtype, head_dim, tokens):
    q, k, v = inputs(tokens, tokens, head_dim, dtype=dtype)
    permutation = torch.rand(v.shape[:3], device="cuda").argsort(-1).to(torch.int32)
    made = to_reference(prepare8(q, k, v, scale=SCALE, permutation=permutation), tokens, SCALE)
    expected = quantize8(q, k, v, permutation, "int8", True)
    assert operand_fault(made, expected) is None


def test_one_compilation_serves_every_length_and_layout():
    def render(q, k, v):
        cold = group_values(v, implementation="triton8")
        called(q, k, v, grouping=group_values(v, cold, implementation="triton8"))
        called(q, k, v)  # as after the grouping's window

    render(*inputs(128, 128))
    before = compilations("attention8", "prepare8", "group")
    for tokens in (1, 16, 77, 128, 4097):
        render(*inputs(tokens, tokens))
        render(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(tokens, tokens, heads=3)))
    assert compilations("attention8", "prepare8", "group") == before
    assert min(before.values()) >= 1


def test_views_equal_contiguous_tensors():
    q, k, v = inputs(200, 200, heads=3)
    expected = called(q, k, v)
    fused = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)
    assert torch.equal(called(*(x.transpose(1, 2) for x in fused.unbind(2))), expected)
    bshd = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    assert torch.equal(called(*bshd, layout="BSHD").transpose(1, 2), expected)
    odd = [torch.nn.functional.pad(x, (3, 2), value=torch.nan)[..., 3:-2] for x in (q, k, v)]
    assert torch.equal(called(*odd), expected)


@pytest.mark.parametrize("axis", ["batch", "head", "token"])
def test_strides_beyond_two_to_the_31(axis, far_apart):
    tensors = random_qkv((2, 2, 300, 128), dtype=torch.float16, device="cuda")
    expected = called(*tensors)  # but for ties: torch adds the mean of k in an order that depends on its strides
    assert relative_l2(called(*far_apart(axis, *tensors)), expected) < 1e-3


@pytest.mark.parametrize("byte", [0xFF, 0x7F])
def test_no_memory_is_read_before_it_is_written(poison, byte):
    q, k, v = inputs(130, 300)
    expected = called(q, k, v)
    with poison(byte):
        assert torch.equal(called(q, k, v), expected)


def test_second_stream():
    q, k, v = inputs(500, 2000)
    expected = called(q, k, v)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = [x.clone() for x in (q, k, v)]
        torch.cuda._sleep(50_000_000)
        for x, real in zip(late, (q, k, v), strict=True):
            x.copy_(real)
        output = called(*late)
        late[0].zero_()  # after the call, in stream order
    stream.synchronize()
    assert torch.equal(output, expected)


@pytest.mark.two_gpus
def test_a_tensor_on_the_second_gpu_while_the_first_is_current():
    q, k, v = inputs(300, 1000)
    expected = called(q, k, v)
    with torch.cuda.device(0):
        output = called(*(x.to("cuda:1") for x in (q, k, v)))
        assert torch.cuda.current_device() == 0
    assert output.device == torch.device("cuda", 1)
    assert torch.equal(output.to(q.device), expected)


@pytest.mark.parametrize("which", range(3))
def test_not_finite_numbers_are_refused(which):
    tensors = inputs(3, 300)
    tensors[which][0, 1, -1, 5] = torch.inf
    with pytest.raises(UnsupportedCall, match="NaN or infinity"):
        called(*tensors)


def test_a_captured_graph_replays_on_new_numbers():
    q, k, v = inputs(200, 500)
    called(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = called(q, k, v)
    fresh = inputs(200, 500, seed=1)
    for x, new in zip((q, k, v), fresh, strict=True):
        x.copy_(new)
    graph.replay()
    assert torch.equal(output, called(*fresh))


def test_on_a_hopper_card_cuda_comes_first():
    if family(torch.device("cuda", 0)) != "sm_90":
        pytest.skip("needs a Hopper card")
    assert support(*inputs(3, 300)).implementation == "cuda"
    assert support(*inputs(3, 300, head_dim=64)).implementation == "triton8"
    tensors, e4m3 = inputs(3, 300), {"qk_format": "e4m3"}  # which `cuda` does not make
    assert torch.equal(attention(*tensors, scale=SCALE, **e4m3), called(*tensors, **e4m3))


# The self-test


def scaled(operands, name):
    return dataclasses.replace(operands, **{name: getattr(operands, name) * 1.02})


FAULTS = {
    "softmax scale": (self_test8, "prepare8", lambda real, *a, **k: scaled(real(*a, **k), "q_scale"), "q_scale"),
    "value scale": (
        self_test8,
        "prepare8",
        lambda real, *a, **k: scaled(real(*a, **k), "residual_scale"),
        "residual_scale",
    ),
    "nothing written": (self_test8, "attend_triton8", lambda real, *a, **k: None, "not every element"),
    "output scale": (
        self_test8,
        "attend_triton8",
        lambda real, o, out, p: (real(o, out, p), out.mul_(1.02)),
        "relative",
    ),
    "crash": (self_test8, "attend_triton8", lambda real, *a: 1 / 0, "does not compile or run here"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_self_test_catches_an_injected_fault_and_disables_the_kernels(fault, monkeypatch):
    module, name, replacement, words = FAULTS[fault]
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: replacement(real, *a, **k))
    monkeypatch.setattr(guard_triton, "_verdicts", {})
    q, k, v = inputs(3, 3)
    answer = support(q, k, v, mode="8-bit", implementation="triton8")
    assert not answer
    assert words in answer.why
    with pytest.raises(UnsupportedCall, match=words):
        called(q, k, v)
    monkeypatch.undo()
    assert support(q, k, v, mode="8-bit", implementation="triton8")
