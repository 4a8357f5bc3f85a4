"""What the GPU tests share: an end to hangs, precise products, memory full of poison, wide strides, compile counts."""

import contextlib
import faulthandler
import os
from importlib import import_module

import pytest
import torch

HANG_S = 60  # the slowest test takes seconds; a module may set LIMIT_S


def compilations(*modules: str) -> dict[str, int]:
    """How often this process compiled each kernel of some modules of ``triton_kernels``."""
    return {
        name: sum(len(caches[0]) for caches in kernel.device_caches.values())
        for module in modules
        for name, kernel in vars(import_module(f"vc_attention.triton_kernels.{module}")).items()
        if name.endswith("_kernel")
    }


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


AXES = ("batch", "head", "token")


@pytest.fixture
def far_apart():
    """``far_apart(axis, *tensors)``: the same numbers in memory full of NaN, a last index more than 2^31 elements off.

    Tensors are [B, H, S, D] of one 16-bit dtype with a first or second axis of two, or more than 256 tokens.
    """

    def placed(axis: str, *tensors):
        dim = AXES.index(axis)
        stride = 2**23 if axis == "token" else 2**31
        room = max(x.numel() // x.shape[dim] for x in tensors)
        end = stride * (max(x.shape[dim] for x in tensors) - 1) + room * len(tensors)
        assert room * len(tensors) <= stride
        memory = torch.full((end,), torch.nan, dtype=tensors[0].dtype, device=tensors[0].device)
        views = []
        for place, x in enumerate(tensors):
            x = x.movedim(dim, 0)
            inner = torch.empty(x.shape[1:], device="meta").stride()
            view = memory.as_strided(x.shape, (stride, *inner), place * room).copy_(x)
            assert stride * (len(x) - 1) >= 2**31
            views.append(view.movedim(0, dim))
        return views

    yield placed
    torch.cuda.empty_cache()
