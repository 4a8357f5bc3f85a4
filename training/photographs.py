"""Photographs that come with Python packages, read from where the packages are installed. None is in this repository.

python training/photographs.py     lists them, their licences and where they were found
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

SHORT_SIDES = (192, 384)  # pixels; the album keeps every photograph in both sizes
SIDE_PER_FRAME = 1.5  # short side of the size that is shown in a frame of height 1


@dataclass(frozen=True)
class Photograph:
    """A file of an installed package, whose license lets anybody show it."""

    package: str  # as it is imported
    distribution: str  # as it is installed
    path: str
    license: str
    credit: str


PHOTOGRAPHS = (
    Photograph("sklearn", "scikit-learn", "datasets/images/china.jpg", "CC BY 2.0", "danielbuechele on Flickr"),
    Photograph("sklearn", "scikit-learn", "datasets/images/flower.jpg", "CC BY 2.0", "vultilion on Flickr"),
    Photograph("skimage", "scikit-image", "data/astronaut.png", "public domain", "NASA"),
    Photograph("skimage", "scikit-image", "data/chelsea.png", "CC0", "Stefan van der Walt"),
    Photograph("skimage", "scikit-image", "data/coffee.png", "CC0", "Rachel Michetti"),
    Photograph("skimage", "scikit-image", "data/rocket.jpg", "public domain", "SpaceX"),
)


@dataclass(frozen=True)
class Album:
    """All photographs on one device.

    Attributes:
        sheets: [P, 3, short side, W] from 0 to 1, one for each of SHORT_SIDES; W is the widest photograph's, the others
            stand left and their last column fills the rest.
        widths: [P] pixels of each photograph in each of the sheets.
    """

    sheets: tuple[Tensor, ...]
    widths: tuple[Tensor, ...]

    def for_height(self, height: int) -> tuple[Tensor, Tensor]:
        """Sheet and widths for frames of ``height`` pixels: the smallest that is sharp enough; larger ones flicker."""
        sharp = [place for place, side in enumerate(SHORT_SIDES) if side >= SIDE_PER_FRAME * height]
        place = sharp[0] if sharp else -1
        return self.sheets[place], self.widths[place]


def find(photograph: Photograph) -> Path:
    """The photograph's file; the package is not imported."""
    spec = importlib.util.find_spec(photograph.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, photograph.path)
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"training shows photographs that come with {photograph.distribution}, and {photograph.path} of it is not "
        "installed: pip install -r training/requirements.txt"
    )


def load(device: torch.device | str) -> Album:
    """Every photograph in both sizes."""
    paths = [find(photograph) for photograph in PHOTOGRAPHS]
    sheets, widths = [], []
    for side in SHORT_SIDES:
        pictures = [_read(path, side) for path in paths]
        widths.append(torch.tensor([picture.shape[2] for picture in pictures], device=device))
        widest = max(picture.shape[2] for picture in pictures)
        sheets.append(torch.stack([_fill(picture, widest) for picture in pictures]).to(device))
    return Album(tuple(sheets), tuple(widths))


def _read(path: Path, side: int) -> Tensor:
    """[3, side, W] from 0 to 1, of a photograph that is at least as wide as high."""
    with Image.open(path) as image:
        image = image.convert("RGB")
        if image.height > image.width:
            raise ValueError(f"{path} is higher than wide, {image.height} x {image.width}")
        image = image.resize((round(side * image.width / image.height), side), Image.Resampling.LANCZOS)
        values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return values.view(side, image.width, 3).permute(2, 0, 1) / 255.0


def _fill(picture: Tensor, width: int) -> Tensor:
    return torch.cat((picture, picture[:, :, -1:].expand(-1, -1, width - picture.shape[2])), dim=2)


def main() -> int:
    for photograph in PHOTOGRAPHS:
        try:
            print(f"{find(photograph)}: {photograph.license}, {photograph.credit}")
        except FileNotFoundError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
