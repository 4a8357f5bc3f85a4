"""``python -m vc_attention`` (or ``python -m kernels`` in the folder of the pack): what runs on this machine."""

from __future__ import annotations

import platform
import sys

from . import __version__
from .arch import MODES, family
from .dispatch import IMPLEMENTATIONS, Call


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
                for dtype in ("bfloat16", "float16"):
                    print(f"  {row.name}, {mode}, {dtype}: {_answer(row, device, Call(name, mode, dtype, 128))}")
    return 0


def _answer(row, device, call: Call) -> str:
    return row.refusal(call) or row.unavailable(device, call) or "ready"


if __name__ == "__main__":
    sys.exit(main())
