"""Write the README's tables: support from the dispatch rows, speed from the newest run of each result file.

python benchmarks/table.py           rewrites README.md
python benchmarks/table.py --check   exit code 1 if README.md differs from its rows
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from vc_attention.arch import FAMILIES
from vc_attention.dispatch import IMPLEMENTATIONS

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
PEERS = {
    "sdpa_flash": "torch SDPA, FlashAttention-2 in bf16 (ComfyUI's default)",
    "sdpa_cudnn": "torch SDPA, cuDNN in bf16",
    "fa3_bf16": "FlashAttention-3 in bf16",
    "fa4_bf16": "FlashAttention-4 package in bf16",
    "sageattention": "SageAttention",
    "comfy_kitchen_int8": "ComfyUI's INT8",
}
BASELINE = "sdpa_cudnn"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    made = replace(replace(text, "support", support_table()), "speed", speed_tables())
    if "--check" in sys.argv[1:]:
        return 0 if made == text else 1
    README.write_text(made, encoding="utf-8")
    return 0


def replace(text: str, name: str, table: str) -> str:
    """``text`` with everything between the markers of one table exchanged."""
    begin, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"README.md has no markers {begin} ... {end}")
    return pattern.sub(lambda _: f"{begin}\n{table}\n{end}", text)


def support_table() -> str:
    """Which GPU gets which mode and kernel, and what has been seen of it."""
    lines = ["| GPU | family | mode `auto` picks | kernel in this version |", "| --- | --- | --- | --- |"]
    for family in FAMILIES:
        rows = [row for row in IMPLEMENTATIONS if row.automatic and family.family in (row.families or ())]
        kernels = "; ".join(f"`{row.name}`, {row.status}" for row in rows)
        lines.append(
            f"| {family.cards} | {family.family} | {family.mode} | "
            f"{kernels or 'not yet: the render stays as it was, and the node says so'} |"
        )
    for row in IMPLEMENTATIONS:
        if not row.automatic:
            modes = f"{', '.join(row.modes)}, by name only"
            lines.append(f"| any, also a CPU | - | {modes} | `{row.name}` in plain torch, {row.status}; slow |")
    lines.append("| older NVIDIA, AMD, Apple | - | none | none: the attention you had, with one sentence saying why |")
    return "\n".join(lines)


def speed_tables() -> str:
    """One table a result file, from its newest run."""
    tables = [_speed_table(newest_run(path)) for path in sorted(RESULTS.glob("*.jsonl"))]
    return "\n\n".join(tables) or "No measured run is in `benchmarks/results/` yet."


def newest_run(path: Path) -> list[dict]:
    """The rows of the last run in a file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [row for row in rows if row["run"] == rows[-1]["run"]]


def _speed_table(rows: list[dict]) -> str:
    shapes = sorted({tuple(row["shape"]) for row in rows if row["operation"] == "complete_call"}, key=_work)
    head = rows[0]
    heading = (
        f"{head['gpu']}, {head['date'][:10]}, driver {head['driver']}, torch {head['torch']}, commit {head['commit']}; "
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
    present = {row["implementation"] for row in rows if row["operation"] == "complete_call"}
    peers = [(label, name, "") for name, label in PEERS.items() if name in present]
    return [*peers, ("**VC Attention, 8-bit, grouping held**", "cuda", "held grouping")]


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
