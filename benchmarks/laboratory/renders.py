"""Renders of the trained model under a variant, batched, with the groupings of every layer."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from vc_attention import attention, group_values
from vc_attention.group.api import Grouping

from .attend import attend
from .orders import balanced, cube_order
from .variants import Variant

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "training"), str(ROOT / "nodes")]  # files there import each other as scripts do

import checkpoint  # noqa: E402
import demo_latents  # noqa: E402
import sampling  # noqa: E402

BASELINE = Variant("16 bit", "control")
PRECISIONS = ("float16", "bfloat16")
PIXELS_PER_TOKEN = 8
PERTURBATION_SEED = 1_000_000


@dataclass(frozen=True)
class ClipSet:
    """Which clips are rendered: some prompts with ``seeds`` seeds each, at one size.

    Attributes:
        prompts: which of the model's prompts.
        seeds: how many clips of each.
        size: frames, pixel rows, pixel columns.
        steps: of the sampler.
        batch: clips rendered at once.
    """

    prompts: range
    seeds: int
    size: tuple[int, int, int] = (16, 128, 128)
    steps: int = 20
    batch: int = 36

    @property
    def clips(self) -> int:
        return len(self.prompts) * self.seeds

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of tokens."""
        return (self.size[0], self.size[1] // PIXELS_PER_TOKEN, self.size[2] // PIXELS_PER_TOKEN)

    @property
    def tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns

    def row(self) -> dict:
        """What a result row says of it."""
        return {
            "clips": self.clips,
            "prompts": len(self.prompts),
            "size": list(self.size),
            "tokens": self.tokens,
            "steps": self.steps,
        }


class Studio:
    """The trained model on one device, and its renders.

    The model computes in fp16, whose rounding is an eighth of bf16's: what a variant changes shall not drown in the
    rounding of everything around it. On a CPU, which multiplies 16-bit numbers slowly, it computes in float32.
    """

    def __init__(self, device: torch.device, folder: Path = checkpoint.WEIGHTS):
        self.device = device
        model, self.table, self.texts = checkpoint.load(folder, device)
        self.layers = len(model.blocks)
        self.models = {name: copy.deepcopy(model).to(_dtype(name, device)) for name in PRECISIONS}

    def render(self, clips: ClipSet, variant: Variant | None = None, watch=None) -> Tensor:
        """Latents [clips, 16, F, h, w] on the CPU; ``variant`` None is 16-bit attention.

        ``watch(step, layer, q, k, v)`` sees the inputs of every call of a 16-bit render.
        """
        return torch.cat([self._render(clips, part, variant, watch) for part in range(-(-clips.clips // clips.batch))])

    def _render(self, clips: ClipSet, part: int, variant: Variant | None, watch) -> Tensor:
        if max(clips.prompts) >= len(self.texts):
            raise ValueError(f"prompt {max(clips.prompts)} is asked for, the model knows {len(self.texts)} from 0 on")
        chosen = range(part * clips.batch, min((part + 1) * clips.batch, clips.clips))
        noise = sampling.start_noise(list(chosen), *clips.size)
        if variant is not None and variant.start_noise:
            other = sampling.start_noise([PERTURBATION_SEED + seed for seed in chosen], *clips.size)
            noise = noise + variant.start_noise * other
        if variant is None or variant.formats is None:
            attend_at = partial(_watched, watch) if watch else lambda step: None
        else:
            attend_at = SelfAttention(variant, clips.grid, clips.steps).at
        with torch.inference_mode():
            latents = sampling.sample(
                self.models[(variant or BASELINE).precision],
                noise.to(self.device),
                self.table[[clips.prompts[clip % len(clips.prompts)] for clip in chosen]],
                self.table[-1:],
                sampling.noise_levels(clips.steps),
                attend_at=attend_at,
            )
        return latents.cpu()

    def decode(self, latents: Tensor) -> Tensor:
        """Frames [clips, F, 3, H, W] from 0 to 1 on this device."""
        return demo_latents.decode(latents.to(self.device))


def _dtype(name: str, device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else getattr(torch, name)


def _watched(watch, step: int):
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        watch(step, layer, q, k, v)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return attend


class SelfAttention:
    """A variant's self-attention over one render, with the grouping each layer holds."""

    def __init__(self, variant: Variant, grid: tuple[int, int, int], steps: int):
        self.variant, self.grid, self.steps = variant, grid, steps
        self.cube = cube_order(grid) if variant.plan.order == "cube" else None
        self.held: dict[int, tuple[Grouping, int]] = {}

    def at(self, step: int):
        """The hook of one step."""
        return partial(self._attend, step)

    def _attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        variant = self.variant
        grouping = self._grouping(step, layer, v)
        demean = variant.plan.removes_means(step, self.steps)
        if variant.kernel != "emulated":
            return attention(q, k, v, mode=variant.kernel, implementation="cuda", grouping=grouping, demean=demean)
        permutation = None if grouping is None else grouping.permutation
        return attend(q, k, v, variant.formats, permutation, demean, self.grid).to(v.dtype)

    def _grouping(self, step: int, layer: int, v: Tensor) -> Grouping | None:
        plan = self.variant.plan
        if self.cube is not None:
            order = self.cube.to(v.device).expand(*v.shape[:3])
            return Grouping(order, v.new_empty((*v.shape[:2], 1, v.shape[3]), dtype=torch.float32))
        last, at = self.held.get(layer, (None, None))
        if plan.regroups(step, self.steps, at):
            last = group_values(v, last if plan.warm else None)
            if plan.order == "balanced":
                last = balanced(v, last)
            self.held[layer] = (last, step)
        return last
