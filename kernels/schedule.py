"""When to group, in plain Python: where a model evaluation stands in the denoising schedule.

Nothing here counts calls. The position comes from the evaluation's noise level alone, because samplers repeat
levels (heun), go backwards (heunpp2), visit levels outside the schedule (dpm_2, dpm_adaptive), skip evaluations
(step caches) or see only a slice of the schedule (the two experts of Wan2.2).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from .errors import InvalidArgument

SIGMA_TOLERANCE = 1e-4  # relative; float noise of schedulers is below 1e-6, the closest steps are about 1e-3
# A whole schedule starts at the model's highest level. Just below it is already a slice: with shift 8 the second
# expert of Wan2.2 may start at 0.986.
WHOLE_FROM = 0.999


@dataclass(frozen=True)
class GroupingPolicy:
    """The two knobs a user sees.

    Args:
        window: share of the denoising schedule, from its start, in which values are regrouped (0 to 1).
        interval: steps for which a grouping is held before it is made anew (1 or more).
    """

    window: float = 0.25
    interval: int = 4

    def __post_init__(self):
        if not isinstance(self.window, Real) or not 0.0 <= self.window <= 1.0:
            raise InvalidArgument(f"window must be between 0 and 1, got {self.window!r}")
        if not isinstance(self.interval, Integral) or self.interval < 1:
            raise InvalidArgument(f"interval must be a whole number of steps from 1, got {self.interval!r}")

    def regroup(self, in_window: bool, step: int, last_refresh: int | None) -> bool:
        """Whether this evaluation makes a new grouping.

        ``last_refresh`` is the step of the grouping held for the same layer and prompt, None if there is none.
        A step smaller than ``last_refresh`` (backward samplers) holds the grouping.
        """
        if not in_window:
            return False
        return last_refresh is None or step - last_refresh >= self.interval


class Schedule:
    """The noise levels one sampler call was given, and the model's scale they are a part of.

    Args:
        sigmas: the N+1 levels of this call, descending; the last is usually 0.
        percent_to_sigma: the model's map from schedule share (0 = start) to noise level, evaluated lazily so
            that it reflects every patch of the model. None where the host has none.
        sigma_max: the model's highest level; tells a whole schedule from a slice. None where unknown.
    """

    def __init__(
        self,
        sigmas: Sequence[float],
        percent_to_sigma: Callable[[float], float] | None = None,
        sigma_max: float | None = None,
    ):
        self.sigmas = [float(sigma) for sigma in sigmas]
        self._ascending_negated = [-sigma for sigma in self.sigmas]
        self._percent_to_sigma = percent_to_sigma
        self.steps = max(len(self.sigmas) - 1, 1)
        self.whole = self._is_whole(sigma_max)

    def _is_whole(self, sigma_max: float | None) -> bool:
        if len(self.sigmas) < 2 or self.sigmas[-1] > SIGMA_TOLERANCE:
            return False
        if sigma_max is None:
            return self._percent_to_sigma is None
        return self.sigmas[0] >= sigma_max * WHOLE_FROM

    def step(self, sigma: float) -> int:
        """The schedule step that ``sigma`` belongs to: the last level not below it. 0 above the schedule."""
        if not self.sigmas:
            return 0
        limit = -sigma + self._tolerance(sigma)
        not_below = bisect_right(self._ascending_negated, limit)
        return min(max(not_below - 1, 0), self.steps - 1)

    def in_first(self, share: float, sigma: float) -> bool:
        """Whether ``sigma`` lies in the first ``share`` of the denoising schedule.

        On a whole schedule this is a share of its steps; on a slice (Wan2.2 experts, denoise < 1) the model's
        own noise scale decides, so that the slice of a low-noise expert is outside an early window.
        """
        if share <= 0.0:
            return False
        if share >= 1.0:
            return True
        if self.whole or self._percent_to_sigma is None:
            return self.step(sigma) < share * self.steps - 1e-9
        threshold = self._percent_to_sigma(share)
        return sigma > threshold + self._tolerance(threshold)

    def between(self, start: float, end: float, sigma: float) -> bool:
        """Whether ``sigma`` lies in the part of the schedule from share ``start`` up to share ``end``."""
        return not self.in_first(start, sigma) and self.in_first(end, sigma)

    @staticmethod
    def _tolerance(sigma: float) -> float:
        return SIGMA_TOLERANCE * max(abs(sigma), 1e-3)
