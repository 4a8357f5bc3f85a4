"""The prompts, and the ranges from which the numbers of their clips are drawn.

Scenes are drawn by formulas, tours are a camera's way over a photograph. A prompt never changes its place: the
embeddings are stored by it, and new prompts go last.
"""

from __future__ import annotations

from dataclasses import dataclass

OBJECTS = 5

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
class Title:
    """A word that moves over a scene: ranges in half frame heights, per second of 16 frames, or from 0 to 1."""

    height: Range = (0.36, 0.5)  # of a capital letter
    x: Range = (-0.2, 0.8)  # of half the frame's width
    y: Range = (-0.5, 0.5)
    vx: Range = (-0.8, -0.3)
    vy: Range = (-0.05, 0.05)
    color: Color = CREAM
    outline: Color = BLACK
    opacity: Range = (0.4, 1.6)  # at the start, cut to 1: it fades in where this is less
    appear: Range = (0.4, 0.8)


@dataclass(frozen=True)
class Scene:
    """A sentence and the drawn scenes it stands for. ``weight``: how often it is drawn, beside the others."""

    text: str
    background: str
    low: Color  # the background's two colors
    high: Color
    things: tuple[Thing, ...] = ()
    scale: Range = (2.0, 3.0)
    slant: Range = (0.0, 0.0)
    pan: tuple[Range, Range] = ((0.0, 0.0), (0.0, 0.0))
    zoom: Range = (0.0, 0.0)
    hill: Range = (9.0, 9.0)  # height of the ground line, 9: none
    ground: Color = GREEN
    light: Range = (1.0, 1.0)
    brighten: Range = (0.0, 0.0)
    title: Title | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Tour:
    """A sentence and the ways of a camera over a photograph. Lengths in half heights of the photograph, angles in
    radians, per second of 16 frames."""

    text: str
    pan: Range = (0.0, 0.0)  # mostly sideways, to either side
    zoom: Range = (0.0, 0.0)
    view: Range = (0.6, 0.85)  # what the frame shows at its widest, as a share of what the photograph has room for
    angle: Range = (-0.08, 0.08)
    spin: Range = (-0.05, 0.05)
    light: Range = (0.8, 1.1)
    brighten: Range = (-0.12, 0.12)
    weight: float = 2.0


def _many(count: int, **changes) -> tuple[Thing, ...]:
    return tuple(Thing(**changes) for _ in range(count))


SCENES = (
    Scene(
        "red balls bounce over blue stripes",
        "stripes",
        BLUE,
        PALE_BLUE,
        _many(3, y=(0.55, 0.8), bounce=(0.7, 1.3), pace=(2.5, 4.0), vx=(-0.4, 0.4), radius=(0.26, 0.36)),
        slant=(-0.6, 0.6),
        pan=((-0.3, 0.3), (0.0, 0.0)),
    ),
    Scene(
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
    Scene(
        "a green star spins over purple waves",
        "waves",
        PURPLE,
        (0.85, 0.62, 0.9),
        (Thing("star", GREEN, YELLOW, radius=(0.55, 0.75), x=(-0.3, 0.3), y=(-0.2, 0.2), spin=(1.5, 3.0), round=0.3),),
        zoom=(-0.2, 0.2),
    ),
    Scene(
        "snow falls through the night",
        "sky",
        NIGHT,
        (0.13, 0.17, 0.36),
        _many(5, color=WHITE, radius=(0.07, 0.14), vy=(0.5, 1.1), vx=(-0.2, 0.2), y=(-1.2, 1.2)),
        hill=(0.45, 0.7),
        ground=(0.85, 0.88, 0.95),
    ),
    Scene(
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
    Scene(
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
    Scene(
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
    Scene(
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
    Scene(
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
    Scene(
        "rings grow on a pond",
        "waves",
        (0.1, 0.3, 0.55),
        (0.2, 0.48, 0.7),
        _many(4, shape="ring", color=WHITE, round=0.0, radius=(0.08, 0.15), grow=(0.5, 0.8), pace=(2.5, 4.0)),
        scale=(1.0, 1.5),
    ),
    Scene(
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
    Scene(
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
    Scene(
        "a title scrolls over stripes",
        "stripes",
        NIGHT,
        PURPLE,
        scale=(0.8, 1.4),
        slant=(-0.8, 0.8),
        pan=((-0.2, 0.2), (-0.1, 0.1)),
        title=Title(),
        weight=2.0,
    ),
)

TOURS = (
    Tour("a photograph, the camera pans across it", pan=(0.25, 0.7), zoom=(-0.1, 0.1)),
    Tour("a photograph, the camera moves closer", zoom=(0.4, 0.7), view=(0.8, 1.0)),
)

PROMPTS = (*SCENES, *TOURS)
