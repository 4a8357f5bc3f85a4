"""Training clips: drawn scenes, words over them, and a camera's ways over photographs.

The same for the same seed; on another device to within the rounding of its arithmetic.
"""

from __future__ import annotations

import lettering
import photographs
import scenes
import torch
import tours
from prompts import PROMPTS, SCENES
from torch import Tensor

TITLED = torch.tensor([scene.title is not None for scene in SCENES])


class Clips:
    """Draws clips of every prompt on one device; holds the photographs and the words."""

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.album = photographs.load(self.device)
        self.words = lettering.load(self.device)

    def draw(self, kinds: Tensor, random: torch.Generator, frames: int, height: int, width: int) -> Tensor:
        """Frames [B, F, 3, H, W] from 0 to 1, float32, of the prompts ``kinds`` [B], a CPU tensor.

        ``random`` is a CPU generator, so that devices agree.
        """
        if int(kinds.max()) >= len(PROMPTS):
            raise IndexError(f"there are {len(PROMPTS)} prompts, got number {int(kinds.max())}")
        size = (frames, height, width)
        drawn = torch.empty(len(kinds), frames, 3, height, width, device=self.device)
        for chosen, draw in ((kinds < len(SCENES), self._scenes), (kinds >= len(SCENES), self._tours)):
            if chosen.any():
                drawn[chosen.nonzero().flatten().to(self.device)] = draw(kinds[chosen], random, size)
        return drawn

    def _scenes(self, kinds: Tensor, random: torch.Generator, size: tuple[int, int, int]) -> Tensor:
        drawn = scenes.render(scenes.draw_scenes(kinds, random, self.device), *size)
        titled = TITLED[kinds]
        if titled.any():
            titles = lettering.draw_titles(kinds[titled], random, self.device)
            rows = titled.nonzero().flatten().to(self.device)
            drawn[rows] = lettering.paint(drawn[rows], titles, self.words)
        return drawn

    def _tours(self, kinds: Tensor, random: torch.Generator, size: tuple[int, int, int]) -> Tensor:
        drawn = tours.draw_tours(kinds - len(SCENES), len(photographs.PHOTOGRAPHS), random, self.device)
        return tours.render(drawn, self.album, *size)
