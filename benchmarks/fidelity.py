"""Render the trained model under every number format, order and schedule; append rows to results/fidelity.jsonl.

    python benchmarks/fidelity.py                        # everything; on an H200 a few minutes
    python benchmarks/fidelity.py --only probes,renders --shard 0/2
    python benchmarks/fidelity.py --made benchmarks/results/fidelity.jsonl --output /tmp/new.jsonl   # what has no row
    python benchmarks/fidelity.py --quick --output /tmp/rows.jsonl     # the same code at a size for a CPU

Every render is compared with the same clips under torch's 16-bit attention. A job whose row is in the output file or
in --made, for the same model and clips, is run again with --again only, as after a change of a kernel or a format.
`docs/fidelity.md` is made from the rows by fidelity_page.py.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import rows
import torch
from fidelity_page import named_as_now
from laboratory.metrics import compare, latent_error
from laboratory.plots import Strip
from laboratory.probes import Watch
from laboratory.renders import ClipSet, Studio, checkpoint
from laboratory.variants import Variant, ablation_variants, long_variants, render_variants, schedule_variants

RESULTS = rows.RESULTS / "fidelity.jsonl"
LAST_12 = range(3, 15)  # words and photographs among them
CLIPS = {
    "renders": ClipSet(prompts=range(15), seeds=5, batch=38),
    "ablations": ClipSet(prompts=LAST_12, seeds=2, batch=24),
    "schedule": ClipSet(prompts=LAST_12, seeds=1, batch=12),
    "long": ClipSet(prompts=range(1, 15, 4), seeds=1, size=(64, 128, 128), batch=4),  # the last: a photograph
    "probes": ClipSet(prompts=LAST_12, seeds=1, batch=12),
}
QUICK = {name: ClipSet(range(1), 2, size=(4, 64, 64), steps=2, batch=2) for name in CLIPS}
VARIANTS: dict[str, Callable[[], list[Variant]]] = {
    "renders": render_variants,
    "ablations": ablation_variants,
    "schedule": schedule_variants,
    "long": long_variants,
}
STRIP = ("16 bit, start noise + 0.001", "plain FP8", "8-bit", "8-bit precise", "4-bit")
VALUE_STEPS = 6  # steps at which the values are looked at, spread over the render


@dataclass(frozen=True)
class Job:
    """One row to make: a variant of a clip set, or the probes."""

    kind: str
    variant: Variant | None


class Baselines:
    """The 16-bit renders of the clip sets, made when first asked for; only the last is kept."""

    def __init__(self, studio: Studio):
        self.studio = studio
        self.clips: ClipSet | None = None

    def of(self, clips: ClipSet) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents on the CPU and frames."""
        if clips != self.clips:
            self.latents = self.studio.render(clips)
            self.frames = self.studio.decode(self.latents)
            self.clips = clips
        return self.latents, self.frames


def main() -> int:
    options = _options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clips = QUICK if options.quick else CLIPS
    studio = Studio(device, options.weights)
    run = {"run": uuid.uuid4().hex[:12], **environment(device), "model": fingerprint(options.weights)}
    done = set() if options.again else finished([options.output, *options.made], run["model"])
    baselines = Baselines(studio)
    strip = Strip(options.strip) if options.strip else None
    started = time.monotonic()
    for number, job in enumerate(jobs := my_jobs(options)):
        if (key := job_key(job, clips[job.kind])) in done:
            continue
        begun = time.monotonic()
        row = made(studio, baselines, job, clips[job.kind], strip)
        rows.append([{**run, **row, "seconds": round(time.monotonic() - begun, 2)}], options.output)
        spent = time.monotonic() - started
        print(f"{spent:6.1f} s  {number + 1}/{len(jobs)}  {' / '.join(map(str, key[:2]))}  {summary(row)}", flush=True)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="probes,renders,long,schedule,ablations", help="kinds of jobs, in this order")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th job, from the i-th")
    parser.add_argument("--match", default="", help="only variants whose title holds one of these, between |")
    parser.add_argument("--again", action="store_true", help="also what has a row: the page shows the newest")
    parser.add_argument("--made", type=Path, action="append", default=[], help="more rows of jobs that need not run")
    parser.add_argument("--quick", action="store_true", help="tiny clips: a check of the code, not of the formats")
    parser.add_argument("--weights", type=Path, default=checkpoint.WEIGHTS, help="folder of the model's two files")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--strip", type=Path, help="picture of the first clip in some of the renders")
    return parser.parse_args()


def my_jobs(options: argparse.Namespace) -> list[Job]:
    """The jobs of this shard."""
    share, of = map(int, options.shard.split("/"))
    every = []
    for kind in options.only.split(","):
        variants = VARIANTS[kind]() if kind in VARIANTS else [None]
        every += [Job(kind, variant) for variant in variants if variant is None or _matches(variant, options.match)]
    if not torch.cuda.is_available():
        every = [job for job in every if job.variant is None or job.variant.kernel == "emulated"]
    return every[share::of]


