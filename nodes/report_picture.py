"""The picture of a report: for each run its sentences, a table, and a map of blocks by steps."""

from __future__ import annotations

from PIL import Image, ImageDraw

from .pictures import ACCENT, ACTIVE, BACKGROUND, IDLE, MARGIN, MUTED, PANEL, TEXT, font, wrapped

WIDTH = 960
LINE = 20
LABELS = 120  # left of the map
SIDE = 170  # right of it: removed energy as a bar and a number, the sampled error as a number
BAR = 64
MOST_MAP_HEIGHT = 560
COUNTS = ("accelerated", "declined", "groupings")
# Of each column of the table: its place, its head.
COLUMNS = (
    (MARGIN, ""),
    (180, "blocks"),
    (250, "accelerated"),
    (350, "left alone"),
    (440, "regroupings"),
    (545, "removed energy"),
    (665, "seconds"),
    (745, "kernel"),
)


def draw_report(runs: list[dict], nothing: str) -> Image.Image:
    """All runs below each other; ``nothing`` is said where there are none."""
    parts = [_draw_run(number, run) for number, run in enumerate(runs, 1)] or [_draw_text(nothing)]
    sheet = Image.new("RGB", (WIDTH, sum(part.height for part in parts)), BACKGROUND)
    top = 0
    for part in parts:
        sheet.paste(part, (0, top))
        top += part.height
    return sheet


def by_type(rows: list[dict]) -> list[tuple[str, ...]]:
    """The table: one line a kind of block, over its blocks and steps."""
    kinds: dict[str, list[dict]] = {}
    for row in rows:
        kinds.setdefault(_kind(row), []).append(row)
    return [(kind, *_line(of_kind)) for kind, of_kind in kinds.items()]


def _line(rows: list[dict]) -> tuple[str, ...]:
    counts = [sum(sum(row[name]) for row in rows) for name in COUNTS]
    removed = [share for row in rows for share in row["removed_energy"] if share is not None]
    return (
        *map(str, (len(rows), *counts)),
        f"{sum(removed) / len(removed):.0%}" if removed else "-",
        f"{sum(sum(row['seconds']) for row in rows):.2f}",
        ", ".join(sorted({" ".join(served) for row in rows for served in row["modes"]})) or "-",
    )


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
    map_top = MARGIN + 30 + LINE * (len(sentences) + len(table) + 3) + 8
    part = Image.new("RGB", (WIDTH, map_top + cell[1] * len(run["rows"]) + 3 * LINE + MARGIN), BACKGROUND)
    draw = ImageDraw.Draw(part)
    draw.text((MARGIN, MARGIN), title, fill=TEXT, font=font(18))
    top = MARGIN + 30
    for line in sentences:
        draw.text((MARGIN, top), line, fill=MUTED, font=font(13))
        top += LINE
    _draw_table(draw, top + 4, table)
    _draw_map(draw, map_top, run, cell)
    _draw_side(draw, map_top, run["rows"], cell[1])
    return part


def _draw_table(draw, top: int, table: list[tuple[str, ...]]) -> None:
    for left, head in COLUMNS:
        draw.text((left, top), head, fill=MUTED, font=font(13))
    for line in table:
        top += LINE
        for (left, _), text in zip(COLUMNS, line, strict=True):
            draw.text((left, top), text, fill=TEXT, font=font(13))


def _cell(run: dict) -> tuple[int, int]:
    """Width and height of one block at one step."""
    width = (WIDTH - LABELS - SIDE - 2 * MARGIN) // run["steps"]
    height = MOST_MAP_HEIGHT // max(len(run["rows"]), 1)
    return min(max(width, 2), 48), min(max(height, 3), 18)


def _draw_map(draw, top: int, run: dict, cell: tuple[int, int]) -> None:
    """A row a block, a column a step. Green: accelerated, brighter where it took longer; a dot: values regrouped."""
    width, height = cell
    left, rows = MARGIN + LABELS, run["rows"]
    steps = min(run["steps"], (WIDTH - left - SIDE - MARGIN) // width)
    slowest = max((max(row["seconds"][:steps], default=0.0) for row in rows), default=0.0) or 1.0
    every = _lines_a_label(height)
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


def _lines_a_label(height: int) -> int:
    return -(-14 // height)


def _draw_side(draw, top: int, rows: list[dict], height: int) -> None:
    """Of each block, what its newest grouping removed, and the error of its first accelerated output."""
    left = WIDTH - MARGIN - SIDE + 16
    stops = (left, left + BAR + 6, left + BAR + 48)
    draw.text((stops[0], top - LINE), "removed energy", fill=MUTED, font=font(11))
    draw.text((stops[2] + 4, top - LINE), "error", fill=MUTED, font=font(11))
    every = _lines_a_label(height)
    for index, row in enumerate(rows):
        y = top + index * height
        share = next((share for share in reversed(row["removed_energy"]) if share is not None), None)
        if share is not None:
            draw.rectangle((stops[0], y, stops[0] + round(BAR * share), y + max(height - 2, 0)), fill=ACCENT)
        if index % every == 0:
            for stop, value, form in ((stops[1], share, ".0%"), (stops[2], row["error"], ".1%")):
                if value is not None:
                    draw.text((stop, y + height / 2), f"{value:{form}}", fill=MUTED, font=font(11), anchor="lm")


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
