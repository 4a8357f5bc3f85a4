"""ComfyUI's attention override: the calls that are ours go to ``vc_attention``, all others where they went before."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels import InvalidArgument, UnsupportedCall, attention, sampled_error, support, uses_grouping
from .accept import OUTSIDE_FORWARD, Reason, unserved, why_not, why_not_here
from .call import AttentionCall, comfy_output, operands, read_call
from .groupings import grouping_for
from .position import Forward, Layer, place_of
from .run_state import FORWARD_KEY, RUN_KEY, RunState

log = logging.getLogger("VC Attention")

TOKEN_ATTRIBUTE = "vc_attention_token"
PREVIOUS_ATTRIBUTE = "vc_attention_previous"


def make_override(token: str, previous: Callable | None) -> Callable:
    """An override for one patched model; keeps nothing but the override that was there before.

    It acts only in runs started for its own token: a copy of the node further up the chain stays silent even where
    a foreign override between the two still calls it.
    """

    def vc_attention_override(func, *args, **kwargs):
        options = kwargs.get("transformer_options") or {}
        run = options.get(RUN_KEY)
        if getattr(run, "token", None) == token:
            reason, output = _serve(run, args, kwargs)
            if reason is None:
                return output
            run.count_declined(
                reason, _name(func if previous is None else previous), place_of(options.get(FORWARD_KEY), options)
            )
        if previous is not None:
            return previous(func, *args, **kwargs)
        return func(*args, **kwargs)

    override = _untraced(vc_attention_override)
    setattr(override, TOKEN_ATTRIBUTE, token)
    setattr(override, PREVIOUS_ATTRIBUTE, previous)
    return override


def is_ours(override: Callable | None) -> bool:
    return hasattr(override, PREVIOUS_ATTRIBUTE)


def foreign(override: Callable | None) -> Callable | None:
    """The override below any of ours."""
    while is_ours(override):
        override = getattr(override, PREVIOUS_ATTRIBUTE)
    return override


def _untraced(function: Callable) -> Callable:
    """torch.compile breaks its graph here instead of freezing this step's decisions into it."""
    try:
        return torch.compiler.disable(function)
    except Exception:
        log.debug("torch.compile is not usable in this installation", exc_info=True)
        return function


def _serve(run: RunState, args: tuple, kwargs: dict) -> tuple[Reason | None, Tensor | None]:
    """Do the call, or say why not. Only what ComfyUI itself acts on, an interrupt or lack of memory, passes through."""
    try:
        return _try_to_serve(run, args, kwargs)
    except (InvalidArgument, UnsupportedCall) as error:
        return unserved(str(error)), None
    except Exception as error:
        if _is_out_of_memory(error):
            raise
        return run.switch_off(error), None


def _try_to_serve(run: RunState, args: tuple, kwargs: dict) -> tuple[Reason | None, Tensor | None]:
    options = kwargs["transformer_options"]
    call = read_call(args, kwargs)
    reason = why_not(call, run.settings)
    if reason is not None:
        return reason, None
    forward = options.get(FORWARD_KEY)
    if forward is None:
        return run.switched_off or OUTSIDE_FORWARD, None
    layer = forward.next_layer(options)
    run.count_block(layer)
    reason = why_not_here(run.settings, forward.position, layer) or run.switched_off or run.errors.excluded(layer)
    if reason is not None:
        return reason, None
    return _accelerate(run, forward, layer, call, options)


def _accelerate(
    run: RunState, forward: Forward, layer: Layer, call: AttentionCall, options: dict
) -> tuple[Reason | None, Tensor | None]:
    settings = run.settings
    q, k, v, layout = operands(call)
    served = support(q, k, v, mode=settings.mode, implementation=settings.implementation, layout=layout)
    if not served:
        return unserved(served.why), None
    place = place_of(forward, options, layer)
    grouped = uses_grouping(served.mode)
    with run.stopwatch.measure(q.device, place) as stretch:
        output = attention(
            q,
            k,
            v,
            mode=settings.mode,
            grouping=grouping_for(run, forward, layer, call, options, v, layout) if grouped else None,
            scale=call.scale,
            layout=layout,
            implementation=settings.implementation,
        )
        reason = run.errors.check(
            layer, served.mode, lambda: sampled_error(q, k, v, output, scale=call.scale, layout=layout)
        )
        stretch.counted = reason is None
    if reason is not None:
        run.leave(layer)
        return reason, None
    output = comfy_output(call, output, layout)
    run.count_accelerated(place, served.mode, served.implementation)
    return None, output


def _is_out_of_memory(error: Exception) -> bool:
    """ComfyUI unloads its models and tells the user; hiding it would leave the next render without memory."""
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower()


def _name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)
