"""Write the README's tables: support from the dispatch rows, speed from the newest run of each result file.

python benchmarks/table.py           rewrites README.md
python benchmarks/table.py --check   exit code 1 if README.md differs from its rows
"""

from __future__ import annotations

import sys
from pathlib import Path

import pages
from vc_attention.arch import FAMILIES, FamilyRow
from vc_attention.dispatch import IMPLEMENTATIONS

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
PEERS = {
    "sdpa_flash": "torch SDPA, FlashAttention-2 in bf16 (ComfyUI's default)",
    "sdpa_cudnn": "torch SDPA, cuDNN in bf16",
    "fa3_bf16": "FlashAttention-3 in bf16",
    "fa4_bf16": "FlashAttention-4 package in bf16",
    "sageattention": "SageAttention {major}",
    "comfy_kitchen_int8": "ComfyUI's INT8",
}
BASELINE = "sdpa_cudnn"
UNNAMED_VERSION = "1"  # SageAttention's in rows without a version
OURS = {
    "held grouping": "**VC Attention, 8-bit, grouping held**",
    "precise": "**VC Attention, 8-bit precise**",
    "precise, held grouping": "**VC Attention, 8-bit precise, grouping held**",  # in runs before it read v as it lies
}
SHIPPED = "as shipped"


def main() -> int:
    return pages.write(README, {"support": support_table(), "speed": speed_tables()})


def support_table() -> str:
    """Which GPU gets which mode and kernel, and what has been seen of it."""
    lines = ["| GPU | family | mode | kernel | seen |", "| --- | --- | --- | --- | --- |"]
    for family in FAMILIES:
        lines += _family_lines(family)
    for row in IMPLEMENTATIONS:
        if not row.automatic:
            lines.append(
                f"| any, also a CPU | - | {', '.join(row.modes)} | `{row.name}` in plain torch, by name only, slow | "
                f"{row.status} |"
            )
    lines.append(
        "| older NVIDIA, AMD, Apple | - | none | none: the attention you had, with a sentence saying why | - |"
    )
    return "\n".join(lines)


def _family_lines(family: FamilyRow) -> list[str]:
    """A line a mode, the one ``auto`` picks first; in each the kernels in the order in which they are taken."""
    lines = []
    for mode in (family.mode, *family.other_modes):
        rows = [row for row in IMPLEMENTATIONS if row.automatic and family.family in row.families and mode in row.modes]
        first = "" if not rows else f"`{rows[0].name}`"
        others = "".join(f", without it `{row.name}`" for row in rows[1:])
        seen = "; ".join(f"`{row.name}` {row.status_on(family.family, mode)}" for row in rows)
        asked = "`auto`" if mode == family.mode else "by hand"
        kernels = f"{first}{others}" if rows else "none yet: the render stays as it was, and the node says so"
        lines.append(f"| {family.cards} | {family.family} | {mode}, {asked} | {kernels} | {seen or '-'} |")
    return lines


def speed_tables() -> str:
    """One table a result file, from its newest run."""
    runs = [newest_run(path) for path in sorted(RESULTS.glob("*.jsonl"))]
    tables = [table for rows in runs for table in (_speed_table(rows), _ablation_table(rows)) if table]
    return "\n\n".join(tables) or "No measured run is in `benchmarks/results/` yet."


def newest_run(path: Path) -> list[dict]:
    """The rows of the last run in a file."""
    rows = pages.read(path)
    return [row for row in rows if row["run"] == rows[-1]["run"]]


def _speed_table(rows: list[dict]) -> str:
    """Times of complete calls; empty for a run without any."""
    shapes = sorted({tuple(row["shape"]) for row in rows if row["operation"] == "complete_call"}, key=_work)
    if not shapes:
        return ""
    head = rows[0]
    heading = (
        f"{head['gpu']}, {head['date'][:10]}, driver {head['driver']}, torch {head['torch']}, commit {head['commit']}"
        f"{' and changes' if head.get('dirty') else ''}; "
        f"one interleaved run, bf16 in and out, ComfyUI's layout. Times are of a complete call; in brackets the factor "
        f"over {PEERS[BASELINE]}. Error: relative L2 against float32 on random normal inputs, first column's shape."
    )
    columns = [f"{shape[2]:,} tokens x {shape[1]} heads" for shape in reversed(shapes)]
    lines = [heading, "", f"| attention | {' | '.join(columns)} | error |", f"| --- |{' --- |' * (len(columns) + 1)}"]
    for label, implementation, settings in _variants(rows):
        found = {
            tuple(row["shape"]): row
            for row in rows
            if (row["operation"], row["implementation"], row["settings"]) == ("complete_call", implementation, settings)
        }
        cells = [_cell(found.get(shape), _baseline(rows, shape)) for shape in reversed(shapes)]
        lines.append(f"| {label} | {' | '.join(cells)} | {found[shapes[-1]]['rel_l2']:.4f} |")
    return "\n".join(lines)


def _variants(rows: list[dict]) -> list[tuple[str, str, str]]:
    present = {row["implementation"]: row for row in rows if row["operation"] == "complete_call"}
    peers = [(_peer_label(present[name]), name, "") for name in PEERS if name in present]
    measured = {row["settings"] for row in rows if row["operation"] == "complete_call"}
    ours = [(label, "cuda", settings) for settings, label in OURS.items() if settings in measured]
    return [*peers, *ours]


def _peer_label(row: dict) -> str:
    version = row.get("version", UNNAMED_VERSION)
    return PEERS[row["implementation"]].format(major=version.partition(".")[0])


def _ablation_table(rows: list[dict]) -> str:
    """What each trick of our kernel costs and gives; empty for a run that did not switch them off."""
    kernel = [row for row in rows if row["operation"] == "attention_kernel"]
    settings = list(dict.fromkeys(row["settings"] for row in kernel))
    if SHIPPED not in settings:
        return ""
    largest = max((tuple(row["shape"]) for row in kernel), key=_work)
    normal = {row["settings"]: row for row in kernel if tuple(row["shape"]) == largest}
    clustered = {row["settings"]: row for row in rows if row["operation"] == "error_clustered"}
    lines = [
        f"The kernel alone, one trick switched off at a time, same run ({largest[2]:,} tokens x {largest[1]} heads; "
        "clustered values: 32,760 tokens x 2 heads):",
        "",
        "| kernel | time | error, normal inputs | error, clustered values |",
        "| --- | --- | --- | --- |",
    ]
    for name in settings:
        row, other = normal[name], clustered[f"kernel, {name}"]
        lines.append(f"| {name} | {row['ms_p50']:.1f} ms | {row['rel_l2']:.4f} | {other['rel_l2']:.4f} |")
    return "\n".join(lines)


def _work(shape: tuple[int, ...]) -> int:
    return shape[1] * shape[2] ** 2


def _baseline(rows: list[dict], shape: tuple[int, ...]) -> float | None:
    for row in rows:
        if (row["operation"], row["implementation"]) == ("complete_call", BASELINE) and tuple(row["shape"]) == shape:
            return row["ms_p50"]
    return None


def _cell(row: dict | None, baseline: float | None) -> str:
    if row is None:
        return "-"
    factor = f" ({baseline / row['ms_p50']:.2f})" if baseline else ""
    return f"{row['ms_p50']:.1f} ms{factor}"


if __name__ == "__main__":
    sys.exit(main())
