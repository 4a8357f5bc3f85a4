"""What a grouping removes and what it takes, by clusters, rounds and start; append rows to results/studies/.

    python benchmarks/grouping.py                    # on a Hopper GPU, about 20 s

Values are those of the demo's trained model (every layer and head of two steps of a render of 64 frames: 16,384 tokens)
and drawn ones (75,600 tokens). `removed` is the share of block energy that the means of 128 tokens take away. Defaults
of `kernels/group/api.py` are set from these rows and from the earlier study beside them.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Iterator
from pathlib import Path

import rows
import torch
from laboratory.renders import ClipSet, Studio
from timing import interleave
from torch import Tensor
from vc_attention import group_values
from vc_attention.group.api import Grouping
from vc_attention.group.blocks import removed_energy
from vc_attention.group.reference import assign
from vc_attention.testing import clustered_qkv

RESULTS = rows.RESULTS / "studies" / "nvidia-h200-grouping.jsonl"
CLUSTERS = (8, 16, 32, 64, 128, 256, 512)
COLD_ITERATIONS = (0, 1, 2, 4, 8)
WARM_ITERATIONS = (1, 2)
LEVELS = ((8, 8), (16, 8), (16, 16), (32, 16))  # two-level: clusters of the first, clusters in each of them
CLIPS = ClipSet(prompts=range(1), seeds=1, size=(64, 128, 128), batch=1)
STEPS = (4, 8)  # of 20: the default window begins a grouping at the first and refreshes it at the second
DRAWN_GRID = (21, 45, 80)
DRAWN_HEADS = 8
DRIFT = 0.3  # standard deviations between a drawn step and the one before it
ROUNDS, TURN_SECONDS = 3, 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    shared = {"run": uuid.uuid4().hex[:12], **rows.environment(), "operation": "grouping", "implementation": "cuda"}
    for name, (before, now) in {"demo model": trained_values(), "drawn": drawn_values()}.items():
        described = {**shared, "data": name, "shape": list(now.shape), "dtype": "bfloat16"}
        described["removed_in_sequence_order"] = rounded(removed_energy(now).mean())
        made = list(measured(before, now))
        rows.append([described | row for row in made], options.output)
        show(described, made)


def trained_values() -> tuple[Tensor, Tensor]:
    """[1, layers x heads, S, D] bf16 of one clip at the two steps."""
    seen: dict[int, list[Tensor]] = {step: [] for step in STEPS}

    def watch(step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if step in seen:
            seen[step].append(v[:1].to(torch.bfloat16, copy=True))

    Studio(torch.device("cuda")).render(CLIPS, watch=watch)
    before, now = (in_comfy_layout(torch.cat(seen[step], dim=1)) for step in STEPS)
    return before, now


def drawn_values() -> tuple[Tensor, Tensor]:
    """[1, H, S, D] bf16: clustered values, and the same before they drifted."""
    _, _, now = clustered_qkv(DRAWN_GRID, heads=DRAWN_HEADS, dtype=torch.bfloat16, device="cuda")
    noise = torch.randn(now.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    before = now.float() + DRIFT * now.float().std() * noise
    return in_comfy_layout(before.bfloat16()), in_comfy_layout(now)


def in_comfy_layout(v: Tensor) -> Tensor:
    """The same tensor with the heads of a token side by side in memory."""
    return v.transpose(1, 2).contiguous().transpose(1, 2)


def measured(before: Tensor, now: Tensor) -> Iterator[dict]:
    """A row for every setting."""
    for clusters in CLUSTERS:
        earlier = group_values(before, clusters=clusters)
        settings = [("cold", None, count) for count in COLD_ITERATIONS]
        settings += [("warm", earlier, count) for count in WARM_ITERATIONS]
        for start, previous, iterations in settings:
            yield {
                "clusters": clusters, "levels": 1, "start": start, "iterations": iterations,
                **outcome(now, group_values(now, previous, clusters=clusters, iterations=iterations)),
                "ms": time_of(now, previous, clusters, iterations),
            }  # fmt: skip
    for coarse, fine in LEVELS:
        found = outcome(now, two_levels(now, coarse, fine))
        yield {"clusters": coarse * fine, "levels": 2, "start": "cold", "iterations": 4, **found, "coarse": coarse}


def outcome(v: Tensor, grouping: Grouping) -> dict:
    """Removed energy, mean and worst head."""
    removed = removed_energy(v, grouping.permutation)
    return {"removed": rounded(removed.mean()), "worst_head": rounded(removed.min())}


def time_of(v: Tensor, previous: Grouping | None, clusters: int, iterations: int) -> float:
    """Milliseconds on the GPU with work queued before, as in a render."""
    call = {"grouping": lambda: group_values(v, previous, clusters=clusters, iterations=iterations)}
    return rounded(interleave([call], ROUNDS, TURN_SECONDS)["grouping"].quantile(0.5))


def two_levels(v: Tensor, coarse: int, fine: int) -> Grouping:
    """Clusters of clusters. It is not timed: a kernel would take at least two assignments of all tokens."""
    first = group_values(v, clusters=coarse)
    orders = [two_level_order(v[:, head : head + 1], first.centroids[0, head], fine) for head in range(v.shape[1])]
    return Grouping(torch.stack(orders)[None], first.centroids)


def two_level_order(v: Tensor, centroids: Tensor, fine: int) -> Tensor:
    """[S] int32 of one head's v [1, 1, S, D]: cluster by cluster, each grouped on its own."""
    labels = assign(v[0, 0], centroids)
    order = []
    for label in range(len(centroids)):
        tokens = (labels == label).nonzero()[:, 0]
        if len(tokens):
            inner = group_values(v[:, :, tokens], clusters=min(fine, len(tokens))).permutation[0, 0]
            order.append(tokens[inner.long()])
    return torch.cat(order).to(torch.int32)


def rounded(value) -> float:
    """Five digits."""
    return float(f"{float(value):.5g}")


def show(described: dict, made: list[dict]) -> None:
    """The rows as lines."""
    print(described["data"], described["shape"], "sequence order", described["removed_in_sequence_order"])
    for row in made:
        spent = f"{row['ms']:.3f} ms" if "ms" in row else "not timed"
        print(
            f"  {row['levels']} x {row['clusters']:4} {row['start']} {row['iterations']}: {row['removed']:.4f}  {spent}"
        )


if __name__ == "__main__":
    main()
