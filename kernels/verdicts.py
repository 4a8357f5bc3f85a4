"""What a self-test found, kept for the life of the process: None, or a sentence that says why not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from .errors import KernelUnavailable

log = logging.getLogger("vc_attention")

HOW_TO_REPORT = "please report what `python -m kernels` prints in the folder of this package"
MOST_CHARACTERS = 200  # of an error: a compiler's fills a screen, and the log has it

_lock = threading.RLock()


def look_up(verdicts: dict, key: tuple, judge: Callable[[], str | None]) -> str | None:
    """The verdict under ``key``; ``judge`` makes it at the first question, but never while a graph is captured."""
    import torch

    if key in verdicts:
        return verdicts[key]
    if torch.cuda.is_current_stream_capturing():
        return "must run once before a CUDA graph is captured"
    with _lock:
        if key not in verdicts:
            verdicts[key] = judge()
    return verdicts[key]


def verdict_of(self_test: Callable[[], str | None], could_not: str, card: str) -> str | None:
    """Run a self-test: None, what it found, or ``could_not`` and the error that ended it.

    Raises:
        torch.cuda.OutOfMemoryError: also where the driver says so in words; that is no verdict on the kernels.
    """
    import torch

    try:
        fault = self_test()
    except KernelUnavailable as error:
        return error.reason
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        if "out of memory" in str(error).lower().replace("_", " "):
            raise torch.cuda.OutOfMemoryError(str(error)) from error
        log.exception("VC Attention's self-test could not run on %s", card)
        sentence = " ".join(str(error).split())[:MOST_CHARACTERS]
        return f"{could_not} ({type(error).__name__}: {sentence}); {HOW_TO_REPORT}"
    if fault is None:
        return None
    log.error("VC Attention's self-test failed on %s: %s", card, fault)
    return f"self-test failed ({fault}); {HOW_TO_REPORT}"
