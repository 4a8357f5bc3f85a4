"""What finished runs leave behind, as plain numbers and texts: no tensor, no model, no run state.

Lifetime: the finished runs are those of one prompt and are dropped when a run of another prompt finishes. The last
status of a node stays until its next run or until ComfyUI ends, so that a reloaded page can show it again. Both are
bounded. This is the one thing in ``nodes/`` that outlives a sampling run; nothing in a render reads it.
"""

from __future__ import annotations

import math
import threading

from .position import Place
from .run_state import RunState, Tally

MOST_RUNS = 16
MOST_STATUSES = 64


class Record:
    """Threads may share it: with several GPUs or a server asking while a render runs."""

    def __init__(self):
        self._lock = threading.Lock()
        self._prompt: str | None = None
        self._runs: list[dict] = []
        self._statuses: dict[tuple, dict] = {}

    def keep_run(self, prompt: str | None, run: dict) -> None:
        """One more finished run; the first of a new prompt drops the earlier prompt's."""
        with self._lock:
            if prompt != self._prompt:
                self._prompt, self._runs = prompt, []
            self._runs = [*self._runs, run][-MOST_RUNS:]

    def runs(self, prompt: str | None) -> list[dict]:
        """The finished runs of this prompt, oldest first; none where its samplers came from the cache."""
        with self._lock:
            return list(self._runs) if prompt == self._prompt else []

    def keep_status(self, node: tuple, status: dict) -> None:
        """``node`` is a workflow's id and a node's: the latter repeats from workflow to workflow."""
        with self._lock:
            self._statuses.pop(node, None)
            self._statuses[node] = status
            while len(self._statuses) > MOST_STATUSES:
                self._statuses.pop(next(iter(self._statuses)))

    def statuses(self) -> list[dict]:
        """The last status of each node, the oldest first."""
        with self._lock:
            return list(self._statuses.values())


def entry_of(run: RunState, node_id: str | None, completed: bool, lines: list[str]) -> dict:
    """What is kept of a finished run, ready for JSON.

    ``rows`` holds one row a block, in the model's order; a row's lists have one number a step of this sampler.
    """
    tally = run.tally
    return {
        "node": node_id,
        "completed": completed,
        "steps": run.schedule.steps,
        "calls": tally.calls,
        "accelerated": tally.accelerated,
        "declined": [[reason.text, count] for reason, count in tally.declined.most_common()],
        "left_to": dict(tally.fallbacks.most_common()),
        "modes": [list(served) for served in sorted(tally.served_by)],
        "groupings": tally.groupings,
        "held_bytes": tally.held_bytes,
        "seconds": round(run.stopwatch.seconds(), 6),
        "lines": list(lines),
        "rows": _rows(run),
    }


def _rows(run: RunState) -> list[dict]:
    tally, steps = run.tally, range(run.schedule.steps)
    places = tally.accelerated_at.keys() | tally.declined_at.keys()
    counts = {
        "accelerated": tally.accelerated_at,
        "declined": tally.declined_at,
        "groupings": tally.regrouped_at,
        "seconds": run.stopwatch.by_place,
    }
    removed, errors, served = tally.removed_energy.by_place(), _errors(run), _served(tally)
    rows = []
    for block in dict.fromkeys((place.block_type, place.block) for place in sorted(places, key=_order)):
        row = {"type": block[0], "block": block[1], "modes": served.get(block, []), "error": errors.get(block)}
        for name, count in counts.items():
            row[name] = [round(count.get(Place(step, *block), 0), 6) for step in steps]
        shares = [removed.get(Place(step, *block)) for step in steps]
        row["removed_energy"] = [None if share is None else round(share, 4) for share in shares]
        rows.append(row)
    return rows


def _served(tally: Tally) -> dict[tuple, list]:
    """Mode and implementation of each block's accelerated calls."""
    served: dict[tuple, set] = {}
    for place, by in tally.served_at.items():
        served.setdefault((place.block_type, place.block), set()).add(by)
    return {block: [list(by) for by in sorted(found)] for block, found in served.items()}


def _errors(run: RunState) -> dict[tuple, float | None]:
    """The largest sampled error of each block's layers; None, as JSON has no other word, where it is infinite."""
    errors: dict[tuple, float] = {}
    for layer, error in run.errors.errors.items():
        block = (layer.block_type, layer.block)
        errors[block] = max(error, errors.get(block, 0.0))
    return {block: round(error, 4) if math.isfinite(error) else None for block, error in errors.items()}


def _order(place: Place) -> tuple:
    """Unnumbered calls first, then by type and number, so that a run's rows come in one order."""
    return (place.block is not None, place.block_type or "", place.block or 0)


RECORD = Record()
