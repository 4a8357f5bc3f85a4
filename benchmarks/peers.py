"""Other attention functions found on the machine, called as their users call them. Layout of q, k, v: [B, H, S, D]."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module, metadata

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def found(q, k, v) -> dict[str, Callable[[], torch.Tensor]]:
    """Every peer that serves these inputs here: ``{name: call without arguments}``. Says why of those that do not.

    Each gets copies of its own: SageAttention 1 subtracts the mean of k in place.
    """
    return _serving(_importable(), q, k, v)


def of_torch(q, k, v) -> dict[str, Callable[[], torch.Tensor]]:
    """`found`, of torch's own alone."""
    return _serving(_TORCH, q, k, v)


def _serving(functions: dict[str, Callable], q, k, v) -> dict[str, Callable[[], torch.Tensor]]:
    peers = {name: _bind(call, *(x.clone() for x in (q, k, v))) for name, call in functions.items()}
    return {name: call for name, call in peers.items() if _runs(name, call)}


def versions() -> dict[str, str]:
    """``{name: version}`` of the packages that were imported for peers, as far as they tell theirs."""
    told = {name: _version(module) for name, module, _ in _OPTIONAL if module in sys.modules}
    return {name: version for name, version in told.items() if version is not None}


def _version(module: str) -> str | None:
    package = module.partition(".")[0]
    names = metadata.packages_distributions().get(package)
    return metadata.version(names[0]) if names else getattr(sys.modules[package], "__version__", None)


def _importable() -> dict[str, Callable]:
    peers = dict(_TORCH)
    for name, module, adapt in _OPTIONAL:
        try:
            peers[name] = adapt(import_module(module))
        except Exception as error:  # noqa: BLE001  a package may be broken here in any way
            _skipped(name, error)
    return peers


def _runs(name: str, call: Callable) -> bool:
    """Whether one call succeeds; it also compiles what a peer compiles at first use."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  or refuse the call in any way
        _skipped(name, error)
        return False
    return True


def _skipped(name: str, error: Exception) -> None:
    lines = str(error).strip().splitlines()
    print(f"skipped {name}: {type(error).__name__}: {lines[0] if lines else ''}", flush=True)


def _bind(function: Callable, *arguments) -> Callable:
    return lambda: function(*arguments)


def _sdpa(backend: SDPBackend) -> Callable:
    def attention(q, k, v):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v)

    return attention


def _bshd(function: Callable) -> Callable:
    """Adapt a function over [B, S, H, D] that may return a tuple."""

    def attention(q, k, v):
        result = function(*(x.transpose(1, 2) for x in (q, k, v)))
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

    return attention


_TORCH = {
    "sdpa_cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa_flash": _sdpa(SDPBackend.FLASH_ATTENTION),
}
_OPTIONAL = (
    ("fa3_bf16", "flash_attn_interface", lambda module: _bshd(module.flash_attn_func)),
    ("fa4_bf16", "flash_attn.cute", lambda module: _bshd(module.flash_attn_func)),
    ("sageattention", "sageattention", lambda module: module.sageattn),
    ("comfy_kitchen_int8", "comfy_kitchen", lambda module: module.int8_attention),
)
