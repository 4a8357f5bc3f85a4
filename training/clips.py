"""Training clips: small scenes drawn by formulas, the same for the same seed on every device.

A scene is a moving background, up to five objects that turn, move and cover each other, a hill line, light and a
camera. Each prompt names one kind of scene; its numbers are drawn anew for every clip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

OBJECTS = 5
TIME_PER_FRAME = 1.0 / 16.0

BACKGROUNDS = ("stripes", "checker", "waves", "sky", "stars", "meadow")
SHAPES = ("disc", "box", "star", "ring", "fish", "balloon")
TEXTURES = ("plain", "stripes", "sectors", "dots")

Range = tuple[float, float]
Color = tuple[float, float, float]

RED, GREEN, BLUE = (0.86, 0.16, 0.14), (0.2, 0.66, 0.27), (0.16, 0.34, 0.8)
YELLOW, ORANGE, PURPLE = (0.97, 0.82, 0.18), (0.95, 0.52, 0.12), (0.5, 0.25, 0.66)
WHITE, BLACK, NIGHT = (0.96, 0.96, 0.96), (0.08, 0.08, 0.1), (0.05, 0.07, 0.2)
PALE_BLUE, SKY, CREAM = (0.75, 0.86, 0.97), (0.4, 0.65, 0.93), (0.96, 0.91, 0.8)
SEA, DEEP, BROWN, GREY = (0.25, 0.7, 0.66), (0.06, 0.36, 0.45), (0.45, 0.28, 0.16), (0.55, 0.56, 0.6)


@dataclass(frozen=True)
class Thing:
    """One object: ranges of what is drawn for each clip. Lengths in half frame heights, angles in radians, per second
    of 16 frames."""

    shape: str = "disc"
    color: Color = RED
    other: Color = WHITE  # the texture's second color
    texture: str = "plain"
    texture_scale: float = 2.0
    round: float = 1.0  # shading as on a ball
    radius: Range = (0.25, 0.4)
    grow: Range = (0.0, 0.0)  # rings: radius gained in one period
    x: Range = (-1.0, 1.0)
    y: Range = (-0.8, 0.8)
    vx: Range = (0.0, 0.0)
    vy: Range = (0.0, 0.0)
    orbit: Range = (0.0, 0.0)
    pace: Range = (0.0, 0.0)  # of the orbit, the bounce and the growth
    bounce: Range = (0.0, 0.0)
    angle: Range = (-0.3, 0.3)
    spin: Range = (0.0, 0.0)


@dataclass(frozen=True)
class Prompt:
    """A sentence and the scenes it stands for."""

    text: str
    background: str
    low: Color  # the background's two colors
    high: Color
    things: tuple[Thing, ...]
    scale: Range = (2.0, 3.0)
    slant: Range = (0.0, 0.0)
    pan: tuple[Range, Range] = ((0.0, 0.0), (0.0, 0.0))
    zoom: Range = (0.0, 0.0)
    hill: Range = (9.0, 9.0)  # height of the ground line, 9: none
    ground: Color = GREEN
    light: Range = (1.0, 1.0)
    brighten: Range = (0.0, 0.0)


def _many(count: int, **changes) -> tuple[Thing, ...]:
    return tuple(Thing(**changes) for _ in range(count))


PROMPTS = (
    Prompt(
        "red balls bounce over blue stripes",
        "stripes",
        BLUE,
        PALE_BLUE,
        _many(3, y=(0.55, 0.8), bounce=(0.7, 1.3), pace=(2.5, 4.0), vx=(-0.4, 0.4), radius=(0.26, 0.36)),
        slant=(-0.6, 0.6),
        pan=((-0.3, 0.3), (0.0, 0.0)),
    ),
    Prompt(
        "yellow boxes tumble over a checkerboard",
        "checker",
        BLACK,
        (0.78, 0.78, 0.8),
        _many(
            3, shape="box", color=YELLOW, other=ORANGE, texture="stripes", round=0.0, radius=(0.24, 0.36), spin=(1, 3)
        ),
        scale=(1.6, 2.2),
        pan=((0.3, 0.7), (0.0, 0.0)),
    ),
    Prompt(
        "a green star spins over purple waves",
        "waves",
        PURPLE,
        (0.85, 0.62, 0.9),
        (Thing("star", GREEN, YELLOW, radius=(0.55, 0.75), x=(-0.3, 0.3), y=(-0.2, 0.2), spin=(1.5, 3.0), round=0.3),),
        zoom=(-0.2, 0.2),
    ),
    Prompt(
        "snow falls through the night",
        "sky",
        NIGHT,
        (0.13, 0.17, 0.36),
        _many(5, color=WHITE, radius=(0.07, 0.14), vy=(0.5, 1.1), vx=(-0.2, 0.2), y=(-1.2, 1.2)),
        hill=(0.45, 0.7),
        ground=(0.85, 0.88, 0.95),
    ),
    Prompt(
        "planets circle a sun among the stars",
        "stars",
        (0.02, 0.02, 0.07),
        WHITE,
        (
            Thing("disc", YELLOW, round=0.25, radius=(0.26, 0.32), x=(0.0, 0.0), y=(0.0, 0.0)),
            Thing(
                "disc",
                BLUE,
                PALE_BLUE,
                "stripes",
                radius=(0.12, 0.17),
                x=(0, 0),
                y=(0, 0),
                orbit=(0.5, 0.55),
                pace=(2, 3),
            ),
            Thing("disc", RED, ORANGE, "dots", radius=(0.1, 0.14), x=(0, 0), y=(0, 0), orbit=(0.8, 0.85), pace=(1, 2)),
        ),
        scale=(5.0, 6.0),
        pan=((0.05, 0.15), (0.0, 0.1)),
    ),
    Prompt(
        "balloons rise into a cloudy sky",
        "sky",
        SKY,
        WHITE,
        (
            *_many(2, shape="balloon", color=RED, radius=(0.2, 0.28), vy=(-0.7, -0.3)),
            *_many(1, shape="balloon", color=YELLOW, radius=(0.2, 0.28), vy=(-0.7, -0.3)),
            *_many(1, shape="balloon", color=GREEN, radius=(0.2, 0.28), vy=(-0.7, -0.3)),
        ),
        scale=(1.2, 1.8),
        pan=((-0.3, 0.3), (0.0, 0.0)),
    ),
    Prompt(
        "fish swim through green water",
        "waves",
        DEEP,
        SEA,
        _many(
            3,
            shape="fish",
            color=ORANGE,
            other=WHITE,
            texture="stripes",
            texture_scale=1.2,
            round=0.5,
            radius=(0.24, 0.36),
            vx=(0.5, 1.0),
            bounce=(0.05, 0.1),
            pace=(3.0, 5.0),
            angle=(-0.15, 0.15),
        ),
        scale=(1.5, 2.2),
        pan=((-0.3, -0.1), (0.0, 0.0)),
    ),
    Prompt(
        "a pinwheel turns before orange stripes",
        "stripes",
        ORANGE,
        CREAM,
        (
            Thing("box", BROWN, x=(0.0, 0.0), y=(1.2, 1.2), radius=(0.06, 0.06), round=0.0, angle=(0.0, 0.0)),
            Thing("disc", RED, WHITE, "sectors", 3.0, 0.0, (0.6, 0.75), x=(-0.2, 0.2), y=(-0.2, 0.0), spin=(2.0, 4.0)),
        ),
        slant=(1.3, 1.8),
        zoom=(0.0, 0.3),
    ),
    Prompt(
        "the sun rises over green hills",
        "sky",
        (0.98, 0.62, 0.35),
        (0.99, 0.85, 0.6),
        (Thing("disc", YELLOW, round=0.0, radius=(0.26, 0.36), x=(-0.5, 0.5), y=(0.4, 0.7), vy=(-0.6, -0.35)),),
        hill=(0.2, 0.4),
        light=(0.45, 0.6),
        brighten=(0.25, 0.4),
        pan=((0.05, 0.2), (0.0, 0.0)),
    ),
    Prompt(
        "rings grow on a pond",
        "waves",
        (0.1, 0.3, 0.55),
        (0.2, 0.48, 0.7),
        _many(4, shape="ring", color=WHITE, round=0.0, radius=(0.08, 0.15), grow=(0.5, 0.8), pace=(2.5, 4.0)),
        scale=(1.0, 1.5),
    ),
    Prompt(
        "butterflies of paper cross a meadow, the camera pans right",
        "meadow",
        (0.2, 0.5, 0.16),
        (0.95, 0.9, 0.35),
        _many(
            3,
            shape="star",
            color=PURPLE,
            other=WHITE,
            texture="sectors",
            texture_scale=2.5,
            round=0.2,
            radius=(0.2, 0.32),
            vx=(-0.5, 0.3),
            bounce=(0.2, 0.5),
            pace=(3.0, 5.0),
            spin=(-1.0, 1.0),
        ),
        scale=(3.0, 4.0),
        pan=((0.5, 0.9), (0.0, 0.0)),
    ),
    Prompt(
        "a beach ball rolls over a grey checkerboard, the camera zooms in",
        "checker",
        GREY,
        (0.82, 0.82, 0.84),
        (
            Thing("disc", BLUE, WHITE, "sectors", 3.0, 1.0, (0.4, 0.55), vx=(0.6, 1.0), y=(0.0, 0.3), spin=(2.0, 3.0)),
            Thing("box", GREEN, round=0.0, radius=(0.2, 0.3), y=(-0.6, 0.0), angle=(-0.5, 0.5)),
        ),
        scale=(1.6, 2.2),
        zoom=(0.3, 0.6),
    ),
)


@dataclass(frozen=True)
class Scenes:
    """Drawn numbers of a batch. ``clip`` [B, n] and ``thing`` [B, OBJECTS, n] by name, choices as one-hot weights."""

    clip: dict[str, Tensor]
    thing: dict[str, Tensor]
    phases: Tensor  # [B, 12], angles of clouds, waves and hills


CLIP_RANGES = ("scale", "slant", "zoom", "hill", "light", "brighten")
THING_RANGES = ("radius", "grow", "x", "y", "vx", "vy", "orbit", "pace", "bounce", "angle", "spin")
COLOR_JITTER = 0.06


def draw_scenes(kinds: Tensor, random: torch.Generator, device: torch.device | str) -> Scenes:
    """Scenes of the prompts ``kinds`` [B]; ``random`` is a CPU generator, so that devices agree."""
    kinds = kinds.cpu()
    batch = len(kinds)

    def between(ranges: Tensor, *shape: int) -> Tensor:
        low, high = ranges[kinds].unbind(-1)
        return (low + (high - low) * torch.rand(*shape, generator=random)).to(device)

    def colors(values: Tensor, *shape: int) -> Tensor:
        return (values[kinds] + COLOR_JITTER * (2.0 * torch.rand(*shape, generator=random) - 1.0)).to(device)

    clip = {name: between(_clip_ranges(name), batch) for name in CLIP_RANGES}
    clip["pan"] = between(torch.tensor([prompt.pan for prompt in PROMPTS]), batch, 2)
    clip["background"] = _one_hot([prompt.background for prompt in PROMPTS], BACKGROUNDS)[kinds].to(device)
    for name in ("low", "high", "ground"):
        clip[name] = colors(torch.tensor([getattr(prompt, name) for prompt in PROMPTS]), batch, 3)
    thing = {name: between(_thing_ranges(name), batch, OBJECTS) for name in THING_RANGES}
    for name in ("color", "other"):
        thing[name] = colors(torch.tensor(_of_things(name)), batch, OBJECTS, 3)
    for name, names in (("shape", SHAPES), ("texture", TEXTURES)):
        thing[name] = _one_hot(sum(_of_things(name), []), names).view(-1, OBJECTS, len(names))[kinds].to(device)
    for name in ("round", "texture_scale"):
        thing[name] = torch.tensor(_of_things(name))[kinds].to(device)
    present = [[place < len(prompt.things) for place in range(OBJECTS)] for prompt in PROMPTS]
    thing["present"] = torch.tensor(present, dtype=torch.float32)[kinds].to(device)
    thing["phase"] = (2 * math.pi * torch.rand(batch, OBJECTS, generator=random)).to(device)
    phases = (2 * math.pi * torch.rand(batch, 12, generator=random)).to(device)
    return Scenes(clip, thing, phases)


def _clip_ranges(name: str) -> Tensor:
    return torch.tensor([getattr(prompt, name) for prompt in PROMPTS], dtype=torch.float32)


def _of_things(name: str) -> list[list]:
    """A field of each prompt's things, filled up to OBJECTS with the default thing's."""
    rows = []
    for prompt in PROMPTS:
        things = (*prompt.things, *(Thing() for _ in range(OBJECTS - len(prompt.things))))
        rows.append([getattr(thing, name) for thing in things])
    return rows


def _thing_ranges(name: str) -> Tensor:
    return torch.tensor(_of_things(name), dtype=torch.float32)


def _one_hot(values: list[str], names: tuple[str, ...]) -> Tensor:
    return torch.eye(len(names))[[names.index(value) for value in values]]


def render(scenes: Scenes, frames: int, height: int, width: int) -> Tensor:
    """Frames [B, F, 3, H, W] from 0 to 1, float32 on the scenes' device."""
    clip, thing = scenes.clip, scenes.thing
    device = scenes.phases.device
    pixel = 2.0 / height
    time = torch.arange(frames, device=device).view(1, -1, 1, 1) * TIME_PER_FRAME
    y = ((torch.arange(height, device=device) + 0.5) * pixel - 1.0).view(1, 1, -1, 1)
    x = ((torch.arange(width, device=device) + 0.5) * pixel - width / height).view(1, 1, 1, -1)

    def each(value: Tensor) -> Tensor:
        return value.view(-1, 1, 1, 1)

    closer = torch.exp(-each(clip["zoom"]) * torch.sin(time))
    x, y, pixel = x * closer, y * closer, pixel * closer
    moved_x = x + each(clip["pan"][:, 0]) * time
    moved_y = y + each(clip["pan"][:, 1]) * time
    share = _background(scenes, moved_x, moved_y, time, pixel)
    colors = [_mix(each(clip["low"][:, c]), each(clip["high"][:, c]), share) for c in range(3)]

    for place in range(OBJECTS):
        _paint(colors, {name: value[:, place] for name, value in thing.items()}, x, y, time, pixel, width / height)
    _cover_with_ground(colors, scenes, moved_x, y, pixel)
    gain = each(clip["light"]) + each(clip["brighten"]) * time.clamp_max(1.5)
    return (torch.stack(colors, dim=2) * gain.unsqueeze(2)).clamp(0.0, 1.0)


