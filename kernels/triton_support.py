"""Triton as this package uses it: whether it is there, how a kernel is launched, and settings that are never tuned.

Triton comes with torch on Linux; elsewhere it is one more package. This module imports neither.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib import import_module, util

OLDEST = (3, 5)  # 3.6 is what the kernels are tested with
TORCH_WITH = {(3, 5): "2.9", (3, 6): "2.10"}  # the oldest torch that brings a Triton; each torch asks for its own
WORD = 8  # elements of 16 bits that one thread reads at once


@dataclass(frozen=True)
class LaunchSettings:
    """How a kernel is built for a family; tables of these are frozen, a render never tunes.

    Attributes:
        num_warps: warps of 32 threads in a program.
        num_stages: tiles of a loop in flight, this one included.
        block_q: query rows of a program, where the kernel has such.
        arch: family whose instructions Triton takes; empty, the card's own.
    """

    num_warps: int
    num_stages: int
    block_q: int = 128
    arch: str = ""

    def options(self) -> dict:
        """As Triton takes them."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {**options, "arch": self.arch} if self.arch else options


def why_missing(oldest: tuple[int, int] = OLDEST) -> str | None:
    """Why Triton cannot be used, with what installs or updates it; None if it can."""
    try:
        if util.find_spec("triton") is None:
            return f"needs Triton, which is not installed; {_how_to_install(oldest)}"
        version = str(import_module("triton").__version__)
    except Exception as error:  # noqa: BLE001  a broken Triton fails in many ways, none of which may end a render
        return f"needs Triton, which fails to import ({type(error).__name__}: {error}); {_how_to_install(oldest)}"
    if _version(version) < oldest:
        return f"needs Triton {'.'.join(map(str, oldest))} or newer, found {version}; {_how_to_update(oldest)}"
    return None


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU and without compiling."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launch(kernel, device, grid: int, *arguments, settings: LaunchSettings, **constants) -> None:
    """Launch ``grid`` programs of a ``triton.jit`` function on ``device`` and on torch's current stream of it.

    Args:
        kernel: a function of ``triton_kernels``.
        arguments: what its run-time parameters get.
        constants: what its constexpr parameters get.
    """
    options = settings.options() | constants
    if device.type != "cuda":
        kernel[(grid,)](*arguments, **options)
        return
    import torch

    with torch.cuda.device(device):
        kernel[(grid,)](*arguments, **options)


def aligned(x):
    """``x`` [B, H, S, D] of a 16-bit dtype, or a copy where kernels could not read it in words of 16 bytes."""
    strides = [stride for stride, size in zip(x.stride()[:3], x.shape, strict=False) if size > 1]
    readable = x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(stride % WORD == 0 for stride in strides)
    if readable:
        return x
    import torch

    return x.clone(memory_format=torch.contiguous_format)  # contiguous() would hand back one that begins in between


def word_strides(x) -> tuple[int, int, int]:
    """Strides of an aligned ``x`` [B, H, S, D] in words; what a kernel multiplies Triton knows to be a multiple."""
    return tuple(stride // WORD for stride in x.stride()[:3])


def _how_to_install(oldest: tuple[int, int]) -> str:
    if sys.platform == "win32":
        return 'install it with: pip install "triton-windows<3.7"'
    if sys.platform == "darwin":
        return "there is none for macOS"
    return f'install it with: pip install "triton>={".".join(map(str, oldest))}"'


def _how_to_update(oldest: tuple[int, int]) -> str:
    torch = TORCH_WITH[oldest]
    if sys.platform == "win32":
        return f'it goes with torch {torch} or newer; then: pip install "triton-windows<3.7"'
    return f"torch {torch} or newer brings it"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
