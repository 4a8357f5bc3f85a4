"""Fill the tables of docs/fidelity.md from the rows of benchmarks/results/fidelity.jsonl.

python benchmarks/fidelity_page.py           tables and plots (matplotlib)
python benchmarks/fidelity_page.py --check   exit code 1 if a table differs from the rows
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from pathlib import Path

import pages
from pages import prose, table

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGE = DOCS / "fidelity.md"
RESULTS = ROOT / "benchmarks" / "results"
ROWS = RESULTS / "fidelity.jsonl"
SPEED = RESULTS / "nvidia-h200.jsonl"

FAR_ALONE = "4-bit without own block"
FAMILIES = (  # in the order of the tables; others behind them as they were run
    *("control", "others", "8-bit", "8-bit, own block", "INT8 throughout", "INT8 throughout, own block"),
    *("4-bit", "4-bit, own cube", FAR_ALONE),
)
PAPER_REMOVED = {"sequence": 0.08, "static cube": 0.12, "k-means": 0.36}
SCHEDULE_STEPS = 40  # of the cost column: Wan2.2's
TARGETS = (
    # what, variant, against, dB wanted
    ("V-Smooth in 8 bit", "8-bit", "8-bit, means stay", 1.0),
    ("V-Smooth in 8 bit, CUDA kernel against exact sums", "8-bit, CUDA kernel", "8-bit, means stay", 1.0),
    ("V-Smooth in INT8 throughout", "INT8 throughout", "INT8 throughout, means stay", 1.0),
    ("V-Smooth in 4 bit", "4-bit", "4-bit, means stay", 2.0),
    ("V-Smooth in 4 bit without own block", FAR_ALONE, f"{FAR_ALONE}, means stay", 2.0),
    ("8-bit against SageAttention2's formats", "8-bit", "SageAttention2's formats", 0.0),
    ("8-bit, CUDA kernel, against SageAttention2's formats", "8-bit, CUDA kernel", "SageAttention2's formats", 0.0),
    ("8-bit precise against ComfyUI's INT8 formats", "8-bit precise", "ComfyUI's INT8 formats", 0.0),
)
OWN_GAINS = (
    # what, variant, against
    ("4-bit", "4-bit", FAR_ALONE),
    ("4-bit, means stay", "4-bit, means stay", f"{FAR_ALONE}, means stay"),
    ("4-bit, a cube of the clip for the own block", "4-bit, own cube", "4-bit"),
    ("8-bit", "8-bit, own block", "8-bit"),
    ("8-bit, means stay", "8-bit, own block, means stay", "8-bit, means stay"),
    ("INT8 throughout", "INT8 throughout, own block", "INT8 throughout"),
    ("INT8 throughout, means stay", "INT8 throughout, own block, means stay", "INT8 throughout, means stay"),
    ("8-bit precise", "8-bit precise, own block", "8-bit precise"),
)
PLOTTED = ("8-bit", "8-bit precise", "4-bit")


def main() -> int:
    rows = read()
    changed = pages.write(PAGE, tables(rows, pages.read(SPEED)))
    if "--plots" in sys.argv[1:]:
        draw(newest(rows))
    return changed


def read() -> list[dict]:
    """All rows, each variant under the name it has now."""
    return [named_as_now(row) for row in pages.read(ROWS)]


def named_as_now(row: dict) -> dict:
    """Rows from before the own block, which name none, have "4-bit" for what is the mode without it now."""
    if "own" in row:
        return row
    named = {field: _without_own(row[field]) for field in ("settings", "family") if field in row}
    if "errors" in row:
        named["errors"] = {_without_own(name): each for name, each in row["errors"].items()}
    return row | named


def _without_own(name: str) -> str:
    return re.sub(r"^4-bit\b", FAR_ALONE, name)


def newest(rows: list[dict]) -> list[dict]:
    """Each job's last row, in the order of FAMILIES; of one kind of job only those of the newest model."""
    model = {row["operation"]: row["model"] for row in rows}
    last = {}
    for row in rows:
        if row["model"] == model[row["operation"]]:
            last[row["operation"], row["settings"]] = row
    return sorted(last.values(), key=_place)


def _place(row: dict) -> int:
    family = row.get("family")
    return FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)


def earlier(rows: list[dict]) -> list[dict]:
    """The renders of the model before the newest."""
    renders = of(rows, "renders")
    others = [row for row in renders if row["model"] != renders[-1]["model"]]
    return newest([row for row in others if row["model"] == others[-1]["model"]])


