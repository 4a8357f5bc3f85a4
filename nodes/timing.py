"""Time spent in accelerated calls, without waiting for the GPU between them."""

from __future__ import annotations

import time
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up stretches of work on any device: events on the stream for CUDA, a clock elsewhere."""

    def __init__(self):
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self, device: torch.device):
        """Time what is done inside. Work that raises is not counted."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
        elif torch.cuda.is_current_stream_capturing():
            yield
        else:
            stream = torch.cuda.current_stream(device)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            yield
            end.record(stream)
            self._events.append((start, end))

    def seconds(self) -> float:
        """The sum so far. Waits for the GPU: ask at the end of a render only."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000.0
        self._events.clear()
        return self._seconds
