"""VC Attention Compare: its numbers against values computed by hand, its pictures, its errors."""

import json
import math

import pytest
import torch

NODE = "VCAttentionCompare"


def compare(host, reference, other, **widgets):
    strip, curves, difference, text = host.execute(NODE, {"reference": reference, "other": other, **widgets}, "9")
    for picture in (strip, curves, difference):
        assert picture.ndim == 4
        assert picture.shape[0] == 1
        assert picture.shape[-1] == 3
        assert picture.dtype == torch.float32
        assert 0 <= picture.min() <= picture.max() <= 1
    return (strip, curves, difference), json.loads(text)


def flat(*color, frames=3, height=24, width=32):
    return torch.tensor(color, dtype=torch.float32).expand(frames, height, width, 3).clone()


def noise(frames=3, height=24, width=32, seed=0):
    return torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(seed))


def test_schema(pack):
    """Names and order are part of saved workflows."""
    schema = pack.nodes[NODE].GET_SCHEMA()
    assert (schema.node_id, schema.display_name) == (NODE, "VC Attention Compare")
    assert [(i.id, getattr(i, "default", None)) for i in schema.inputs] == [
        ("reference", None),
        ("other", None),
        ("measured_frames", 12),
        ("shown_frames", 5),
        ("amplification", 8),
    ]
    assert [item.id for item in schema.outputs] == ["strip", "curves", "difference", "json"]
    assert schema.is_output_node
    assert all(len(item.tooltip) > 20 for item in schema.inputs)


def test_equal_clips(host, pack):
    clip = noise()
    (_, _, difference), result = compare(host, clip, clip.clone())
    assert result["equal"] is True
    assert result["psnr"] is None
    assert result["per_frame"]["psnr"] == [None] * 3
    assert result["ssim"] == pytest.approx(1.0)
    assert result["flip"] == 0.0
    assert (difference == 0.5).all()


def test_psnr_by_hand(host, pack):
    """Errors of 0.1, 0.2 and 0 in three frames: PSNR is -10 log10 of the squared error; over all of its mean."""
    reference, other = flat(0.5, 0.5, 0.5), flat(0.5, 0.5, 0.5)
    other[0] += 0.1
    other[1] += 0.2
    _, result = compare(host, reference, other)
    assert result["per_frame"]["psnr"][:2] == pytest.approx([20.0, 20 * math.log10(5)], abs=1e-3)
    assert result["per_frame"]["psnr"][2] is None
    assert result["psnr"] == pytest.approx(-10 * math.log10((0.01 + 0.04) / 3), abs=1e-3)
    assert result["most_different_frame"] == 1


def test_ssim_of_flat_pictures_by_hand(host, pack):
    """No structure on either side: only the luminance term is left."""
    _, result = compare(host, flat(0.4, 0.4, 0.4), flat(0.6, 0.6, 0.6))
    c1 = 0.01**2
    assert result["ssim"] == pytest.approx((2 * 0.4 * 0.6 + c1) / (0.4**2 + 0.6**2 + c1), abs=1e-4)


def test_ssim_of_inverted_contrast_by_hand(host, pack):
    """A stripe of +-a around gray against its negative: means equal, covariance = -variance."""
    row = torch.tensor([0.4, 0.6]).repeat(64)[:, None].expand(128, 3)
    reference = row.expand(1, 64, 128, 3).clone()
    _, result = compare(host, reference, 1.0 - reference)
    # Within the window the even and odd weights differ a little from one half each: allow for that.
    variance, c2 = 0.01, 0.03**2
    assert result["ssim"] == pytest.approx((-2 * variance + c2) / (2 * variance + c2), abs=5e-3)


def test_flip_of_flat_pictures_by_hand(host, pack):
    """Nothing to filter and no edges: the color term alone, computed here from the paper's formulas."""

    def hunt(x, y, z):
        a, b = 500 * (x - y), 200 * (y - z)
        lightness = 116 * y - 16
        return lightness, 0.01 * lightness * a, 0.01 * lightness * b

    def root(t):
        return t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29

    def lab(red, green, blue):  # linear; XYZ relative to D65
        x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
        y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.0890
        return hunt(root(x), root(y), root(z))

    def hyab(one, two):
        return abs(one[0] - two[0]) + math.hypot(one[1] - two[1], one[2] - two[2])

    largest = hyab(lab(0, 1, 0), lab(0, 0, 1)) ** 0.7
    cut = 0.4 * largest

    def expected(one, two):
        error = hyab(one, two) ** 0.7
        return 0.95 * error / cut if error < cut else 0.95 + 0.05 * (error - cut) / (largest - cut)

    def linear(value):
        return ((value + 0.055) / 1.055) ** 2.4

    cases = [
        ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), expected(lab(0, 0, 0), lab(1, 1, 1))),
        ((0.0, 1.0, 0.0), (0.0, 0.0, 1.0), 1.0),
        ((0.5, 0.5, 0.5), (0.6, 0.6, 0.6), expected(lab(*[linear(0.5)] * 3), lab(*[linear(0.6)] * 3))),
    ]
    assert cases[0][2] == pytest.approx(0.9674, abs=1e-3), "lightness 100 of a largest error near 203"
    for reference, other, wanted in cases:
        _, result = compare(host, flat(*reference), flat(*other))
        assert result["flip"] == pytest.approx(wanted, abs=2e-3), (reference, other)


