"""Fidelity of the 4-bit mode by what is smoothed: output error against exact attention, one row a combination.

    python benchmarks/fourbit.py [--frames 16 --rows 32 --columns 32 --heads 4] [--out FILE]

The reference recurrence on operands of each combination; nothing is timed. ``value_error`` is what 4-bit values alone
cost: exact softmax over the decoded values. Rows go to
benchmarks/results/studies/<device>-fourbit.jsonl, the table to the terminal.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from rows import RESULTS, append, environment
from vc_attention.attend.exact import exact_attention
from vc_attention.attend.reference import attend4
from vc_attention.formats import nvfp4_scale, quantize_nvfp4
from vc_attention.group.blocks import BLOCK, ValueBlocks, permute_tokens, removed_energy
from vc_attention.group.reference import group_reference
from vc_attention.quantize.operands import Operands4
from vc_attention.quantize.reference import smooth_queries, split_values
from vc_attention.quantize.rotation import rotate
from vc_attention.testing import clustered_qkv, random_qkv, relative_l2

CUBE = (2, 8, 8)  # tokens of a static cube: one block of 128
CLUSTERS = (8, 64, 256)
ITERATIONS = 4


@dataclass(frozen=True)
class Smoothing:
    """What is done to queries and keys before they are rounded to NVFP4."""

    name: str
    key_mean: bool = False
    rotated: bool = False
    query_means: bool = False


SMOOTHINGS = (
    Smoothing("none"),
    Smoothing("K mean", key_mean=True),
    Smoothing("K mean, Q block means", key_mean=True, query_means=True),
    Smoothing("Hadamard", rotated=True),
    Smoothing("K mean, Hadamard", key_mean=True, rotated=True),
    Smoothing("K mean, Hadamard, Q block means", key_mean=True, rotated=True, query_means=True),
)
DEFAULT = SMOOTHINGS[-1]


def operands(q: Tensor, k: Tensor, v: Tensor, smoothing: Smoothing, order: Tensor | None, demean: bool) -> Operands4:
    """quantize/reference.py's ``quantize4`` with each smoothing step on or off."""
    q, k = q.float(), k.float()
    if smoothing.key_mean:
        k = (k.double() - k.mean(2, keepdim=True, dtype=torch.float64)).float()
    if smoothing.rotated:
        q, k = rotate(q), rotate(k)
    queries, q_means = smooth_queries(q)
    if not smoothing.query_means:
        queries, q_means = q, torch.zeros_like(q_means)
    keys = permute_tokens(k, order)
    blocks = split_values(permute_tokens(v, order), demean)
    residual = blocks.residual.transpose(2, 3)
    return Operands4(
        q=quantize_nvfp4(queries, nvfp4_scale(queries, (2, 3))),
        k=quantize_nvfp4(keys, nvfp4_scale(keys, (2, 3))),
        q_means=q_means,
        k_exact=keys,
        residual=quantize_nvfp4(residual, nvfp4_scale(residual, (3,))),
        means=blocks.means,
    )


def cube_order(grid: tuple[int, int, int], like: Tensor) -> Tensor:
    """[B, H, S] order that walks the grid cube by cube."""
    places = torch.arange(grid[0] * grid[1] * grid[2], device=like.device).view(grid)
    for dim, size in enumerate(CUBE):
        places = places.unflatten(2 * dim, (-1, size))
    order = places.permute(0, 2, 4, 1, 3, 5).flatten()
    return order.expand(*like.shape[:2], -1)


def orders(v: Tensor, grid: tuple[int, int, int]) -> dict[str, Tensor | None]:
    """Orders of the tokens by name."""
    grouped = {f"k-means, {count}": group_reference(v, None, count, ITERATIONS)[0] for count in CLUSTERS}
    return {"sequence": None, "static cube": cube_order(grid, v), **grouped}


