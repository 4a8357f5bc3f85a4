"""Pages whose tables are drawn from rows: read the rows, write Markdown, put it between a page's markers."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path


def read(path: Path) -> list[dict]:
    """All rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def prose(*paragraphs: str) -> str:
    """Sentences in lines of the page's width, those of a list item under one another."""
    made = []
    for text in paragraphs:
        indent = "  " if text.startswith("- ") else ""
        made.append(textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))
    return "\n".join(made)


def fill(text: str, tables: dict[str, str]) -> str:
    """``text`` with the content between each table's pair of markers made anew; SystemExit where they are missing."""
    for name, content in tables.items():
        begin, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"the page has no markers {begin} ... {end}")
        text = pattern.sub(lambda _, block=f"{begin}\n{content}\n{end}": block, text)
    return text


def write(page: Path, tables: dict[str, str]) -> int:
    """Fill a page; with ``--check`` on the command line only say, by exit code 1, whether that would change it."""
    text = page.read_text(encoding="utf-8")
    made = fill(text, tables)
    if "--check" in sys.argv[1:]:
        return 0 if made == text else 1
    page.write_text(made, encoding="utf-8")
    return 0
