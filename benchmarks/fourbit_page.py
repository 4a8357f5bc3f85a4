"""Write the tables of docs/blackwell.md from the newest run of its rows.

python benchmarks/fourbit_page.py           rewrites docs/blackwell.md
python benchmarks/fourbit_page.py --check   exit code 1 if a table differs from the rows
"""

from __future__ import annotations

import sys
from pathlib import Path

import pages
from pages import prose, table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "blackwell.md"
ROWS = ROOT / "benchmarks" / "results" / "studies" / "nvidia-h200-fourbit.jsonl"
ROUNDINGS = ("to 6", "closest", "fed back")
SMOOTHED = "K mean, Hadamard, Q block means"
PLAIN, SHIPPED = "plain", "V-Smooth, k-means"
OWN, NO_OWN = "128", "none"
FED_BACK = "fed back"
# What the mode does, one after the other: smoothing of q and k, values, rounding, own block.
STEPS = (
    ("nothing smoothed, a group's largest to 6", "none", PLAIN, "to 6", NO_OWN),
    ("K without its mean", "K mean", PLAIN, "to 6", NO_OWN),
    ("Hadamard", "K mean, Hadamard", PLAIN, "to 6", NO_OWN),
    ("Q without its block means", SMOOTHED, PLAIN, "to 6", NO_OWN),
    ("best of five group scales", SMOOTHED, PLAIN, "closest", NO_OWN),
    ("errors of q and k fed back", SMOOTHED, PLAIN, FED_BACK, NO_OWN),
    ("V-Smooth; means take up what rounding lost", SMOOTHED, SHIPPED, FED_BACK, NO_OWN),
    ("own block in 16 bit", SMOOTHED, SHIPPED, FED_BACK, OWN),
)
MAIN = {"table": "main", "smoothing": SMOOTHED}
COMPARED = (
    ("a group's largest to 6", {**MAIN, "rounding": "to 6", "own": NO_OWN}),
    ("best of five group scales", {**MAIN, "rounding": "closest", "own": NO_OWN}),
    ("errors of q and k fed back", {**MAIN, "rounding": FED_BACK, "own": NO_OWN}),
    ("a group's largest to 6, own block", {**MAIN, "rounding": "to 6", "own": OWN}),
    ("**as shipped**: fed back, own block", {**MAIN, "rounding": FED_BACK, "own": OWN}),
    (
        "only V rounded, plain values grouped too",
        {"table": "terms", "rounding": FED_BACK, "rounded": "V", "own": NO_OWN},
    ),
    ("the same, own block", {"table": "terms", "rounding": FED_BACK, "rounded": "V", "own": OWN}),
    ("K in two terms, plain values grouped too", {"table": "queries", "queries": "k in two terms"}),
    ("Q and K in E4M3, plain values grouped too", {"table": "queries", "queries": "e4m3"}),
    ("Q and K in INT8, plain values grouped too", {"table": "queries", "queries": "int8"}),
)
CLUSTERED, WIDE, DEMO = "clustered", "clustered, wide", "demo model"


def main() -> int:
    rows = newest(pages.read(ROWS))
    return pages.write(PAGE, tables(rows) | sentences(rows))


def newest(rows: list[dict]) -> list[dict]:
    """The rows of the last run."""
    return [row for row in rows if row["run"] == rows[-1]["run"]]


def tables(rows: list[dict]) -> dict[str, str]:
    """Every table by its name."""
    return {
        "steps": steps_table(rows),
        "v-smooth": v_smooth_table(rows),
        "own": own_table(rows),
        "smoothing": smoothing_table(rows),
        "terms": terms_table(rows),
        "kernels": kernels_table(rows),
    }


def sentences(rows: list[dict]) -> dict[str, str]:
    """What the page says with numbers of the rows of all inputs."""
    return {"against-before": against_before(rows), "share": share(rows), "smoothing-pays": smoothing_pays(rows)}


