"""From a tensor's device to a named hardware family, and from the family to the mode that fits it.

A family is a plain string: ``sm_90`` for CUDA capability 9.0, or ``hip``, ``mps``, ``cpu``, ... Rows list the
families they serve; nothing is inferred from "newer than", because a newer card is not a superset.
"""

from __future__ import annotations

from typing import NamedTuple

EIGHT_BIT = "8-bit"
FOUR_BIT = "4-bit"
PRECISE = "8-bit precise"
MODES = (EIGHT_BIT, FOUR_BIT, PRECISE)


class FamilyRow(NamedTuple):
    """One line of the hardware table (method, section 5).

    Attributes:
        mode: the one ``auto`` takes.
        expcast: whether its 8-bit mode makes probabilities by ExpCast.
        other_modes: what can be asked for beside it.
        qk_format: of q and k in 8-bit mode; the fifth generation of tensor cores has lost INT8.
    """

    family: str
    cards: str
    mode: str
    expcast: bool
    other_modes: tuple[str, ...] = ()
    qk_format: str = "int8"


FAMILIES = (
    FamilyRow("sm_89", "RTX 40, L40S", EIGHT_BIT, False),
    FamilyRow("sm_90", "H100, H200", EIGHT_BIT, True, (PRECISE,)),
    FamilyRow("sm_100", "B200", EIGHT_BIT, True, (), "e4m3"),
    FamilyRow("sm_103", "B300", EIGHT_BIT, True, (), "e4m3"),
    FamilyRow("sm_120", "RTX PRO 6000, RTX 50", FOUR_BIT, False, (EIGHT_BIT,)),
    FamilyRow("sm_121", "DGX Spark", FOUR_BIT, False, (EIGHT_BIT,)),
)
_ROWS = {row.family: row for row in FAMILIES}


def uses_grouping(mode: str) -> bool:
    """Whether a grouping changes what ``mode`` (or "auto") computes: the precise mode leaves values in 16 bits."""
    return mode != PRECISE


def device_capability(device) -> tuple[int, int]:
    """CUDA compute capability of one device; its own function so that tests can patch it."""
    import torch

    return torch.cuda.get_device_capability(device)


def is_hip() -> bool:
    """Whether this torch talks to AMD cards through its ``cuda`` device type."""
    import torch

    return getattr(torch.version, "hip", None) is not None


def family(device) -> str:
    """Name the hardware family of ``device`` (a ``torch.device``): ``sm_90``, ``hip``, ``mps``, ``cpu``, ..."""
    if device.type != "cuda":
        return device.type
    if is_hip():
        return "hip"
    major, minor = device_capability(device)
    return f"sm_{major}{minor}"


def family_row(name: str) -> FamilyRow | None:
    """The hardware table's row for a family, or None where no mode exists."""
    return _ROWS.get(name)


def cards_of_mode(mode: str) -> str:
    """Names of the cards a mode is for, separated by commas."""
    return ", ".join(row.cards for row in FAMILIES if mode == row.mode or mode in row.other_modes)


def why_no_mode(name: str) -> str:
    """One sentence for a person whose device has no mode in the table."""
    if name == "cpu":
        return "tensors are on the CPU and VC-Attention's kernels are for NVIDIA GPUs"
    if name == "hip":
        return "AMD GPUs (ROCm) are not supported"
    if name == "mps":
        return "Apple GPUs (MPS) are not supported"
    if not name.startswith("sm_"):
        return f"devices of type {name!r} are not supported"
    known = ", ".join(f"{row.cards} ({row.family})" for row in FAMILIES)
    return f"this GPU is of the family {name}; VC-Attention is made for {known}"
