"""Write the tables of docs/blackwell.md from the newest run of its rows.

python benchmarks/fourbit_page.py           rewrites docs/blackwell.md
python benchmarks/fourbit_page.py --check   exit code 1 if a table differs from the rows
"""

from __future__ import annotations

import sys
from pathlib import Path

import pages
from pages import table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "blackwell.md"
ROWS = ROOT / "benchmarks" / "results" / "studies" / "nvidia-h200-fourbit.jsonl"
ROUNDINGS = ("to 6", "closest", "fed back")
SMOOTHED = "K mean, Hadamard, Q block means"
PLAIN, SHIPPED = "plain", "V-Smooth, k-means"
# What the mode does, one after the other: smoothing of q and k, values, rounding.
STEPS = (
    ("nothing smoothed, a group's largest to 6", "none", PLAIN, "to 6"),
    ("K without its mean", "K mean", PLAIN, "to 6"),
    ("Hadamard", "K mean, Hadamard", PLAIN, "to 6"),
    ("Q without its block means", SMOOTHED, PLAIN, "to 6"),
    ("best of five group scales", SMOOTHED, PLAIN, "closest"),
    ("errors of q and k fed back", SMOOTHED, PLAIN, "fed back"),
    ("V-Smooth; means take up what rounding lost", SMOOTHED, SHIPPED, "fed back"),
)
COMPARED = (
    ("a group's largest to 6", {"table": "main", "smoothing": SMOOTHED, "rounding": "to 6"}),
    ("best of five group scales", {"table": "main", "smoothing": SMOOTHED, "rounding": "closest"}),
    ("**as shipped**", {"table": "main", "smoothing": SMOOTHED, "rounding": "fed back"}),
    ("only V rounded, plain values grouped too", {"table": "terms", "rounding": "fed back", "rounded": "V"}),
    ("K in two terms, plain values grouped too", {"table": "queries", "queries": "k in two terms"}),
    ("Q and K in E4M3, plain values grouped too", {"table": "queries", "queries": "e4m3"}),
    ("Q and K in INT8, plain values grouped too", {"table": "queries", "queries": "int8"}),
)


def main() -> int:
    return pages.write(PAGE, tables(newest(pages.read(ROWS))))


def newest(rows: list[dict]) -> list[dict]:
    """The rows of the last run."""
    return [row for row in rows if row["run"] == rows[-1]["run"]]


def tables(rows: list[dict]) -> dict[str, str]:
    """Every table by its name."""
    return {
        "steps": steps_table(rows),
        "v-smooth": v_smooth_table(rows),
        "smoothing": smoothing_table(rows),
        "terms": terms_table(rows),
        "kernels": kernels_table(rows),
    }


def error(rows: list[dict], **of) -> float:
    """Relative error of the one row that has these fields."""
    (found,) = [row for row in rows if of.items() <= row.items()]
    return found["error"]


def inputs(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["input"] for row in rows))


def less(before: float, after: float) -> str:
    """By how much the second is less, in percent."""
    return f"{100 * (1 - after / before):.1f} %"


def steps_table(rows: list[dict]) -> str:
    """What each step of the mode brings, after those before it."""
    lines = []
    for what, smoothing, values, rounding in STEPS:
        of = {"table": "main", "smoothing": smoothing, "values": values, "rounding": rounding}
        lines.append([what, *(f"{error(rows, input=name, **of):.4f}" for name in inputs(rows))])
    return table(["step", *inputs(rows)], lines)


def v_smooth_table(rows: list[dict]) -> str:
    """The same with plain values and with V-Smooth, for several roundings and formats of queries and keys."""
    names = inputs(rows)
    lines = []
    for what, of in COMPARED:
        pairs = [[error(rows, input=name, values=values, **of) for values in (PLAIN, SHIPPED)] for name in names]
        lines.append([what, *(f"{before:.4f} to {after:.4f}: {less(before, after)}" for before, after in pairs)])
    return table(["error by V-Smooth", *names], lines)


def smoothing_table(rows: list[dict]) -> str:
    """What is smoothed and in which order values stand, under each rounding."""
    mains = [row for row in rows if row["table"] == "main"]
    lines = []
    for smoothing, values in dict.fromkeys((row["smoothing"], row["values"]) for row in mains):
        cells = []
        for name in inputs(rows):
            of = {"input": name, "smoothing": smoothing, "values": values}
            cells.append(" / ".join(f"{error(mains, rounding=rounding, **of):.4f}" for rounding in ROUNDINGS))
        lines.append([smoothing, values, *cells])
    return table(["q and k", "values", *inputs(rows)], lines)


def terms_table(rows: list[dict]) -> str:
    """Operands rounded alone, and all but one."""
    terms = [row for row in rows if row["table"] == "terms"]
    rounded = list(dict.fromkeys(row["rounded"] for row in terms))
    lines = []
    for name, values, rounding in dict.fromkeys((row["input"], row["values"], row["rounding"]) for row in terms):
        of = {"input": name, "values": values, "rounding": rounding}
        lines.append([name, values, rounding, *(f"{error(terms, rounded=term, **of):.4f}" for term in rounded)])
    return table(["input", "values", "rounding", *rounded], lines)


def kernels_table(rows: list[dict]) -> str:
    """The shipped mode by the Triton kernels, beside the same in torch with one row maximum for all tiles."""
    if not any(row["table"] == "kernels" for row in rows):
        return ""
    torch_row = {"table": "main", "smoothing": SMOOTHED, "values": SHIPPED, "rounding": "fed back"}
    lines = []
    for what, of in (("in torch, one row maximum", torch_row), ("by the Triton kernels", {"table": "kernels"})):
        lines.append([what, *(f"{error(rows, input=name, **of):.4f}" for name in inputs(rows))])
    return table(["as shipped", *inputs(rows)], lines)


if __name__ == "__main__":
    sys.exit(main())
