"""The reference on a CUDA device: the CPU's numbers within a derived bound, the same bits twice, no stale memory."""

import pytest
import torch
import vc_attention
from vc_attention import attention, group_values
from vc_attention.formats import decode_e4m3, encode_e2m1, encode_e4m3, expcast
from vc_attention.group.blocks import demean
from vc_attention.testing import clustered_qkv, quantization_error, random_qkv, relative_l2

pytestmark = pytest.mark.gpu

MODES = {
    "int8 expcast": {"mode": "8-bit", "qk_format": "int8", "probabilities": "expcast"},
    "int8 exp2": {"mode": "8-bit", "qk_format": "int8", "probabilities": "exp2"},
    "e4m3 expcast": {"mode": "8-bit", "qk_format": "e4m3", "probabilities": "expcast"},
    "nvfp4": {"mode": "4-bit"},
}
# Two correct runs differ where float32 rounds a number to the other side of a code. Rotation and means add up in
# another order: 1e-6 relative, a code of a rotated INT8 number flips when it lies within 1e-6 x 127 of a boundary,
# 1 in 10^4; its error is a step, 0.95 % of the number. Then scores move by about 1e-2 x 0.0095 of their error's size,
# and probabilities flip codes as rarely. E2M1 steps are 30 times INT8's. Output error of flips: below a tenth of the
# quantization error, and far below a fault's.
SHARE_OF_QUANTIZATION_ERROR = 0.1


