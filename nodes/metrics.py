"""How close two clips are: PSNR and SSIM, in numpy. Imports nothing of the pack: demo/ loads this file by its path."""

from __future__ import annotations

import math

import numpy as np

PEAK = 255.0
WINDOW = 11
WINDOW_SIGMA = 1.5
LUMA = np.array([0.299, 0.587, 0.114])


def psnr(reference: np.ndarray, other: np.ndarray, peak: float = PEAK) -> float:
    """Peak signal-to-noise ratio in dB of two arrays of one shape; infinite when they are equal."""
    error = np.mean((reference.astype(np.float64) - other.astype(np.float64)) ** 2)
    return math.inf if error == 0 else float(10 * np.log10(peak**2 / error))


def ssim(reference: np.ndarray, other: np.ndarray, peak: float = PEAK) -> float:
    """Mean structural similarity of two clips [frames, height, width, 3].

    Wang et al. 2004: on luma, Gaussian window of 11 x 11 with sigma 1.5, K1 = 0.01, K2 = 0.03, population
    statistics, only where the window fits.
    """
    return float(np.mean([ssim_frame(a, b, peak) for a, b in zip(reference, other, strict=True)]))


def ssim_frame(reference: np.ndarray, other: np.ndarray, peak: float = PEAK) -> float:
    """``ssim`` of two frames [height, width, 3]."""
    a, b = reference @ LUMA, other @ LUMA
    c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
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
        image = np.moveaxis(image, axis, 0)
        length = image.shape[0] - WINDOW + 1
        image = sum(weight * image[start : start + length] for start, weight in enumerate(kernel))
        image = np.moveaxis(image, 0, axis)
    return image
