"""Fidelity of the 4-bit mode: output error against exact attention, one row a combination of what is done to inputs.

    python benchmarks/fourbit.py [--frames 16 --rows 32 --columns 32 --heads 4] [--out FILE]

Four tables: what is smoothed, in which order values stand and how NVFP4 is rounded; each rounding alone and all but
one; other formats of queries and keys; which keys stay in 16 bit, the own block. The mode as it ships also runs through
the Triton kernels, on a GPU without 4-bit products emulated. Nothing is timed. Rows go to
benchmarks/results/studies/<device>-fourbit.jsonl; benchmarks/fourbit_page.py writes the tables of docs/blackwell.md
from those of an H200.

Inputs are normal numbers, the made-up video layer of testing.py in two shapes, and q, k and v of calls of the demo's
trained model, caught in a 16-bit render; of those the root mean square over calls is told.
"""

from __future__ import annotations

import argparse
import math
import platform
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from fourbit_page import ROUNDINGS, tables
from laboratory.orders import CUBE, cube_order
from rows import RESULTS, append, environment
from vc_attention import group_values
from vc_attention.arch import FOUR_BIT
from vc_attention.attend import run_triton4
from vc_attention.attend.exact import exact_attention
from vc_attention.attend.settings import AUTO, resolve
from vc_attention.formats import (
    E2M1_MAX,
    E4M3_MAX,
    INT8_MAX,
    decode_e4m3,
    encode_e4m3,
    nvfp4_scale,
    positive,
    quantize_nvfp4,
)
from vc_attention.group.blocks import BLOCK, block_means, expand_blocks, permute_tokens, removed_energy
from vc_attention.quantize.nvfp4 import closest_nvfp4, fed_back_nvfp4, feedback, sampled_blocks
from vc_attention.quantize.reference import split_values
from vc_attention.quantize.rotation import rotate
from vc_attention.testing import clustered_qkv, random_qkv

CLUSTERS = (8, 64, 256)
OWN = {"none": 0, "own key": 1, "64": 64, "128": 128, "256": 256, "2 x 8 x 8": math.prod(CUBE)}  # tokens
WIDE = "clustered, wide"
DEMO = "demo model"
STEPS = 8  # of the render whose calls are caught
CAUGHT = {"cuda": (0, 4), "cpu": (2,)}  # steps
TERMS = ("Q", "K", "P", "V")
TOP = E2M1_MAX * E4M3_MAX


@dataclass(frozen=True)
class Method:
    """What is done to the inputs of a call before attention.

    Attributes:
        key_mean, query_means, rotated: smoothing of queries and keys.
        order: of keys and values: "sequence", "static cube", "k-means" (as the package groups) or "k-means, <count>".
        demean: block means of the values are removed.
        rounding: "to 6", "closest" (scale of the least squared error) or "fed back" (and errors of q and k fed back).
        terms: which operands are rounded.
        queries: format of queries and keys: "nvfp4", "k in two terms", "e4m3" or "int8" (scales of a row).
        own: which keys a query attends to in 16 bit, of OWN: itself, so many tokens of the sequence, or a cube.
        shift: their scores move by what rounding the query does to the score with its own key.
    """

    key_mean: bool = True
    query_means: bool = True
    rotated: bool = True
    order: str = "sequence"
    demean: bool = False
    rounding: str = "fed back"
    terms: tuple[str, ...] = TERMS
    queries: str = "nvfp4"
    own: str = "none"
    shift: bool = True

    def smoothing(self) -> str:
        done = {"K mean": self.key_mean, "Hadamard": self.rotated, "Q block means": self.query_means}
        return ", ".join(name for name, wanted in done.items() if wanted) or "none"

    def values(self) -> str:
        return f"V-Smooth, {self.order}" if self.demean else "plain"


SHIPPED = Method(order="k-means", demean=True, own="128")
FAR = replace(SHIPPED, own="none")


def smoothing_methods() -> Iterator[Method]:
    """The main table: each smoothing with plain values, each order, the own block; each with each rounding."""
    for rounding in ROUNDINGS:
        plain = Method(rounding=rounding)
        for key_mean, rotated, query_means in (
            *((False, False, False), (True, False, False), (True, False, True)),
            *((False, True, False), (True, True, False), (True, True, True)),
        ):
            yield replace(plain, key_mean=key_mean, rotated=rotated, query_means=query_means)
        smooth = replace(plain, demean=True)
        for order in ("sequence", "static cube", *(f"k-means, {count}" for count in CLUSTERS), "k-means"):
            yield replace(smooth, order=order)
        yield replace(smooth, order="k-means", rotated=False)
        yield replace(smooth, order="k-means", query_means=False)
        yield replace(plain, own=SHIPPED.own)
        yield replace(SHIPPED, rounding=rounding)


