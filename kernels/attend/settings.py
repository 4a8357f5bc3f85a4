"""The choices of one attention call, resolved from what a caller asked for."""

from __future__ import annotations

from dataclasses import dataclass

from ..arch import EIGHT_BIT, FOUR_BIT, MODES, PRECISE, family_row
from ..errors import InvalidArgument

AUTO = "auto"
LAYOUTS = ("BHSD", "BSHD")
QK_FORMATS = {EIGHT_BIT: ("int8", "e4m3"), FOUR_BIT: ("nvfp4",), PRECISE: ("int8",)}
PROBABILITIES = {EIGHT_BIT: ("expcast", "exp2"), FOUR_BIT: ("exp2",), PRECISE: ("exp2",)}


@dataclass(frozen=True)
class Settings:
    """Numerics of one call.

    Attributes:
        mode: "8-bit", "4-bit" or "8-bit precise".
        qk_format: number format of queries and keys.
        probabilities: "expcast" or "exp2" (an exponential and a cast; in the precise mode to the dtype of the call).
        demean: whether block means of the values are removed and restored; the precise mode leaves values as they are.
        own_block: whether the 4-bit mode attends to the keys of each query's own block in 16 bit.
    """

    mode: str
    qk_format: str
    probabilities: str
    demean: bool
    own_block: bool = True


def check_choice(name: str, value, choices: tuple[str, ...]) -> None:
    """Raise InvalidArgument unless ``value`` is one of ``choices``."""
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise InvalidArgument(f"{name} must be one of {expected}, got {value!r}")


def check_settings(mode: str, qk_format: str, probabilities: str) -> None:
    """Raise InvalidArgument where the three contradict each other or the formats; no device is needed."""
    check_choice("mode", mode, (AUTO, *MODES))
    modes = MODES if mode == AUTO else (mode,)
    check_choice("qk_format", qk_format, (AUTO, *_united(QK_FORMATS, modes)))
    check_choice("probabilities", probabilities, (AUTO, *_united(PROBABILITIES, modes)))


def resolve(
    mode: str, qk_format: str, probabilities: str, demean: bool, family: str, own_block: bool = True
) -> Settings:
    """Settings for a hardware family. A family without a mode of its own gets 8-bit: the reference runs anywhere."""
    row = family_row(family)
    if mode == AUTO:
        mode = row.mode if row else EIGHT_BIT
    if qk_format == AUTO:
        qk_format = row.qk_format if row and mode == EIGHT_BIT else QK_FORMATS[mode][0]
    if probabilities == AUTO:
        without_expcast = mode == EIGHT_BIT and row is not None and not row.expcast
        probabilities = "exp2" if without_expcast else PROBABILITIES[mode][0]
    check_choice("qk_format", qk_format, QK_FORMATS[mode])
    check_choice("probabilities", probabilities, PROBABILITIES[mode])
    return Settings(mode, qk_format, probabilities, demean, own_block)


def _united(table: dict[str, tuple[str, ...]], modes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(choice for mode in modes for choice in table[mode]))
