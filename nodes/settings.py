"""What a user set on the node, checked once: every error names the widget, what it takes and what it got."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..kernels import implementation_names

MODES = ("auto", "8-bit", "4-bit", "off", "8-bit precise")
IMPLEMENTATIONS = implementation_names()
# On an H200 a call beats FlashAttention-2 from 2,048 to 3,072 tokens on and cuDNN from 3,072 to 4,096
# (docs/hopper.md). It also keeps the text refiners of video models out.
MIN_TOKENS = 4096
MOST_CLUSTERS = 1024
MOST_TOKENS = 1 << 24

_BLOCKS_ENTRY = re.compile(r"(?:(?P<type>[A-Za-z_]\w*)\s*:\s*)?(?P<first>\d+)(?:\s*-\s*(?P<last>\d+))?")
_BLOCKS_EXPECTED = "numbers and ranges such as '0-2,39' or 'double:0-2,single:37'"


@dataclass(frozen=True)
class BlockRange:
    """Blocks ``first`` to ``last`` of one type, or of every type where ``type`` is None."""

    type: str | None
    first: int
    last: int


def parse_blocks(text: str) -> tuple[BlockRange, ...]:
    """Read a list of blocks: ``0-2,39`` for every block type, ``single:37`` for one."""
    if not isinstance(text, str):
        raise _wrong("skip_blocks", _BLOCKS_EXPECTED, text)
    return tuple(_parse_entry(entry.strip(), text) for entry in text.split(",") if entry.strip())


def _parse_entry(entry: str, text: str) -> BlockRange:
    match = _BLOCKS_ENTRY.fullmatch(entry)
    if match is None:
        raise _wrong("skip_blocks", _BLOCKS_EXPECTED, text)
    first = int(match["first"])
    last = int(match["last"]) if match["last"] else first
    if last < first:
        raise _wrong("skip_blocks", "ranges that go up", text)
    return BlockRange(match["type"], first, last)


@dataclass(frozen=True)
class Settings:
    """The node's widgets.

    Raises:
        ValueError: a value is not one the widget takes.
    """

    mode: str = "auto"
    grouping_window: float = 0.25
    refresh_interval: int = 4
    start_percent: float = 0.0
    end_percent: float = 1.0
    skip_blocks: str = ""
    clusters: int = 0
    implementation: str = "auto"
    min_tokens: int = MIN_TOKENS
    skipped: tuple[BlockRange, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        _check_choice("mode", self.mode, MODES)
        _check_share("grouping_window", self.grouping_window)
        _check_count("refresh_interval", self.refresh_interval, 1, 50)
        _check_share("start_percent", self.start_percent)
        _check_share("end_percent", self.end_percent)
        if self.end_percent <= self.start_percent:
            raise _wrong("end_percent", f"more than start_percent = {self.start_percent}", self.end_percent)
        _check_count("clusters", self.clusters, 0, MOST_CLUSTERS)
        _check_choice("implementation", self.implementation, IMPLEMENTATIONS)
        _check_count("min_tokens", self.min_tokens, 0, MOST_TOKENS)
        object.__setattr__(self, "skipped", parse_blocks(self.skip_blocks))

    def skips(self, block_type: str | None, block_index: int) -> bool:
        """Whether a block was named in ``skip_blocks``."""
        return any(
            blocks.type in (None, block_type) and blocks.first <= block_index <= blocks.last for blocks in self.skipped
        )


def _check_choice(widget: str, value, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _wrong(widget, f"one of {', '.join(choices)}", value)


def _check_share(widget: str, value) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise _wrong(widget, "a number from 0 to 1", value)


def _check_count(widget: str, value, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(widget, f"a whole number from {least} to {most}", value)


def _wrong(widget: str, expected: str, value) -> ValueError:
    return ValueError(f"VC Attention Patch: {widget} must be {expected}, got {value!r}")