def tables(all_rows: list[dict], speed: list[dict]) -> dict[str, str]:
    """Every table of the page by its name."""
    rows = newest(all_rows)
    return {
        "run": run_table(rows),
        "four-bit": four_bit_text(rows),
        "targets": targets_table(rows),
        "own": own_table(rows),
        "renders": fidelity_table(of(rows, "renders")),
        "long": fidelity_table(of(rows, "long")),
        "ablations": fidelity_table(of(rows, "ablations")),
        "earlier": fidelity_table(earlier(all_rows)),
        "earlier-targets": targets_table(earlier(all_rows), unrun=False),
        "schedule": schedule_table(of(rows, "schedule"), speed),
        "layers": layers_table(of(rows, "probes")),
        "operands": operands_table(of(rows, "probes")),
        "whole": whole_table(of(rows, "probes")),
        "values": values_table(of(rows, "probes")),
        "energy": energy_table(of(rows, "probes")),
    }


def of(rows: list[dict], kind: str) -> list[dict]:
    """The rows of one kind of job."""
    return [row for row in rows if row["operation"] == f"fidelity_{kind}"]


def run_table(rows: list[dict]) -> str:
    """Where, when and what was rendered: a line for the rows of one kind and one version."""
    made: dict[tuple[str, str], list[dict]] = {}
    for kind in ("renders", "long", "ablations", "schedule", "probes"):
        for row in of(rows, kind):
            made.setdefault((kind, _version(row)), []).append(row)
    lines = []
    for (kind, where), found in made.items():
        row, size = found[0], found[0]["size"]
        clip = f"{size[0]} frames of {size[1]} x {size[2]}, {row['tokens']:,} tokens, {row['steps']} steps"
        clips = f"{row['clips']} ({row['prompts']} prompts)"
        seconds = sum(each["seconds"] for each in found)
        lines.append([f"{kind}: {len(found)}", clips, clip, f"{seconds:.0f} s", where, row["model"]])
    return table(["rows", "clips", "each", "took", "on", "model file, SHA-256"], lines)


def _version(row: dict) -> str:
    where = f"{row['gpu']}, torch {row['torch']}, {row['date'][:10]}"
    if "commit" in row:
        where += f", commit {row['commit']}{' and changes' if row['dirty'] else ''}"
    return where


def fidelity_table(rows: list[dict]) -> str:
    """Every measure of every variant, mean and spread over clips, and the worst clip."""
    if not rows:
        return "Not run yet."
    head = ["attention", "PSNR dB", "worst clip", "SSIM", "FLIP", "latents"]
    perceptual = bool(rows) and all("lpips_mean" in row for row in rows)
    lines = []
    for row in rows:
        cells = [
            row["settings"] + (" (CUDA)" if row["implementation"] == "cuda" and "CUDA" not in row["settings"] else ""),
            f"{row['psnr_mean']:.2f} ± {row['psnr_std']:.2f}",
            f"{row['psnr_worst']:.2f}",
            f"{row['ssim_mean']:.4f}",
            f"{row['flip_mean']:.4f}",
            f"{row['latent_error_mean']:.4f}",
        ]
        lines.append(cells + ([f"{row['lpips_mean']:.4f}"] if perceptual else []))
    return table(head + (["LPIPS"] if perceptual else []), lines)


def targets_table(rows: list[dict], unrun: bool = True) -> str:
    """What was wanted and what came, over the same clips; ``unrun``: also what was not run."""
    found = {row["settings"]: row for row in of(rows, "renders")}
    lines = []
    for what, title, against, wanted in TARGETS:
        if title not in found or against not in found:
            if unrun:
                lines.append([what, f"{wanted:+.1f} dB", "not run", "", "", ""])
            continue
        gains = paired(found[title], found[against])
        gain, error = mean_and_error(gains)
        met = "met" if gain >= wanted else "missed" if gain + 2 * error < wanted else "missed, within the error"
        lines.append([what, f"{wanted:+.1f} dB", *gain_cells(found, title, against), met])
    return table(["what", "target", "PSNR", "clips nearer", "latents", ""], lines)


def gain_cells(found: dict[str, dict], title: str, against: str) -> list[str]:
    """Gain in PSNR, clips nearer and gain of the latents of one variant against another."""
    if title not in found or against not in found:
        return ["not run", "", ""]
    gains = paired(found[title], found[against])
    gain, error = mean_and_error(gains)
    nearer = f"{sum(each > 0 for each in gains)} of {len(gains)}"
    return [f"{gain:+.2f} ± {error:.2f} dB", nearer, f"{latent_gain(found, title, against):+.2f} dB"]


def own_table(rows: list[dict]) -> str:
    """What an own block in 16 bit brings each format, over the same clips."""
    found = {row["settings"]: row for row in of(rows, "renders")}
    lines = [[what, *gain_cells(found, title, against)] for what, title, against in OWN_GAINS]
    return table(["own block in", "PSNR", "clips nearer", "latents"], lines)


