"""What the GPU tests share: an end to hangs, products of full precision, and memory full of poison."""

import contextlib
import faulthandler
import os

import pytest
import torch

HANG_S = 60  # the slowest test takes seconds; a module may set LIMIT_S


@pytest.fixture(scope="session")
def terminal(request):
    """File descriptor of the real standard error, behind pytest's capture."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        descriptor = os.dup(2)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(autouse=True)
def no_hang(request, terminal):
    """A kernel that never ends cannot be interrupted from Python: show where the test stands, and leave."""
    limit = getattr(request.module, "LIMIT_S", HANG_S)
    faulthandler.dump_traceback_later(limit, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def exact_products():
    """TF32 off, as the reference expects by default; and back."""
    kept = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = kept


@pytest.fixture
def poison():
    """``with poison(byte):`` memory from torch.empty and torch.empty_like holds that byte; 0xff is NaN or -1."""

    @contextlib.contextmanager
    def poisoned(byte: int):
        empty, empty_like = torch.empty, torch.empty_like

        def fill(tensor):
            if tensor.is_cuda and tensor.numel():
                empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(byte)
            return tensor

        torch.empty = lambda *args, **kwargs: fill(empty(*args, **kwargs))
        torch.empty_like = lambda *args, **kwargs: fill(empty_like(*args, **kwargs))
        try:
            yield
        finally:
            torch.empty, torch.empty_like = empty, empty_like

    return poisoned
