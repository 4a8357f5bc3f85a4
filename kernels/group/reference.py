"""Online k-means on value tokens, in plain torch: the specification of the grouping kernels.

Per (batch, head): ``z[t] = argmin_c |v_t - c|^2``, then ``pi = argsort(z, stable)`` (paper, section 3.2).
The same input gives the same result: centroid sums are matrix products, not atomic additions.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS_PER_PASS = 16384  # bounds the [tokens, clusters] distance matrix


def group_reference(v: Tensor, centroids: Tensor | None, clusters: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Group value tokens.

    Args:
        v: [B, H, S, D], any float dtype, finite.
        centroids: [B, H, C, D] of an earlier grouping (warm start), or None (cold start).
        clusters: C, 1 to S; ignored when ``centroids`` is given.
        iterations: centroid updates, 0 or more; the assignment after the last update is the result.

    Returns:
        permutation [B, H, S] int32 (``v[permutation]`` is sorted by cluster, stable), centroids [B, H, C, D] float32.
    """
    batch, heads, tokens, head_dim = v.shape
    rows = v.reshape(batch * heads, tokens, head_dim)
    starts = None if centroids is None else centroids.reshape(batch * heads, -1, head_dim)
    permutations, results = [], []
    for index, row in enumerate(rows):
        values = row.float()
        start = cold_start(values, clusters) if starts is None else starts[index].float()
        labels, final = kmeans(values, start, iterations)
        permutations.append(torch.argsort(labels, stable=True).to(torch.int32))
        results.append(final)
    permutation = torch.stack(permutations).reshape(batch, heads, tokens)
    return permutation, torch.stack(results).reshape(batch, heads, -1, head_dim)


def cold_start(values: Tensor, clusters: int) -> Tensor:
    """[C, D]: tokens of ``values`` [S, D] at equal spacing, the middle of each of C equal stretches."""
    tokens = values.shape[0]
    index = (torch.arange(clusters, device=values.device) * 2 + 1) * tokens // (2 * clusters)
    return values[index].clone()


def kmeans(values: Tensor, centroids: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Lloyd's iterations on ``values`` [S, D] from ``centroids`` [C, D]: labels [S] int64 and the last centroids."""
    for _ in range(iterations):
        centroids = update(values, assign(values, centroids), centroids)
    return assign(values, centroids), centroids


def assign(values: Tensor, centroids: Tensor) -> Tensor:
    """[S] int64: the nearest centroid of every token, the first of equally near ones."""
    # Distances from a common origin near the data keep |c|^2 - 2 v.c free of cancellation.
    origin = centroids.mean(0)
    centred = centroids - origin
    half_norm = centred.square().sum(1) / 2
    chunks = values.split(TOKENS_PER_PASS)
    return torch.cat([(half_norm - (chunk - origin) @ centred.T).argmin(1) for chunk in chunks])


def update(values: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """[C, D]: mean of each cluster's tokens; an empty cluster keeps its centroid."""
    sums = torch.zeros_like(centroids)
    counts = torch.zeros(centroids.shape[0], device=values.device)
    clusters = torch.arange(centroids.shape[0], device=values.device)
    for chunk, label in zip(values.split(TOKENS_PER_PASS), labels.split(TOKENS_PER_PASS), strict=True):
        member = (label == clusters[:, None]).float()
        sums += member @ chunk
        counts += member.sum(1)
    return torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None], centroids)
