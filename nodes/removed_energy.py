"""Share of the values' energy that the block means of a grouping removed, by block and step of a run."""

from __future__ import annotations

import math

from torch import Tensor

from .position import Place


class RemovedEnergy:
    """The newest share of each place. They stay on the GPU until they are asked for: a render never waits for them."""

    def __init__(self):
        self._newest: dict[Place, Tensor] = {}

    def put(self, place: Place, share: Tensor) -> None:
        self._newest[place] = share

    def by_place(self) -> dict[Place, float]:
        """Shares from 0 to 1, of finite values only. Waits for the GPU: ask at the end of a run."""
        shares = {place: float(share) for place, share in self._newest.items()}
        return {place: share for place, share in shares.items() if math.isfinite(share)}
