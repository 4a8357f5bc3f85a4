"""``python -m vc_attention`` (or ``python -m kernels`` in the folder of the pack): what runs on this machine."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable

from . import __version__
from .arch import MODES, family
from .dispatch import IMPLEMENTATIONS, Call
from .errors import UnsupportedCall

DTYPES = ("bfloat16", "float16")
HEAD_DIM = 128
GROUPINGS = {"cuda": "cuda", "triton": "triton8"}  # kernels that group values, and the name that asks for them


def main() -> int:
    import torch

    print(
        f"vc_attention {__version__}, Python {platform.python_version()}, torch {torch.__version__} on {sys.platform}"
    )
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]
    for device in devices:
        name = family(device)
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        print(f"{device}: {card}, family {name}")
        for row in IMPLEMENTATIONS:
            for mode in MODES:
                for dtype in DTYPES:
                    call = Call(name, mode, dtype, HEAD_DIM)
                    answer = _answer(lambda: row.refusal(call) or row.unavailable(device, call))  # noqa: B023
                    print(f"  {row.name}, {mode}, {dtype}: {answer}")
        for kernel, asked_for in GROUPINGS.items():
            for dtype in DTYPES:
                answer = _answer(lambda: _why_not_group(asked_for, device, dtype))  # noqa: B023
                print(f"  grouping by {kernel}, {dtype}: {answer}")
    return 0


def _answer(why_not: Callable[[], str | None]) -> str:
    """``why_not()`` for a person; a render may have taken the memory that a test needs."""
    import torch

    try:
        return why_not() or "ready"
    except torch.cuda.OutOfMemoryError as error:
        return f"not tested, no memory is left for it ({error})"


def _why_not_group(implementation: str, device, dtype: str) -> str | None:
    import torch

    from .group.dispatch import choose_group

    try:
        v = torch.empty(1, 1, 1, HEAD_DIM, dtype=getattr(torch, dtype), device=device)
        choose_group(v, 1, implementation)
    except UnsupportedCall as error:
        return error.reasons[implementation]
    return None


if __name__ == "__main__":
    sys.exit(main())
