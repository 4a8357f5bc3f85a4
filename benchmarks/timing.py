"""Interleaved GPU timing: every variant once per round, so that clocks and heat are shared fairly.

A long attention call runs at the card's power limit; what is compared must run in the same minutes, and what is
compared to the percent must take turns call by call, or in neighbouring turns on a card that is hot from both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from rows import device_uuid

LEAD_SECONDS = 0.2  # untimed at the beginning of a turn, so that the card is as warm as the calls make it
CALLS_IN_FLIGHT = 4  # so that the GPU does not wait for the host
LONG_CALL_SECONDS = 0.05  # from here on two: more would outlast a turn
SHORT_CALL_SECONDS = 0.002  # up to here other work is queued before a call: the host is slower than the GPU
WORK_CYCLES = 2_000_000  # about a millisecond, longer than the host needs for any short call


@dataclass
class Samples:
    """Times of one variant in milliseconds and what the card drew meanwhile."""

    ms: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)  # of every turn
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
    turns: Sequence[dict[object, Callable[[], object]]],
    rounds: int,
    seconds_per_call: float,
    on_empty_queue: Callable[[object], bool] = lambda name: False,
) -> dict[object, Samples]:
    """Time the calls of every turn, ``rounds`` times over, for about ``seconds_per_call`` each: samples by name.

    A turn may occur several times. Calls of one turn alternate and share its readings of power and clock. Times are
    CUDA events around single calls. The queue is never empty, as in a render, where the host prepares a call while the
    one before runs; but calls chosen by ``on_empty_queue`` begin when the GPU has nothing to do, and their times
    include the host's.
    """
    samples = {name: Samples() for turn in turns for name in turn}
    with _PowerMeter() as meter:
        for _ in range(rounds):
            for turn in turns:
                seconds = _lead_in(turn)
                meter.readings.clear()
                made = _turn(turn, seconds, seconds_per_call * len(turn), on_empty_queue)
                for name in turn:
                    ms = [ms for called, ms in made if called == name]
                    samples[name].ms += ms
                    samples[name].medians.append(median(ms))
                    samples[name].watts += [watts for watts, _ in meter.readings]
                    samples[name].sm_mhz += [mhz for _, mhz in meter.readings]
    return samples


def _lead_in(turn: dict) -> dict[object, float]:
    """Call everything untimed for a while, at least once; the seconds that each took with the host's share."""
    seconds = {}
    deadline = time.monotonic() + LEAD_SECONDS
    while not seconds or time.monotonic() < deadline:
        for name, call in turn.items():
            torch.cuda.synchronize()
            started = time.monotonic()
            call()
            torch.cuda.synchronize()
            seconds[name] = time.monotonic() - started
    return seconds


def _turn(turn: dict, seconds: dict, seconds_in_all: float, on_empty_queue: Callable) -> list[tuple[object, float]]:
    """Names and milliseconds of single calls."""
    calls_in_flight = 2 if max(seconds.values()) > LONG_CALL_SECONDS else CALLS_IN_FLIGHT
    deadline = time.monotonic() + seconds_in_all
    made = []
    torch.cuda._sleep(WORK_CYCLES)
    while time.monotonic() < deadline or not made:
        for name, call in turn.items():
            if on_empty_queue(name):
                torch.cuda.synchronize()
            elif seconds[name] < SHORT_CALL_SECONDS:
                torch.cuda._sleep(WORK_CYCLES)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            made.append((name, start, end))
            if len(made) >= calls_in_flight:
                made[-calls_in_flight][2].synchronize()
    torch.cuda.synchronize()
    return [(name, start.elapsed_time(end)) for name, start, end in made]


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
            mhz = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            self.readings.append((_watts(pynvml, handle), mhz))


def _watts(pynvml, handle) -> float:
    """Board power at this moment where the driver tells it; the mean of the last second otherwise."""
    field = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])[0]
    told = field.nvmlReturn == pynvml.NVML_SUCCESS
    return (field.value.uiVal if told else pynvml.nvmlDeviceGetPowerUsage(handle)) / 1e3
