"""The grouping of one attention call: held from earlier steps, made anew, or none.

All key tokens of a call are grouped by value, whatever they stand for. HunyuanVideo and MiniMax-H3 put text, audio
and reference tokens into one sequence with the video; full attention is a sum over keys, so permuting keys and
values together leaves it unchanged for every mixture of kinds, and a row of a kind apart only forms its own cluster.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from itertools import zip_longest

import torch
from torch import Tensor

from ..kernels import Grouping, group_values, sampled_removed_energy
from .call import AttentionCall
from .position import Forward, Layer, Place, place_of
from .run_state import HeldGrouping, RunState


def grouping_for(
    run: RunState,
    forward: Forward,
    layer: Layer,
    call: AttentionCall,
    transformer_options: dict,
    v: Tensor,
    layout: str,
) -> Grouping | None:
    """The grouping for the rows of this call.

    Rows are one chunk per prompt (unconditional first, as ComfyUI batches them), each of the latent batch's size.
    A prompt keeps its own grouping, because which prompts share a call may change from step to step.

    Context windows hold nothing: windows may move from step to step, and a grouping per window and layer would
    multiply the memory. Nor do rows that are no chunk per prompt (a wrapper that evaluates them one by one): whose they
    are is not known. Inside the grouping window both are grouped afresh in every call.
    """
    place = place_of(forward, transformer_options, layer)
    prompts = _prompts(transformer_options)
    if transformer_options.get("context_window") is not None or call.batch % len(prompts):
        return _make(run, place, v, None, layout) if forward.position.grouping else None
    rows = call.batch // len(prompts)
    keys = [_key(layer, call, rows, v, prompt) for prompt in prompts]
    chunks = [v[i * rows : (i + 1) * rows] for i in range(len(prompts))]
    return _joined(_refreshed(run, forward, layer, place, keys, chunks, layout))


def _prompts(transformer_options: dict) -> list:
    """What tells the chunks of a call apart: side, identity, and a number where ComfyUI copied an area prompt."""
    uuids = transformer_options.get("uuids") or [None]
    sides = transformer_options.get("cond_or_uncond") or []
    chunks = list(zip_longest(sides[: len(uuids)], uuids))
    return [(*chunk, chunks[:index].count(chunk)) for index, chunk in enumerate(chunks)]


def _key(layer: Layer, call: AttentionCall, rows: int, v: Tensor, prompt) -> tuple:
    return (v.device, layer, prompt, rows, call.heads, call.tokens, v.shape[-1])


def _refreshed(
    run: RunState, forward: Forward, layer: Layer, place: Place, keys: list[tuple], values: list[Tensor], layout: str
) -> list[Grouping | None]:
    """The grouping of each chunk, regrouped where due; None for a prompt that first came after the window."""
    step, in_window = forward.position.step, forward.position.grouping
    for key, value in zip(keys, values, strict=True):
        held = run.groupings.get(key)
        if run.policy.regroup(in_window, step, held.step if held else None):
            made = _make(run, place, value, held.grouping if held else None, layout)
            run.hold(key, HeldGrouping(made, layer, step))
    kept = [run.groupings.get(key) for key in keys]
    return [held.grouping if held else None for held in kept]


def _joined(held: list[Grouping | None]) -> Grouping | None:
    """One grouping for all rows. Chunks without one stay in sequence order, as they would in a call of their own."""
    some = next((grouping for grouping in held if grouping is not None), None)
    if some is None or len(held) == 1:
        return some
    return Grouping.concat([grouping or _sequence_order(some) for grouping in held])


def _sequence_order(like: Grouping) -> Grouping:
    order = torch.arange(like.tokens, dtype=like.permutation.dtype, device=like.permutation.device)
    return Grouping(order.expand_as(like.permutation), like.centroids)


def _make(run: RunState, place: Place, v: Tensor, previous: Grouping | None, layout: str) -> Grouping:
    tokens = v.shape[1 if layout == "BSHD" else 2]
    wanted = min(run.settings.clusters, tokens) or None
    with _allocations_that_stay():
        grouping = group_values(
            v,
            previous,
            clusters=None if previous is not None else wanted,
            layout=layout,
            implementation=run.settings.implementation,
        )
        removed = sampled_removed_energy(v, grouping, layout=layout)
    run.count_regrouped(place, removed)
    return grouping


def _allocations_that_stay():
    """ComfyUI after 0.33 replays the allocations of a block; tensors that outlive it must not be among them."""
    pause = getattr(sys.modules.get("comfy.model_prefetch"), "pause_malloc_graph", None)
    return nullcontext() if pause is None else pause()
