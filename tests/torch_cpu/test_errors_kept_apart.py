"""kernels/testing.py: error of the number formats and error of an implementation are measured apart."""

import pytest
import torch
from vc_attention.attend.exact import exact_attention
from vc_attention.attend.reference import attend4, attend8
from vc_attention.group.blocks import removed_energy
from vc_attention.quantize.reference import quantize4, quantize8
from vc_attention.testing import (
    clustered_qkv,
    implementation_error,
    quantization_error,
    random_qkv,
    relative_l2,
    worst_row_cosine,
)

SCALE = 64**-0.5
CASES = {
    "8-bit expcast": (lambda q, k, v: quantize8(q, k, v, None, "int8", True), "expcast"),
    "8-bit exp2": (lambda q, k, v: quantize8(q, k, v, None, "e4m3", True), "exp2"),
    "4-bit": (lambda q, k, v: quantize4(q, k, v, None, True), "exp2"),
    "4-bit, own block": (lambda q, k, v: quantize4(q, k, v, None, True, own_block=True), "exp2"),
}
# What an implementation may differ by. Additions in another order: 2^-24 a step, below 1e-6 in all. Scores that float32
# rounds to the other side of a code: about one in 10^5, a code is 9 %. A bf16 output: 2^-9 root mean square.
ALLOWED = 3e-3


@pytest.fixture(params=list(CASES))
def case(request):
    """Inputs, operands, the reference's output and its kind of probabilities."""
    quantize, probabilities = CASES[request.param]
    q, k, v = random_qkv((1, 2, 300, 64))
    operands = quantize(q, k, v)
    output = attend4(operands, SCALE) if request.param.startswith("4-bit") else attend8(operands, SCALE, probabilities)
    return (q, k, v), operands, output, probabilities


def test_reference_has_quantization_error_and_no_implementation_error(case):
    inputs, operands, output, probabilities = case
    assert implementation_error(output, operands, SCALE, probabilities) == 0.0
    assert quantization_error(output, *inputs) > 0.02


def test_exact_attention_has_no_quantization_error_and_is_no_implementation(case):
    inputs, operands, _, probabilities = case
    exact = exact_attention(*inputs)
    assert quantization_error(exact, *inputs) == 0.0
    assert implementation_error(exact, operands, SCALE, probabilities) > 0.02


def test_an_injected_fault_of_one_percent_is_caught_by_the_implementation_error_only(case):
    inputs, operands, output, probabilities = case
    fault = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    faulty = output + fault / fault.norm() * output.norm() * 1e-2
    assert implementation_error(faulty, operands, SCALE, probabilities) == pytest.approx(1e-2, rel=1e-3)
    assert implementation_error(faulty, operands, SCALE, probabilities) > 3 * ALLOWED
    before, after = quantization_error(output, *inputs), quantization_error(faulty, *inputs)
    assert after < before * 1.05  # hidden in the error of the formats


@pytest.mark.parametrize("fault", ["last tile dropped", "means not restored", "wrong scale", "neighbouring head"])
def test_real_faults_are_caught(case, fault):
    (q, k, v), operands, output, probabilities = case
    kind = "4-bit" if not hasattr(operands, "residual_scale") else "8-bit"
    if fault == "last tile dropped":
        cut = [x[:, :, :256] for x in (k, v)]
        other = CASES["4-bit" if kind == "4-bit" else "8-bit expcast"][0](q, *cut)
    elif fault == "means not restored":
        other = type(operands)(**{**vars(operands), "means": operands.means * 0})
    else:
        other = operands
    scale = SCALE * 1.02 if fault == "wrong scale" else SCALE
    faulty = attend4(other, scale) if kind == "4-bit" else attend8(other, scale, probabilities)
    if fault == "neighbouring head":
        faulty = faulty.flip(1)
    assert implementation_error(faulty, operands, SCALE, probabilities) > 2 * ALLOWED


def test_allowed_rounding_passes(case):
    _, operands, output, probabilities = case
    assert implementation_error(output.bfloat16(), operands, SCALE, probabilities) < ALLOWED
    assert implementation_error(output * (1 + 2**-20), operands, SCALE, probabilities) < ALLOWED


def test_another_order_of_additions_passes(case):
    # The same recurrence in float64: other roundings, and now and then a score on the other side of a code.
    _, operands, _, probabilities = case
    double = {
        name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in vars(operands).items()
    }
    if probabilities == "exp2" and not hasattr(operands, "residual_scale"):
        output = attend4(type(operands)(**double), SCALE)
    else:
        q = type(operands.q)(operands.q.codes, operands.q.scale.double())
        k = type(operands.k)(operands.k.codes, operands.k.scale.double())
        output = attend8(type(operands)(**{**double, "q": q, "k": k}), SCALE, probabilities)
    assert implementation_error(output, operands, SCALE, probabilities) < ALLOWED


# The measures themselves


def test_relative_l2():
    assert relative_l2(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])) == 0
    assert relative_l2(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
    assert relative_l2(
        torch.tensor([1.0]).bfloat16(), torch.tensor([1.0 + 1e-12], dtype=torch.float64)
    ) == pytest.approx(1e-12, rel=1e-3)


def test_worst_row_cosine_finds_one_bad_row():
    x = torch.randn(1, 2, 50, 8, generator=torch.Generator().manual_seed(0))
    bad = x.clone()
    bad[0, 1, 49] *= -1
    assert worst_row_cosine(x, x) == pytest.approx(1)
    assert worst_row_cosine(bad, x) == pytest.approx(-1)
    assert worst_row_cosine(x * 3, x) == pytest.approx(1)


def test_quantization_error_takes_the_scale():
    q, k, v = random_qkv((1, 1, 20, 8))
    assert quantization_error(exact_attention(q, k, v, 0.5), q, k, v, 0.5) == 0
    assert quantization_error(exact_attention(q, k, v, 0.5), q, k, v) > 0.01


def test_inputs_are_the_same_for_the_same_seed():
    for make in (lambda seed: random_qkv((1, 2, 9, 8), seed), lambda seed: clustered_qkv((2, 4, 4), 2, 8, seed=seed)):
        assert all(torch.equal(x, y) for x, y in zip(make(3), make(3), strict=True))
        assert not torch.equal(make(3)[2], make(4)[2])
    assert random_qkv((1, 2, 9, 8), dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_clustered_inputs_are_like_a_video_layers():
    q, k, v = clustered_qkv((8, 16, 16), heads=3, head_dim=64)
    assert q.shape == k.shape == v.shape == (1, 3, 2048, 64)
    assert (removed_energy(v) > 0.01).all()  # measured 0.018 to 0.032; the paper's heads 0.08
    assert (removed_energy(v) < 0.1).all()
    sizes = v.abs().amax((2, 3)) / v.std((2, 3))
    assert sizes.max() > 10  # a few tokens with large values; measured 18, 20, 4.5
    assert (k.mean(2).abs().amax(-1) > 1).all()  # keys have an offset