def _mix(low: Tensor, high: Tensor, share: Tensor) -> Tensor:
    return low + (high - low) * share


def _edge(distance: Tensor, pixel: Tensor) -> Tensor:
    """1 inside (negative distance), 0 outside, one pixel wide between."""
    return (0.5 - distance / pixel).clamp(0.0, 1.0)


def _background(scenes: Scenes, x: Tensor, y: Tensor, time: Tensor, pixel: Tensor) -> Tensor:
    """Share of the second color, from 0 to 1."""
    clip, phases = scenes.clip, scenes.phases.view(len(scenes.phases), -1, 1, 1, 1)
    scale, slant = (clip[name].view(-1, 1, 1, 1) for name in ("scale", "slant"))
    sine, cosine = slant.sin(), slant.cos()
    u, v = (x * cosine + y * sine) * scale, (y * cosine - x * sine) * scale
    soft = pixel * scale * math.pi
    stripes = 0.5 + 0.5 * (torch.sin(math.pi * u + phases[:, 0]) / soft).clamp(-1.0, 1.0)
    squares = torch.sin(math.pi * u + phases[:, 0]) * torch.sin(math.pi * v + phases[:, 1])
    checker = 0.5 + 0.5 * (squares / soft).clamp(-1.0, 1.0)
    waves = 0.5 + 0.25 * (
        torch.sin(2.0 * u + 1.3 * torch.sin(1.7 * v + phases[:, 2] + 2.0 * time) + phases[:, 3])
        + torch.sin(2.7 * v - 0.8 * u + phases[:, 4] - 1.5 * time)
    )
    clouds = torch.sin(1.3 * u + phases[:, 5]) * torch.sin(2.3 * v + 0.7 * u + phases[:, 6])
    clouds = clouds + 0.5 * torch.sin(3.1 * u + phases[:, 7]) * torch.sin(4.3 * v + phases[:, 8])
    sky = (0.15 + 0.25 * y + 0.6 * torch.sigmoid(5.0 * (clouds - 0.35))).clamp(0.0, 1.0)
    stars = _dots(u, v, 0.13, soft / math.pi)
    meadow = _dots(u, v, 0.26, soft / math.pi)
    patterns = (stripes, checker, waves, sky, stars, meadow)
    return sum(clip["background"][:, index].view(-1, 1, 1, 1) * pattern for index, pattern in enumerate(patterns))


