"""Orders of key and value tokens: as they come, in cubes of the clip, by k-means, by k-means of equal sizes."""

from __future__ import annotations

import torch
from torch import Tensor
from vc_attention.group.api import Grouping

CUBE = (2, 8, 8)  # frames, rows, columns of tokens: 128


def cube_order(grid: tuple[int, int, int], device: torch.device | str = "cpu") -> Tensor:
    """[S] int32: tokens of a clip of ``grid`` (frames, rows, columns), cube by cube."""
    places = torch.cartesian_prod(*(torch.arange(size, device=device) for size in grid))
    sides = torch.tensor(CUBE, device=device)
    key = torch.zeros(len(places), dtype=torch.int64, device=device)
    for axis, value in (*enumerate((places // sides).T), *enumerate((places % sides).T)):
        key = key * grid[axis] + value
    return key.argsort(stable=True).to(torch.int32)


def balanced(v: Tensor, grouping: Grouping) -> Grouping:
    """The same centroids with clusters of equal size, so that none shares a block with another.

    Every token asks its nearest cluster with room, which takes the nearest of those that ask. v [B, H, S, D].
    """
    tokens, clusters = v.shape[2], grouping.clusters
    points, centroids = v.flatten(0, 1).float(), grouping.centroids.flatten(0, 1)
    distance = torch.cdist(points, centroids)
    labels = equal_labels(distance, -(-tokens // clusters))
    permutation = labels.argsort(dim=1, stable=True).to(torch.int32)
    return Grouping(permutation.view(v.shape[:3]), grouping.centroids)


def equal_labels(distance: Tensor, capacity: int) -> Tensor:
    """[R, S] int64: a cluster for every token, at most ``capacity`` tokens each, from ``distance`` [R, S, C]."""
    rows, tokens, clusters = distance.shape
    labels = torch.full((rows, tokens), clusters, dtype=torch.int64, device=distance.device)
    room = torch.full((rows, clusters + 1), capacity, device=distance.device)
    place = torch.arange(tokens, device=distance.device).expand(rows, -1)
    while bool((labels == clusters).any()):
        nearest, wanted = distance.masked_fill(room[:, None, :clusters] == 0, torch.inf).min(2)
        wanted = torch.where(labels == clusters, wanted, clusters)
        by_distance = nearest.argsort(dim=1)
        queue = by_distance.gather(1, wanted.gather(1, by_distance).argsort(dim=1, stable=True))
        asked = wanted.gather(1, queue)
        counts = torch.zeros_like(room).scatter_add_(1, wanted, torch.ones_like(wanted))
        rank = place - (counts.cumsum(1) - counts).gather(1, asked)
        taken = (asked < clusters) & (rank < room.gather(1, asked))
        labels.scatter_(1, queue, torch.where(taken, asked, labels.gather(1, queue)))
        room.scatter_add_(1, asked, -taken.to(room.dtype))
    return labels