def term_methods() -> Iterator[Method]:
    """Each operand rounded alone, and all but each, before and with what the mode does."""
    earlier = (Method(rounding="to 6"), replace(FAR, rounding="to 6"), replace(FAR, demean=False), FAR)
    for start in (*earlier, replace(SHIPPED, demean=False), SHIPPED):
        for term in TERMS:
            yield replace(start, terms=(term,))
            yield replace(start, terms=tuple(other for other in TERMS if other != term))


def query_methods() -> Iterator[Method]:
    """Queries and keys in more bits, without an own block."""
    for queries in ("k in two terms", "e4m3", "int8"):
        yield replace(FAR, queries=queries)
        yield replace(FAR, queries=queries, demean=False)


def own_methods() -> Iterator[Method]:
    """Other own blocks, with and without the shift."""
    for own in OWN:
        for shift in (False, True)[own == "none" :]:
            yield replace(SHIPPED, own=own, shift=shift)


TABLES = {"main": smoothing_methods, "terms": term_methods, "queries": query_methods, "own": own_methods}


@dataclass(frozen=True)
class Calls:
    """q, k, v [B, H, S, D] of B calls of equal size, the queries that are asked, and the exact output for them."""

    q: Tensor
    k: Tensor
    v: Tensor
    grid: tuple[int, int, int]
    blocks: Tensor
    exact: Tensor

    @staticmethod
    def of(qkv: list[Tensor], grid: tuple[int, int, int], queries: int) -> Calls:
        """``queries`` rows are asked: whole blocks at equal distances."""
        q, k, v = qkv
        count = max(1, min(queries, q.shape[2]) // BLOCK)
        blocks = torch.arange(count, device=q.device) * (q.shape[2] // BLOCK) // count
        asked = chosen(q, blocks)
        return Calls(q, k, v, grid, blocks, exact_attention(asked, k, v, q.shape[-1] ** -0.5))

    def permutation(self, order: str) -> Tensor | None:
        """int32 [B, H, S] of an order's name."""
        if order == "sequence":
            return None
        if order == "static cube":
            return cube_order(self.grid, self.v.device).expand(*self.v.shape[:3])
        _, _, count = order.partition(", ")
        return group_values(self.v, clusters=int(count) if count else None).permutation

    def own_keys(self, own: str, permutation: Tensor | None) -> Tensor:
        """Bool, broadcastable to [B, H, rows, S]: which keys, in their order, are of the own block of a query."""
        place = torch.arange(self.q.shape[2], device=self.q.device)
        if own == "2 x 8 x 8":
            place = cube_order(self.grid, self.q.device).argsort()
        block = place // max(1, OWN[own])
        of_keys = block if permutation is None else block[permutation.long()]
        of_queries = block.unflatten(0, (-1, BLOCK))[self.blocks].flatten()
        return (of_queries[:, None] == of_keys[..., None, :]) & (own != "none")


def chosen(x: Tensor, blocks: Tensor) -> Tensor:
    """Rows of some blocks of x [B, H, S, X]."""
    return x.unflatten(2, (-1, BLOCK))[:, :, blocks].flatten(2, 3)


def attended(calls: Calls, method: Method, permutation: Tensor | None) -> Tensor:
    """float32 [B, H, rows, D]: attention with the operands as ``method`` rounds them."""
    q, k = calls.q.float(), calls.k.float()
    if method.key_mean:
        k = (k.double() - k.mean(2, keepdim=True, dtype=torch.float64)).float()
    if method.rotated:
        q, k = rotate(q), rotate(k)
    keys = permute_tokens(k, permutation)
    q_means = block_means(q) if method.query_means else torch.zeros_like(block_means(q))
    queries, stored_keys = rounded_rows(q - expand_blocks(q_means, q.shape[2]), keys, method)
    exact, queries, own_keys = (chosen(x, calls.blocks) for x in (q, queries, k))
    means = expand_blocks(q_means[:, :, calls.blocks], queries.shape[2])
    scale = q.shape[-1] ** -0.5
    scores = (queries @ stored_keys.transpose(2, 3) + means @ keys.transpose(2, 3)) * scale
    near = exact @ keys.transpose(2, 3) * scale
    if method.shift:
        near = near + ((queries + means - exact) * own_keys).sum(-1, keepdim=True) * scale
    return attended_by_scores(scores, near, calls, method, permutation)


def attended_by_scores(
    scores: Tensor, near: Tensor, calls: Calls, method: Method, permutation: Tensor | None
) -> Tensor:
    """The softmax and what follows.

    Args:
        scores, near: [B, H, rows, S] of rounded operands, and those that count for the own block.
    """
    is_own = calls.own_keys(method.own, permutation)
    scores, near = scores.masked_fill(is_own, -torch.inf), near.masked_fill(~is_own, -torch.inf)
    near_total = near.logsumexp(-1, keepdim=True)
    total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), near_total)
    weights, near_weights = torch.exp(scores - total), torch.exp(near - total)
    largest = torch.exp(torch.maximum(scores.amax(-1, keepdim=True), near_total) - total)  # where the kernels start
    values = permute_tokens(calls.v, permutation)
    residual, means = rounded_values(values, method)
    stored = rounded_probabilities(weights, largest) if "P" in method.terms else weights
    output = stored @ residual + near_weights @ values.float()
    if means is None:
        return output / (stored.sum(-1, keepdim=True) + near_weights.sum(-1, keepdim=True))
    return output + weights @ expand_blocks(means, values.shape[2])


