"""What a grouping is worth, measured on a few heads: what a report can ask for at every grouping of a render."""

from __future__ import annotations

from torch import Tensor

from ..attend.settings import LAYOUTS, check_choice
from ..attend.validation import check_grouping, check_tensor
from ..errors import InvalidArgument
from .api import Grouping
from .blocks import removed_energy

HEADS = 4


def sampled_removed_energy(v: Tensor, grouping: Grouping, *, layout: str = "BHSD", heads: int = HEADS) -> Tensor:
    """Share of ``|v|^2`` that the means of 128 grouped tokens take away (V-Smooth), on evenly spaced heads.

    The mean over some heads of the first batch row. 4 of Wan2.2's 40 heads at 75,600 tokens are 155 MB in float32 and
    pass through half a dozen such tensors, fewer than the attention call itself needs. Does not wait for the GPU.

    Args:
        v: as for ``group_values``.
        grouping: made for these tokens.
        layout: "BHSD" or "BSHD".
        heads: how many heads are measured; all of them where there are fewer.

    Returns:
        float32 scalar on v's device, from 0 to 1; NaN where v is not finite.

    Raises:
        InvalidArgument: an argument is wrong in itself.
    """
    check_choice("layout", layout, LAYOUTS)
    check_tensor("v", v, layout)
    if not isinstance(heads, int) or heads < 1:
        raise InvalidArgument(f"heads must be a whole number from 1, got {heads!r}")
    if layout == "BSHD":
        v = v.transpose(1, 2)
    check_grouping(grouping, tuple(v.shape[:3]), v.device)
    step = max(v.shape[1] // heads, 1)
    sample = slice(step // 2, step * heads, step)  # not a list of indices: copying one to the GPU may wait
    return removed_energy(v[:1, sample], grouping.permutation[:1, sample]).mean()
