"""What a layer's values look like at a step, and what each format costs its output: one 16-bit render is watched."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from vc_attention import group_values
from vc_attention.group.blocks import removed_energy

from . import formats
from .attend import attend
from .formats import Formats
from .orders import balanced, cube_order
from .variants import CHANNEL_ROW_MAXIMUM, EARLIER_4BIT, OURS, OWN_STUDIES, PRECISE, ROW_MAXIMUM

CLUSTER_COUNTS = (8, 16, 32, 64, 128, 256, 512)
OUTLIER = 3.0  # times the median norm of a head's tokens
EXPCAST_ZERO = -14.89375  # log2 units below the row maximum at which the code rounds to 0: (0.5 - 55.65) / 8 - 8
HEADS_AT_ONCE = 8


@dataclass(frozen=True)
class Call:
    """One watched attention call: q, k, v [B, H, S, D], exact output, the k-means grouping's permutation, the grid."""

    q: Tensor
    k: Tensor
    v: Tensor
    exact: Tensor
    permutation: Tensor
    grid: tuple[int, int, int]


def error_probes() -> dict[str, Callable[[Call], Tensor]]:
    """Output of each format on a watched call. The last ones quantize one operand and leave the others in 16 bit."""

    def with_formats(kinds: Formats, smooth: bool = False):
        return lambda call: attend(
            call.q, call.k, call.v, kinds, call.permutation if smooth else None, smooth, call.grid
        )

    exact = formats.SIXTEEN_BIT
    whole = {
        "16 bit": formats.SIXTEEN_BIT,
        "plain FP8": formats.PLAIN_FP8,
        "SageAttention2's formats": formats.SAGE_ATTENTION_2,
        "ComfyUI's INT8 formats": formats.COMFY_INT8,
    }
    whole[PRECISE] = formats.OURS_PRECISE
    whole[CHANNEL_ROW_MAXIMUM] = formats.COMFY_INT8.but(probabilities="u8")
    made = {name: with_formats(kinds) for name, kinds in whole.items()}
    ours = dict(OURS)
    ours[ROW_MAXIMUM] = formats.INT8_THROUGHOUT.but(probabilities="u8")
    ours |= EARLIER_4BIT
    for name, kinds in OWN_STUDIES.items():
        made[name] = with_formats(kinds, smooth=True)
    for name, kinds in ours.items():
        made[name] = with_formats(kinds, smooth=True)
        made[f"{name}, means stay"] = with_formats(kinds)
    for name, kinds in ours.items():
        one = exact.but(own=kinds.own)
        made[f"{name}, only Q and K"] = with_formats(one.but(qk=kinds.qk, smooth_keys=True, rotate=True))
        made[f"{name}, only P"] = with_formats(one.but(probabilities=kinds.probabilities, exact_sums=False))
        made[f"{name}, only V"] = with_formats(one.but(values=kinds.values))
        made[f"{name}, only V, V-Smooth"] = with_formats(one.but(values=kinds.values), smooth=True)
    return made


class Watch:
    """Collects, for every layer, the errors of `error_probes` at some steps, and value statistics at others.

    Attributes:
        errors: name -> {(layer, step): relative L2 of the output}.
        facts: name -> {(layer, step): mean over clips and heads}.
    """

    def __init__(self, grid: tuple[int, int, int], clips: int, error_steps: set[int], value_steps: set[int]):
        self.grid, self.clips, self.error_steps, self.value_steps = grid, clips, error_steps, value_steps
        self.probes = error_probes()
        self.errors: dict[str, dict[tuple[int, int], float]] = {name: {} for name in self.probes}
        self.facts: dict[str, dict[tuple[int, int], float]] = {}

    def __call__(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if step not in self.error_steps:
            return
        q, k, v = (x[: self.clips].contiguous() for x in (q, k, v))  # the prompts' half of a guided batch
        exact, attention_facts = exact_attention(q, k, v)
        call = Call(q, k, v, exact, group_values(v).permutation, self.grid)
        for name, probe in self.probes.items():
            self.errors[name][layer, step] = relative_error(probe(call), exact)
        facts = attention_facts
        if step in self.value_steps:
            facts = facts | value_facts(v) | energy_facts(v, self.grid)
        for name, value in facts.items():
            self.facts.setdefault(name, {})[layer, step] = value


def relative_error(output: Tensor, exact: Tensor) -> float:
    """Relative L2 over everything."""
    return float((output.float() - exact).norm() / exact.norm())


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Attention in float32 and what its probabilities look like: entropy in bits, largest one, ExpCast's lost tail."""
    outputs, tails, entropies, largest = [], [], [], []
    queries, keys, values = (x.flatten(0, 1).float() for x in (q, k, v))
    for start in range(0, len(queries), HEADS_AT_ONCE):
        part = slice(start, start + HEADS_AT_ONCE)
        scores = queries[part] @ keys[part].transpose(1, 2) * q.shape[-1] ** -0.5
        below = (scores - scores.amax(-1, keepdim=True)) * math.log2(math.e)
        weights = torch.exp2(below)
        total = weights.sum(-1, keepdim=True)
        outputs.append(weights @ values[part] / total)
        tails.append((weights * (below < EXPCAST_ZERO)).sum(-1) / total[..., 0])
        entropies.append(total[..., 0].log2() - (weights * below).sum(-1) / total[..., 0])
        largest.append(1 / total[..., 0])
    tail = torch.cat(tails)
    facts = {
        "tau_mean": float(tail.mean()),
        "tau_p99": float(tail.flatten()[:: max(1, tail.numel() // 1_000_000)].quantile(0.99)),
        "tau_max": float(tail.max()),
        "entropy_bits": float(torch.cat(entropies).mean()),
        "largest_probability": float(torch.cat(largest).mean()),
    }
    return torch.cat(outputs).view(q.shape), facts


def value_facts(v: Tensor) -> dict[str, float]:
    """Outlier tokens and channel spread of v [B, H, S, D], means over clips and heads."""
    values = v.float()
    norms = values.norm(dim=3)
    median = norms.median(2, keepdim=True).values
    channel_rms = values.square().mean(2).sqrt()
    channel_peak = values.abs().amax(2)
    centred = values - values.mean(2, keepdim=True)
    return {
        "outlier_tokens": float((norms > OUTLIER * median).float().mean()),
        "largest_token": float((norms.amax(2) / median[..., 0]).mean()),
        "channel_spread": float((channel_rms.amax(2) / channel_rms.median(2).values).mean()),
        "channel_peak_over_rms": float((channel_peak / channel_rms).mean()),
        "channel_mean_energy": float(1 - (centred.square().sum((2, 3)) / values.square().sum((2, 3))).mean()),
    }


def energy_facts(v: Tensor, grid: tuple[int, int, int]) -> dict[str, float]:
    """Block energy that the means remove in each order, means over clips and heads."""
    cube = cube_order(grid, v.device).expand(*v.shape[:3])
    made = {
        "removed_sequence": float(removed_energy(v).mean()),
        "removed_cube": float(removed_energy(v, cube).mean()),
    }
    for clusters in CLUSTER_COUNTS:
        if clusters <= v.shape[2]:
            permutation = group_values(v, clusters=clusters).permutation
            made[f"removed_kmeans_{clusters}"] = float(removed_energy(v, permutation).mean())
    found = group_values(v)
    made["removed_kmeans"] = float(removed_energy(v, found.permutation).mean())
    made["removed_balanced"] = float(removed_energy(v, balanced(v, found).permutation).mean())
    return made