def inputs(grid: tuple[int, int, int], heads: int, device: str) -> dict[str, list[Tensor]]:
    """q, k, v in bf16 by name."""
    tokens = grid[0] * grid[1] * grid[2]
    clustered = clustered_qkv(grid, heads=heads, dtype=torch.bfloat16, device=device)
    loud = [x.clone() for x in clustered]
    for x, factor in zip(loud, (4.0, 6.0), strict=False):  # some channels of q and k with an offset and a wide range
        x[..., ::29] = x[..., ::29] * factor + 6.0
    return {
        "random": random_qkv((1, heads, tokens, 128), dtype=torch.bfloat16, device=device),
        "clustered": clustered,
        "clustered, loud channels of q and k": loud,
    }


def spread_blocks(q: Tensor, queries: int) -> Tensor:
    """About ``queries`` rows of q: whole blocks at equal distances."""
    blocks = q.unflatten(2, (-1, BLOCK))
    step = max(1, q.shape[2] // queries)
    return blocks[:, :, ::step].flatten(2, 3)


def measure(name: str, qkv: list[Tensor], grid: tuple[int, int, int], queries: int) -> list[dict]:
    """Rows of one input: every smoothing with plain values, then every order with the default smoothing."""
    q, k, v = qkv
    scale = q.shape[-1] ** -0.5
    asked = spread_blocks(q, queries)
    expected = exact_attention(asked, k, v, scale)

    def row(smoothing: Smoothing, order_name: str, order: Tensor | None, demean: bool) -> dict:
        made = operands(asked, k, v, smoothing, order, demean)
        output = attend4(made, scale)
        values = ValueBlocks(made.residual.dequantize().transpose(2, 3), made.means).restore()
        value_output = exact_attention(asked, permute_tokens(k, order), values, scale)
        return {
            "input": name,
            "smoothing": smoothing.name,
            "values": f"V-Smooth, {order_name}" if demean else "plain",
            "removed_energy": removed_energy(v, order).mean().item() if demean else 0.0,
            "error": relative_l2(output, expected),
            "value_error": relative_l2(value_output, expected),
        }

    rows = [row(smoothing, "sequence", None, False) for smoothing in SMOOTHINGS]
    for order_name, order in orders(v, grid).items():
        rows.append(row(DEFAULT, order_name, order, True))
    rows.append(row(SMOOTHINGS[2], f"k-means, {CLUSTERS[-1]}", order, True))
    rows.append(row(SMOOTHINGS[4], f"k-means, {CLUSTERS[-1]}", order, True))
    return rows


def table(rows: list[dict]) -> str:
    """Markdown: one line a combination, one column an input; in brackets the error of the values alone."""
    names = list(dict.fromkeys(row["input"] for row in rows))
    lines = [f"| q and k | values | {' | '.join(names)} |", "| --- " * (len(names) + 2) + "|"]
    cells = {
        (row["smoothing"], row["values"], row["input"]): f"{row['error']:.4f} ({row['value_error']:.4f})"
        for row in rows
    }
    for smoothing, values in dict.fromkeys((row["smoothing"], row["values"]) for row in rows):
        lines.append(f"| {smoothing} | {values} | {' | '.join(cells[smoothing, values, name] for name in names)} |")
    return "\n".join(lines)


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--columns", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--queries", type=int, default=4096, help="query rows that are computed")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    grid = (arguments.frames, arguments.rows, arguments.columns)
    shared = {
        **(environment() if device == "cuda" else cpu_environment()),
        "operation": "attend4 of the reference",
        "grid": list(grid),
        "heads": arguments.heads,
        "queries": arguments.queries,
    }
    file_name = f"{'cpu' if device == 'cpu' else shared['gpu'].lower().replace(' ', '-')}-fourbit.jsonl"
    rows = []
    for name, qkv in inputs(grid, arguments.heads, device).items():
        measured = measure(name, qkv, grid, arguments.queries)
        append([shared | row for row in measured], arguments.out or RESULTS / "studies" / file_name)
        rows += measured
    print(table(rows))


if __name__ == "__main__":
    main()
