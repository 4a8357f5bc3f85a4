"""Puts us into a copy of a model, and takes us out of one. Only ``transformer_options`` of the copy are touched."""

from __future__ import annotations

import uuid

from .override import foreign, is_ours, make_override
from .sampling import forward_wrapper, make_run_wrapper
from .settings import Settings

KEY = "vc_attention"
OVERRIDE = "optimized_attention_override"
OUTER_SAMPLE, APPLY_MODEL = "outer_sample", "apply_model"  # comfy.patcher_extension.WrappersMP


def patch_model(model, settings: Settings, node_id: str | None = None):
    """A copy of the model whose accepted attention calls are ours. An earlier copy of the node is replaced."""
    token = uuid.uuid4().hex
    patched = model.clone()
    options = patched.model_options.setdefault("transformer_options", {})
    options[OVERRIDE] = make_override(token, foreign(options.get(OVERRIDE)))
    wrappers = options.setdefault("wrappers", {})
    wrappers.setdefault(OUTER_SAMPLE, {})[KEY] = [make_run_wrapper(token, settings, node_id)]
    wrappers.setdefault(APPLY_MODEL, {})[KEY] = [forward_wrapper]
    return patched


def unpatch_model(model):
    """The model without us: itself, or a copy where an earlier copy of the node had patched it.

    Overrides of other nodes stay. One of ours below them falls silent, because no run is started for it any more.
    """
    if KEY not in model.model_options.get("transformer_options", {}).get("wrappers", {}).get(OUTER_SAMPLE, {}):
        return model
    plain = model.clone()
    options = plain.model_options["transformer_options"]
    for wrappers in options["wrappers"].values():
        wrappers.pop(KEY, None)
    if is_ours(options.get(OVERRIDE)):
        previous = foreign(options.pop(OVERRIDE))
        if previous is not None:
            options[OVERRIDE] = previous
    return plain