def one(rows: list[dict], **of) -> dict:
    """The one row that has these fields."""
    (found,) = [row for row in rows if of.items() <= row.items()]
    return found


def error(rows: list[dict], **of) -> float:
    """Relative error of the one row that has these fields."""
    return one(rows, **of)["error"]


def main_error(rows: list[dict], name: str, values: str = SHIPPED, own: str = OWN, **of) -> float:
    """Error of the main table, as shipped but for what is said."""
    return error(rows, input=name, values=values, own=own, **{**MAIN, "rounding": FED_BACK, **of})


def inputs(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["input"] for row in rows))


def less(before: float, after: float, digits: int = 1) -> str:
    """By how much the second is less, in percent."""
    return f"{100 * (1 - after / before):.{digits}f} %"


def steps_table(rows: list[dict]) -> str:
    """What each step of the mode brings, after those before it."""
    lines = []
    for what, smoothing, values, rounding, own in STEPS:
        of = {"smoothing": smoothing, "values": values, "rounding": rounding, "own": own}
        lines.append([what, *(f"{main_error(rows, name, **of):.4f}" for name in inputs(rows))])
    return table(["step", *inputs(rows)], lines)


def against_before(rows: list[dict]) -> str:
    """How far the mode has come."""
    first, shipped = (
        {name: main_error(rows, name, **of) for name in (CLUSTERED, WIDE, DEMO)}
        for of in ({"values": PLAIN, "rounding": "to 6", "own": NO_OWN}, {})
    )
    far = main_error(rows, DEMO, own=NO_OWN)
    return prose(
        f"- **Against 4 bit as it was** (K and Q smoothed, a group's largest to 6, plain values) the error falls by"
        f" {less(first[CLUSTERED], shipped[CLUSTERED], 0)} on clustered inputs, by"
        f" {less(first[WIDE], shipped[WIDE], 0)} on the wide ones and by {less(first[DEMO], shipped[DEMO], 0)} on the"
        f" demo model's (without the own block {less(first[DEMO], far, 0)})."
    )


def v_smooth_table(rows: list[dict]) -> str:
    """The same with plain values and with V-Smooth, for several roundings and formats of queries and keys."""
    names = inputs(rows)
    lines = []
    for what, of in COMPARED:
        pairs = [[error(rows, input=name, values=values, **of) for values in (PLAIN, SHIPPED)] for name in names]
        lines.append([what, *(f"{before:.4f} to {after:.4f}: {less(before, after)}" for before, after in pairs)])
    return table(["error by V-Smooth", *names], lines)


def share(rows: list[dict]) -> str:
    """What V-Smooth takes off, and whose the rest is."""

    def taken(own: str) -> str:
        each = [less(*(main_error(rows, name, v, own) for v in (PLAIN, SHIPPED))) for name in (CLUSTERED, WIDE, DEMO)]
        return f"{each[0]} on clustered inputs, {each[1]} on the wide ones, {each[2]} on the demo model's"

    def of_terms(name: str) -> str:
        terms = {"table": "terms", "values": SHIPPED, "rounding": FED_BACK, "own": OWN}
        squares = {term: error(rows, input=name, rounded=term, **terms) ** 2 for term in "VKQP"}
        return ", ".join(f"{term} {100 * square / sum(squares.values()):.0f} %" for term, square in squares.items())

    return prose(
        f"V-Smooth takes off {taken(OWN)}; before there was an own block, {taken(NO_OWN)}. The other operands stay: of"
        f" the squared error that is left, clustered inputs: {of_terms(CLUSTERED)}; wide: {of_terms(WIDE)}; demo model:"
        f" {of_terms(DEMO)}."
    )


