"""Pictures of the laboratory: a strip of renders, and plots of the rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

FRAMES_SHOWN = 4
GAIN = 8
GAP, LABEL_HEIGHT = 4, 18
BACKGROUND = 0.08


class Strip:
    """Frames of one clip in several renders, each beside its difference from the 16-bit one, as a PNG."""

    def __init__(self, path: Path):
        self.path = path
        self.lines: list[tuple[str, Tensor]] = []

    def add(self, title: str, reference: Tensor, other: Tensor) -> None:
        """Another clip [F, 3, H, W] from 0 to 1; the reference is drawn once, above all. Writes the file anew."""
        picks = torch.linspace(0, len(reference) - 1, FRAMES_SHOWN).round().long().to(reference.device)
        first, second = reference[picks].cpu(), other[picks].cpu()
        grey = torch.full_like(first, 0.5)
        if not self.lines:
            self.lines.append((f"16 bit (right: difference from it, times {GAIN})", _row(first, grey)))
        self.lines.append((title, _row(second, (0.5 + GAIN * (second - first)).clamp(0, 1))))
        self._save()

    def _save(self) -> None:
        from PIL import Image, ImageDraw

        sheets = [torch.nn.functional.pad(row, (0, 0, LABEL_HEIGHT, 0), value=BACKGROUND) for _, row in self.lines]
        pixels = torch.cat(sheets, dim=1).permute(1, 2, 0)
        picture = Image.fromarray((pixels * 255).round().byte().numpy())
        draw, top = ImageDraw.Draw(picture), 0
        for (title, _), sheet in zip(self.lines, sheets, strict=True):
            draw.text((GAP, top + 3), title, fill=(235, 235, 235))
            top += sheet.shape[1]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        picture.quantize(128).save(self.path, optimize=True)


def _row(*groups: Tensor) -> Tensor:
    frames = [frame for group in groups for frame in group]
    return torch.cat([torch.nn.functional.pad(frame, (0, GAP, 0, GAP), value=BACKGROUND) for frame in frames], dim=2)


def layers_and_steps(probes: dict, names: list[str], path: Path) -> None:
    """Output error against the step, one line a layer, one panel a format; and the tail that ExpCast flushes."""
    figure, axes = _panels(len(names) + 1)
    for axis, name in zip(axes, names, strict=False):
        _lines(axis, probes["errors"][name], name, "relative L2 error of the output")
    _lines(axes[len(names)], probes["facts"]["tau_mean"], "tau: mass that ExpCast flushes", "mean over rows")
    axes[len(names)].legend(fontsize=7)
    _save(figure, path)


def removed_energy(probes: dict, counts: list[int], paper: dict[str, float], path: Path) -> None:
    """Share of block energy that the means remove against the number of clusters, one line a layer."""
    figure, axes = _panels(1, width=6.0)
    facts = probes["facts"]
    for layer in range(len(facts["removed_sequence"])):
        shares = [_mean(facts[f"removed_kmeans_{count}"][layer]) for count in counts]
        color = axes[0].plot(counts, shares, marker="o", markersize=3, label=f"layer {layer}")[0].get_color()
        axes[0].axhline(_mean(facts["removed_sequence"][layer]), color=color, linewidth=0.8, linestyle=":")
    for name, share in paper.items():
        axes[0].axhline(share, color="grey", linewidth=0.8, linestyle="--")
        axes[0].annotate(f"paper, {name}", (counts[-1], share), fontsize=7, ha="right", va="bottom", color="grey")
    axes[0].set(xscale="log", xticks=counts, xticklabels=counts, xlabel="clusters (dotted: sequence order)")
    axes[0].set(ylabel="block energy removed", ylim=(0, 1), title="k-means on values")
    axes[0].legend(fontsize=7)
    _save(figure, path)


def _panels(count: int, width: float = 3.4):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(width * count, 3.2), squeeze=False)
    return figure, axes[0]


def _lines(axis, table: list[list[float]], title: str, label: str) -> None:
    for layer, row in enumerate(table):
        axis.plot(range(len(row)), row, linewidth=1, label=f"layer {layer}")
    axis.set(xlabel="step", ylabel=label, title=title, yscale="log")
    axis.title.set_fontsize(9)
    axis.tick_params(labelsize=7)


def _save(figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)
