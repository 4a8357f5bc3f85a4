"""What a run did, said once in the log and once on the node."""

from __future__ import annotations

import logging
import time

from ..kernels import uses_grouping
from .host import send_text
from .run_state import RunState, Tally

log = logging.getLogger("VC Attention")

MOST_REASONS = 4
MOST_NAMES = 8
WORTH_SAYING_BYTES = 250_000_000  # of the groupings a run holds


def report(run: RunState, replaced_by: str | None, completed: bool, node_id: str | None) -> list[str]:
    """One log line and one text on the node; returns their parts.

    A finished render without an accelerated call is a warning.
    """
    lines = summary(run, replaced_by, completed)
    idle = completed and run.tally.accelerated == 0
    node = "" if node_id is None else f" (node {node_id})"
    log.log(logging.WARNING if idle else logging.INFO, "VC Attention%s: %s", node, "; ".join(lines))
    send_text("\n".join(lines), node_id)
    return lines


def summary(run: RunState, replaced_by: str | None, completed: bool) -> list[str]:
    """The parts of the report, most important first."""
    tally = run.tally
    lines = [_idle(tally, replaced_by, completed)] if tally.accelerated == 0 else [_active(tally)]
    if tally.declined:
        lines.append(_declined(tally))
    lines += _left_alone(run)
    if tally.accelerated:
        lines.append(_regrouped(run))
        lines += _error(run)
        if completed:
            lines.append(_time(run))
    if not completed:
        lines.append("the render stopped early")
    return lines


def _active(tally: Tally) -> str:
    served = " and ".join(f"{mode} ({implementation})" for mode, implementation in sorted(tally.served_by))
    return (
        f"{served}, {len(tally.blocks)} of {len(tally.blocks_seen)} blocks, "
        f"{tally.accelerated} of {tally.calls} attention calls"
    )


def _idle(tally: Tally, replaced_by: str | None, completed: bool) -> str:
    if not completed and not tally.calls:
        return "no attention call was finished"
    return f"ACTIVE ON 0 % OF CALLS (0 of {tally.calls}): {_likely_cause(tally, replaced_by)}"


def _likely_cause(tally: Tally, replaced_by: str | None) -> str:
    if tally.declined:
        reason, _ = tally.reasons()[0]
        return reason.text if reason.rank > 1 else f"calls were {reason.text}"
    if replaced_by is not None:
        return (
            f"another node after VC Attention Patch replaced the attention (from {replaced_by}); "
            "put VC Attention Patch last, directly before the sampler"
        )
    return "this model's attention did not pass through ComfyUI's attention hook, or the model was not evaluated"


def _declined(tally: Tally) -> str:
    others = " and ".join(name for name, _ in tally.fallbacks.most_common(2))
    reasons = tally.reasons()
    texts = [f"{reason.text} ({count})" for reason, count in reasons[:MOST_REASONS]]
    rest = sum(count for _, count in reasons[MOST_REASONS:])
    if rest:
        texts.append(f"other reasons ({rest})")
    return f"{tally.declined.total()} left to {others}: {', '.join(texts)}"


def _left_alone(run: RunState) -> list[str]:
    blocks = run.errors.left_alone()
    return [f"left alone for their error: {_some(blocks)}"] if blocks else []


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")


def _regrouped(run: RunState) -> str:
    steps = sorted({place.step for place in run.tally.regrouped_at})
    if steps:
        count = run.tally.groupings
        named = _some([str(step + 1) for step in steps])
        plural = "s" if len(steps) > 1 else ""
        return f"values grouped {count} times, in step{plural} {named} of {run.schedule.steps}{_grouped(run.tally)}"
    if not uses_grouping(run.settings.mode):
        return "values not grouped (this mode keeps them in 16 bits)"
    if run.settings.grouping_window == 0.0:
        return "values not grouped (grouping_window is 0)"
    return "values not grouped (no accelerated step of this sampler lies inside grouping_window)"


def _grouped(tally: Tally) -> str:
    """What grouping brought and what it held."""
    removed = tally.removed_energy.by_place().values()
    brought = (
        f", which took {sum(removed) / len(removed):.0%} of their energy out of the quantization" if removed else ""
    )
    if tally.held_bytes < WORTH_SAYING_BYTES:
        return brought
    return f"{brought}, holding {tally.held_bytes / 1e9:.1f} GB of memory"


def _error(run: RunState) -> list[str]:
    worst = run.errors.worst()
    if worst is None:
        return []
    layer, error = worst
    return [f"largest sampled error of an attention output {error:.1%} ({layer.text})"]


def _time(run: RunState) -> str:
    attention = run.stopwatch.seconds()
    total = time.perf_counter() - run.started
    return f"accelerated attention took {attention:.1f} s of {total:.1f} s"
