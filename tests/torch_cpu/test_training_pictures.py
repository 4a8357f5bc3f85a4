"""Photographs and words of the training clips: from where they come, that they move, stay inside and can be read."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).parents[2]
MODULES = (
    *("backgrounds", "clips", "demo_latents", "lettering", "objects", "painting"),
    *("photographs", "prompts", "scenes", "tours"),
)


@pytest.fixture
def site(tmp_path):
    """Packages with a small picture in the place of every photograph, whatever is installed here."""
    random = np.random.default_rng(0)
    for number, (name, width) in enumerate(
        (
            ("sklearn/datasets/images/china.jpg", 96),
            ("sklearn/datasets/images/flower.jpg", 90),
            ("skimage/data/astronaut.png", 64),
            ("skimage/data/chelsea.png", 100),
            ("skimage/data/coffee.png", 80),
            ("skimage/data/rocket.jpg", 72),
        )
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rough = random.integers(0, 256, (8, 12, 3), dtype=np.uint8)
        rough[..., number % 3] //= 2
        Image.fromarray(rough).resize((width, 64)).save(path)
    return tmp_path


@pytest.fixture
def training(site, monkeypatch):
    """Imports a module of training/ that finds the packages of ``site``; leaves no trace in this process."""
    for folder in (ROOT / "training", ROOT / "nodes"):
        monkeypatch.syspath_prepend(str(folder))
    photographs = importlib.import_module("photographs")
    monkeypatch.setattr(photographs, "find", lambda photograph: site / photograph.package / photograph.path)
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def clips(training):
    return training("clips").Clips("cpu")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def places(training, kind):
    prompts = training("prompts")
    first = len(prompts.SCENES)
    return (
        range(first, len(prompts.PROMPTS)) if kind == "tours" else [i for i in range(first) if prompts.SCENES[i].title]
    )


# Photographs


def test_a_missing_package_is_named(training, monkeypatch):
    photographs = importlib.reload(training("photographs"))
    monkeypatch.setattr(photographs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="come with scikit-learn, .*pip install -r training/requirements.txt"):
        photographs.load("cpu")
    assert photographs.main() == 1


def test_a_photograph_is_found_without_importing_its_package(training, site, monkeypatch):
    photographs = importlib.reload(training("photographs"))
    (site / "pictured").mkdir()
    (site / "pictured" / "__init__.py").write_text("raise ImportError('not to be imported')")
    Image.new("RGB", (9, 6), (255, 128, 0)).save(site / "pictured" / "one.png")
    monkeypatch.syspath_prepend(str(site))
    one = photographs.Photograph("pictured", "pictured", "one.png", "CC0", "nobody")
    assert photographs.find(one) == site / "pictured" / "one.png"
    monkeypatch.setattr(photographs, "PHOTOGRAPHS", (one,))
    album = photographs.load("cpu")
    assert [tuple(sheet.shape) for sheet in album.sheets] == [(1, 3, 192, 288), (1, 3, 384, 576)]
    assert torch.allclose(album.sheets[0][0, :, 5, 5], torch.tensor([255.0, 128.0, 0.0]) / 255)


def test_requirements_install_every_package_and_no_torch(training):
    text = (ROOT / "training" / "requirements.txt").read_text(encoding="utf-8")
    names = {line.partition("==")[0] for line in text.splitlines() if not line.startswith("#")}
    assert {photograph.distribution for photograph in training("photographs").PHOTOGRAPHS} < names
    assert not names & {"torch", "triton", "torchvision"}


def test_larger_frames_are_shown_from_the_larger_sheet(clips):
    assert [clips.album.for_height(height)[0].shape[2] for height in (32, 96, 128, 129, 256, 512)] == [
        *(192, 192, 192),
        *(384, 384, 384),
    ]


def test_a_sheet_s_rest_repeats_the_last_column(clips):
    sheet, widths = clips.album.for_height(32)
    for picture, width in zip(sheet, widths.tolist(), strict=True):
        assert (picture[:, :, width:] == picture[:, :, width - 1 : width]).all()
    assert widths.max() == sheet.shape[3] > widths.min()


# Tours


@pytest.mark.parametrize("aspect", [1.0, 4 / 3, 0.75])
def test_a_camera_never_sees_the_border(training, aspect):
    """All four corners of every frame, over more seconds than any training clip."""
    tours = training("tours")
    kinds = torch.arange(len(training("prompts").TOURS)).repeat(200)
    drawn = tours.draw_tours(kinds, 6, seeded(0), "cpu")
    room = 1.0 + torch.rand(len(kinds), generator=seeded(1))
    center, size, angle = tours.way(drawn, 128, aspect, room)
    assert size.min() > 0.02
    for x, y in ((aspect, 1.0), (aspect, -1.0), (-aspect, 1.0), (-aspect, -1.0)):
        across = center[..., 0] + size * (x * angle.cos() - y * angle.sin())
        down = center[..., 1] + size * (x * angle.sin() + y * angle.cos())
        assert (across.abs() <= room[:, None] + 1e-5).all()
        assert (down.abs() <= 1.0 + 1e-5).all()


def test_what_lies_beside_a_photograph_never_shows(training, clips):
    """Its border is replaced by a color that no photograph has."""
    tours, album = training("tours"), clips.album
    sheets = tuple(torch.full_like(sheet, 50.0) for sheet in album.sheets)
    for sheet, widths in zip(sheets, album.widths, strict=True):
        for picture, width in zip(sheet, widths.tolist(), strict=True):
            picture[:, :, : width + 1] = 0.5  # half a pixel beside the last one counts as the last one
    drawn = tours.draw_tours(torch.tensor([0, 1] * 30), 6, seeded(2), "cpu")
    album = training("photographs").Album(sheets, album.widths)
    assert tours.render(drawn, album, 40, 32, 40).max() < 0.7


def test_one_tour_pans_and_the_other_moves_closer(training):
    tours = training("tours")
    for kind, text in enumerate(tour.text for tour in training("prompts").TOURS):
        drawn = tours.draw_tours(torch.full((100,), kind), 6, seeded(3), "cpu")
        center, size, _ = tours.way(drawn, 17, 1.0, torch.full((100,), 1.5))
        closer = (size[:, 0] / size[:, -1]).mean()
        moved = (center[:, 1:] - center[:, :-1]).norm(dim=2).sum(1).mean()
        assert (closer > 1.3) == ("closer" in text)
        assert (moved > 0.3) == ("pans" in text)


def test_a_standing_camera_shows_the_photograph(training, clips):
    tours, album = training("tours"), clips.album
    names = {"light": 1.0, "view": 1.0}
    numbers = {name: torch.full((1,), names.get(name, 0.0)) for name in tours.RANGES}
    for mirrored in (1.0, -1.0):
        drawn = tours.Tours(
            torch.tensor([2]), torch.tensor([mirrored]), torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), numbers
        )
        shown = tours.render(drawn, album, 2, 128, 128)[0]
        expected = torch.nn.functional.interpolate(album.sheets[0][2:3, :, :, :192], (128, 128), mode="bilinear")[0]
        expected = expected if mirrored > 0 else expected.flip(2)
        assert torch.allclose(shown[0], expected, atol=1e-4)
        assert torch.equal(shown[0], shown[1])


def test_light_on_a_photograph_changes(training, clips):
    drawn = training("tours").draw_tours(torch.zeros(8, dtype=torch.int64), 6, seeded(4), "cpu")
    drawn.numbers["pan"].zero_()
    for name in ("zoom", "spin"):
        drawn.numbers[name].zero_()
    means = training("tours").render(drawn, clips.album, 16, 32, 32).mean((2, 3, 4))
    assert ((means[:, -1] - means[:, 0]).sign() == drawn.numbers["brighten"].sign()).all()


# Words


def test_every_word_is_its_font_s(training, clips):
    lettering = training("lettering")
    font = ImageFont.load_default(size=80)
    for word, field in zip(lettering.WORDS, clips.words.distance[:, 0], strict=True):
        inked = field < 0
        rows, columns = inked.any(1).nonzero(), inked.any(0).nonzero()
        cut = inked[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        left, top, right, bottom = font.getbbox(word)
        image = Image.new("L", (right - left, bottom - top))
        ImageDraw.Draw(image).text((-left, -top), word, fill=255, font=font)
        wanted = torch.from_numpy(np.array(image.crop(image.getbbox()).resize(tuple(cut.shape[::-1]))) > 127)
        assert (cut & wanted).sum() / (cut | wanted).sum() > 0.8, word


def test_distances_are_distances(training):
    lettering = training("lettering")
    ink = torch.zeros(9, 20, dtype=torch.bool)
    ink[2, 3] = ink[7, 15] = True
    rows, columns = torch.meshgrid(torch.arange(9.0), torch.arange(20.0), indexing="ij")
    nearest = torch.minimum(torch.hypot(rows - 2, columns - 3), torch.hypot(rows - 7, columns - 15))
    assert torch.allclose(lettering._distance_to(ink), (nearest - 0.5).clamp_min(0))


def test_words_can_be_read_at_the_size_of_training_and_from_its_latents(training, clips):
    """Letters against their outline, before and after the latents."""
    lettering, latents = training("lettering"), training("demo_latents")
    (kind,) = places(training, "titles")
    kinds = torch.full((12,), kind)
    frames = clips.draw(kinds, seeded(5), 12, 128, 128)
    again, scenes = seeded(5), training("scenes")
    bare = scenes.render(scenes.draw_scenes(kinds, again, "cpu"), 12, 128, 128)
    fill, outline = lettering.coverage(lettering.draw_titles(kinds, again, "cpu"), clips.words, 12, 128, 128)
    assert (bare[:, -1] - frames[:, -1]).abs().amax(1)[outline[:, -1] == 0].max() == 0
    whole = fill[:, -1].amax((1, 2)) == 1  # the others are still fading in
    assert whole.sum() >= 8
    letters, around = fill[whole, -1] > 0.9, (outline[whole, -1] > 0.9) & (fill[whole, -1] < 0.1)
    assert (letters.sum((1, 2)) > 300).all()
    for shown in (frames[whole], latents.decode(latents.encode(frames[whole]))):
        brightness = shown[:, -1].mean(1)
        for clip, (ink, border) in enumerate(zip(letters, around, strict=True)):
            assert brightness[clip][ink].mean() - brightness[clip][border].mean() > 0.5
            assert brightness[clip][ink].quantile(0.1) > brightness[clip][border].quantile(0.9)


def test_words_scroll_to_the_left_and_fade_in(training, clips):
    lettering = training("lettering")
    (kind,) = places(training, "titles")
    titles = lettering.draw_titles(torch.full((40,), kind), seeded(6), "cpu")
    titles.numbers["x"].zero_()
    fill, _ = lettering.coverage(titles, clips.words, 5, 64, 256)
    middle = (fill.sum(2) * torch.arange(256.0)).sum(2) / fill.sum((2, 3))
    assert (middle[:, 4] < middle[:, 0] - 1).all()
    faint = titles.numbers["opacity"] < 0.7
    assert faint.any()
    assert (fill[faint, 4].amax((1, 2)) > fill[faint, 0].amax((1, 2)) + 0.05).all()
    assert (fill[titles.numbers["opacity"] > 1, 0].amax((1, 2)) > 0.99).all()


# Both


@pytest.mark.parametrize("size", [(3, 32, 32), (2, 24, 32), (2, 64, 64)])
def test_pictures_follow_their_seed_and_stay_in_range(training, clips, size):
    kinds = torch.tensor([*places(training, "titles"), *places(training, "tours")])
    first = clips.draw(kinds, seeded(0), *size)
    assert first.shape == (3, size[0], 3, *size[1:])
    assert torch.equal(first, clips.draw(kinds, seeded(0), *size))
    assert torch.isfinite(first).all()
    assert 0 <= first.min() < first.max() <= 1
    other = clips.draw(kinds, seeded(1), *size)
    assert all((a - b).abs().mean() > 0.01 for a, b in zip(first, other, strict=True))
    assert (first[1] - first[2]).abs().mean() > 0.01


def test_kinds_of_a_batch_keep_their_rows(training, clips):
    """A word lies over its own clip, a photograph in its own place, whatever stands between them."""
    (title,), tours = places(training, "titles"), list(places(training, "tours"))
    kinds = torch.tensor([tours[0], title, 3, tours[1], 0, title])
    drawn = clips.draw(kinds, seeded(7), 2, 32, 32)
    random = seeded(7)
    for rows in ([1, 2, 4, 5], [0, 3]):
        assert torch.equal(drawn[rows], clips.draw(kinds[rows], random, 2, 32, 32))
    with pytest.raises(IndexError, match="there are 15 prompts, got number 15"):
        clips.draw(torch.tensor([15]), random, 2, 32, 32)
