"""One attention call as ComfyUI makes it, and the same call as ``vc_attention`` takes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of ``optimized_attention``, by name.

    Tensors are (B, L, heads * D), with ``skip_reshape`` (B, heads, L, D). ``others`` holds keywords not known here.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int
    mask: Tensor | None
    attn_precision: object
    skip_reshape: bool
    skip_output_reshape: bool
    scale: float | None
    enable_gqa: bool
    low_precision_attention: bool
    others: dict

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def tokens(self) -> int:
        return self.q.shape[2 if self.skip_reshape else 1]


def read_call(args: tuple, kwargs: dict) -> AttentionCall | None:
    """The call behind an override's arguments; None for a form that ComfyUI did not have when this was written."""
    try:
        return _bind(*args, **kwargs)
    except TypeError:
        return None


def _bind(
    q,
    k,
    v,
    heads,
    mask=None,
    attn_precision=None,
    skip_reshape=False,
    skip_output_reshape=False,
    *,
    scale=None,
    enable_gqa=False,
    low_precision_attention=True,
    transformer_options=None,
    _inside_attn_wrapper=None,
    **others,
) -> AttentionCall:
    return AttentionCall(
        q,
        k,
        v,
        heads,
        mask,
        attn_precision,
        bool(skip_reshape),
        bool(skip_output_reshape),
        scale,
        bool(enable_gqa),
        low_precision_attention,
        others,
    )


def operands(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, str]:
    """q, k and v as views, and their layout.

    The layout decides the memory order of the output. It is chosen so that the output needs no copy and has the
    strides that ``attention_pytorch`` gives: heads folded into channels, or q's own order with
    ``skip_output_reshape``.
    """
    tensors = (call.q, call.k, call.v)
    if not call.skip_reshape:
        return *(tensor.unflatten(-1, (call.heads, -1)) for tensor in tensors), "BSHD"
    if call.skip_output_reshape and call.q.stride(1) >= call.q.stride(2):
        return *tensors, "BHSD"
    return *(tensor.transpose(1, 2) for tensor in tensors), "BSHD"


def comfy_output(call: AttentionCall, output: Tensor, layout: str) -> Tensor:
    """The output of ``vc_attention`` in the form the call asked for."""
    if not call.skip_output_reshape:
        return output.flatten(2)
    return output if layout == "BHSD" else output.transpose(1, 2)
