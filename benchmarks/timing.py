"""Interleaved GPU timing: every variant once per round, so that clocks and heat are shared fairly.

A long attention call runs at the card's power limit; what is compared must run in the same minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from rows import device_uuid

CALLS_IN_FLIGHT = 4  # so that the GPU does not wait for the host between short calls
WORK_CYCLES = 2_000_000  # about a millisecond, longer than the host needs for any short call
LONG_CALL_SECONDS = 0.05  # from here on one at a time: four would outlast a turn


@dataclass
class Samples:
    """Times of one variant in milliseconds and what the card drew meanwhile."""

    ms: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    sm_mhz: list[float] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """The time below which ``share`` of the samples lie."""
        return torch.tensor(self.ms, dtype=torch.float64).quantile(share).item()

    def row(self) -> dict:
        """Fields of a result row."""
        mean = {name: sum(x) / len(x) if x else None for name, x in (("watts", self.watts), ("sm_mhz", self.sm_mhz))}
        return {
            "ms_p20": self.quantile(0.2),
            "ms_p50": self.quantile(0.5),
            "ms_p80": self.quantile(0.8),
            "samples": len(self.ms),
            **mean,
        }


def interleave(
    variants: dict[str, Callable[[], object]],
    rounds: int,
    seconds_per_turn: float,
    behind_work: Callable[[str], bool] = lambda name: False,
) -> dict[str, Samples]:
    """Time every variant in turn, ``rounds`` times over, for about ``seconds_per_turn`` each.

    Each turn begins with one untimed call. Times are CUDA events around single calls. Variants chosen by
    ``behind_work`` have other work queued before them, as every call of a render has: the host's time is then hidden.
    """
    samples = {name: Samples() for name in variants}
    with _PowerMeter() as meter:
        for _ in range(rounds):
            for name, call in variants.items():
                started = time.monotonic()
                call()
                torch.cuda.synchronize()
                long = time.monotonic() - started > LONG_CALL_SECONDS
                meter.readings.clear()
                calls_in_flight = 1 if long else CALLS_IN_FLIGHT
                _turn(call, samples[name], seconds_per_turn, calls_in_flight, behind_work(name))
                samples[name].watts += [watts for watts, _ in meter.readings]
                samples[name].sm_mhz += [mhz for _, mhz in meter.readings]
    return samples


def _turn(call, samples: Samples, seconds: float, calls_in_flight: int, behind_work: bool) -> None:
    deadline = time.monotonic() + seconds
    pending = []
    while time.monotonic() < deadline or not pending:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if behind_work:
            torch.cuda._sleep(WORK_CYCLES)
        start.record()
        call()
        end.record()
        pending.append((start, end))
        if len(pending) % calls_in_flight == 0:
            end.synchronize()
    torch.cuda.synchronize()
    samples.ms += [start.elapsed_time(end) for start, end in pending]


class _PowerMeter:
    """Reads board power and SM clock every 20 ms while it is open; reads nothing where NVML is missing."""

    def __init__(self):
        self.readings: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        try:
            import pynvml
        except ImportError:
            return
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(device_uuid())
        while not self._stop.wait(0.02):
            watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
            mhz = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            self.readings.append((watts, mhz))
