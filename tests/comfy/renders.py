"""Small helpers that the tests of this room share."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from .watch import watching


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


def prompts(host, kind="wan"):
    return host.cond(kind, seed=1), host.cond(kind, seed=2)


def render(host, model, kind="wan", **keywords):
    """One KSampler render with fixed prompts and seed."""
    positive, negative = keywords.pop("conds", None) or prompts(host, kind)
    latent = keywords.pop("latent", None)
    latent = host.latent(kind) if latent is None else latent
    return host.ksampler(model, positive, negative, latent, **keywords)


def watched(host, pack, model, kind="wan", **keywords):
    """A render and what attention did in it."""
    with watching(host, pack) as watch:
        output = render(host, model, kind, **keywords)
    return output, watch


def probed(host, model, probe):
    """A clone whose every forward first calls ``probe(optimized_attention, transformer_options)``.

    The call is made inside a running evaluation, with the live transformer_options, as a model block would make it.
    """
    model = model.clone()

    def wrapper(executor, *args, **kwargs):
        options = kwargs.get("transformer_options")
        if options is None:
            options = next(a for a in args if isinstance(a, dict) and "sigmas" in a)
        options = {**options, "block_type": "probe", "block_index": 0}
        probe(host.attention.optimized_attention, options)
        return executor(*args, **kwargs)

    model.add_wrapper_with_key(host.extension.WrappersMP.DIFFUSION_MODEL, "probe", wrapper)
    return model


def with_override(model, override):
    """A clone with somebody else's override on it."""
    model = model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = override
    return model


class Recorder:
    """A foreign override that computes what the host's backend would and keeps what it was called with."""

    def __init__(self, chain=None):
        self.calls, self.chain = [], chain

    def __call__(self, func, *args, **kwargs):
        self.calls.append((func, args, dict(kwargs)))
        if self.chain is not None:
            return self.chain(func, *args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def at_call_sites(host, change):
    """Models call ``change(original)`` in the place of the host's attention, as in older hosts or patched models."""
    originals = [site.optimized_attention for site in host.call_sites]
    for site, original in zip(host.call_sites, originals, strict=True):
        site.optimized_attention = change(original)
    try:
        yield
    finally:
        for site, original in zip(host.call_sites, originals, strict=True):
            site.optimized_attention = original


@contextmanager
def wrapped(model, kind, wrapper):
    """A test's own wrapper on a patcher, taken off afterwards."""
    model.add_wrapper_with_key(kind, "test", wrapper)
    try:
        yield model
    finally:
        model.remove_wrappers_with_key(kind, "test")
