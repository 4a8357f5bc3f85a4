"""The preparation kernels against their specification: scales, means and values to the bit, q8 and k8 up to ties."""

import itertools

import pytest
import torch
from vc_attention.kernel_arguments import alignment_bytes
from vc_attention.quantize.cuda import prepare
from vc_attention.quantize.hopper import HopperOperands, hopper_operands

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
D, BLOCK = 128, 128
DTYPES = (torch.bfloat16, torch.float16)
LENGTHS = (*range(1, 131), 255, 257, 640, 1023, 4095, 4096, 4097, 32760, 75600)
FIELDS = ("q8", "q_scale", "k8", "v8", "v_scale", "means")
# Sums in another order move a number by 1e-7 of its size, so a code of 127 by 1e-5: that share of the elements lies so
# near to a tie. Measured on an H200: at most 6.1e-5 one code off. A scale of q may then be the next half.
TIES, TIES_OF_SHORT = 2e-4, 2
Q_SCALE_LIMIT = 1.1e-3
NOT_FINITE = 1


def inputs(batch, heads, q_tokens, tokens, layout="BSHD", dtype=torch.bfloat16, seed=0, offset=0):
    """Normal q, k, v with a spread and a mean per head and channel; ``offset`` elements into their storage."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def one(length, mean):
        spread = 0.5 + torch.rand(1, heads, 1, D, generator=generator)
        x = normal(batch, heads, length, D) * spread + mean * normal(1, heads, 1, D)
        flat = torch.empty(x.numel() + offset, dtype=dtype, device=DEVICE)[offset:]
        if layout == "BSHD":
            view = flat.view(batch, length, heads, D).transpose(1, 2)
        else:
            view = flat.view(batch, heads, length, D)
        view.copy_(x)
        return view

    return one(q_tokens, 0.3), one(tokens, 1.0), one(tokens, 0.7)


def random_order(batch, heads, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, heads, tokens, generator=generator).argsort(-1).int().to(DEVICE)


def check(operands: HopperOperands, q, k, v, flags=0, **arguments):
    """Assert that ``operands`` are those of the specification."""
    expected = hopper_operands(q, k, v, **arguments)
    for name in ("q8", "k8"):
        off = (getattr(operands, name).int() - getattr(expected, name).int()).abs()
        assert off.max() <= 1, f"{name} differs by {off.max().item()}"
        count = (off > 0).sum().item()
        assert count <= TIES_OF_SHORT + TIES * off.numel(), f"{name} differs in {count} of {off.numel()}"
    assert (operands.q8[:, q.shape[2] :] == 0).all()
    assert (operands.k8[:, k.shape[2] :] == 0).all()
    assert torch.equal(operands.q_scale, operands.q_scale.half().float())
    assert ((operands.q_scale - expected.q_scale).abs() <= Q_SCALE_LIMIT * expected.q_scale).all()
    assert torch.equal(operands.v_scale, expected.v_scale)
    assert torch.equal(operands.means, expected.means)
    for made, wanted in zip(operands.v8.unbind(0), expected.v8.unbind(0), strict=True):  # equal but for signs of zero
        assert ((made == wanted) | ((made & 127) + (wanted & 127) == 0)).all()
    assert operands.kv_length == k.shape[2]
    assert int(operands.flags[0]) == flags


def same_bits(one: HopperOperands, two: HopperOperands) -> bool:
    pairs = ((getattr(one, name), getattr(two, name)) for name in (*FIELDS, "flags"))
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_operands_of_the_specification_from_poisoned_memory(tokens, poison):
    batch, heads = (1, 2) if tokens > 5000 else (2, 3)
    q_tokens = tokens if tokens % 3 else max(1, tokens - 37)
    dtype, scale = DTYPES[tokens % 2], 0.11 if tokens % 5 else D**-0.5
    layout, permuted = (("BSHD", True), ("BHSD", False), ("BSHD", False), ("BHSD", True))[tokens // 2 % 4]
    q, k, v = inputs(batch, heads, q_tokens, tokens, layout, dtype, seed=tokens)
    arguments = {"scale": scale, "permutation": random_order(batch, heads, tokens) if permuted else None}
    with poison(0xFF):
        operands = prepare(q, k, v, **arguments)
    check(operands, q, k, v, **arguments)
    with poison(0x5A):
        assert same_bits(prepare(q, k, v, **arguments), operands), "two runs differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_every_width_of_load(offset, dtype):
    q, k, v = inputs(2, 2, 300, 500, "BSHD", dtype, offset=offset)
    assert alignment_bytes(q, k, v) == 2 * offset
    for permutation in (random_order(2, 2, 500), None):
        arguments = {"scale": 0.1, "permutation": permutation}
        check(prepare(q, k, v, **arguments), q, k, v, **arguments)


def test_slices_of_a_fused_projection():
    qkv = torch.randn(2, 777, 3, 4, D, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    check(prepare(q, k, v, scale=0.1), q, k, v, scale=0.1)


def test_nothing_around_the_inputs_is_read():
    # [B, S, H, D] views into memory full of NaN: rows behind, channels beside and a batch after.
    made = []
    for x in inputs(1, 2, 130, 300):
        memory = torch.full((2, x.shape[2] + 5, 2 * D + 8), float("nan"), device=DEVICE, dtype=x.dtype)
        view = memory[:1, : x.shape[2], : 2 * D].unflatten(2, (2, D)).transpose(1, 2)
        made.append(view.copy_(x))
    check(prepare(*made, scale=0.1), *made, scale=0.1)


def test_zero_tokens_blocks_heads_and_channels():
    q, k, v = inputs(1, 2, 700, 700)
    v[:, :, 128:256] = 0
    v[:, 1] = 0
    k[:, 1] = 0
    q[:, :, 5:9] = 0
    v[:, 0, :, 7] = 0
    operands = prepare(q, k, v, scale=0.1)
    check(operands, q, k, v, scale=0.1)
    assert (operands.v_scale[1] == 1).all()
    assert operands.v_scale[0, 7] == 1


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
def test_one_channel_2000_times_the_others(which):
    q, k, v = inputs(1, 2, 900, 900)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if which in (name, "all"):
            tensor[..., 11] *= 2000
    check(prepare(q, k, v, scale=1e-4), q, k, v, scale=1e-4)


def test_a_mean_far_above_the_residual_stays_in_half():
    q, k, v = inputs(1, 1, 300, 300)
    v[..., 3] = 5 + 0.001 * v[..., 3]
    operands = prepare(q, k, v, scale=0.1)
    check(operands, q, k, v, scale=0.1)
    assert operands.means.abs().max() <= 60000


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_one_bad_number_is_flagged_and_other_heads_are_unharmed(which, bad):
    tensors = dict(zip("qkv", inputs(1, 2, 300, 300), strict=True))
    clean = prepare(*tensors.values(), scale=0.1)
    for token, channel, head in ((0, 0, 0), (299, 127, 1), (150, 64, 0)):
        changed = tensors | {which: tensors[which].clone()}
        changed[which][0, head, token, channel] = bad
        operands = prepare(*changed.values(), scale=0.1)
        assert int(operands.flags[0]) & NOT_FINITE
        other = 1 - head
        for name in FIELDS:
            assert torch.equal(getattr(operands, name)[other], getattr(clean, name)[other]), name


def test_rows_beyond_the_largest_q_scale_are_shortened():
    q, k, v = inputs(1, 2, 300, 300)
    q, k = q * 300, k * 300
    check(prepare(q, k, v, scale=D**-0.5), q, k, v, scale=D**-0.5)


def test_without_means():
    q, k, v = inputs(1, 2, 300, 300)
    operands = prepare(q, k, v, scale=0.1, demean=False)
    check(operands, q, k, v, scale=0.1, demean=False)
    assert (operands.means == 0).all()


def test_graph_replay_with_new_contents():
    q, k, v = inputs(1, 4, 2000, 2000)
    arguments = {"scale": 0.1, "permutation": random_order(1, 4, 2000)}
    before = prepare(q, k, v, **arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = prepare(q, k, v, **arguments)
    for old, new in zip((q, k, v), inputs(1, 4, 2000, 2000, seed=9), strict=True):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(captured, prepare(q, k, v, **arguments))
    assert not torch.equal(captured.q8, before.q8)


def test_every_head_is_independent_of_the_batch():
    q, k, v = inputs(2, 3, 700, 1000)
    whole = prepare(q, k, v, scale=0.1)
    for batch, head in itertools.product(range(2), range(3)):
        alone = prepare(*(x[batch : batch + 1, head : head + 1] for x in (q, k, v)), scale=0.1)
        for name in FIELDS:
            assert torch.equal(getattr(alone, name)[0], getattr(whole, name)[3 * batch + head]), name


@pytest.mark.parametrize("axis", ["batch", "head", "token"])
@pytest.mark.parametrize("permuted", [False, True])
def test_strides_beyond_two_to_the_31(permuted, axis, far_apart):
    tensors = inputs(2, 2, 300, 300, "BHSD", torch.float16)
    arguments = {"scale": 0.1, "permutation": random_order(2, 2, 300) if permuted else None}
    assert same_bits(prepare(*far_apart(axis, *tensors), **arguments), prepare(*tensors, **arguments))


def test_more_than_two_to_the_31_elements():
    heads, tokens = 224, 75600
    generator = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randn(1, heads, 200, D, device=DEVICE, dtype=torch.float16, generator=generator)
    k = torch.randn(1, heads, tokens, D, device=DEVICE, dtype=torch.float16, generator=generator)
    whole = prepare(q, k, k, scale=0.1)
    assert min(whole.k8.numel(), whole.v8.numel(), k.numel()) > 2**31
    for head in (0, heads // 2, heads - 1):
        part = slice(head, head + 1)
        alone = prepare(q[:, part], k[:, part], k[:, part], scale=0.1)
        for name in FIELDS:
            assert torch.equal(getattr(alone, name), getattr(whole, name)[part]), f"{name} of head {head}"
