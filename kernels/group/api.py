"""The public grouping call and the grouping it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..attend.settings import LAYOUTS, check_choice
from ..attend.validation import check_tensor, dtype_name
from ..dispatch import implementation_names
from ..errors import InvalidArgument

# One cluster per block, up to 256: at 8,192 clustered tokens 64 clusters removed 45 % of the block energy, 16 of them
# 34 %, 128 no more; at 75,600 tokens 256 removed 52 %, 64 of them 42 %, 512 of them 54 % for 1.6 times the time (H200).
TOKENS_PER_CLUSTER = 128
MOST_CLUSTERS = 256
COLD_ITERATIONS = 4
WARM_ITERATIONS = 1  # a second round from the centroids of an earlier step removed 0.2 points more


@dataclass(frozen=True)
class Grouping:
    """An order of key and value tokens in which similar values are neighbours.

    Attributes:
        permutation: [B, H, S] int32; position i of the order holds token ``permutation[b, h, i]``.
        centroids: [B, H, C, D] float32; start of the next grouping of the same layer.
    """

    permutation: Tensor
    centroids: Tensor

    @property
    def tokens(self) -> int:
        """S."""
        return self.permutation.shape[2]

    @property
    def clusters(self) -> int:
        """C."""
        return self.centroids.shape[2]

    def select(self, rows: slice) -> Grouping:
        """The grouping of a slice of batch rows."""
        return Grouping(self.permutation[rows], self.centroids[rows])

    @staticmethod
    def concat(groupings: Sequence[Grouping]) -> Grouping:
        """Groupings of the same tokens and clusters, one after the other along the batch."""
        return Grouping(
            torch.cat([grouping.permutation for grouping in groupings]),
            torch.cat([grouping.centroids for grouping in groupings]),
        )


def automatic_clusters(tokens: int) -> int:
    """Cluster count for a sequence: about one per 128-token block, 1 to 256."""
    return max(1, min(MOST_CLUSTERS, tokens // TOKENS_PER_CLUSTER))


def group_values(
    v: Tensor,
    previous: Grouping | None = None,
    *,
    clusters: int | None = None,
    iterations: int | None = None,
    layout: str = "BHSD",
    implementation: str = "auto",
) -> Grouping:
    """Group value tokens by online k-means, per batch and head (V-Smooth, paper section 3.2).

    Args:
        v: [B, H, S, D] or, with layout "BSHD", [B, S, H, D]; bf16, fp16 or fp32.
        previous: grouping of the same layer at an earlier step; its centroids are the start.
        clusters: 1 to S; None: previous' count, else by the length.
        iterations: centroid updates; None: 1 from a previous grouping, else 4.
        layout: "BHSD" or "BSHD".
        implementation: "auto" takes the GPU kernel where it serves the call, else the reference; a named one never
            falls back.

    Raises:
        InvalidArgument: an argument is wrong in itself.
        UnsupportedCall: a named implementation does not serve the call, or the reference met NaN or infinity in v.
    """
    check_choice("layout", layout, LAYOUTS)
    check_choice("implementation", implementation, implementation_names())
    check_tensor("v", v, layout)
    shape = tuple(ops.to_bhsd(v, layout).shape)
    if previous is not None:
        _check_previous(previous, shape, v.device)
    clusters = _cluster_count(clusters, previous, shape[2])
    if iterations is None:
        iterations = COLD_ITERATIONS if previous is None else WARM_ITERATIONS
    if not isinstance(iterations, int) or iterations < 0:
        raise InvalidArgument(f"iterations must be an integer of 0 or more, got {iterations!r}")
    centroids = None if previous is None else previous.centroids
    return Grouping(*ops.call_operator(ops.group_operator, v, centroids, clusters, iterations, layout, implementation))


def _check_previous(previous, shape: tuple[int, int, int, int], device) -> None:
    batch, heads, _, head_dim = shape
    centroids = getattr(previous, "centroids", None)
    if not isinstance(centroids, Tensor):
        raise InvalidArgument(f"previous must be a Grouping from group_values or None, got {type(previous).__name__}")
    have = tuple(centroids.shape)
    if len(have) != 4 or (have[0], have[1], have[3]) != (batch, heads, head_dim) or not have[2]:
        raise InvalidArgument(
            f"previous must have centroids [B, H, C, D] = [{batch}, {heads}, *, {head_dim}], got {list(have)}"
        )
    if not centroids.is_floating_point():
        raise InvalidArgument(f"previous must have floating-point centroids, got {dtype_name(centroids.dtype)}")
    if centroids.device != device:
        raise InvalidArgument(f"previous must be on v's device {device}, got {centroids.device}")


def _cluster_count(clusters: int | None, previous: Grouping | None, tokens: int) -> int:
    if previous is not None:
        if clusters not in (None, previous.clusters):
            raise InvalidArgument(f"clusters must be previous' count {previous.clusters} or None, got {clusters!r}")
        return previous.clusters
    if clusters is None:
        return automatic_clusters(tokens)
    if not isinstance(clusters, int) or not 1 <= clusters <= tokens:
        raise InvalidArgument(f"clusters must be an integer from 1 to S = {tokens}, got {clusters!r}")
    return clusters