@pytest.fixture
def poisoned(monkeypatch):
    """Uninitialized memory holds NaN (the largest number for integers), in new and in recycled blocks."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x):
        if x.is_floating_point() and x.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            return x.fill_(torch.nan)
        return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max) if not x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    recycled = [empty(1 << 22, device="cuda").fill_(torch.nan) for _ in range(8)]
    recycled += [empty(1 << size, device="cuda").fill_(torch.nan) for size in range(4, 22) for _ in range(4)]
    del recycled  # the caching allocator hands these blocks out again


def on(device, tensors):
    return [x.to(device) for x in tensors]


def run(name, tensors, **arguments):
    return attention(*tensors, implementation="reference", **MODES[name], **arguments)


# Formats: bit for bit


def test_encoders_give_the_cpus_bits():
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype)
        x = x[~x.isnan()]
        for encode in (encode_e4m3, encode_e2m1):
            assert torch.equal(encode(x.cuda()).cpu(), encode(x))
    u = -torch.arange(0, 20 * 4096, dtype=torch.float32) / 4096
    assert torch.equal(expcast(u.cuda()).cpu(), expcast(u))
    codes = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(decode_e4m3(codes.cuda()).cpu(), decode_e4m3(codes), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pair_of_mean_and_residual_is_exact(dtype):
    v = random_qkv((2, 2, 300, 64), dtype=dtype, device="cuda")[2] + 1
    blocks = demean(v)
    assert torch.equal(blocks.restore(), v.float())
    # Means may differ by one rounding to 16 bit.
    torch.testing.assert_close(blocks.means.float().cpu(), demean(v.cpu()).means.float(), rtol=2**-7, atol=1e-6)


# Grouping


@pytest.mark.parametrize("tokens", [1, 127, 300, 4097])
def test_grouping_is_a_permutation_as_good_as_the_cpus(tokens):
    v = clustered_qkv((1, 17, 241), heads=2, head_dim=64)[2][:, :, :tokens]
    ours, cpus = group_values(v.cuda()), group_values(v)
    everything = torch.arange(tokens, dtype=torch.int32).expand(1, 2, tokens)
    assert torch.equal(ours.permutation.sort(-1).values.cpu(), everything)
    # Near ties may fall the other way and shift later centroids; the spread around the centroids must not.
    spread = [
        torch.cdist(v[0].double(), one.centroids[0].double().cpu()).amin(-1).square().sum().item()
        for one in (ours, cpus)
    ]
    assert spread[0] <= spread[1] * 1.01 + 1e-9


def test_grouping_twice_gives_the_same_bits():
    v = clustered_qkv((4, 32, 33), heads=2, head_dim=128, device="cuda")[2]
    one, two = group_values(v), group_values(v.clone())
    assert torch.equal(one.permutation, two.permutation)
    assert torch.equal(one.centroids, two.centroids)


# Attention


@pytest.mark.parametrize("name", list(MODES))
@pytest.mark.parametrize("tokens", [1, 2, 63, 77, 127, 128, 129, 257, 1023, 4097])
def test_cuda_gives_the_cpus_numbers(name, tokens):
    tensors = random_qkv((1, 2, tokens, 64), seed=tokens)
    expected = run(name, tensors)
    output = run(name, on("cuda", tensors)).cpu()
    limit = SHARE_OF_QUANTIZATION_ERROR * quantization_error(expected, *tensors) + 1e-5
    assert relative_l2(output, expected) < limit
    assert relative_l2(output[:, :, -min(64, tokens) :], expected[:, :, -min(64, tokens) :]) < 2 * limit


@pytest.mark.parametrize("name", list(MODES))
@pytest.mark.parametrize("head_dim", [64, 72, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_gives_the_cpus_numbers_in_16_bit_grouped(name, head_dim, dtype):
    tensors = random_qkv((2, 2, 300, head_dim), dtype=dtype)
    grouping = group_values(tensors[2])
    moved = vc_attention.Grouping(grouping.permutation.cuda(), grouping.centroids.cuda())
    expected = run(name, tensors, grouping=grouping)
    output = run(name, on("cuda", tensors), grouping=moved)
    assert output.dtype == dtype
    limit = SHARE_OF_QUANTIZATION_ERROR * quantization_error(expected, *tensors) + 2**-8  # and a rounding to 16 bit
    assert relative_l2(output.cpu(), expected) < limit


@pytest.mark.parametrize("name", list(MODES))
def test_two_runs_give_the_same_bits(name):
    tensors = random_qkv((2, 3, 4097, 128), dtype=torch.bfloat16, device="cuda")
    grouping = group_values(tensors[2])
    one = run(name, tensors, grouping=grouping)
    torch.cuda.empty_cache()
    two = run(name, [x.clone() for x in tensors], grouping=grouping)
    assert torch.equal(one, two)


@pytest.mark.parametrize("name", list(MODES))
@pytest.mark.parametrize("tokens", [1, 77, 129, 1023])
def test_no_result_comes_from_uninitialized_memory(name, tokens, poisoned):
    tensors = random_qkv((2, 2, tokens, 64), device="cuda")
    grouping = group_values(tensors[2])
    output = run(name, tensors, grouping=grouping)
    assert output.isfinite().all()
    assert grouping.centroids.isfinite().all()
    assert torch.equal(output, run(name, tensors, grouping=grouping))


@pytest.mark.parametrize("name", list(MODES))
def test_tf32_does_not_enter_the_reference(name):
    # A host may have switched it on for its own products.
    tensors = random_qkv((1, 2, 300, 64), device="cuda")
    expected = run(name, tensors)
    torch.backends.cuda.matmul.allow_tf32 = True
    assert torch.equal(run(name, tensors), expected)


def test_autocast_around_the_call_changes_nothing():
    tensors = random_qkv((1, 2, 300, 64), device="cuda")
    expected = run("int8 expcast", tensors)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(run("int8 expcast", tensors), expected)


def test_views_equal_contiguous_bit_for_bit():
    tensors = random_qkv((2, 3, 300, 64), dtype=torch.bfloat16, device="cuda")
    expected = run("int8 expcast", tensors)
    fused = torch.stack([x.transpose(1, 2) for x in tensors], 2).contiguous()
    assert torch.equal(run("int8 expcast", [x.transpose(1, 2) for x in fused.unbind(2)]), expected)


def test_the_current_stream_is_used():
    tensors = random_qkv((1, 2, 1023, 64), device="cuda")
    expected = run("int8 expcast", tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = [x + 0 for x in tensors]
        output = run("int8 expcast", again)
    stream.synchronize()
    assert torch.equal(output, expected)


@pytest.mark.two_gpus
def test_second_device_while_the_first_is_current():
    tensors = random_qkv((1, 2, 300, 64))
    expected = run("int8 expcast", on("cuda:0", tensors), grouping=group_values(tensors[2].to("cuda:0")))
    assert torch.cuda.current_device() == 0
    second = on("cuda:1", tensors)
    grouping = group_values(second[2])
    output = run("int8 expcast", second, grouping=grouping)
    assert output.device == grouping.permutation.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert relative_l2(output.cpu(), expected.cpu()) < 5e-3  # two cards may be of two kinds
    with pytest.raises(vc_attention.InvalidArgument, match="cuda:0"):
        attention(second[0], tensors[1].to("cuda:0"), second[2], implementation="reference")
    mixed = vc_attention.Grouping(grouping.permutation.to("cuda:0"), grouping.centroids.to("cuda:0"))
    with pytest.raises(vc_attention.InvalidArgument, match="grouping"):
        run("int8 expcast", second, grouping=mixed)
