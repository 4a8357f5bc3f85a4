"""Asks a preparation's flag while the attention kernel runs: the GPU never waits for the answer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UnsupportedCall

NOT_FINITE = 1  # bit of the flag
REFUSED = "q, k or v holds NaN or infinity"


class FiniteCheck:
    """Made between preparation and attention; ``require`` then waits for the preparation only.

    While a CUDA graph is captured nothing can be asked, and nothing is.

    Args:
        flags: int32 [1] of the preparation.
        implementation: that declines the call.
        reason: what the flag says of q, k and v.
    """

    def __init__(self, flags: Tensor, implementation: str, reason: str = REFUSED):
        self._implementation, self._reason = implementation, reason
        self._flags, self._ready = flags, None
        if not _is_on_gpu(flags):
            return
        if torch.cuda.is_current_stream_capturing():
            self._flags = None
            return
        self._flags = torch.empty(1, dtype=torch.int32, pin_memory=True)
        with torch.cuda.device(flags.device):
            self._flags.copy_(flags, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(flags.device))

    def require(self) -> None:
        """Raise UnsupportedCall if the flag is set: q, k or v holds NaN or infinity."""
        if self._flags is None:
            return
        if self._ready is not None:
            self._ready.synchronize()
        if int(self._flags[0]) & NOT_FINITE:
            raise UnsupportedCall({self._implementation: self._reason})


def _is_on_gpu(flags: Tensor) -> bool:
    return flags.is_cuda
