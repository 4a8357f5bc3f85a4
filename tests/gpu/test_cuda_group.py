"""The grouping kernels against the reference.

Integers up to 3 make every score, norm and distance exact in float32, so labels, order and ties must be equal to the
bit. On other values a label may differ where two centroids are equally near.
"""

import pytest
import torch
import vc_attention
from vc_attention import group_values
from vc_attention.errors import UnsupportedCall
from vc_attention.group.blocks import removed_energy
from vc_attention.group.cuda import group_cuda
from vc_attention.group.reference import assign, group_reference
from vc_attention.testing import clustered_qkv

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
D = 128
DTYPES = (torch.bfloat16, torch.float16)
SIZES = (
    *((tokens, min(8, tokens)) for tokens in range(1, 131)),
    *((1, 8), (2, 8), (64, 64), (127, 512), (129, 3), (255, 100), (257, 256), (1000, 1), (1000, 257), (4095, 64)),
    *((4096, 128), (4097, 511), (32760, 64), (75600, 256)),
)
FLOAT_SIZES = ((1, 1), (63, 8), (129, 3), (255, 100), (1000, 1), (4095, 64), (4097, 512), (32760, 64), (75600, 256))
NEAR = 2e-6  # of |v| |c|: float32 sums; measured, labels differ in 1.3e-5 of the tokens, all within


def placed(values, layout="BSHD", offset=0):
    """``values`` [B, H, S, D] on the device, in a layout and ``offset`` elements into their storage."""
    batch, heads, tokens, _ = values.shape
    flat = torch.empty(values.numel() + offset, dtype=values.dtype, device=DEVICE)[offset:]
    if layout == "BSHD":
        return flat.view(batch, tokens, heads, D).transpose(1, 2).copy_(values)
    return flat.view(batch, heads, tokens, D).copy_(values)


def integers(batch, heads, tokens, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (batch, heads, tokens, D), generator=generator).to(dtype)