def rounded_rows(q: Tensor, k: Tensor, method: Method) -> tuple[Tensor, Tensor]:
    """Smoothed q and k as stored."""
    if method.queries in ("e4m3", "int8"):
        return tuple(by_row(x, method.queries) for x in (q, k))
    made = []
    for name, x, other in (("Q", q, k), ("K", k, q)):
        if name not in method.terms:
            made.append(x)
            continue
        rounding = rounder(method.rounding, x, other)
        stored = rounding(x)
        made.append(stored + rounding(x - stored) if name == "K" and method.queries == "k in two terms" else stored)
    return tuple(made)


def rounder(rounding: str, x: Tensor, other: Tensor) -> Callable[[Tensor], Tensor]:
    """NVFP4 and back of rows x that are multiplied with ``other``."""
    if rounding == "fed back":
        weights = feedback(rotate(sampled_blocks(other).flatten(2, 3)))  # which turns back: ``other`` is as x is
        return lambda x: fed_back_nvfp4(x, nvfp4_scale(x, (2, 3)), weights).dequantize()
    made = quantize_nvfp4 if rounding == "to 6" else closest_nvfp4
    return lambda x: made(x, nvfp4_scale(x, (2, 3))).dequantize()


def by_row(x: Tensor, number_format: str) -> Tensor:
    """x in 8 bits with a scale for each row, and back."""
    largest = INT8_MAX if number_format == "int8" else E4M3_MAX
    scale = positive(x.abs().amax(-1, keepdim=True) / largest)
    return (decode_e4m3(encode_e4m3(x / scale)) if number_format == "e4m3" else (x / scale).round()) * scale


def rounded_values(v: Tensor, method: Method) -> tuple[Tensor, Tensor | None]:
    """Residual [B, H, S, D] as stored, and block means."""
    blocks = split_values(v, method.demean)
    means = None if blocks.means is None else blocks.means.float()
    if "V" not in method.terms:
        return blocks.residual, means
    exact = blocks.residual.transpose(2, 3)
    made = quantize_nvfp4 if method.rounding == "to 6" else closest_nvfp4
    stored = made(exact.contiguous(), nvfp4_scale(exact, (3,))).dequantize().transpose(2, 3)
    if means is not None and method.rounding != "to 6":
        means = means + block_means(blocks.residual - stored)
    return stored, means


def rounded_probabilities(weights: Tensor, largest: Tensor) -> Tensor:
    """NVFP4 of rows whose ``largest`` is 448 x 6, and back; one row maximum for all tiles, not a running one."""
    unit = largest / TOP
    one = torch.ones((), device=weights.device)
    heads = (weights / unit).flatten(0, 1)  # in turn, for memory
    return torch.stack([quantize_nvfp4(head, one).dequantize() for head in heads]).view_as(weights) * unit


def kernels(calls: Calls, permutation: Tensor | None) -> Tensor:
    """The shipped mode by the Triton kernels, for the queries that are asked."""
    output = torch.empty_like(calls.q)
    settings = resolve(FOUR_BIT, AUTO, AUTO, demean=True, family="sm_120")
    run_triton4.run(calls.q, calls.k, calls.v, permutation, calls.q.shape[-1] ** -0.5, settings, output)
    return chosen(output, calls.blocks).float()


def relative_error(output: Tensor, exact: Tensor) -> float:
    """Relative L2, root mean square over calls."""
    calls = (1, 2, 3)
    squares = (output.double() - exact.double()).square().sum(calls) / exact.double().square().sum(calls)
    return float(squares.mean().sqrt())


