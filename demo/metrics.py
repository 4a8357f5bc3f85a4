"""How close two clips are: PSNR and SSIM, in numpy."""

from __future__ import annotations

import math

import numpy as np

PEAK = 255.0
WINDOW = 11
WINDOW_SIGMA = 1.5
LUMA = np.array([0.299, 0.587, 0.114])


def psnr(reference: np.ndarray, other: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of two uint8 arrays of one shape; infinite when they are equal."""
    error = np.mean((reference.astype(np.float64) - other.astype(np.float64)) ** 2)
    return math.inf if error == 0 else float(10 * np.log10(PEAK**2 / error))


def ssim(reference: np.ndarray, other: np.ndarray) -> float:
    """Mean structural similarity of two clips [frames, height, width, 3], uint8.

    Wang et al. 2004: on luma, Gaussian window of 11 x 11 with sigma 1.5, K1 = 0.01, K2 = 0.03, population
    statistics, only where the window fits.
    """
    first, second = reference @ LUMA, other @ LUMA
    return float(np.mean([_ssim_frame(a, b) for a, b in zip(first, second, strict=True)]))


def _ssim_frame(a: np.ndarray, b: np.ndarray) -> float:
    c1, c2 = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2
    mean_a, mean_b = _blur(a), _blur(b)
    variance_a = _blur(a * a) - mean_a**2
    variance_b = _blur(b * b) - mean_b**2
    covariance = _blur(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * covariance + c2) / (variance_a + variance_b + c2)
    return float(np.mean(luminance * structure))


def _blur(image: np.ndarray) -> np.ndarray:
    """Weighted mean over the window around each pixel where it fits."""
    offset = np.arange(WINDOW) - WINDOW // 2
    kernel = np.exp(-(offset**2) / (2 * WINDOW_SIGMA**2))
    kernel /= kernel.sum()
    for axis in (0, 1):
        view = np.lib.stride_tricks.sliding_window_view(image, WINDOW, axis=axis)
        image = view @ kernel
    return image