def _dots(u: Tensor, v: Tensor, radius: float, soft: Tensor) -> Tensor:
    """One dot in each unit square, at a place that depends on the square."""
    column, row = u.floor(), v.floor()
    hashed = torch.sin(12.9898 * column + 78.233 * row)
    to_x = u - column - 0.5 - 0.3 * torch.sin(57.0 * hashed)
    to_y = v - row - 0.5 - 0.3 * torch.sin(91.0 * hashed)
    size = radius * (0.7 + 0.3 * torch.sin(33.0 * hashed))
    return (0.5 - (torch.hypot(to_x, to_y) - size) / soft).clamp(0.0, 1.0)


def _cover_with_ground(colors: list[Tensor], scenes: Scenes, x: Tensor, y: Tensor, pixel: Tensor) -> None:
    phases = scenes.phases.view(len(scenes.phases), -1, 1, 1, 1)
    level = scenes.clip["hill"].view(-1, 1, 1, 1)
    line = level + 0.16 * torch.sin(2.1 * x + phases[:, 9]) + 0.08 * torch.sin(4.7 * x + phases[:, 10])
    cover = _edge(line - y, pixel)
    for index in range(3):
        ground = scenes.clip["ground"][:, index].view(-1, 1, 1, 1) * (1.15 - 0.3 * (y - line).clamp(0.0, 1.0))
        colors[index] = _mix(colors[index], ground, cover)


