"""Host side of triton_kernels/attention8.py: 8-bit attention for every card whose tensor cores multiply E4M3."""

from __future__ import annotations

from torch import Tensor

from ..arch import family
from ..quantize.triton8 import TritonOperands8
from ..triton_support import LaunchSettings, is_interpreted, launch, word_strides

# 128 rows by 128 keys with 8 warps: on sm_89 and sm_12x fewer rows put the warps side by side along the keys, and the
# probabilities then go through shared memory. Three stages are 90 KB of the 99 KB of the RTX 40 and 50 series.
_TILE = LaunchSettings(num_warps=8, num_stages=3)
SETTINGS = {
    "sm_89": _TILE,
    # 38.6 ms at 75,600 tokens x 8 heads; with 2 stages 49.1; 64 rows, 4 warps: 50.9 with 3 stages, 43.3 with 2 (H200).
    "sm_90": _TILE,
    "sm_100": _TILE,
    "sm_103": _TILE,
    "sm_120": _TILE,
    # Triton 3.6 knows no E4M3 product of sm_121, which has those of sm_120.
    "sm_121": LaunchSettings(num_warps=8, num_stages=3, arch="sm120"),
}
INTERPRETED = LaunchSettings(num_warps=1, num_stages=1)


def attend_triton8(operands: TritonOperands8, out: Tensor, probabilities: str) -> None:
    """Write attention of the operands to ``out``, on its device and torch's current stream, without synchronizing.

    Args:
        out: [B, H, S_q, D], bf16 or fp16, 16-byte aligned rows, any strides.
        probabilities: "expcast" or "exp2".
    """
    from ..triton_kernels.attention8 import attention8_fwd_kernel

    batch, heads, q_tokens, head_dim = out.shape
    name = family(out.device)
    settings = INTERPRETED if is_interpreted() else SETTINGS[name]
    means = operands.means
    launch(
        attention8_fwd_kernel,
        out.device,
        batch * heads * -(-q_tokens // settings.block_q),
        *(operands.q, operands.q_scale, operands.k, operands.k_scale, operands.residual, operands.residual_scale),
        *(operands.residual_scale if means is None else means, out),
        *(heads, q_tokens, operands.tokens, *word_strides(out)),
        settings=settings,
        D=head_dim,
        BLOCK_Q=settings.block_q,
        INT8=operands.int8,
        EXPCAST=probabilities == "expcast",
        MEANS=means is not None,
        EMULATE=is_interpreted(),
        SUM_BY_DOT=sums_by_dot(name),
    )


def sums_by_dot(name: str) -> bool:
    """Whether the tensor cores also add the probabilities: 15 to 28 % fewer instructions, but 48 % more on tcgen05."""
    return name not in ("sm_100", "sm_103")