def four_bit_text(rows: list[dict]) -> str:
    """The page's first words on the 4-bit mode."""
    found = {row["settings"]: row for row in of(rows, "renders")}

    def gain(title: str, against: str) -> str:
        return gain_cells(found, title, against)[0]

    def psnr(title: str) -> str:
        return f"{found[title]['psnr_mean']:.2f} dB" if title in found else "not run"

    return prose(
        f"- 4-bit renders have a PSNR of {psnr('4-bit')} against 16 bit, without the own block {psnr(FAR_ALONE)}."
        f" The own block brings {gain('4-bit', FAR_ALONE)}, V-Smooth {gain('4-bit', '4-bit, means stay')} (without own"
        f" block {gain(FAR_ALONE, f'{FAR_ALONE}, means stay')}), how NVFP4 is rounded"
        f" {gain(FAR_ALONE, f'{FAR_ALONE}, largest at 6')} (without own block)."
    )


def paired(row: dict, other: dict) -> list[float]:
    """PSNR gain of each clip."""
    return [a - b for a, b in zip(row["each"]["psnr"], other["each"]["psnr"], strict=True)]


def mean_and_error(gains: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    return statistics.fmean(gains), statistics.stdev(gains) / len(gains) ** 0.5


def latent_gain(found: dict[str, dict], title: str, against: str) -> float:
    """dB between the squared latent errors of all clips together: less at the mercy of single clips than PSNR."""
    energy = [statistics.fmean(x**2 for x in found[name]["each"]["latent_error"]) for name in (against, title)]
    return 10 * math.log10(energy[0] / energy[1])


def schedule_table(rows: list[dict], speed: list[dict]) -> str:
    """Each plan's fidelity in both modes, and what its groupings cost at 75,600 tokens."""
    modes = list(dict.fromkeys(row["family"] for row in rows))
    plans = dict.fromkeys(row["settings"].partition(", ")[2] for row in rows)
    found = {row["settings"]: row for row in rows}
    lines = []
    for plan in plans:
        present = {mode: found[f"{mode}, {plan}"] for mode in modes if f"{mode}, {plan}" in found}
        cells = [_cell(present.get(mode), found) for mode in modes]
        lines.append([plan, *cells, grouping_cost(next(iter(present.values()))["plan"], speed)])
    return table(["grouping", *(f"{mode}, PSNR dB" for mode in modes), "share of attention time"], lines)


def _cell(row: dict | None, found: dict[str, dict]) -> str:
    return "not run" if row is None else f"{row['psnr_mean']:.2f}{_gain(row, found)}"


def _gain(row: dict, found: dict[str, dict]) -> str:
    base = found.get(f"{row['family']}, means stay")
    if base is None or base is row:
        return ""
    gain, error = mean_and_error(paired(row, base))
    return f" ({gain:+.2f} ± {error:.2f})"


def grouping_cost(plan: dict, speed: list[dict]) -> str:
    """Grouping's share of a 40-step render's 8-bit attention calls, from the newest measured times of an H200."""
    made = refreshes(plan, SCHEDULE_STEPS)
    if not made:
        return "0"
    shape = [1, 40, 75600, 128]
    times = {
        (row["operation"], row["settings"]): row["ms_p50"]
        for row in speed
        if row["implementation"] == "cuda" and row["shape"] == shape and row.get("ms_p50")
    }
    cold, warm = times["regroup_extra", "cold"], times["regroup_extra", "warm"]
    spent = cold + (made - 1) * (warm if plan["warm"] else cold)
    return f"{spent / SCHEDULE_STEPS / times['complete_call', 'held grouping']:.2%}"


def refreshes(plan: dict, steps: int) -> int:
    """How many groupings a plan makes in ``steps`` steps."""
    if plan["order"] not in ("k-means", "balanced"):
        return 0
    first, last = (round(share * steps) for share in plan["window"])
    return -(-(last - first) // plan["interval"])


def layers_table(rows: list[dict]) -> str:
    """Error of the output by layer, means over steps, and how it goes with the tail."""
    if not rows:
        return "Not run yet."
    probes = rows[0]
    names = [name for name in probes["errors"] if ", only" not in name]
    layers = range(len(probes["errors"][names[0]]))
    tail = [value for row in probes["facts"]["tau_mean"] for value in row]
    lines = []
    for name in names:
        each = probes["errors"][name]
        flat = [value for row in each for value in row]
        lines.append([name, *(f"{mean(each[layer]):.4f}" for layer in layers), f"{rank_correlation(flat, tail):+.2f}"])
    facts = (("tau, mean over rows", "tau_mean", "{:.1e}"), ("tau, 99 % of rows below", "tau_p99", "{:.1e}"))
    facts += (("entropy, bits", "entropy_bits", "{:.1f}"), ("largest probability", "largest_probability", "{:.3f}"))
    for label, fact, form in facts:
        lines.append([label, *(form.format(mean(probes["facts"][fact][layer])) for layer in layers), ""])
    return table(["", *(f"layer {layer}" for layer in layers), "rank correlation with tau"], lines)


def operands_table(rows: list[dict]) -> str:
    """Error of the output with one operand quantized at a time, the share of the values, and what V-Smooth gains."""
    if not rows:
        return "Not run yet."
    errors = rows[0]["errors"]
    lines = []
    for mode in (name for name in errors if f"{name}, only P" in errors):
        scores, weights, values, smooth = (
            root_mean_square(errors[f"{mode}, only {part}"]) for part in ("Q and K", "P", "V", "V, V-Smooth")
        )
        share = values**2 / (scores**2 + weights**2 + values**2)
        stay, whole = (root_mean_square(errors[name]) for name in (f"{mode}, means stay", mode))
        cells = [f"{value:.4f}" for value in (scores, weights, values, smooth, stay, whole)]
        lines.append([mode, *cells, f"{share:.0%}", f"{20 * math.log10(stay / whole):+.2f} dB"])
    head = ["", "Q and K", "P", "V", "V, V-Smooth", "all, means stay", "all, V-Smooth", "share of V", "V-Smooth gains"]
    return table(head, lines)


def whole_table(rows: list[dict]) -> str:
    """Error of the output of each format, over layers and steps."""
    if not rows:
        return "Not run yet."
    errors = {name: each for name, each in rows[0]["errors"].items() if ", only" not in name}
    return table(["", "relative L2"], [[name, f"{root_mean_square(each):.4f}"] for name, each in errors.items()])


def values_table(rows: list[dict]) -> str:
    """What the values look like, by layer."""
    if not rows:
        return "Not run yet."
    facts = rows[0]["facts"]
    shown = (
        ("tokens over 3 median norms", "outlier_tokens", "{:.2%}"),
        ("largest token over the median", "largest_token", "{:.2f}"),
        ("largest channel RMS over the median", "channel_spread", "{:.2f}"),
        ("channel peak over its RMS", "channel_peak_over_rms", "{:.2f}"),
        ("energy in the mean of all tokens", "channel_mean_energy", "{:.1%}"),
    )
    layers = range(len(facts["outlier_tokens"]))
    lines = [[label, *(form.format(mean(facts[fact][layer])) for layer in layers)] for label, fact, form in shown]
    return table(["", *(f"layer {layer}" for layer in layers)], lines)


def energy_table(rows: list[dict]) -> str:
    """Block energy removed by the means, by layer, and the same by step."""
    if not rows:
        return "Not run yet."
    probes = rows[0]
    facts = {name: each for name, each in probes["facts"].items() if name.startswith("removed_")}
    layers = range(len(facts["removed_sequence"]))
    names = {"removed_sequence": "sequence order", "removed_cube": "static cube 2 x 8 x 8"}
    names |= {f"removed_kmeans_{count}": f"k-means, {count} clusters" for count in cluster_counts(probes)}
    names |= {"removed_kmeans": "k-means, automatic count", "removed_balanced": "the same, balanced"}
    paper = {"removed_sequence": "8 %", "removed_cube": "12 %", "removed_kmeans": "36 %"}
    lines = []
    for fact, label in names.items():
        steps = [mean([facts[fact][layer][step] for layer in layers]) for step in probes["value_steps"]]
        first, last = f"{steps[0]:.1%}", f"{steps[-1]:.1%}"
        by_layer = [f"{mean(facts[fact][layer]):.1%}" for layer in layers]
        lines.append([label, *by_layer, first, last, paper.get(fact, "")])
    head = ["order", *(f"layer {layer}" for layer in layers), "first step", "last step", "paper"]
    return table(head, lines)


def cluster_counts(probes: dict) -> list[int]:
    """The counts that were tried."""
    return sorted(int(name.removeprefix("removed_kmeans_")) for name in probes["facts"] if "kmeans_" in name)


def mean(values: list[float | None]) -> float:
    """Of what is known."""
    return statistics.fmean(value for value in values if value is not None)


def root_mean_square(rows: list[list[float]]) -> float:
    """Over layers and the steps that were looked at."""
    return statistics.fmean(value**2 for row in rows for value in row if value is not None) ** 0.5


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""
    ranks = [[sorted(values).index(value) for value in values] for values in (a, b)]
    return statistics.correlation(*ranks) if min(map(len, map(set, ranks))) > 1 else 0.0


def draw(rows: list[dict]) -> None:
    """The plots that the page shows."""
    from laboratory import plots

    for probes in of(rows, "probes"):
        plots.layers_and_steps(
            probes, [name for name in PLOTTED if name in probes["errors"]], DOCS / "fidelity-layers.png"
        )
        plots.removed_energy(probes, cluster_counts(probes), PAPER_REMOVED, DOCS / "fidelity-energy.png")


if __name__ == "__main__":
    sys.exit(main())
