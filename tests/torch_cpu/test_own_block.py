"""The 16-bit part of the 4-bit mode in plain torch: against loops, alone and in the recurrence, and what it is for."""

import math

import pytest
import torch
from vc_attention import Grouping, attention
from vc_attention.attend import reference
from vc_attention.attend.exact import exact_attention
from vc_attention.attend.own_block import attend_own_block
from vc_attention.attend.reference import attend4
from vc_attention.formats import decode_e2m1, encode_e2m1
from vc_attention.quantize.operands import has_own_block
from vc_attention.quantize.reference import quantize4
from vc_attention.quantize.rotation import rotate
from vc_attention.testing import clustered_qkv, random_qkv, relative_l2

BLOCK = 128
SCALE = 0.2
NATS = math.log2(math.e)


def random_order(tokens, heads=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(1, heads, tokens, generator=generator).argsort(-1).int()


def case(tokens=300, head_dim=16, dtype=torch.float32, grouped=True, demean=True):
    q, k, v = random_qkv((1, 1, tokens, head_dim), seed=tokens, dtype=dtype)
    q, v = q * 2 + 0.5, v + 0.7
    return quantize4(q, k + 1, v, random_order(tokens) if grouped else None, demean, own_block=True)


def own_part(operands, i):
    """Scores in octaves of query i and the keys of its block, written from the formula, and those keys."""
    q, k = (x[0, 0].double() for x in (operands.own.q, operands.own.k))
    first = i // BLOCK * BLOCK
    keys = range(first, min(first + BLOCK, len(k)))
    mean = q[first : first + BLOCK].mean(0)
    seen = rotate(operands.q.dequantize())[0, 0, i].double() + mean
    exact = k - k.mean(0)
    moved = (seen - q[i]) @ exact[i]
    return [(exact[j] @ q[i] + moved).item() * SCALE * NATS for j in keys], keys


def softmax_sum(scores, rows):
    weights = [2.0 ** (s - max(scores)) for s in scores]
    output = sum(w * row for w, row in zip(weights, rows, strict=True)) / sum(weights)
    return max(scores) + math.log2(sum(weights)), output


@pytest.mark.parametrize("tokens", [129, 255, 256, 300])
def test_own_keys_are_attended_to_by_the_formula(tokens):
    operands = case(tokens)
    log_sum, output = attend_own_block(operands, SCALE, slice(0, tokens))
    for i in (0, 77, 127, 128, tokens - 1):
        scores, keys = own_part(operands, i)
        wanted, row = softmax_sum(scores, [operands.own.v[0, 0, j].double() for j in keys])
        assert log_sum[0, 0, i, 0].item() == pytest.approx(wanted, abs=1e-5)
        torch.testing.assert_close(output[0, 0, i].double(), row, rtol=1e-5, atol=1e-6)


def nvfp4_group(numbers):
    """E2M1 times UE4M3 of up to 16 probabilities, the largest mapped to 6."""
    scale = torch.tensor(max(numbers) / 6).clamp_max(448).to(torch.float8_e4m3fn).float()
    ratio = torch.tensor(numbers, dtype=torch.float32) / scale if scale > 0 else torch.zeros(len(numbers))
    return (decode_e2m1(encode_e2m1(ratio)) * scale).tolist()


def whole_row(operands, i):
    """Output of query i: the own block by `own_part`, then tiles of the other keys in 4 bit, key by key in float64."""
    scores, keys = own_part(operands, i)
    maximum, own_output = softmax_sum(scores, [operands.own.v[0, 0, j].double() for j in keys])
    row, row_sum = 2688 * own_output, 2688.0
    order = range(operands.own.q.shape[2]) if operands.own.permutation is None else operands.own.permutation[0, 0]
    query, mean = operands.q.dequantize()[0, 0, i].double(), operands.q_means[0, 0, i // BLOCK].double()
    rounded, exact = operands.k.dequantize()[0, 0].double(), operands.k_exact[0, 0].double()
    residual = operands.residual.dequantize()[0, 0].T.double()
    scores = [
        -math.inf if int(token) in keys else (rounded[p] @ query + exact[p] @ mean).item() * SCALE * NATS
        for p, token in enumerate(order)
    ]
    for tile, start in enumerate(range(0, len(scores), BLOCK)):
        own = scores[start : start + BLOCK]
        raised = max(maximum, *own)
        exponentials = [2688 * 2.0 ** (s - raised) for s in own]
        decoded = [x for g in range(0, len(own), 16) for x in nvfp4_group(exponentials[g : g + 16])]
        weights = decoded if operands.means is None else exponentials
        row = row * 2.0 ** (maximum - raised) + torch.tensor(decoded).double() @ residual[start : start + BLOCK]
        if operands.means is not None:
            row += sum(weights) * operands.means[0, 0, tile].double()
        row_sum = row_sum * 2.0 ** (maximum - raised) + sum(weights)
        maximum = raised
    return row / row_sum


ROWS = (0, 100, 127, 128, 200, 299)


def error_of_rows(operands):
    expected = torch.stack([whole_row(operands, i) for i in ROWS])
    return relative_l2(attend4(operands, SCALE)[0, 0, list(ROWS)], expected)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("demean", [True, False])
def test_the_recurrence_starts_with_own_keys_seen_and_leaves_them_out(grouped, demean):
    # Of some thousand probabilities a few fall on the other side of an E2M1 boundary in float32.
    assert error_of_rows(case(grouped=grouped, demean=demean)) < 2e-3


@pytest.mark.parametrize("fault", ["own keys twice", "no own keys", "sum off by 2 %", "keys of the next block"])
def test_faults_are_noticed(fault, monkeypatch):
    right_keys, right_part = reference.is_own_key, reference.attend_own_block

    def off(operands, scale, rows):
        log_sum, output = right_part(operands, scale, rows)
        return log_sum + (math.log2(1.02) if "2 %" in fault else -1e3), output

    if fault == "own keys twice":
        monkeypatch.setattr(reference, "is_own_key", lambda *arguments: right_keys(*arguments) & False)
    elif fault == "keys of the next block":
        monkeypatch.setattr(reference, "is_own_key", lambda *arguments: right_keys(*arguments).roll(BLOCK, dims=-2))
    else:
        monkeypatch.setattr(reference, "attend_own_block", off)
    assert error_of_rows(case()) > 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_where_only_own_keys_matter_the_error_is_that_of_16_bit(dtype):
    # A direction to each block: scores inside it are 40 octaves above all others and differ by some octaves.
    q, k, v = random_qkv((1, 2, 512, 64), dtype=dtype)
    direction = torch.eye(4).repeat_interleave(BLOCK, dim=0).to(dtype)
    q[..., :4], k[..., :4] = 14 * direction, 14 * direction
    exact = exact_attention(q, k, v, SCALE)
    arguments = {"mode": "4-bit", "implementation": "reference", "scale": SCALE}
    limit = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 5e-6}[dtype]  # of v, P and the output
    assert relative_l2(attention(q, k, v, **arguments), exact) < limit
    assert relative_l2(attention(q, k, v, **arguments, own_block=False), exact) > 0.1


@pytest.mark.parametrize("grouped", [True, False])
def test_clustered_inputs_lose_half_of_the_error(grouped):
    q, k, v = clustered_qkv((8, 16, 16))
    grouping = Grouping(v[..., 0].argsort(-1).int(), torch.zeros(1, 1, 1, 128)) if grouped else None
    exact = exact_attention(q, k, v)
    arguments = {"mode": "4-bit", "implementation": "reference", "grouping": grouping}
    with_block, without = (relative_l2(attention(q, k, v, **arguments, own_block=own), exact) for own in (True, False))
    assert with_block < 0.5 * without  # measured 0.0301 of 0.0956


def test_near_and_far_scores_are_in_one_frame():
    # Queries and keys shifted alike move every score of a row by a constant; 4-bit codes stay what they are.
    q, k, v = random_qkv((1, 2, 400, 64))
    q, k = ((x * 8).round() / 8 for x in (q, k))
    shift = torch.randn(64, generator=torch.Generator().manual_seed(1)).mul(8).round() / 8
    arguments = {"mode": "4-bit", "implementation": "reference"}
    expected = attention(q, k, v, **arguments)
    torch.testing.assert_close(attention(q, k + shift, v, **arguments), expected, rtol=1e-3, atol=2e-3)


def test_rows_in_passes_are_the_rows_at_once(monkeypatch):
    operands = case(700)
    at_once = attend4(operands, SCALE)
    monkeypatch.setattr(reference, "ROWS_PER_PASS", 256)
    assert torch.equal(attend4(operands, SCALE), at_once)


@pytest.mark.parametrize(
    ("queries", "keys", "served"), [(1, 1, False), (128, 128, False), (129, 129, True), (130, 129, False)]
)
def test_which_calls_have_an_own_block(queries, keys, served):
    q, k, v = random_qkv((1, 1, 130, 16))
    q, k, v = q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]
    assert has_own_block(queries, keys) == served
    assert (quantize4(q, k, v, None, True, own_block=True).own is not None) == served
    arguments = {"mode": "4-bit", "implementation": "reference"}
    without = attention(q, k, v, **arguments, own_block=False)
    assert torch.equal(attention(q, k, v, **arguments), without) == (not served)


def test_other_modes_have_no_such_part():
    q, k, v = random_qkv((1, 1, 200, 16))
    for mode in ("8-bit", "8-bit precise"):
        arguments = {"mode": mode, "implementation": "reference"}
        assert torch.equal(attention(q, k, v, **arguments), attention(q, k, v, **arguments, own_block=False))
