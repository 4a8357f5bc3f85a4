"""Number formats of low-bit attention, in plain torch: E4M3, E2M1, NVFP4 and the ExpCast code map.

Every encoder returns the stored bits (uint8), every decoder float32. Encoders saturate: a value beyond the largest
finite number becomes that number, never NaN. Rounding is to nearest, ties to even.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

INT8_MAX = 127.0  # symmetric: -128 is not used
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NVFP4_GROUP = 16

EXPCAST_BETA = -0.35  # method, section 3: centres the error of reading a code as a logarithm
EXPCAST_TOP = 120  # E4M3 code of 256, given to the row maximum
LOG2_SCALE = 8  # probabilities are held as 2^8 p, so that E4M3's range serves them
CODES_PER_OCTAVE = 8  # 3 mantissa bits
CODE_OF_ONE = 56  # E4M3 bias 7, times 8


def encode_e4m3(x: Tensor) -> Tensor:
    """E4M3 bits of ``x`` (any shape), saturated to +-448; NaN stays NaN (0x7f or 0xff)."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """float32 values of E4M3 bits (uint8, any shape)."""
    return codes.view(torch.float8_e4m3fn).float()


def _tie_to_even_bounds() -> tuple[float, ...]:
    """Smallest float32 that rounds up to each E2M1 magnitude but the first."""
    bounds = []
    for code in range(1, len(E2M1_MAGNITUDES)):
        midpoint = (E2M1_MAGNITUDES[code - 1] + E2M1_MAGNITUDES[code]) / 2
        rounds_up_at_midpoint = code % 2 == 0
        bounds.append(midpoint if rounds_up_at_midpoint else _next_float32(midpoint))
    return tuple(bounds)


def _next_float32(x: float) -> float:
    # Every midpoint lies in [2^e, 2^(e+1)), where float32 steps by 2^(e-23).
    return x + math.ldexp(1.0, math.frexp(x)[1] - 24)


_E2M1_BOUNDS = _tie_to_even_bounds()


def encode_e2m1(x: Tensor) -> Tensor:
    """E2M1 bits of ``x`` (any shape): sign in bit 3, magnitude index in bits 0 to 2, one value per byte."""
    bounds = torch.tensor(_E2M1_BOUNDS, dtype=torch.float32, device=x.device)
    magnitude = torch.bucketize(x.float().abs(), bounds, right=True).to(torch.uint8)
    return magnitude | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """float32 values of E2M1 bits (uint8, one value per byte, any shape)."""
    table = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32, device=codes.device)
    magnitude = table[(codes & 7).long()]
    return torch.where(codes & 8 != 0, -magnitude, magnitude)


@dataclass(frozen=True)
class NVFP4:
    """A tensor in NVFP4 along its last dimension: ``value = scale * group_scale * E2M1``.

    Attributes:
        codes: [..., N] uint8, E2M1 bits, one value per byte.
        group_scales: [..., ceil(N / 16)] uint8, UE4M3 bits (never negative), one per 16 values.
        scale: float32, broadcastable to [..., 1].
    """

    codes: Tensor
    group_scales: Tensor
    scale: Tensor

    def numbers(self) -> Tensor:
        """float32 [..., N]: the values before the FP32 scale, exact."""
        scales = decode_e4m3(self.group_scales).repeat_interleave(NVFP4_GROUP, dim=-1)
        return decode_e2m1(self.codes) * scales[..., : self.codes.shape[-1]]

    def dequantize(self) -> Tensor:
        """float32 [..., N]."""
        return self.numbers() * self.scale


def group_maxima(x: Tensor) -> Tensor:
    """[..., ceil(N / 16)]: largest magnitude of each group of 16 along the last dimension (the last may be short)."""
    short = -x.shape[-1] % NVFP4_GROUP
    padded = torch.nn.functional.pad(x.abs(), (0, short))
    return padded.unflatten(-1, (-1, NVFP4_GROUP)).amax(-1)


def quantize_nvfp4(x: Tensor, scale: Tensor) -> NVFP4:
    """NVFP4 along the last dimension of ``x`` [..., N] under a given FP32 ``scale``, broadcastable to [..., 1].

    Each group's largest magnitude is mapped to 6. A group whose scale underflows to zero is stored as zeros.
    """
    x = x.float() / scale
    group_scales = encode_e4m3(group_maxima(x) / E2M1_MAX)
    divisor = decode_e4m3(group_scales).repeat_interleave(NVFP4_GROUP, dim=-1)[..., : x.shape[-1]]
    codes = encode_e2m1(torch.where(divisor > 0, x / divisor, torch.zeros_like(x)))
    return NVFP4(codes, group_scales, scale)


def nvfp4_scale(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """FP32 scale that lets the largest group of ``x`` over ``dims`` use the whole UE4M3 range; kept dims, never 0."""
    largest = x.abs().amax(dims, keepdim=True).float()
    return positive(largest / (E2M1_MAX * E4M3_MAX))


def positive(scale: Tensor) -> Tensor:
    """``scale`` with 1 in place of values too small to divide by: what they would scale is stored as zero."""
    return torch.where(scale > torch.finfo(torch.float32).tiny, scale, torch.ones_like(scale))


def expcast(u: Tensor, beta: float = EXPCAST_BETA) -> Tensor:
    """ExpCast-FP8: E4M3 bits of about ``2^(u + 8)``, from one multiply-add and a rounding.

    Args:
        u: scores below the row maximum in log2 units, ``u <= 0``, any shape, float32.
        beta: offset in codes.

    Returns:
        uint8 codes in 0..120 (paper, section 3.3: ``c(u) = clip(round(8 (u + 8) + 56 + beta), 0, 120)``).
    """
    code = torch.round(CODES_PER_OCTAVE * (u + LOG2_SCALE) + (CODE_OF_ONE + beta))
    return code.clamp(0, EXPCAST_TOP).to(torch.uint8)
