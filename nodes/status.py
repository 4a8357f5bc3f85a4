"""The live status of a node: small messages to the browser while its model is sampled, and a last one at the end."""

from __future__ import annotations

import logging
import time

from .host import client_id, prompt_id, send_event, workflow_id
from .record import RECORD
from .run_state import RunState

log = logging.getLogger("VC Attention")

EVENT = "vc_attention.status"
LEAST_SECONDS = 0.3  # between two messages of one run
MOST_REASONS = 8
UNREPORTED = "this render could not be reported on, see ComfyUI's log"


class LiveStatus:
    """Tells the browser about one run, from counters that are kept anyway. Costs some microseconds an evaluation."""

    def __init__(self, node_id: str | None):
        self.node_id = node_id
        self.prompt = prompt_id()
        self.workflow = None if node_id is None else workflow_id(self.prompt)
        self.client = None if node_id is None else client_id(self.prompt)
        self._next = 0.0

    def tick(self, run: RunState) -> None:
        """Called once a model evaluation; sends at most a few times a second."""
        now = time.monotonic()
        if self.node_id is None or now < self._next:
            return
        self._next = now + LEAST_SECONDS
        self._send(run, "running", [], run.stopwatch.seconds_done())

    def finish(self, run: RunState, completed: bool, lines: list[str]) -> None:
        """The last message, with the report's own sentences."""
        self._send(run, _ended(completed), lines, run.stopwatch.seconds())

    def finish_unreported(self, run: RunState, completed: bool) -> None:
        """The last message of a run whose report failed: a GPU that broke does not answer any more."""
        self._send(run, _ended(completed), [UNREPORTED], run.stopwatch.seconds_known())

    def off(self) -> None:
        """The message of a node that is set to off: without it the row would go on showing an earlier render."""
        self._publish({"state": "off"})

    def _send(self, run: RunState, state: str, lines: list[str], seconds: float) -> None:
        self._publish({"state": state, **snapshot(run, seconds), "lines": lines})

    def _publish(self, status: dict) -> None:
        if self.node_id is None:
            return
        origin = {"prompt": self.prompt, "workflow": self.workflow, "client": self.client}
        status = {"node": self.node_id, **origin, **status}
        RECORD.keep_status((self.workflow, self.node_id), status)
        send_event(EVENT, status, self.node_id)


def _ended(completed: bool) -> str:
    return "done" if completed else "stopped"


def snapshot(run: RunState, seconds: float) -> dict:
    """A run's counters as plain numbers and texts.

    ``share`` is the part of the time so far, from 0 to 1; ``fault`` is why the run goes on without us, if it does.
    """
    tally = run.tally
    total = 0.0 if run.started is None else time.perf_counter() - run.started
    return {
        "modes": [list(served) for served in sorted(tally.served_by)],
        "step": run.step + 1,
        "steps": run.schedule.steps,
        "accelerated": tally.accelerated,
        "declined": tally.declined.total(),
        "blocks": [len(tally.blocks), len(tally.blocks_seen)],
        "groupings": tally.groupings,
        "seconds": round(seconds, 3),
        "total_seconds": round(total, 3),
        "share": round(min(seconds / total, 1.0), 4) if total > 0 else 0.0,
        "reasons": [[reason.text, count] for reason, count in tally.reasons()[:MOST_REASONS]],
        "fault": None if run.switched_off is None else run.switched_off.text,
    }
