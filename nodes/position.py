"""Where an attention call stands: in the denoising schedule, and in the model."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ..kernels import Schedule
from .settings import Settings

log = logging.getLogger("VC Attention")


class Position(NamedTuple):
    """One noise level's place in the schedule.

    Attributes:
        step: index in the levels this sampler call was given.
        grouping: whether values are regrouped here.
        active: whether it lies between start_percent and end_percent.
    """

    step: int
    grouping: bool
    active: bool


def locate(schedule: Schedule, settings: Settings, sigma: float) -> Position:
    """The place of one noise level."""
    return Position(
        schedule.step(sigma),
        schedule.in_first(settings.grouping_window, sigma),
        schedule.between(settings.start_percent, settings.end_percent, sigma),
    )


def schedule_of(guider, sigmas) -> Schedule:
    """The schedule of a sampler call.

    The model's noise scale is asked now, not when the node ran: a node after ours may have changed its shift.
    """
    levels = [float(sigma) for sigma in sigmas.tolist()]
    try:
        sampling = guider.model_patcher.get_model_object("model_sampling")
        sigma_max = float(sampling.sigma_max)
        float(sampling.percent_to_sigma(0.5))
    except Exception:
        log.debug("this model has no noise scale; steps are counted on the sampler's own", exc_info=True)
        return Schedule(levels)
    return Schedule(levels, lambda percent: float(sampling.percent_to_sigma(percent)), sigma_max)


class Layer(NamedTuple):
    """One attention of the model.

    Attributes:
        block_type, block_index: as the model names its blocks; None where it does not, or not by name and number.
        ordinal: of the call inside that block, or inside the forward where blocks have no index. A VACE block
            reports the index of its main block, and some patches call attention per group of heads.
    """

    block_type: str | None
    block_index: int | None
    ordinal: int

    @property
    def block(self) -> int:
        """The block's number; the ordinal where the model numbers none (MiniMax-H3 in ComfyUI 0.33)."""
        return self.ordinal if self.block_index is None else self.block_index

    @property
    def text(self) -> str:
        """For a person: ``double block 3``."""
        return f"block {self.block}" if self.block_type is None else f"{self.block_type} block {self.block}"


class Place(NamedTuple):
    """A block of the model at a step of the schedule; None where the call or the model does not say."""

    step: int | None
    block_type: str | None
    block: int | None


def place_of(forward: Forward | None, transformer_options: dict, layer: Layer | None = None) -> Place:
    """Where a call is counted. Calls declined before they have a layer go by the model's own block number."""
    step = None if forward is None else forward.position.step
    if layer is not None:
        return Place(step, layer.block_type, layer.block)
    return Place(step, *_block(transformer_options))


def _block(transformer_options: dict) -> tuple[str | None, int | None]:
    """Type and number of the block at hand, None for what is not a name or a number: calls are counted by them."""
    block_type, index = transformer_options.get("block_type"), transformer_options.get("block_index")
    if not isinstance(index, int):
        return None, None
    return block_type if isinstance(block_type, str) else None, index


class Forward:
    """One evaluation of the model on one batch of prompts: counts the calls inside each block."""

    def __init__(self, position: Position):
        self.position = position
        self._calls: dict[tuple, int] = {}

    def next_layer(self, transformer_options: dict) -> Layer:
        """The layer of the call at hand. Counts it, so ask once a call, and only for calls that may be ours."""
        block = _block(transformer_options)
        ordinal = self._calls.get(block, 0)
        self._calls[block] = ordinal + 1
        return Layer(*block, ordinal)
