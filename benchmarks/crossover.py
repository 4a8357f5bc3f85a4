"""From which length on VC-Attention pays: short calls against torch's own; append rows to results/studies/.

    python benchmarks/crossover.py                   # about 15 s on a GPU with a VC-Attention kernel

Complete calls with a held grouping, with a regrouping and in the precise mode beside FlashAttention-2, which is
ComfyUI's default, and cuDNN. The default of the node's `min_tokens` is set from these rows.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Callable
from pathlib import Path

import bench
import peers
import rows
import torch
from timing import interleave
from vc_attention import attention, group_values

RESULTS = rows.RESULTS / "studies"
TOKENS = (512, 1024, 2048, 3072, 4096, 6144, 8192, 16384)
HEADS = (12, 40)
ROUNDS, TURN_SECONDS = 3, 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a file instead of one in results/studies")
    options = parser.parse_args()
    run = {"run": uuid.uuid4().hex[:12], **rows.environment()}
    path = options.output or RESULTS / f"{rows.stem(run['gpu'])}-crossover.jsonl"
    measured((1, HEADS[0], TOKENS[0], bench.HEAD_DIM))  # compiles, fills caches: not the first row's
    for heads in HEADS:
        for tokens in TOKENS:
            made = measured((1, heads, tokens, bench.HEAD_DIM))
            rows.append([{**run, **row} for row in made], path)
            print(*map(bench.summary, made), sep="\n", flush=True)


def measured(shape: tuple[int, int, int, int]) -> list[dict]:
    """Rows of one shape."""
    q, k, v = bench.normal_inputs(shape)
    grouping = group_values(v)
    expected = bench.ReferenceRows(q, k, v)
    calls = bench.named("complete_call", "cuda", ours(q, k, v, grouping))
    calls |= {("complete_call", name, ""): call for name, call in peers.of_torch(q, k, v).items()}
    timed = interleave([calls], ROUNDS, TURN_SECONDS)
    return [
        bench.timed_row(key, samples, shape, grouping) | {"rel_l2": expected.error(calls[key]())}
        for key, samples in timed.items()
    ]


def ours(q, k, v, grouping) -> dict[str, Callable[[], torch.Tensor]]:
    """Our calls by their settings."""
    return {
        bench.HELD: lambda: attention(q, k, v, grouping=grouping),
        bench.REGROUPED: lambda: attention(q, k, v, grouping=group_values(v, grouping)),
        "precise": lambda: attention(q, k, v, mode=bench.PRECISE),
    }


if __name__ == "__main__":
    main()