def own_table(rows: list[dict]) -> str:
    """Other own blocks: without and with the shift of the near scores."""
    lines = []
    for own in dict.fromkeys(row["own"] for row in rows if row["table"] == "own"):
        cells = []
        for name in inputs(rows):
            found = [row for row in rows if row["table"] == "own" and row["input"] == name and row["own"] == own]
            cells.append(" / ".join(f"{row['error']:.4f}" for row in sorted(found, key=lambda row: row["shift"])))
        lines.append([own, *cells])
    return table(["own block", *inputs(rows)], lines)


def smoothing_table(rows: list[dict]) -> str:
    """What is smoothed and in which order values stand, under each rounding."""
    mains = [row for row in rows if row["table"] == "main"]
    lines = []
    for smoothing, values, own in dict.fromkeys((row["smoothing"], row["values"], row["own"]) for row in mains):
        cells = []
        for name in inputs(rows):
            of = {"input": name, "smoothing": smoothing, "values": values, "own": own}
            cells.append(" / ".join(f"{error(mains, rounding=rounding, **of):.4f}" for rounding in ROUNDINGS))
        lines.append([smoothing, values, own, *cells])
    return table(["q and k", "values", "own block", *inputs(rows)], lines)


def smoothing_pays(rows: list[dict]) -> str:
    """What order and smoothing bring, without the own block."""

    def energy(name: str, values: str) -> str:
        row = one(rows, input=name, values=values, rounding=FED_BACK, own=NO_OWN, **MAIN)
        return f"{100 * row['removed_energy']:.0f}"

    def without(name: str, smoothing: str) -> tuple[float, float]:
        return main_error(rows, name, own=NO_OWN, smoothing=smoothing), main_error(rows, name, own=NO_OWN)

    sequence = "V-Smooth, sequence"
    means, turned = "K mean, Hadamard", "K mean, Q block means"
    of_demo, of_clustered, unturned = without(DEMO, means), without(CLUSTERED, means), without(DEMO, turned)
    return prose(
        f"- **Groups.** In k-means order, of the package's own number of clusters, block means remove"
        f" {energy(CLUSTERED, SHIPPED)} % of the clustered values' energy and {energy(DEMO, SHIPPED)} % of the demo"
        f" model's; in sequence order {energy(CLUSTERED, sequence)} and {energy(DEMO, sequence)} %.",
        f"- **Query block means pay** their scratch memory on a trained model: {less(*of_demo, 0)} of the error"
        f" ({of_demo[0]:.4f} to {of_demo[1]:.4f}), {less(*of_clustered, 0)} on clustered inputs.",
        f"- **Hadamard** changes nothing on random and clustered rows once both means are gone, and takes"
        f" {less(*unturned, 0)} off on the demo model ({unturned[0]:.4f} to {unturned[1]:.4f}). So it stays on.",
    )


def terms_table(rows: list[dict]) -> str:
    """Operands rounded alone, and all but one."""
    terms = [row for row in rows if row["table"] == "terms"]
    rounded = list(dict.fromkeys(row["rounded"] for row in terms))
    fields = ("input", "values", "rounding", "own")
    lines = []
    for kind in dict.fromkeys(tuple(row[field] for field in fields) for row in terms):
        of = dict(zip(fields, kind, strict=True))
        lines.append([*kind, *(f"{error(terms, rounded=term, **of):.4f}" for term in rounded)])
    return table(["input", "values", "rounding", "own block", *rounded], lines)


def kernels_table(rows: list[dict]) -> str:
    """The shipped mode by the Triton kernels, beside the same in torch with one row maximum for all tiles."""
    if not any(row["table"] == "kernels" for row in rows):
        return ""
    in_torch = [f"{main_error(rows, name):.4f}" for name in inputs(rows)]
    by_kernels = [f"{error(rows, input=name, table='kernels'):.4f}" for name in inputs(rows)]
    lines = [["in torch, one row maximum", *in_torch], ["by the Triton kernels", *by_kernels]]
    return table(["as shipped", *inputs(rows)], lines)


if __name__ == "__main__":
    sys.exit(main())
