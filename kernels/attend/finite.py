"""Asks a preparation's flag while the attention kernel runs: the GPU never waits for the answer."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..errors import UnsupportedCall

NOT_FINITE = 1  # bit of the flag
REFUSED = "q, k or v holds NaN or infinity"


class FiniteCheck:
    """Made between preparation and attention; ``require`` then waits for the preparation only.

    The flag is copied on a stream of its own, so nothing but an event stands between the two. While a CUDA graph is
    captured nothing can be asked, and nothing is.

    Args:
        flags: int32 [1] of the preparation.
        implementation: that declines the call.
        reason: what the flag says of q, k and v.
    """

    def __init__(self, flags: Tensor, implementation: str, reason: str = REFUSED):
        self._implementation, self._reason = implementation, reason
        self._flags, self._made = flags, None
        if not _is_on_gpu(flags):
            return
        if torch.cuda.is_current_stream_capturing():
            self._flags = None
            return
        with torch.cuda.device(flags.device):
            self._made = torch.cuda.Event()
            self._made.record(torch.cuda.current_stream(flags.device))

    def require(self) -> None:
        """Raise UnsupportedCall if the flag is set: q, k or v holds NaN or infinity."""
        if self._flags is None:
            return
        flags = self._flags if self._made is None else _copied_after(self._made, self._flags)
        if int(flags[0]) & NOT_FINITE:
            raise UnsupportedCall({self._implementation: self._reason})


def _copied_after(event: torch.cuda.Event, flags: Tensor) -> Tensor:
    """``flags`` in pinned memory, read once ``event`` has come."""
    stream = _copy_stream(flags.device)
    with torch.cuda.stream(stream):
        stream.wait_event(event)
        copied = flags.to("cpu", non_blocking=True)
    stream.synchronize()
    return copied


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    # Of high priority for its pool: the 32 streams that a program makes by default may have long copies of its own.
    return torch.cuda.Stream(device, priority=-1)


def _is_on_gpu(flags: Tensor) -> bool:
    return flags.is_cuda