def mixed(batch, heads, tokens, dtype, seed, classes=37):
    """Noise around ``classes`` centres."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, classes, (batch, heads, tokens), generator=generator)
    centres = 1.5 * torch.randn(classes, D, generator=generator)
    return (torch.randn(batch, heads, tokens, D, generator=generator) + centres[label]).to(dtype)


def case(tokens, clusters, make):
    """Values of one size, with dtype, layout and alignment varied by it."""
    batch, heads = (1, 2) if tokens > 5000 else (2, 3)
    dtype, layout = DTYPES[tokens % 2], ("BSHD", "BHSD")[tokens // 2 % 2]
    return placed(make(batch, heads, tokens, dtype, tokens + clusters), layout, (0, 1, 2, 4)[tokens % 4])


@pytest.mark.parametrize(("tokens", "clusters"), SIZES)
def test_exact_values_give_the_reference_to_the_bit(tokens, clusters, poison):
    v = case(tokens, clusters, integers)
    expected = group_reference(v, None, clusters, 0)
    for byte in (0xFF, 0x5A):
        with poison(byte):
            permutation, centroids = group_cuda(v, None, clusters, 0)
        assert torch.equal(centroids, expected[1])
        assert torch.equal(permutation, expected[0])


@pytest.mark.parametrize(("tokens", "clusters"), SIZES)
def test_one_update_from_exact_centroids(tokens, clusters, poison):
    v = case(tokens, clusters, integers)
    generator = torch.Generator().manual_seed(clusters)
    start = torch.randint(-3, 4, (*v.shape[:2], clusters, D), generator=generator).float().to(DEVICE)
    _, expected = group_reference(v, start, clusters, 1)
    outcomes = []
    for byte in (0xFF, 0x5A):
        with poison(byte):
            outcomes.append(group_cuda(v, start, clusters, 1))
    torch.testing.assert_close(outcomes[0][1], expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    assert torch.equal(outcomes[0][0], outcomes[1][0]), "two runs differ"


def check_order(v, permutation, centroids):
    """The permutation sorts by nearest centroid, stable, but for tokens with two centroids equally near."""
    heads = (x.flatten(0, 1) for x in (v, permutation, centroids))
    for values, order, centres in zip(*heads, strict=True):
        order = order.long()
        assert torch.equal(order.sort().values, torch.arange(len(values), device=values.device))
        expected = assign(values, centres).argsort(stable=True)
        rounded = centres.to(values.dtype).double()
        scores = values.double() @ rounded.T - rounded.square().sum(1) / 2
        best = scores.topk(min(2, scores.shape[1]), dim=1).values
        size = values.double().norm(dim=1) * rounded.norm(dim=1).max()
        open_question = best[:, 0] - best[:, -1] <= NEAR * size if scores.shape[1] > 1 else size < 0
        assert open_question.float().mean() < 1e-3
        assert torch.equal(order[~open_question[order]], expected[~open_question[expected]])


def spread(v, centroids):
    heads = zip(v.flatten(0, 1).double(), centroids.flatten(0, 1).double(), strict=True)
    return sum(torch.cdist(values, centres).amin(1).square().sum().item() for values, centres in heads)


@pytest.mark.parametrize(("tokens", "clusters"), FLOAT_SIZES)
def test_iterations_are_as_good_as_the_references(tokens, clusters):
    v = case(tokens, clusters, mixed)
    permutation, centroids = group_cuda(v, None, clusters, 3)
    check_order(v, permutation, centroids)
    expected_order, expected = group_reference(v, None, clusters, 3)
    assert spread(v, centroids) <= 1.005 * spread(v, expected) + 1e-6
    lost = removed_energy(v, expected_order) - removed_energy(v, permutation)
    assert lost.max() < 0.01
    again = group_cuda(v, None, clusters, 3)
    assert torch.equal(again[0], permutation)
    assert torch.equal(again[1], centroids)


def test_zero_and_equal_tokens_do_no_harm():
    v = placed(mixed(1, 2, 3000, torch.bfloat16, 0))
    v[:, :, 100:140] = 0
    v[:, 1] = v[:, 1, :1].clone()  # a head of one value
    permutation, centroids = group_cuda(v, None, 64, 3)
    assert torch.equal(permutation[:, 0].long().sort(-1).values, torch.arange(3000, device=DEVICE)[None])
    assert torch.equal(permutation[:, 1].long(), torch.arange(3000, device=DEVICE)[None])
    assert centroids.isfinite().all()


def test_bad_numbers_still_give_a_permutation_and_finite_centroids():
    v = placed(mixed(1, 2, 3000, torch.bfloat16, 1))
    everything = torch.arange(3000, device=DEVICE).expand(1, 2, -1)
    start = torch.full((1, 2, 32, D), float("nan"), device=DEVICE)
    _, centroids = group_cuda(v, start, 32, 1)
    assert centroids.isfinite().all()
    v[0, 0, 17, 5] = float("nan")
    v[0, 1, 2999] = float("inf")
    permutation, centroids = group_cuda(v, None, 32, 3)
    assert torch.equal(permutation.long().sort(-1).values, everything)
    assert centroids.isfinite().all()


def test_a_head_alone_gives_the_bits_it_gives_in_a_batch():
    v = placed(mixed(2, 3, 5000, torch.bfloat16, 2))
    permutation, centroids = group_cuda(v, None, 40, 2)
    alone = group_cuda(v[1:, 2:], None, 40, 2)
    assert torch.equal(alone[0], permutation[1:, 2:])
    assert torch.equal(alone[1], centroids[1:, 2:])


def test_graph_replay_with_new_contents():
    v = placed(mixed(1, 3, 5000, torch.bfloat16, 3))
    before = group_cuda(v, None, 40, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = group_cuda(v, None, 40, 2)
    v.copy_(mixed(1, 3, 5000, torch.bfloat16, 4))
    graph.replay()
    torch.cuda.synchronize()
    eager = group_cuda(v, None, 40, 2)
    assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))
    assert not torch.equal(captured[0], before[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_public_call_takes_the_kernel(layout, dtype, monkeypatch):
    def never(*_):
        raise AssertionError("the reference ran")

    monkeypatch.setattr("vc_attention.group.dispatch._reference", never)
    v = clustered_qkv((3, 24, 33), heads=2, dtype=dtype, device=DEVICE)[2]
    given = v.transpose(1, 2).contiguous() if layout == "BSHD" else v
    for implementation in ("auto", "cuda"):
        cold = group_values(given, layout=layout, implementation=implementation)
        warm = group_values(given, cold, layout=layout, implementation=implementation)
        for grouping in (cold, warm):
            check_order(v, grouping.permutation, grouping.centroids)
    expected = group_reference(v, None, cold.clusters, 4)[0]
    assert (removed_energy(v, expected) - removed_energy(v, cold.permutation)).max() < 0.01
    assert removed_energy(v, cold.permutation).min() > removed_energy(v).max()


def test_a_named_kernel_refuses_and_auto_takes_the_reference():
    v = torch.randn(1, 1, 700, D, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for values, clusters, reason in ((v, 8, "float32"), (v[..., :64].half(), 8, "head_dim"), (v.half(), 513, "512")):
        with pytest.raises(UnsupportedCall, match=reason):
            group_values(values, clusters=clusters, implementation="cuda")
        grouping = group_values(values, clusters=clusters)
        assert grouping.centroids.isfinite().all()
    assert isinstance(grouping, vc_attention.Grouping)


@pytest.mark.parametrize("axis", ["batch", "head", "token"])
def test_strides_beyond_two_to_the_31(axis, far_apart):
    v = placed(mixed(2, 2, 300, torch.float16, 5), "BHSD")
    far = far_apart(axis, v)[0]
    expected = group_cuda(v, None, 20, 2)
    for start in (None, expected[1]):  # cold, warm
        made, wanted = (group_cuda(x, start, 20, 2) for x in (far, v))
        assert torch.equal(made[0], wanted[0])
        assert torch.equal(made[1], wanted[1])


def test_more_than_two_to_the_31_elements():
    heads, tokens = 224, 75600
    generator = torch.Generator(DEVICE).manual_seed(0)
    v = torch.randn(1, heads, tokens, D, device=DEVICE, dtype=torch.float16, generator=generator)
    assert v.numel() > 2**31
    permutation, centroids = group_cuda(v, None, 64, 1)
    for head in (0, heads // 2, heads - 1):
        alone = group_cuda(v[:, head : head + 1], None, 64, 1)
        assert torch.equal(alone[0][0, 0], permutation[0, head])
        assert torch.equal(alone[1][0, 0], centroids[0, head])