def _paint(colors: list[Tensor], thing: dict, x: Tensor, y: Tensor, time: Tensor, pixel: Tensor, aspect: float) -> None:
    """Draw one object of every clip over ``colors``."""
    one = {name: value.view(len(value), -1, 1, 1, 1).squeeze(1) for name, value in thing.items() if value.ndim == 1}
    turn = one["pace"] * time + one["phase"]
    reach_x, reach_y = aspect + 0.45, 1.45
    center_x = _wrap(one["x"] * aspect + one["vx"] * time, reach_x) + one["orbit"] * turn.cos()
    center_y = (
        _wrap(one["y"] + one["vy"] * time, reach_y) + one["orbit"] * turn.sin() - one["bounce"] * turn.sin().abs()
    )
    radius = one["radius"] + one["grow"] * (turn / (2.0 * math.pi)).frac()
    angle = one["angle"] + one["spin"] * time
    sine, cosine = angle.sin(), angle.cos()
    dx, dy = (x - center_x) / radius, (y - center_y) / radius
    u, v = dx * cosine + dy * sine, dy * cosine - dx * sine

    distance = _shape_distance(thing["shape"], u, v)
    cover = one["present"] * _edge(distance * radius, pixel)
    share = _texture(thing["texture"], one["texture_scale"], u, v, pixel / radius)
    lit = _shade(dx, dy, one["round"])
    for index in range(3):
        first, second = (thing[name][:, index].view(-1, 1, 1, 1) for name in ("color", "other"))
        colors[index] = _mix(colors[index], _mix(first, second, share) * lit, cover)


