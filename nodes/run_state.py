"""Everything one sampling run needs and leaves: made when sampling starts, emptied when it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from ..kernels import Grouping, GroupingPolicy, Schedule
from .accept import Reason, failed
from .error_budget import ErrorBudget
from .position import Forward, Layer, Place, Position, locate
from .removed_energy import RemovedEnergy
from .settings import Settings
from .timing import Stopwatch

RUN_KEY = "vc_attention_run"
FORWARD_KEY = "vc_attention_forward"

log = logging.getLogger("VC Attention")


@dataclass(frozen=True)
class HeldGrouping:
    """A grouping, the layer whose it is and the step it was made in."""

    grouping: Grouping
    layer: Layer
    step: int

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.grouping.permutation, self.grouping.centroids))


class RunState:
    """State of one sampling run; ComfyUI hands it to every attention call by reference.

    With several GPUs, threads share it: groupings are keyed by device, counters change under a lock.
    """

    def __init__(self, token: str, settings: Settings, schedule: Schedule):
        self.token = token
        self.settings = settings
        self.schedule = schedule
        self.policy = GroupingPolicy(settings.grouping_window, settings.refresh_interval)
        self.groupings: dict[tuple, HeldGrouping] = {}
        self.stopwatch = Stopwatch()
        self.tally = Tally()
        self.errors = ErrorBudget()
        self.switched_off: Reason | None = None
        self.started: float | None = None
        self.step = 0  # of the evaluation at hand
        self.live = None  # tells the browser about this run; see status.py
        self._located: tuple | None = None
        self._lock = threading.Lock()

    def begin_forward(self, sigma) -> Forward:
        """A new evaluation of the model at one noise level (a tensor; all its rows are equal)."""
        if self.started is None:
            self.started = time.perf_counter()
        position = self._position(sigma)
        self.step = position.step
        return Forward(position)

    def _position(self, sigma) -> Position:
        """The tensor's value is fetched from the GPU once per model evaluation: its forwards share the tensor."""
        located = self._located
        if located is None or located[0] is not sigma:
            located = (sigma, locate(self.schedule, self.settings, float(sigma.reshape(-1)[0])))
            self._located = located
        return located[1]

    def count_declined(self, reason: Reason, attention: str, place: Place) -> None:
        with self._lock:
            self.tally.declined[reason] += 1
            self.tally.fallbacks[attention] += 1
            self.tally.declined_at[place] += 1

    def count_accelerated(self, place: Place, mode: str, implementation: str) -> None:
        with self._lock:
            self.tally.served_at[place] = (mode, implementation)
            self.tally.accelerated_at[place] += 1

    def count_block(self, layer: Layer) -> None:
        with self._lock:
            self.tally.blocks_seen.add((layer.block_type, layer.block))

    def count_regrouped(self, place: Place, removed_energy: Tensor) -> None:
        """``removed_energy`` is a scalar on the device; nobody waits for it before the run has ended."""
        with self._lock:
            self.tally.regrouped_at[place] += 1
            self.tally.removed_energy.put(place, removed_energy)

    def hold(self, key: tuple, held: HeldGrouping) -> None:
        """Keep a grouping until the next of its key, the end of its layer's acceleration, or that of the run."""
        with self._lock:
            before = self.groupings.get(key)
            self.groupings[key] = held
            self.tally.held_bytes += held.bytes - (before.bytes if before else 0)

    def leave(self, layer: Layer) -> None:
        """Let go of the groupings of a layer that is not accelerated any more."""
        with self._lock:
            for key in [key for key, held in self.groupings.items() if held.layer == layer]:
                self.tally.held_bytes -= self.groupings.pop(key).bytes

    def switch_off(self, error: Exception) -> Reason:
        """Accelerate nothing more in this run. Said once, where the error is handled, with its traceback."""
        reason = failed(error)
        with self._lock:
            first = self.switched_off is None
            self.switched_off = self.switched_off or reason
        if first:
            log.exception("VC Attention failed; the rest of this render does without it")
        return reason

    def free(self) -> None:
        """Let go of every tensor but the scalars that the report will read."""
        self.groupings.clear()
        self._located = None


class Tally:
    """What happened to the attention calls of a run.

    Attributes:
        held_bytes: memory of the groupings that the run held at its end, when it holds most.
    """

    def __init__(self):
        self.declined: Counter[Reason] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.blocks_seen: set[tuple] = set()
        self.served_at: dict[Place, tuple[str, str]] = {}
        self.accelerated_at: Counter[Place] = Counter()
        self.declined_at: Counter[Place] = Counter()
        self.regrouped_at: Counter[Place] = Counter()
        self.removed_energy = RemovedEnergy()
        self.held_bytes = 0

    @property
    def served_by(self) -> set[tuple[str, str]]:
        """Mode and implementation of the accelerated calls."""
        return set(self.served_at.values())

    @property
    def accelerated(self) -> int:
        return self.accelerated_at.total()

    @property
    def groupings(self) -> int:
        return self.regrouped_at.total()

    @property
    def blocks(self) -> set[tuple]:
        """Blocks in which a call was accelerated."""
        return {(place.block_type, place.block) for place in self.accelerated_at}

    def reasons(self) -> list[tuple[Reason, int]]:
        """Why calls were left alone, and how many: what explains most comes first."""
        return sorted(self.declined.items(), key=lambda item: (item[0].rank, item[1]), reverse=True)

    @property
    def calls(self) -> int:
        return self.accelerated + self.declined.total()
