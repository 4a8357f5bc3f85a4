"""Which attention calls are ours. Everything else goes to the attention the user had, and the reason is counted."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .call import AttentionCall
from .position import Layer, Position
from .settings import Settings

# Keywords, unknown to the calls seen so far, that would change the result of attention if they were set.
RESULT_CHANGING = frozenset(
    {"is_causal", "causal", "attn_mask", "attn_bias", "bias", "dropout_p", "window_size", "softcap", "return_lse"}
)
MOST_CHARACTERS = 200  # of a fault, on the row and in the report


class Reason(NamedTuple):
    """Why a call was left alone.

    Attributes:
        text: for a person, as part of a sentence.
        rank: how well it explains a render in which nothing was accelerated; cross-attention is in every render.
    """

    text: str
    rank: int = 1


CROSS = Reason("cross-attention", 0)
MASKED = Reason("with an attention mask")
EXACT = Reason("for which the model asks for full precision")
GROUPED_HEADS = Reason("with fewer key than query heads")
UNKNOWN_FORM = Reason("in a form that this version does not know")
MIXED_DTYPES = Reason("with q, k and v of different dtypes")
MIXED_DEVICES = Reason("with q, k and v on different devices")
GRADIENTS = Reason("that need gradients")
OUTSIDE_FORWARD = Reason("made outside a sampler's model evaluation")
OUTSIDE_PERCENT = Reason("outside start_percent to end_percent")
SKIPPED_BLOCK = Reason("in skip_blocks")


def too_short(settings: Settings) -> Reason:
    return Reason(f"shorter than min_tokens ({settings.min_tokens})")


def unserved(why: str) -> Reason:
    """The kernels do not serve the call: the hardware, or a shape."""
    return Reason(why, 2)


def failed(error: Exception) -> Reason:
    """A fault of ours. The log has the rest of a long message: CUDA's and Triton's fill a screen."""
    first_line = str(error).strip().partition("\n")[0]
    why = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    return Reason(f"failed: {why[:MOST_CHARACTERS]}", 3)


def why_not(call: AttentionCall | None, settings: Settings) -> Reason | None:
    """Why this call is never ours, whatever the step or block; None if it may be.

    A mask is not looked into, not even for being all true: that would wait for the GPU in every call.
    """
    if call is None or not _is_well_formed(call):
        return UNKNOWN_FORM
    if call.low_precision_attention is False or call.attn_precision is not None:
        return EXACT
    if call.enable_gqa or _channels(call, call.k) != _channels(call, call.q):
        return GROUPED_HEADS
    if call.k.shape != call.q.shape or call.v.shape != call.q.shape:
        return CROSS
    if call.mask is not None:
        return MASKED
    if any(name in RESULT_CHANGING and _is_set(value) for name, value in call.others.items()):
        return UNKNOWN_FORM
    if call.tokens < settings.min_tokens:
        return too_short(settings)
    return _why_not_tensors(call.q, call.k, call.v)


def why_not_here(settings: Settings, position: Position, layer: Layer) -> Reason | None:
    """Why a call that could be ours is left alone at this step and in this block; None if it is ours."""
    if not position.active:
        return OUTSIDE_PERCENT
    if settings.skips(layer.block_type, layer.block):
        return SKIPPED_BLOCK
    return None


def _is_well_formed(call: AttentionCall) -> bool:
    tensors = (call.q, call.k, call.v)
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return False
    if any(tensor.ndim != (4 if call.skip_reshape else 3) for tensor in tensors):
        return False
    if call.skip_reshape:
        return call.q.shape[1] == call.heads
    return call.heads > 0 and call.q.shape[2] % call.heads == 0


def _channels(call: AttentionCall, tensor: torch.Tensor) -> int:
    """Heads, or heads times head_dim where they are folded together."""
    return tensor.shape[1 if call.skip_reshape else 2]


def _is_set(value) -> bool:
    return isinstance(value, torch.Tensor) or bool(value)


def _why_not_tensors(q, k, v) -> Reason | None:
    if not q.device == k.device == v.device:
        return MIXED_DEVICES
    if not q.dtype == k.dtype == v.dtype:
        return MIXED_DTYPES
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return GRADIENTS
    return None
