"""What finished runs leave behind, as plain numbers and texts: no tensor, no model, no run state.

Lifetime: the finished runs are those of one prompt and are dropped when a run of another prompt finishes. The last
status of a node stays until its next run or until ComfyUI ends, so that a reloaded page can show it again. Both are
bounded. This is the one thing in ``nodes/`` that outlives a sampling run; nothing in a render reads it.
"""

from __future__ import annotations

import threading

from .position import Place
from .run_state import RunState

MOST_RUNS = 16
MOST_STATUSES = 64


class Record:
    """Threads may share it: with several GPUs or a server asking while a render runs."""

    def __init__(self):
        self._lock = threading.Lock()
        self._prompt: str | None = None
        self._runs: list[dict] = []
        self._statuses: dict[str, dict] = {}

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

    def keep_status(self, node: str, status: dict) -> None:
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
    tally, steps = run.tally, run.schedule.steps
    places = tally.accelerated_at.keys() | tally.declined_at.keys()
    blocks = dict.fromkeys((place.block_type, place.block) for place in sorted(places, key=_order))
    columns = {
        "accelerated": tally.accelerated_at,
        "declined": tally.declined_at,
        "groupings": tally.regrouped_at,
        "seconds": run.stopwatch.by_place,
    }
    rows = []
    for block_type, block in blocks:
        row = {"type": block_type, "block": block}
        for name, counts in columns.items():
            values = [counts.get(Place(step, block_type, block), 0) for step in range(steps)]
            row[name] = [round(value, 6) for value in values]
        rows.append(row)
    return {
        "node": node_id,
        "completed": completed,
        "steps": steps,
        "calls": tally.calls,
        "accelerated": tally.accelerated,
        "declined": [[reason.text, count] for reason, count in tally.declined.most_common()],
        "left_to": dict(tally.fallbacks.most_common()),
        "modes": [list(served) for served in sorted(tally.served_by)],
        "groupings": tally.groupings,
        "seconds": round(run.stopwatch.seconds(), 6),
        "lines": list(lines),
        "rows": rows,
    }


def _order(place: Place) -> tuple:
    """Unnumbered calls first, then by type and number, so that a run's rows come in one order."""
    return (place.block is not None, place.block_type or "", place.block or 0)


RECORD = Record()
