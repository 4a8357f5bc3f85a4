"""Time spent in accelerated calls, without waiting for the GPU between them."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Hashable
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Stretch:
    """Work that is being timed.

    Attributes:
        counted: False leaves its time out.
    """

    counted: bool = True


class Stopwatch:
    """Adds up stretches of work on any device: events on the stream for CUDA, a clock elsewhere.

    Attributes:
        by_place: seconds of the stretches added up so far, under the name each was measured with.
    """

    def __init__(self):
        self.by_place: Counter[Hashable] = Counter()
        self._devices: set[torch.device] = set()
        self._events: deque[tuple[Hashable, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, device: torch.device, place: Hashable = None):
        """Time what is done inside and yield its Stretch. Work that raises is not counted."""
        self._devices.add(device)
        stretch = Stretch()
        if device.type != "cuda":
            start = time.perf_counter()
            yield stretch
            if stretch.counted:
                with self._lock:
                    self.by_place[place] += time.perf_counter() - start
        elif torch.cuda.is_current_stream_capturing():
            yield stretch
        else:
            stream = torch.cuda.current_stream(device)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            yield stretch
            if stretch.counted:
                end.record(stream)
                self._events.append((place, start, end))

    def seconds(self) -> float:
        """The sum so far; of several GPUs, which work side by side, the mean. Waits: ask at the end of a render."""
        return self._add_up(wait=True)

    def seconds_done(self) -> float:
        """The sum of what the GPU has finished. Never waits."""
        if self._events and torch.cuda.is_current_stream_capturing():
            return self.seconds_known()  # asking for an event would break the capture
        return self._add_up(wait=False)

    def seconds_known(self) -> float:
        """The sum of what was added up before. Asks nothing of the GPU."""
        return self.by_place.total() / max(len(self._devices), 1)

    def _add_up(self, wait: bool) -> float:
        with self._lock:
            while self._events and (wait or self._events[0][2].query()):
                place, start, end = self._events.popleft()
                end.synchronize()
                self.by_place[place] += start.elapsed_time(end) / 1000.0
            return self.seconds_known()
