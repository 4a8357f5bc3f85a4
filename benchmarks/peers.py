"""Other attention functions found on the machine, called as their users call them. Layout of q, k, v: [B, H, S, D]."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def found() -> dict[str, Callable]:
    """Every peer that can be imported here: ``{name: attention(q, k, v)}``."""
    peers = {
        "sdpa_cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
        "sdpa_flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    }
    for name, module, adapt in _OPTIONAL:
        try:
            peers[name] = adapt(import_module(module))
        except ImportError:
            continue
    return peers


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


_OPTIONAL = (
    ("fa3_bf16", "flash_attn_interface", lambda module: _bshd(module.flash_attn_func)),
    ("fa4_bf16", "flash_attn.cute", lambda module: _bshd(module.flash_attn_func)),
    ("sageattention", "sageattention", lambda module: module.sageattn),
    ("comfy_kitchen_int8", "comfy_kitchen", lambda module: module.int8_attention),
)