def measured(calls: Calls, method: Method, orders: dict[str, Tensor | None]) -> dict:
    """A row of one method."""
    if method.order not in orders:
        orders[method.order] = calls.permutation(method.order)
    permutation = orders[method.order]
    return {
        "smoothing": method.smoothing(),
        "values": method.values(),
        "rounding": method.rounding,
        "rounded": "".join(method.terms),
        "queries": method.queries,
        "own": method.own,
        "shift": method.shift,
        "calls": calls.q.shape[0],
        "removed_energy": float(removed_energy(calls.v, permutation).mean()) if method.demean else 0.0,
        "error": relative_error(attended(calls, method, permutation), calls.exact),
    }


def input_rows(name: str, calls: Calls) -> Iterator[dict]:
    """All rows of one input."""
    orders: dict[str, Tensor | None] = {}
    for table, methods in TABLES.items():
        for method in methods():
            yield {"input": name, "table": table, "computed": "torch"} | measured(calls, method, orders)
    if calls.q.is_cuda:
        shipped = {"smoothing": SHIPPED.smoothing(), "values": SHIPPED.values(), "rounding": SHIPPED.rounding}
        shipped |= {"own": SHIPPED.own, "shift": SHIPPED.shift}
        computed = {"table": "kernels", "computed": "Triton kernels, instructions emulated", "calls": calls.q.shape[0]}
        error = relative_error(kernels(calls, orders["k-means"]), calls.exact)
        yield {"input": name, **computed, **shipped, "error": error}


def inputs(arguments: argparse.Namespace, device: str) -> Iterator[tuple[str, Calls]]:
    """Calls by the name of their inputs, bf16."""
    grid = (arguments.frames, arguments.rows, arguments.columns)
    wide = (arguments.frames // 2, arguments.rows, arguments.columns * 5 // 2)  # 128 tokens: 1.6 rows of a picture
    drawn = {"dtype": torch.bfloat16, "device": device}
    shape = (1, arguments.heads, math.prod(grid), 128)
    yield "random", Calls.of(random_qkv(shape, **drawn), grid, arguments.queries)
    for name, of in (("clustered", grid), (WIDE, wide)):
        yield name, Calls.of(clustered_qkv(of, heads=arguments.heads, **drawn), of, arguments.queries)
    if not arguments.drawn_only:
        yield DEMO, caught_calls(arguments.queries, device)


def caught_calls(queries: int, device: str) -> Calls:
    """Self-attention of every layer at some steps of one render of the demo's model."""
    from laboratory.renders import ClipSet, Studio

    clips = ClipSet(prompts=range(1), seeds=1, steps=STEPS, batch=1)
    caught: list[list[Tensor]] = []

    def watch(step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if step in CAUGHT[device]:
            caught.append([x[:1].to(torch.bfloat16) for x in (q, k, v)])

    Studio(torch.device(device)).render(clips, None, watch)
    return Calls.of([torch.cat(x) for x in zip(*caught, strict=True)], clips.grid, queries)


def demo_fingerprint() -> str:
    """First digits of the SHA-256 of the weights whose calls are caught."""
    from fidelity import fingerprint
    from laboratory.renders import checkpoint

    return fingerprint(checkpoint.WEIGHTS)


def cpu_environment() -> dict:
    """What a row without a GPU says of when, where and which code; rounding errors do not depend on the processor."""
    now = datetime.now(timezone.utc)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "commit": f"working copy on {commit.stdout.strip() or 'unknown'}",
        "gpu": "none",
        "cpu": platform.machine(),
        "torch": torch.__version__,
    }


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = device == "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=8 if small else 16)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--columns", type=int, default=32)
    parser.add_argument("--heads", type=int, default=1 if small else 4)
    parser.add_argument("--queries", type=int, default=512 if small else 2048, help="query rows that are computed")
    parser.add_argument("--drawn-only", action="store_true", help="without the demo's model")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    shared = {"run": uuid.uuid4().hex[:12], **(cpu_environment() if small else environment())}
    name = "cpu" if small else shared["gpu"].lower().replace(" ", "-")
    path = arguments.out or RESULTS / "studies" / f"{name}-fourbit.jsonl"
    shared |= {"operation": "fourbit", "query_rows": arguments.queries, "cube": list(CUBE)}
    made = []
    with torch.inference_mode():
        for name, calls in inputs(arguments, device):
            _, heads, tokens, _ = calls.q.shape
            about = shared | {"heads": heads, "tokens": tokens, "grid": list(calls.grid)}
            if name == DEMO:
                about["model"] = demo_fingerprint()
            rows = [about | row for row in input_rows(name, calls)]
            append(rows, path)
            made += rows
    print("\n\n".join(tables(made).values()))


if __name__ == "__main__":
    main()
