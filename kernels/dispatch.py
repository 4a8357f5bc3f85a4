"""Which implementation serves a call: rows of support, and the choice with its reasons.

A row says what an implementation can do; documentation tables and test parametrization read the same rows.
``auto`` takes the first automatic row that serves the call. A named implementation serves the call or is refused
with the reason; it never slides to another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from .arch import EIGHT_BIT, FOUR_BIT, MODES, PRECISE, cards_of_mode, family_row, why_no_mode
from .attend.settings import AUTO, check_choice
from .errors import UnsupportedCall

MOST_GRID_Y = 65535  # CUDA's limit on the second dimension of a grid
ROWS_IN_INT32 = 2**31 - 1  # rows of all heads are numbered with 31 bits
ROWS_OF_128_IN_INT32 = ROWS_IN_INT32 // 128  # elements of rows of 128 are


@dataclass(frozen=True)
class Implementation:
    """One way to compute an attention call.

    Attributes:
        name: what a caller writes.
        families: hardware families it runs on, or None for every one.
        modes: which of "8-bit", "4-bit" and "8-bit precise".
        dtypes: names of input dtypes.
        head_dims: smallest and largest head dimension.
        automatic: whether ``auto`` may choose it.
        entry: "module:function" inside this package, loaded on first use.
        status: what has been seen of it, for the documentation.
        seen: families or modes of which something else has been seen, and what: ``(("sm_89", "compiled only"),)``.
        head_dim_step: distance between the head dimensions it serves, from the smallest on.
        lacks: what it does not make of its modes' qk_formats and probabilities: ``(("8-bit", "e4m3"),)``.
        most_heads, most_tokens, most_rows: largest B * H, S_q and S_kv, and B * H times the longer of these; None: any.
        readiness: "module:function" that answers for a device and a dtype, and for the mode where the row has several,
            why it cannot run there; empty: it can.
    """

    name: str
    families: tuple[str, ...] | None
    modes: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_dims: tuple[int, int]
    automatic: bool
    entry: str
    status: str
    readiness: str = ""
    seen: tuple[tuple[str, str], ...] = ()
    head_dim_step: int = 1
    lacks: tuple[tuple[str, str], ...] = ()
    most_heads: int | None = None
    most_tokens: int | None = None
    most_rows: int | None = None

    def status_on(self, family: str, mode: str) -> str:
        """What has been seen of it in one mode on one family."""
        seen = dict(self.seen)
        return seen.get(mode) or seen.get(family) or self.status

    def refusal(self, call: Call) -> str | None:
        """Why this implementation does not serve the call; None if it does."""
        if self.families is not None and call.family not in self.families:
            return f"runs on {', '.join(self.families)}, not on {call.family}"
        if call.mode not in self.modes:
            return f"has no {call.mode} mode{_made_for(call.mode)}"
        if call.dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}, not {call.dtype}"
        smallest, largest = self.head_dims
        if call.head_dim not in range(smallest, largest + 1, self.head_dim_step):
            return f"serves head_dim {self._head_dims_text()}, not {call.head_dim}"
        for choice in (call.qk_format, call.probabilities):
            if (call.mode, choice) in self.lacks:
                return f"makes no {choice} in {call.mode} mode"
        return self._size_refusal(call)

    def _size_refusal(self, call: Call) -> str | None:
        sizes = (
            ("B * H", self.most_heads, call.heads),
            ("S", self.most_tokens, call.tokens),
            ("B * H * S", self.most_rows, call.heads * call.tokens),
        )
        for name, most, size in sizes:
            if most is not None and size > most:
                return f"serves {name} up to {most}, not {size}"
        return None

    def _head_dims_text(self) -> str:
        smallest, largest = self.head_dims
        if smallest == largest:
            return f"{largest}"
        if self.head_dim_step == 1:
            return f"from {smallest} to {largest}"
        return " and ".join(map(str, range(smallest, largest + 1, self.head_dim_step)))

    def load(self) -> Callable:
        """The function behind ``entry``."""
        return _load(self.entry)

    def unavailable(self, device, call: Call) -> str | None:
        """Why it cannot run on this machine; None if it can. The first question may compile and test a kernel."""
        if not self.readiness:
            return None
        choices = (call.mode, call.probabilities) if len(self.modes) > 1 else ()
        return _load(self.readiness)(device, call.dtype, *choices)


def _load(place: str) -> Callable:
    module, _, function = place.partition(":")
    return getattr(import_module(module, __package__), function)


@dataclass(frozen=True)
class Call:
    """What decides about support; no tensors, so that it can be made up in a test.

    Attributes:
        qk_format, probabilities: None: whichever an implementation makes.
        heads: B * H.
        tokens: the longer of S_q and S_kv.
    """

    family: str
    mode: str
    dtype: str
    head_dim: int
    qk_format: str | None = None
    probabilities: str | None = None
    heads: int = 1
    tokens: int = 1


IMPLEMENTATIONS = (
    Implementation(
        name="cuda",
        families=("sm_90",),
        modes=(EIGHT_BIT, PRECISE),
        dtypes=("bfloat16", "float16"),
        head_dims=(128, 128),
        automatic=True,
        entry=".attend.run_cuda:run",
        status="run on an H200",
        readiness=".guard:why_cuda_is_unavailable",
        lacks=((EIGHT_BIT, "e4m3"),),
        most_heads=MOST_GRID_Y,
        most_rows=ROWS_IN_INT32,
    ),
    Implementation(
        name="triton8",
        families=("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"),
        modes=(EIGHT_BIT,),
        dtypes=("bfloat16", "float16"),
        head_dims=(64, 128),
        automatic=True,
        entry=".attend.run_triton8:run",
        status="compiled only",
        readiness=".guard_triton:why_triton8_is_unavailable",
        seen=(("sm_90", "run on an H200"),),
        head_dim_step=64,
        most_tokens=ROWS_OF_128_IN_INT32,
        most_rows=ROWS_IN_INT32,
    ),
    Implementation(
        name="triton4",
        families=("sm_120", "sm_121"),
        modes=(FOUR_BIT,),
        dtypes=("bfloat16", "float16"),
        head_dims=(64, 128),
        automatic=True,
        entry=".attend.run_triton4:run",
        status="compiled; emulated on an H200",
        readiness=".guard_triton:why_triton4_is_unavailable",
        head_dim_step=64,
        most_heads=ROWS_OF_128_IN_INT32,
        most_tokens=ROWS_OF_128_IN_INT32,
        most_rows=ROWS_IN_INT32,
    ),
    Implementation(
        name="reference",
        families=None,
        modes=MODES,
        dtypes=("bfloat16", "float16", "float32"),
        head_dims=(1, 256),
        automatic=False,
        entry=".attend.run_reference:run",
        status="run on CPUs and an H200",
    ),
)


def implementation_names() -> tuple[str, ...]:
    """Names a caller may give, "auto" first."""
    return (AUTO, *(row.name for row in IMPLEMENTATIONS))


def choose(call: Call, name: str = AUTO, device=None) -> Implementation:
    """The implementation for a call; raises UnsupportedCall with a reason per implementation asked.

    With a ``device`` (torch.device) an implementation must also be able to run there.
    """
    check_choice("implementation", name, implementation_names())
    if name == AUTO:
        candidates = [row for row in IMPLEMENTATIONS if row.automatic and _is_for_family(row, call.family)]
    else:
        candidates = [row for row in IMPLEMENTATIONS if row.name == name]
    reasons = {}
    for row in candidates:
        refusal = row.refusal(call)
        if refusal is None and device is not None:
            refusal = row.unavailable(device, call)
        if refusal is None:
            return row
        reasons[row.name] = refusal
    raise UnsupportedCall(reasons or {AUTO: why_no_kernel(call.family)})


def why_no_kernel(family: str) -> str:
    """One sentence on why ``auto`` has nothing for a hardware family."""
    row = family_row(family)
    if row is None:
        return why_no_mode(family)
    return f"this version has no GPU kernel for {row.cards} ({family}) yet"


def _made_for(mode: str) -> str:
    """Which cards a mode is for, to end a refusal with."""
    cards = cards_of_mode(mode)
    return f", which is for {cards}" if cards else ""


def _is_for_family(row: Implementation, family: str) -> bool:
    return row.families is None or family in row.families
