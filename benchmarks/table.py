"""Draw tables from the dispatch rows and from the newest run of each result file: the README's and docs/hopper.md's.

python benchmarks/table.py           rewrites the two pages
python benchmarks/table.py --check   exit code 1 if one differs from its rows
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pages
from vc_attention.arch import FAMILIES, FamilyRow
from vc_attention.dispatch import IMPLEMENTATIONS

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
HOPPER = ROOT / "docs" / "hopper.md"
RESULTS = ROOT / "benchmarks" / "results"
PEERS = {
    "sdpa_flash": "torch SDPA, FlashAttention-2 in bf16 (ComfyUI's default)",
    "sdpa_cudnn": "torch SDPA, cuDNN in bf16",
    "fa3_bf16": "FlashAttention-3 in bf16",
    "fa4_bf16": "FlashAttention-4's kernel in bf16",
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
TRICKS = {  # settings of the kernel's rows: what was switched off
    "as shipped": "nothing",
    "means off": "means",
    "grouping off": "grouping (sequence order)",
    "expcast off": "ExpCast (an exponential and a cast instead)",
    "rotation off": "rotation (inputs rotated before, so that the preparation undoes it)",
}
NOTHING_OFF = "nothing off"  # as shipped, timed beside those; older runs have only "as shipped"
CROSSOVER = RESULTS / "studies" / "nvidia-h200-crossover.jsonl"
SHORT_CALLS = {
    "FlashAttention-2": ("sdpa_flash", ""),
    "cuDNN": ("sdpa_cudnn", ""),
    "8-bit, grouping held": ("cuda", "held grouping"),
    "8-bit, regrouped": ("cuda", "warm regrouping"),
    "8-bit precise": ("cuda", "precise"),
}
TRICK_ERRORS = {"normal": None, "clustered": "error_clustered", "a loud channel in k": "error_loud_channel"}


def main() -> int:
    readme = pages.write(README, {"support": support_table(), "speed": speed_tables()})
    hopper = pages.write(HOPPER, {"tricks": tricks_tables(), "crossover": crossover_table()})
    return max(readme, hopper)


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
    return _tables(_speed_table) or "No measured run is in `benchmarks/results/` yet."


def tricks_tables() -> str:
    """What each trick of our kernel costs and gives, by the newest run of each result file."""
    return _tables(_tricks_table) or "No run with one trick switched off at a time is in `benchmarks/results/` yet."


def _tables(draw: Callable[[list[dict]], str]) -> str:
    runs = [newest_run(path) for path in sorted(RESULTS.glob("*.jsonl"))]
    return "\n\n".join(made for rows in runs if (made := draw(rows)))


def newest_run(path: Path) -> list[dict]:
    """The rows of the last run in a file."""
    rows = pages.read(path)
    return [row for row in rows if row["run"] == rows[-1]["run"]]


def _speed_table(rows: list[dict]) -> str:
    """Times of complete calls; empty for a run without any."""
    shapes = sorted({tuple(row["shape"]) for row in rows if row["operation"] == "complete_call"}, key=_work)
    if not shapes:
        return ""
    heading = (
        f"{_machine(rows[0])}; one interleaved run, bf16 in and out, ComfyUI's layout. Times are of a complete call; "
        f"in brackets the factor over {PEERS[BASELINE]}. Errors: relative L2 against float32, on random normal inputs "
        "of the first column's shape and on values that cluster and have outlier tokens (32,760 tokens x 2 heads)."
    )
    columns = [f"{shape[2]:,} tokens x {shape[1]} heads" for shape in reversed(shapes)]
    lines = []
    for label, implementation, settings in _variants(rows):
        mine = [row for row in rows if (row["implementation"], row["settings"]) == (implementation, settings)]
        found = {tuple(row["shape"]): row for row in mine if row["operation"] == "complete_call"}
        clustered = next((row for row in mine if row["operation"] == "error_clustered"), None)
        paired = {tuple(row["shape"]): row["factor"] for row in mine if row["operation"] == "call_over_cudnn"}
        cells = [_cell(found.get(shape), _baseline(rows, shape), paired.get(shape)) for shape in reversed(shapes)]
        lines.append([label, *cells, _error(found[shapes[-1]]), _error(clustered)])
    return f"{heading}\n\n{pages.table(['attention', *columns, 'error, normal', 'error, clustered'], lines)}"


def _variants(rows: list[dict]) -> list[tuple[str, str, str]]:
    present = {row["implementation"]: row for row in rows if row["operation"] == "complete_call"}
    peers = [(_peer_label(present[name]), name, "") for name in PEERS if name in present]
    measured = {row["settings"] for row in rows if row["operation"] == "complete_call"}
    ours = [(label, "cuda", settings) for settings, label in OURS.items() if settings in measured]
    return [*peers, *ours]


def _peer_label(row: dict) -> str:
    version = row.get("version", UNNAMED_VERSION)
    return PEERS[row["implementation"]].format(major=version.partition(".")[0])


def _tricks_table(rows: list[dict]) -> str:
    """Empty for a run that switched nothing off."""
    settings = {*TRICKS, NOTHING_OFF}
    kernel = [row for row in rows if row["operation"] == "attention_kernel" and row["settings"] in settings]
    if not {row["settings"] for row in kernel} >= TRICKS.keys():
        return ""
    largest = max((tuple(row["shape"]) for row in kernel), key=_work)
    times = {row["settings"]: row for row in kernel if tuple(row["shape"]) == largest}
    if NOTHING_OFF in times:
        times["as shipped"] = times["as shipped"] | {"ms_p50": times[NOTHING_OFF]["ms_p50"]}
    heading = (
        f"{_machine(rows[0])}; kernel alone, {largest[2]:,} tokens x {largest[1]} heads. Errors on normal inputs of "
        "that shape, and of 32,760 tokens x 2 heads on clustered values and with a channel of k 16 times as large."
    )
    head = ["switched off", "time", *(f"error, {name}" for name in TRICK_ERRORS)]
    lines = [
        [label, f"{times[settings]['ms_p50']:.1f} ms", *_trick_errors(rows, times[settings])]
        for settings, label in TRICKS.items()
    ]
    return f"{heading}\n\n{pages.table(head, lines)}"


def _trick_errors(rows: list[dict], timed: dict) -> list[str]:
    named = {(row["operation"], row["settings"]): row for row in rows}
    found = [
        timed if operation is None else named.get((operation, f"kernel, {timed['settings']}"))
        for operation in TRICK_ERRORS.values()
    ]
    return [_error(row) for row in found]


def crossover_table() -> str:
    """Milliseconds of short calls, by the newest run of benchmarks/crossover.py."""
    rows = newest_run(CROSSOVER)
    times = {(*row["shape"][1:3], row["implementation"], row["settings"]): row["ms_p50"] for row in rows}
    shapes = sorted({key[:2] for key in times})
    lines = [
        [f"{heads} x {tokens:,}", *(f"{times[(heads, tokens, *column)]:.3f}" for column in SHORT_CALLS.values())]
        for heads, tokens in shapes
    ]
    return f"{_machine(rows[0])}.\n\n{pages.table(['heads x tokens', *SHORT_CALLS], lines)}"


def _error(row: dict | None) -> str:
    return "-" if row is None else f"{row['rel_l2']:.4f}"


def _machine(row: dict) -> str:
    """Where, when and of which code a run is."""
    dirty = " and changes" if row.get("dirty") else ""
    return (
        f"{row['gpu']}, {row['date'][:10]}, driver {row['driver']}, torch {row['torch']}, commit {row['commit']}{dirty}"
    )


def _work(shape: tuple[int, ...]) -> int:
    return shape[1] * shape[2] ** 2


def _baseline(rows: list[dict], shape: tuple[int, ...]) -> float | None:
    for row in rows:
        if (row["operation"], row["implementation"]) == ("complete_call", BASELINE) and tuple(row["shape"]) == shape:
            return row["ms_p50"]
    return None


def _cell(row: dict | None, baseline: float | None, paired: float | None) -> str:
    """A time and its factor: that of neighbouring turns, if it was measured, or else of all."""
    if row is None:
        return "-"
    if paired is None and baseline is not None:
        paired = baseline / row["ms_p50"]
    return f"{row['ms_p50']:.1f} ms" + ("" if paired is None else f" ({paired:.2f})")


if __name__ == "__main__":
    sys.exit(main())
