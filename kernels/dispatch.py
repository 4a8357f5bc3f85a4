"""Which implementation serves a call: rows of support, and the choice with its reasons.

A row says what an implementation can do; documentation tables and test parametrization read the same rows.
``auto`` takes the first automatic row that serves the call. A named implementation serves the call or is refused
with the reason; it never slides to another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from .arch import MODES, family_row, why_no_mode
from .errors import UnsupportedCall

AUTO = "auto"


@dataclass(frozen=True)
class Implementation:
    """One way to compute an attention call.

    Attributes:
        name: what a caller writes.
        families: hardware families it runs on, or None for every one.
        modes: "8-bit", "4-bit" or both.
        dtypes: names of input dtypes.
        max_head_dim: largest head dimension.
        automatic: whether ``auto`` may choose it.
        entry: "module:function" inside this package, loaded on first use.
        status: what has been seen of it, for the documentation.
    """

    name: str
    families: tuple[str, ...] | None
    modes: tuple[str, ...]
    dtypes: tuple[str, ...]
    max_head_dim: int
    automatic: bool
    entry: str
    status: str

    def refusal(self, call: Call) -> str | None:
        """Why this implementation does not serve the call; None if it does."""
        if self.families is not None and call.family not in self.families:
            return f"runs on {', '.join(self.families)}, not on {call.family}"
        if call.mode not in self.modes:
            return f"has no {call.mode} mode"
        if call.dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}, not {call.dtype}"
        if call.head_dim > self.max_head_dim:
            return f"serves head_dim up to {self.max_head_dim}, not {call.head_dim}"
        return None

    def load(self) -> Callable:
        """The function behind ``entry``."""
        module, _, function = self.entry.partition(":")
        return getattr(import_module(module, __package__), function)


@dataclass(frozen=True)
class Call:
    """What decides about support; no tensors, so that it can be made up in a test."""

    family: str
    mode: str
    dtype: str
    head_dim: int


IMPLEMENTATIONS = (
    Implementation(
        name="reference",
        families=None,
        modes=MODES,
        dtypes=("bfloat16", "float16", "float32"),
        max_head_dim=256,
        automatic=False,
        entry=".attend.run_reference:run",
        status="run on hardware",
    ),
)


def implementation_names() -> tuple[str, ...]:
    """Names a caller may give, "auto" first."""
    return (AUTO, *(row.name for row in IMPLEMENTATIONS))


def choose(call: Call, name: str = AUTO) -> Implementation:
    """The implementation for a call; raises UnsupportedCall with a reason per implementation asked."""
    candidates = [row for row in IMPLEMENTATIONS if (row.automatic if name == AUTO else row.name == name)]
    reasons = {}
    for row in candidates:
        refusal = row.refusal(call)
        if refusal is None:
            return row
        reasons[row.name] = refusal
    if name == AUTO and not any(_is_for_family(row, call.family) for row in candidates):
        reasons = {AUTO: why_no_kernel(call.family), **reasons}
    raise UnsupportedCall(reasons)


def why_no_kernel(family: str) -> str:
    """One sentence on why ``auto`` has nothing for a hardware family."""
    row = family_row(family)
    if row is None:
        return why_no_mode(family)
    return f"this version has no GPU kernel for {row.cards} ({family}) yet"


def _is_for_family(row: Implementation, family: str) -> bool:
    return row.families is None or family in row.families
