"""A block that low-bit attention would change too much keeps the attention the user had, for the rest of the render.

Some layers cannot stand low-bit queries and keys at all; no list of models would stay right. So the first accelerated
call of each layer is compared with the host torch's own attention on 64 rows, before its output is used.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from .accept import Reason
from .position import Layer

log = logging.getLogger("VC Attention")

FOUR_BIT = "4-bit"
# Relative L2 error of a call's output. Normal inputs, the hardest that are no fault, give 0.04 in 8 bits and 0.16 in 4.
BUDGET, BUDGET_OF_FOUR_BIT = 0.2, 0.4


def budget(mode: str) -> float:
    """The largest error with which a layer is accelerated."""
    return BUDGET_OF_FOUR_BIT if mode == FOUR_BIT else BUDGET


def too_far(mode: str) -> Reason:
    return Reason(f"in a block where {mode} attention would change the output by more than {budget(mode):.0%}", 2)


class ErrorBudget:
    """Errors measured in one run, a number per layer; threads may share it."""

    def __init__(self):
        self.errors: dict[Layer, float] = {}
        self._excluded: dict[Layer, Reason] = {}
        self._lock = threading.Lock()

    def excluded(self, layer: Layer) -> Reason | None:
        """Why a layer is left alone from now on; None if it is not."""
        return self._excluded.get(layer)

    def check(self, layer: Layer, mode: str, measure: Callable[[], Tensor]) -> Reason | None:
        """Judge the first output of a layer; None if it may be used. Waits for the GPU that one time.

        ``measure`` gives the error as a scalar tensor. Nothing is judged while a CUDA graph is captured.
        """
        if layer in self.errors or _is_capturing():
            return None
        error = measure().item()
        with self._lock:
            self.errors[layer] = error
            if error <= budget(mode):
                return None
            level = logging.DEBUG if self._excluded else logging.WARNING  # the report names them all
            reason = self._excluded[layer] = too_far(mode)
        log.log(level, "VC Attention: %s keeps its attention: %s", layer.text, _said(error))
        return reason

    def left_alone(self) -> list[str]:
        """The blocks with a layer over the budget, for a person, in the order they were found."""
        with self._lock:
            return list(dict.fromkeys(layer.text for layer in self._excluded))

    def worst(self) -> tuple[Layer, float] | None:
        """The accelerated layer with the largest error; None before the first was measured."""
        with self._lock:
            used = {layer: error for layer, error in self.errors.items() if layer not in self._excluded}
        return max(used.items(), key=lambda item: item[1], default=None)


def _said(error: float) -> str:
    return f"error {error:.0%}" if math.isfinite(error) else "its low-bit output is not finite"


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
