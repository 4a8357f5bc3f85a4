"""The number formats of one attention call, ours and those of others, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

QUERY_FORMATS = ("16-bit", "int8", "e4m3", "nvfp4", "nvfp4, fed back")
SCALE_GROUPS = ("block", "thread", "head")
PROBABILITY_FORMATS = ("16-bit", "e4m3", "expcast", "u8", "u8 per tile", "nvfp4")
VALUE_FORMATS = ("16-bit", "e4m3", "e4m3 per head", "int8", "int8 per block", "nvfp4", "nvfp4, closest")
OWN_BLOCKS = ("none", "block", "cube")


@dataclass(frozen=True)
class Formats:
    """How the operands of an attention call are stored.

    Attributes:
        qk: format of queries and keys; NVFP4 also takes the mean of each 128 query rows out, exactly. "fed back" and,
            of values, "closest" are the package's own rounding (quantize/nvfp4.py).
        qk_scales: tokens that share a scale: 128 ("block"), those of one tensor-core thread ("thread": 4 rows of q,
            16 of k, as SageAttention2 does), or all of a head ("head"). NVFP4 has its own groups of 16 channels.
        smooth_keys: keys without their mean over tokens.
        rotate: q and k times a Hadamard matrix over the head dimension.
        probabilities: format of the probabilities. "u8" are 255ths of the row's running maximum, "u8 per tile" those of
            its maximum in each tile of 128 keys, which then has a weight.
        exact_sums: the denominator adds probabilities before they are rounded.
        values: format of the values, or of what is left of them without their block means.
        rotate_values: v times a Hadamard matrix, the output turned back.
        own: tokens that attend to each other in 16 bit: 128 of the sequence ("block") or a "cube" of the clip.
    """

    qk: str = "16-bit"
    qk_scales: str = "block"
    smooth_keys: bool = True
    rotate: bool = True
    probabilities: str = "16-bit"
    exact_sums: bool = False
    values: str = "16-bit"
    rotate_values: bool = False
    own: str = "none"

    def __post_init__(self):
        for name, choices in (
            ("qk", QUERY_FORMATS),
            ("qk_scales", SCALE_GROUPS),
            ("probabilities", PROBABILITY_FORMATS),
            ("values", VALUE_FORMATS),
            ("own", OWN_BLOCKS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")

    def but(self, **changes) -> Formats:
        """The same with some attributes changed."""
        return replace(self, **changes)


SIXTEEN_BIT = Formats(smooth_keys=False, rotate=False, exact_sums=True)
PLAIN_FP8 = Formats("e4m3", "head", False, False, "e4m3", False, "e4m3 per head")
SAGE_ATTENTION_2 = Formats("int8", "thread", True, False, "e4m3", True, "e4m3")
COMFY_INT8 = Formats("int8", "thread", True, True, "u8 per tile", False, "int8")
OURS_8BIT = Formats("int8", "block", True, True, "expcast", False, "e4m3")
OURS_PRECISE = Formats("int8", "block", True, True, "16-bit", False, "16-bit")
INT8_THROUGHOUT = Formats("int8", "block", True, True, "u8 per tile", False, "int8 per block")
FAR_4BIT = Formats("nvfp4, fed back", "block", True, True, "nvfp4", False, "nvfp4, closest")
OURS_4BIT = FAR_4BIT.but(own="block")
NVFP4_AT_6 = FAR_4BIT.but(qk="nvfp4", values="nvfp4")
