"""The torch operators behind the public functions: opaque to torch.compile, with fakes for its tracing.

Operators are process-wide, and two copies of this package may be loaded (the ComfyUI pack and the pip package).
The first copy of a version registers them when this module is imported, which is when a public function is first
asked for; a second copy of the same version calls those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .arch import family
from .attend.settings import Settings, resolve
from .attend.validation import dtype_name
from .dispatch import Call, choose
from .errors import InvalidArgument, UnsupportedCall

NAMESPACE = "vc_attention_0_1_1"  # changes with every change of a schema or of what an operator computes

ATTENTION_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? permutation, float scale, str layout, str mode, str qk_format,"
    " str probabilities, bool demean, bool own_block, str implementation) -> Tensor"
)
GROUP_SCHEMA = (
    "(Tensor v, Tensor? centroids, int clusters, int iterations, str layout, str implementation) -> (Tensor, Tensor)"
)


def call_operator(operator, *args):
    """Call an operator; an UnsupportedCall or InvalidArgument of another copy of this package becomes ours."""
    try:
        return operator(*args)
    except (NotImplementedError, ValueError) as error:
        if isinstance(error, (UnsupportedCall, InvalidArgument)):
            raise
        if type(error).__name__ == UnsupportedCall.__name__:
            raise UnsupportedCall(error.reasons) from error
        if type(error).__name__ == InvalidArgument.__name__:
            raise InvalidArgument(str(error)) from error
        raise


def _attention(
    q, k, v, permutation, scale, layout, mode, qk_format, probabilities, demean, own_block, implementation
) -> Tensor:
    name = family(q.device)
    settings = resolve(mode, qk_format, probabilities, demean, name, own_block)
    run = choose(describe(q, k, layout, settings, name), implementation, q.device).load()
    output = _empty_output(q)
    with torch.autocast(q.device.type, enabled=False):
        run(*(to_bhsd(x, layout) for x in (q, k, v)), permutation, scale, settings, to_bhsd(output, layout))
    return output


def _attention_fake(
    q, k, v, permutation, scale, layout, mode, qk_format, probabilities, demean, own_block, implementation
):
    return _empty_output(q)


def _empty_output(q: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _group_values(v, centroids, clusters, iterations, layout, implementation) -> tuple[Tensor, Tensor]:
    from .group.dispatch import choose_group

    group = choose_group(to_bhsd(v, layout), clusters, implementation)
    with torch.autocast(v.device.type, enabled=False):
        return group(to_bhsd(v, layout), centroids, clusters, iterations)


def _group_values_fake(v, centroids, clusters, iterations, layout, implementation):
    batch, heads, tokens, head_dim = to_bhsd(v, layout).shape
    if centroids is not None:
        clusters = centroids.shape[2]
    permutation = v.new_empty((batch, heads, tokens), dtype=torch.int32)
    return permutation, v.new_empty((batch, heads, clusters, head_dim), dtype=torch.float32)


def describe(q: Tensor, k: Tensor, layout: str, settings: Settings, family_name: str) -> Call:
    """The facts about a call that decide which implementation serves it."""
    batch, heads, q_tokens, head_dim = to_bhsd(q, layout).shape
    return Call(
        family=family_name,
        mode=settings.mode,
        dtype=dtype_name(q.dtype),
        head_dim=head_dim,
        qk_format=settings.qk_format,
        probabilities=settings.probabilities,
        heads=batch * heads,
        tokens=max(q_tokens, to_bhsd(k, layout).shape[2]),
    )


def to_bhsd(x: Tensor, layout: str) -> Tensor:
    """A view with the middle dimensions swapped for BSHD; its own inverse."""
    return x if layout == "BHSD" else x.transpose(1, 2)


def _register(name: str, schema: str, function, fake) -> None:
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    operator = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=(), schema=schema)
    operator.register_fake(fake)


_register("attention", ATTENTION_SCHEMA, _attention, _attention_fake)
_register("group_values", GROUP_SCHEMA, _group_values, _group_values_fake)
attention_operator = getattr(torch.ops, NAMESPACE).attention.default
group_operator = getattr(torch.ops, NAMESPACE).group_values.default
