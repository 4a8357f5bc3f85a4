"""Draws a training's log: the loss, its running mean, and the validation error at each noise level.

Rows of trainings that went on from each other's weights may be joined in one file: steps count on, ``run`` tells them
apart, and a line marks where each run started.

python training/curve.py training/results/log.jsonl training/results/loss.png
python training/curve.py training/results/log.jsonl training/results/loss.png --add /tmp/train/log.jsonl
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

SMOOTHING = 0.1  # share of a new value in the running mean


def read(path: Path) -> list[dict]:
    """Rows of log.jsonl; of two rows with one step, from a resumed training, the later."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return sorted({row["step"]: row for row in rows}.values(), key=lambda row: row["step"])


def starts(rows: list[dict]) -> list[int]:
    """Last steps of all runs but the last: where the next one started."""
    return [row["step"] for row, after in pairwise(rows) if row.get("run") != after.get("run")]


def join(rows: list[dict], added: list[dict]) -> list[dict]:
    """``rows`` and behind them those of a training that started from their weights."""
    run, step = rows[-1].get("run", 1) + 1, rows[-1]["step"]
    return rows + [{**row, "run": run, "step": step + row["step"]} for row in added]


def write(rows: list[dict], path: Path) -> None:
    """As log.jsonl, ``run`` first."""
    ordered = [{"run": row.get("run", 1), **{k: v for k, v in row.items() if k != "run"}} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in ordered), encoding="utf-8")


def running_mean(values: list[float]) -> list[float]:
    mean, means = values[0], []
    for value in values:
        mean += SMOOTHING * (value - mean)
        means.append(mean)
    return means


def draw(rows: list[dict], path: Path) -> None:
    """The curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    axes.plot(steps, losses, color="0.8", linewidth=0.8, label="loss, mean of 20 steps")
    axes.plot(steps, running_mean(losses), color="tab:blue", label="its running mean")
    checked = [row for row in rows if "validation" in row]
    for level in checked[-1]["validation"] if checked else ():
        values = [row["validation"][level] for row in checked]
        axes.plot([row["step"] for row in checked], values, ".--", linewidth=0.8, label=f"validation, noise {level}")
    for step in starts(rows):
        axes.axvline(step, color="0.4", linewidth=0.8, linestyle=":")
    axes.set(yscale="log", xlabel="step", ylabel="mean squared error of the velocity")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--add", type=Path, help="log of a training that went on from these weights: joined to the log")
    options = parser.parse_args(arguments)
    rows = read(options.log)
    if options.add:
        rows = join(rows, read(options.add))
        write(rows, options.log)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
