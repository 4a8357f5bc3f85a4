"""A workflow's picture in the template browser: its name over a screenshot of its graph."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIZE = (640, 400)
GROUND, TEXT, SOFT, MARK = (24, 26, 30), (240, 240, 240), (160, 168, 176), (98, 176, 108)


def draw_thumbnail(screenshot: Path, target: Path, name: str, facts: str) -> None:
    graph = Image.open(screenshot).convert("RGB")
    graph.thumbnail((SIZE[0], SIZE[1] * 2), Image.Resampling.LANCZOS)
    picture = Image.new("RGB", SIZE, GROUND)
    picture.paste(graph, ((SIZE[0] - graph.width) // 2, SIZE[1] - graph.height))
    draw = ImageDraw.Draw(picture)
    head = max(SIZE[1] - graph.height, 110)
    draw.rectangle((0, 0, SIZE[0], head), fill=GROUND)
    draw.rectangle((24, 22, 30, head - 14), fill=MARK)
    draw.text((44, 16), name, TEXT, ImageFont.load_default(30))
    draw.text((44, 54), facts, SOFT, ImageFont.load_default(19))
    draw.text((44, 80), "with VC Attention", MARK, ImageFont.load_default(19))
    picture.save(target, "JPEG", quality=82, optimize=True)
