"""The picture of a report: for each run its sentences, a table, and a map of blocks by steps."""

from __future__ import annotations

from PIL import Image, ImageDraw

from .pictures import ACCENT, ACTIVE, BACKGROUND, IDLE, MARGIN, MUTED, PANEL, TEXT, font, wrapped

WIDTH = 960
LINE = 20
LABELS = 120  # left of the map
MOST_MAP_HEIGHT = 560
NUMBERS = ("accelerated", "declined", "groupings", "seconds")
HEADS = ("blocks", "accelerated", "left alone", "regroupings", "seconds")


def draw_report(runs: list[dict], nothing: str) -> Image.Image:
    """All runs below each other; ``nothing`` is said where there are none."""
    parts = [_draw_run(number, run) for number, run in enumerate(runs, 1)] or [_draw_text(nothing)]
    sheet = Image.new("RGB", (WIDTH, sum(part.height for part in parts)), BACKGROUND)
    top = 0
    for part in parts:
        sheet.paste(part, (0, top))
        top += part.height
    return sheet


def by_type(rows: list[dict]) -> list[tuple]:
    """The table: one line a kind of block, with the sums over its blocks and steps."""
    sums: dict[str, list] = {}
    for row in rows:
        line = sums.setdefault(_kind(row), [0, *(0 for _ in NUMBERS)])
        line[0] += 1
        for column, name in enumerate(NUMBERS, 1):
            line[column] += sum(row[name])
    return [(kind, *line) for kind, line in sums.items()]


def _kind(row: dict) -> str:
    return "unnumbered calls" if row["block"] is None else f"{row['type'] or ''} blocks".strip()


def _draw_text(text: str) -> Image.Image:
    face = font(15)
    probe = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    lines = wrapped(probe, text, face, WIDTH - 2 * MARGIN)
    part = Image.new("RGB", (WIDTH, 2 * MARGIN + LINE * len(lines)), BACKGROUND)
    draw = ImageDraw.Draw(part)
    for number, line in enumerate(lines):
        draw.text((MARGIN, MARGIN + number * LINE), line, fill=TEXT, font=face)
    return part


def _draw_run(number: int, run: dict) -> Image.Image:
    node = "" if run["node"] is None else f" · node {run['node']}"
    served = ", ".join(f"{mode} ({implementation})" for mode, implementation in run["modes"]) or "nothing accelerated"
    title = f"Run {number}{node} · {served} · {run['steps']} steps"
    probe = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    sentences = [line for text in run["lines"] for line in wrapped(probe, text, font(13), WIDTH - 2 * MARGIN)]
    table = by_type(run["rows"])
    cell = _cell(run)
    map_top = MARGIN + 30 + LINE * (len(sentences) + len(table) + 2) + 8
    part = Image.new("RGB", (WIDTH, map_top + cell[1] * len(run["rows"]) + 3 * LINE + MARGIN), BACKGROUND)
    draw = ImageDraw.Draw(part)
    draw.text((MARGIN, MARGIN), title, fill=TEXT, font=font(18))
    top = MARGIN + 30
    for line in sentences:
        draw.text((MARGIN, top), line, fill=MUTED, font=font(13))
        top += LINE
    _draw_table(draw, top + 4, table)
    _draw_map(draw, map_top, run, cell)
    return part


def _draw_table(draw, top: int, table: list[tuple]) -> None:
    stops = [MARGIN, 240, 340, 460, 580, 700]
    for stop, head in zip(stops[1:], HEADS, strict=True):
        draw.text((stop, top), head, fill=MUTED, font=font(13))
    for line in table:
        top += LINE
        kind, *numbers, seconds = line
        for stop, value in zip(stops, (kind, *numbers, f"{seconds:.2f}"), strict=True):
            draw.text((stop, top), str(value), fill=TEXT, font=font(13))


def _cell(run: dict) -> tuple[int, int]:
    """Width and height of one block at one step."""
    width = (WIDTH - LABELS - 2 * MARGIN) // run["steps"]
    height = MOST_MAP_HEIGHT // max(len(run["rows"]), 1)
    return min(max(width, 2), 48), min(max(height, 3), 18)


def _draw_map(draw, top: int, run: dict, cell: tuple[int, int]) -> None:
    """A row a block, a column a step. Green: accelerated, brighter where it took longer; a dot: values regrouped."""
    width, height = cell
    left, rows = MARGIN + LABELS, run["rows"]
    steps = min(run["steps"], (WIDTH - left - MARGIN) // width)
    slowest = max((max(row["seconds"][:steps], default=0.0) for row in rows), default=0.0) or 1.0
    every = -(-14 // height)
    for index, row in enumerate(rows):
        y = top + index * height
        if index % every == 0:
            label = "unnumbered" if row["block"] is None else f"{row['type'] or ''} {row['block']}".strip()
            draw.text((MARGIN, y + height / 2), label, fill=MUTED, font=font(11), anchor="lm")
        for step in range(steps):
            x = left + step * width
            color = _color(row, step, slowest)
            draw.rectangle((x, y, x + max(width - 2, 0), y + max(height - 2, 0)), fill=color)
            if row["groupings"][step] and width >= 5 and height >= 5:
                middle, radius = (x + width / 2 - 1, y + height / 2 - 1), min(width, height) / 5
                box = (middle[0] - radius, middle[1] - radius, middle[0] + radius, middle[1] + radius)
                draw.ellipse(box, fill=ACCENT)
    bottom = top + height * len(rows) + 4
    for step in range(0, steps, -(-22 // width)):
        draw.text((left + (step + 0.5) * width - 1, bottom), str(step + 1), fill=MUTED, font=font(11), anchor="mt")
    _draw_legend(draw, left, bottom + LINE)


def _color(row: dict, step: int, slowest: float) -> tuple[int, int, int]:
    if row["accelerated"][step]:
        share = 0.45 + 0.55 * row["seconds"][step] / slowest
        return tuple(round(base + share * (full - base)) for base, full in zip(PANEL, ACTIVE, strict=True))
    return IDLE if row["declined"][step] else PANEL


def _draw_legend(draw, left: int, top: int) -> None:
    entries = ((ACTIVE, "accelerated (brighter: longer)"), (IDLE, "all calls left alone"), (PANEL, "no call"))
    for color, text in entries:
        draw.rectangle((left, top + 2, left + 12, top + 14), fill=color)
        draw.text((left + 18, top + 1), text, fill=MUTED, font=font(12))
        left += 40 + int(draw.textlength(text, font=font(12)))
    draw.ellipse((left + 3, top + 5, left + 9, top + 11), fill=ACCENT)
    draw.text((left + 18, top + 1), "values regrouped", fill=MUTED, font=font(12))