def _wrap(value: Tensor, reach: float) -> Tensor:
    """Into [-reach, reach): what leaves on one side comes back on the other."""
    return torch.remainder(value + reach, 2.0 * reach) - reach


def _shape_distance(weights: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """About the distance to the outline, negative inside, in radii."""
    far = torch.sqrt(u * u + v * v + 1e-9)
    around = torch.atan2(v, u)
    disc = far - 1.0
    box = torch.maximum(u.abs(), v.abs()) - 0.9
    star = far - (0.7 + 0.3 * torch.cos(5.0 * around))
    ring = (far - 0.85).abs() - 0.15
    body = torch.sqrt(u * u + (v / 0.55) ** 2 + 1e-9) - 1.0
    tail = torch.maximum(v.abs() + 0.8 * (u + 0.7), -1.6 - u)
    fish = torch.minimum(body, tail)
    string = torch.maximum(u.abs() - 0.06, (v - 1.8).abs() - 0.9)
    balloon = torch.minimum(disc, string)
    shapes = (disc, box, star, ring, fish, balloon)
    return sum(weights[:, index].view(-1, 1, 1, 1) * shape for index, shape in enumerate(shapes))


def _texture(weights: Tensor, scale: Tensor, u: Tensor, v: Tensor, pixel: Tensor) -> Tensor:
    """Share of the object's second color."""
    soft = pixel * scale * math.pi
    stripes = 0.5 + 0.5 * (torch.sin(math.pi * scale * u) / soft).clamp(-1.0, 1.0)
    around = torch.sin(2.0 * scale * torch.atan2(v, u)) * torch.sqrt(u * u + v * v + 1e-9)
    sectors = 0.5 + 0.5 * (around / (2.0 * scale * pixel)).clamp(-1.0, 1.0)
    dots = 0.5 + 0.5 * ((torch.sin(math.pi * scale * u) * torch.sin(math.pi * scale * v) - 0.4) / soft).clamp(-1.0, 1.0)
    patterns = (torch.zeros_like(u), stripes, sectors, dots)
    return sum(weights[:, index].view(-1, 1, 1, 1) * pattern for index, pattern in enumerate(patterns))


def _shade(dx: Tensor, dy: Tensor, roundness: Tensor) -> Tensor:
    """Light from above left on a ball; 1 everywhere where ``roundness`` is 0."""
    toward = torch.sqrt((1.0 - dx * dx - dy * dy).clamp_min(0.0))
    lit = 0.45 + 0.65 * (0.65 * toward - 0.45 * dx - 0.6 * dy).clamp(0.0, 1.0)
    return 1.0 + roundness * (lit - 1.0)