def _matches(variant: Variant, texts: str) -> bool:
    return any(text in variant.title for text in texts.split("|"))


def made(studio: Studio, baselines: Baselines, job: Job, clips: ClipSet, strip: Strip | None) -> dict:
    """The row of one job."""
    if job.variant is None:
        return probe_row(studio, clips)
    latents = studio.render(clips, job.variant)
    expected_latents, expected = baselines.of(clips)
    frames = studio.decode(latents)
    if strip is not None and job.kind == "renders" and job.variant.title in STRIP:
        strip.add(job.variant.title, expected[0], frames[0])
    return {
        "operation": f"fidelity_{job.kind}",
        "implementation": implementation(job.variant),
        "settings": job.variant.title,
        "family": job.variant.family,
        "own": job.variant.formats.own if job.variant.formats else "none",
        "plan": plan_row(job.variant, clips.steps),
        **clips.row(),
        **measured({"latent_error": latent_error(expected_latents, latents), **compare(expected, frames)}),
    }


def implementation(variant: Variant) -> str:
    """What computed the attention of a variant."""
    if variant.formats is None:
        return "torch sdpa"
    return "emulated" if variant.kernel == "emulated" else "cuda"


def plan_row(variant: Variant, steps: int) -> dict:
    """What a row says of the plan of a variant."""
    plan = variant.plan
    return {
        "demean": plan.demean,
        "order": plan.order,
        "window": list(plan.window),
        "interval": plan.interval,
        "warm": plan.warm,
        "refreshes": plan.refreshes(steps),
    }


def measured(values: dict[str, list[float]]) -> dict:
    """Mean, spread and worst clip of every measure, and the clips themselves."""
    made = {}
    for name, each in values.items():
        worst = min(each) if name in ("psnr", "ssim") else max(each)
        made |= {
            f"{name}_mean": statistics.fmean(each),
            f"{name}_std": statistics.stdev(each) if len(each) > 1 else 0.0,
            f"{name}_worst": worst,
        }
    return made | {"each": {name: [float(f"{value:.5g}") for value in each] for name, each in values.items()}}


def probe_row(studio: Studio, clips: ClipSet) -> dict:
    """Errors of every layer and step of a 16-bit render, and its value statistics at some."""
    value_steps = spread_steps(VALUE_STEPS, clips.steps)
    watch = Watch(clips.grid, clips.clips, set(range(clips.steps)), value_steps)
    studio.render(clips, watch=watch)

    def table(found: dict[tuple[int, int], float]) -> list[list[float | None]]:
        return [[_rounded(found.get((layer, step))) for step in range(clips.steps)] for layer in range(studio.layers)]

    return {
        "operation": "fidelity_probes",
        "implementation": "emulated",
        "settings": "prompt rows of a 16-bit render; k-means cold at every call",
        "own": "in some",
        **clips.row(),
        "value_steps": sorted(value_steps),
        "errors": {name: table(found) for name, found in watch.errors.items()},
        "facts": {name: table(found) for name, found in watch.facts.items()},
    }


def spread_steps(count: int, steps: int) -> set[int]:
    """``count`` of ``steps`` steps, the first and the last among them."""
    return {round(place * (steps - 1) / (count - 1)) for place in range(count)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def job_key(job: Job, clips: ClipSet) -> tuple:
    """What makes a row that of this job."""
    settings = job.variant.title if job.variant else ""
    return (job.kind, settings, clips.clips, *clips.size, clips.steps)


def finished(paths: list[Path], model: str) -> set[tuple]:
    """Keys of the jobs whose rows are in one of the files, for this model."""
    found = [row for path in paths if path.exists() for row in rows.read(path)]
    return {row_key(row) for row in map(named_as_now, found) if row["model"] == model}


def row_key(row: dict) -> tuple:
    """`job_key` of a row's job."""
    kind = row["operation"].removeprefix("fidelity_")
    settings = row["settings"] if kind in VARIANTS else ""
    return (kind, settings, row["clips"], *row["size"], row["steps"])


def summary(row: dict) -> str:
    """One line for a person."""
    if "psnr_mean" not in row:
        return ""
    return (
        f"PSNR {row['psnr_mean']:.2f} dB (worst {row['psnr_worst']:.2f}), SSIM {row['ssim_mean']:.4f}, "
        f"FLIP {row['flip_mean']:.4f}, latents {row['latent_error_mean']:.4f}"
    )


def environment(device: torch.device) -> dict:
    """`rows.environment` on a GPU; what there is of it on a CPU."""
    if device.type == "cuda":
        return rows.environment()
    return {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "gpu": "CPU", "torch": torch.__version__}


def fingerprint(folder: Path) -> str:
    """First digits of the model file's SHA-256."""
    return hashlib.sha256((folder / checkpoint.MODEL_FILE).read_bytes()).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