def test_flip_grows_with_the_difference_and_sees_edges(host, pack):
    reference = noise(1, 48, 48)
    shift = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1))
    small, large = (compare(host, reference, (reference + k * shift).clamp(0, 1))[1] for k in (0.02, 0.2))
    assert 0 < small["flip"] < large["flip"] < 1
    assert small["psnr"] > large["psnr"]
    assert small["ssim"] > large["ssim"]
    # The same brightness error as an edge and as a flat step: the edge is weighted up where it is.
    gray, edge = flat(0.5, 0.5, 0.5, frames=1, height=64, width=64), flat(0.5, 0.5, 0.5, frames=1, height=64, width=64)
    edge[:, :, 32:] += 0.1
    flip = next(m for m in pack.modules() if m.__name__.endswith(".nodes.flip")).flip
    seen = flip(gray[0].permute(2, 0, 1), edge[0].permute(2, 0, 1))
    assert seen[32, 33] > seen[32, 63] > 0
    assert seen[32, 0] == pytest.approx(0.0, abs=1e-4)


def test_order_of_the_clips_matters_only_for_the_sign(host, pack):
    a, b = noise(seed=1), noise(seed=2)
    (_, _, one), there = compare(host, a, b, amplification=1)
    (_, _, two), back = compare(host, b, a, amplification=1)
    for name in ("psnr", "ssim", "flip"):
        assert there[name] == pytest.approx(back[name], abs=1e-4)
    assert torch.allclose(one - 0.5, 0.5 - two, atol=1e-6)


def test_difference_is_amplified_around_gray(host, pack):
    reference, other = flat(0.5, 0.5, 0.5), flat(0.5, 0.5, 0.5)
    other[1, 3, 4, 0] += 0.03
    (_, _, difference), result = compare(host, reference, other, amplification=10)
    assert result["most_different_frame"] == 1
    assert result["amplification"] == 10
    assert difference.shape == (1, 24, 32, 3)
    assert difference[0, 3, 4, 0] == pytest.approx(0.8, abs=1e-5)
    assert difference[0, 3, 4, 1] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("frames", "most", "picks"),
    [(9, 3, [0, 4, 8]), (2, 12, [0, 1]), (1, 5, [0]), (81, 1, [0]), (5, 5, [0, 1, 2, 3, 4])],
)
def test_measured_frames_are_spread(host, pack, frames, most, picks):
    clip = noise(frames, 12, 12)
    _, result = compare(host, clip, clip, measured_frames=most)
    assert result["measured_frames"] == picks
    assert (result["frames"], result["height"], result["width"]) == (frames, 12, 12)


def test_explains_that_another_sample_is_not_a_worse_one(host, pack):
    _, result = compare(host, noise(seed=1), noise(seed=2))
    assert "not a worse sample" in result["note"]


def test_strip_holds_both_clips(host, pack):
    """Red above, blue below; wide frames are made smaller, not the strip endless."""
    (strip, _, _), _ = compare(host, flat(1, 0, 0), flat(0, 0, 1), shown_frames=2)
    red = (strip[0] == torch.tensor([1.0, 0.0, 0.0])).all(-1)
    blue = (strip[0] == torch.tensor([0.0, 0.0, 1.0])).all(-1)
    assert red.sum() == blue.sum() == 2 * 24 * 32
    wide = torch.zeros(12, 36, 1600, 3)
    (strip, _, _), _ = compare(host, wide, wide, shown_frames=12, measured_frames=1)
    assert strip.shape[2] < 12 * 400


def test_four_channels_and_halves(host, pack):
    """Alpha is left out; a batch in half precision is measured all the same."""
    clip = noise()
    with_alpha = torch.cat([clip, torch.zeros(3, 24, 32, 1)], -1)
    assert compare(host, clip, with_alpha)[1]["equal"] is True
    assert compare(host, clip.half(), clip.half())[1]["equal"] is True


def test_a_black_clip_of_nan_is_told(host, pack):
    broken = noise()
    broken[1] = float("nan")
    _, result = compare(host, noise(), broken)
    assert result["not_finite"] == {"reference": 0, "other": 24 * 32 * 3}
    assert result["psnr"] is not None


@pytest.mark.parametrize(
    ("reference", "other"),
    [
        ((3, 24, 32, 3), (2, 24, 32, 3)),
        ((3, 24, 32, 3), (3, 32, 24, 3)),
        ((3, 24, 32, 3), (3, 24, 32, 1)),
        ((24, 32, 3), (24, 32, 3)),
        ((3, 8, 32, 3), (3, 8, 32, 3)),
        ((0, 24, 32, 3), (0, 24, 32, 3)),
    ],
    ids=["frames", "size", "channels", "no batch", "smaller than the window", "no frame"],
)
def test_errors_name_both_shapes(host, pack, reference, other):
    with pytest.raises(ValueError, match="VC Attention Compare") as caught:
        compare(host, torch.zeros(reference), torch.zeros(other))
    assert str(list(reference)) in str(caught.value)
    assert str(list(other)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cancel_is_let_through(host, pack):
    """A long comparison ends when the user says so."""
    host.interrupt.set(True)
    with pytest.raises(host.InterruptProcessingException):
        compare(host, noise(), noise())


def test_inputs_are_not_changed(host, pack):
    a, b = noise(seed=1), noise(seed=2)
    copies = a.clone(), b.clone()
    compare(host, a, b)
    assert torch.equal(a, copies[0])
    assert torch.equal(b, copies[1])
