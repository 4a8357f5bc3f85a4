"""The contract as facts: one run's events and what an attention override and a wrapper see, as plain JSON data.

The same code runs on both hosts. ``fixtures/contract_0.33.json`` is what the real one said; regenerate it with
``COMFYUI_PATH=... RECORD_CONTRACT=1 python -m pytest tests/comfy/test_contract.py`` and read the difference.
"""

from __future__ import annotations

import gc
import weakref

import torch

from .watch import step_of

WRAPPED = (
    "OUTER_SAMPLE",
    "PREPARE_SAMPLING",
    "SAMPLER_SAMPLE",
    "PREDICT_NOISE",
    "CALC_COND_BATCH",
    "APPLY_MODEL",
    "DIFFUSION_MODEL",
)
CALLBACKS = ("ON_PRE_RUN", "ON_PREPARE_STATE", "ON_CLEANUP")
# The keys of transformer_options that the node may rely on: a host that lacks one breaks the contract.
KEYS = ("sigmas", "sample_sigmas", "cond_or_uncond", "uuids", "block_type", "block_index", "total_blocks", "wrappers")


class Marker:
    """An object put into transformer_options: passed by reference, as the pack's run state is."""


def _levels(values) -> list[float]:
    return [round(float(value), 4) for value in values]


def observed(model, host):
    """A clone that reports events and calls through an override, and the list they go to."""
    events, model = [], model.clone()
    for name in WRAPPED:

        def wrapper(executor, *args, _name=name, **kwargs):
            has = [hasattr(executor.class_obj, n) for n in ("model_options", "model_patcher", "conds")]
            events.append((_name, args, kwargs, executor.class_obj, has))
            try:
                return executor(*args, **kwargs)
            finally:
                events.append(("end " + _name, args, kwargs, executor.class_obj))

        model.add_wrapper_with_key(getattr(host.extension.WrappersMP, name), "trace", wrapper)
    for name in CALLBACKS:

        def callback(patcher, *args, _name=name):
            events.append((_name, args, {}, patcher))

        model.add_callback_with_key(getattr(host.extension.CallbacksMP, name), "trace", callback)

    def override(func, *args, **kwargs):
        events.append(("attention", args, kwargs, func, _attention_fact(args, kwargs)))
        return func(*args, **kwargs)

    model.model_options["transformer_options"]["optimized_attention_override"] = override
    return model, events


def attention_fact(event) -> dict:
    return event[4]


def _attention_fact(args, kwargs) -> dict:
    """Taken when the call happens: the host changes the dict afterwards."""
    options, q, k = kwargs["transformer_options"], args[0], args[1]
    return {
        "q": list(q.shape),
        "k": list(k.shape),
        "heads_positional": len(args) > 3,
        "skip_reshape": bool(kwargs.get("skip_reshape", False)),
        "has_mask": kwargs.get("mask") is not None,
        "block": [options.get("block_type"), options.get("block_index"), options.get("total_blocks")],
        "chunks": list(options["cond_or_uncond"]),
        "uuids": len(options["uuids"]),
        "sigma": _levels(options["sigmas"]),
        "inside_marker": kwargs.get("_inside_attn_wrapper"),
    }


def names(events) -> list[str]:
    return [event[0] for event in events]


def attention(events) -> list:
    return [event for event in events if event[0] == "attention"]


def evaluated_steps(host, sampler: str, steps: int) -> list[int]:
    """Index of the schedule level of every model evaluation."""
    model, events = observed(host.model(), host)
    host.ksampler(model, host.cond(seed=1), host.cond(seed=2), host.latent(), steps=steps, sampler=sampler)
    found = []
    for event in events:
        if event[0] == "APPLY_MODEL":
            options = next(a for a in event[1] if isinstance(a, dict) and "sigmas" in a)
            found.append(step_of(float(options["sigmas"][0]), _levels(options["sample_sigmas"])))
    return found


def trace(host) -> dict:
    facts = {}
    latent, positive, negative = host.latent(), host.cond(seed=1), host.cond(seed=2)

    model, events = observed(host.model(), host)
    host.ksampler(model, positive, negative, latent, steps=2)
    facts["events of a 2-step run"] = names(events)
    calls = attention(events)
    facts["wan calls"] = [attention_fact(event) for event in calls]
    options = [event[2]["transformer_options"] for event in calls]
    facts["schedule"] = _levels(options[0]["sample_sigmas"])
    facts["keys missing"] = [key for key in KEYS if key not in options[0]]
    facts["one dict per evaluation"] = [options[0] is options[3], options[0] is options[4]]
    facts["uuids stable over steps"] = options[0]["uuids"] == options[-1]["uuids"]
    facts["raw backend is undecorated"] = not hasattr(calls[0][3], "__wrapped__")
    outer = next(event for event in events if event[0] == "OUTER_SAMPLE")
    facts["OUTER_SAMPLE args[3] are the sigmas"] = _levels(outer[1][3]) == facts["schedule"]
    facts["OUTER_SAMPLE class_obj has model_options, model_patcher, conds"] = outer[4]
    predict = next(event for event in events if event[0] == "PREDICT_NOISE")
    facts["PREDICT_NOISE args[1] is the level"] = _levels(predict[1][1])
    facts["PREDICT_NOISE class_obj is the guider"] = predict[3] is outer[3]

    model, events = observed(host.model(), host)
    host.ksampler(model, positive, negative, latent, steps=1, cfg=1.0)
    facts["chunks at cfg 1"] = [attention_fact(event)["chunks"] for event in attention(events)]
    model, events = observed(host.model(), host)
    host.ksampler(model, positive + host.cond(seed=3), negative, latent, steps=1)
    facts["chunks with two positive prompts"] = attention_fact(attention(events)[0])
    model, events = observed(host.model(), host)
    host.ksampler(model, positive, host.cond(length=20, seed=2), latent, steps=1)
    facts["chunks of unequal prompts"] = [attention_fact(event)["chunks"] for event in attention(events)]
    model, events = observed(host.model(), host)
    host.ksampler(model, positive, negative, host.latent(batch=2), steps=1)
    facts["rows at batch 2"] = attention_fact(attention(events)[0])["q"]
    early = host.cond(seed=3, end_percent=0.5)
    model, events = observed(host.model(), host)
    host.ksampler(model, positive + early, negative, latent, steps=4)
    facts["a prompt with a time range"] = [attention_fact(event)["chunks"] for event in attention(events)]

    model, events = observed(host.model("joint"), host)
    host.ksampler(model, host.cond("joint", 12, 1), host.cond("joint", 9, 2), host.latent("joint"), steps=1)
    facts["joint calls"] = [attention_fact(event) for event in attention(events)]
    values = [event[1][2] for event in attention(events)]
    facts["joint v contiguous"] = [value.is_contiguous() for value in values[:6]]

    for sampler, steps in (("euler", 4), ("heun", 4), ("heunpp2", 5), ("dpm_2", 4)):
        facts[f"{sampler}: steps evaluated"] = evaluated_steps(host, sampler, steps)
    facts.update(_slices(host, positive, negative, latent))
    facts.update(_lifetime(host, positive, negative, latent))
    facts.update(_endings(host, positive, negative, latent))
    return facts


def _slices(host, positive, negative, latent) -> dict:
    """What each of two samplers sees of one schedule."""
    facts, seen = {}, {}
    for name, keywords in (
        ("first expert", {"steps": 8, "start": 0, "last": 4}),
        ("second expert", {"steps": 8, "start": 4, "add_noise": False}),
        ("denoise 0.5", {"steps": 4, "denoise": 0.5}),
        ("start beyond the end", {"steps": 4, "start": 4}),
    ):
        model, events = observed(host.model(), host)
        host.ksampler(model, positive, negative, latent, **keywords)
        seen = [event[2]["transformer_options"] for event in attention(events)[:1]]
        facts[f"schedule of {name}"] = _levels(seen[0]["sample_sigmas"]) if seen else None
        facts[f"events of {name}"] = len(events) > 0
    shifted = host.set_shift(host.model(), 5.0)
    sampling = shifted.get_model_object("model_sampling")
    facts["percent_to_sigma at shift 5"] = _levels(sampling.percent_to_sigma(p) for p in (0.0, 0.25, 0.5, 1.0))
    facts["sigma_max"] = _levels([sampling.sigma_max])
    return facts


def _lifetime(host, positive, negative, latent) -> dict:
    """What is copied, shared, renewed and dropped."""
    facts, base = {}, host.model()
    marker, plain = Marker(), {"count": 0}
    seen = []

    def closure(func, *args, **kwargs):
        options = kwargs["transformer_options"]
        options["plain"]["count"] += 1
        seen.append((options["marker"] is marker, options["plain"] is plain, options["plain"]["count"]))
        return func(*args, **kwargs)

    options = base.model_options["transformer_options"]
    options.update(optimized_attention_override=closure, marker=marker, plain=plain)
    clone = base.clone()
    cloned = clone.model_options["transformer_options"]
    facts["clones share"] = {
        "function": cloned["optimized_attention_override"] is closure,
        "object": cloned["marker"] is marker,
        "dict": cloned["plain"] is plain,
    }
    host.ksampler(clone, positive, negative, latent, steps=2)
    facts["marker object by reference"] = all(item[0] for item in seen)
    facts["plain dict by reference"] = any(item[1] for item in seen)
    facts["plain dict restarts per evaluation"] = [item[2] for item in seen]

    observed_model, events = observed(host.model(), host)
    inside = []

    def look(executor, *args, **kwargs):
        guider = executor.class_obj
        inside.append(guider.model_options is observed_model.model_options)
        guider.model_options["transformer_options"]["from wrapper"] = marker
        return executor(*args, **kwargs)

    observed_model.add_wrapper_with_key(host.extension.WrappersMP.OUTER_SAMPLE, "look", look)
    guider = host.guider(observed_model, positive, negative)
    sigmas = host.sigmas(observed_model, 1)
    host.run_guider(guider, latent, sigmas)
    calls = attention(events)
    first = calls[0][2]["transformer_options"]
    facts["OUTER_SAMPLE sees a copy of model_options"] = not inside[0]
    facts["what it adds reaches attention"] = first["from wrapper"] is marker
    facts["what it adds stays on the model"] = (
        "from wrapper" in observed_model.model_options["transformer_options"]
        or "from wrapper" in guider.model_options["transformer_options"]
    )
    first_uuids = first["uuids"]
    events.clear()
    host.run_guider(guider, latent, sigmas)
    facts["a kept guider keeps its uuids"] = attention(events)[0][2]["transformer_options"]["uuids"] == first_uuids
    events.clear()
    host.ksampler(observed_model, positive, negative, latent, steps=1)
    facts["a new run has new uuids"] = attention(events)[0][2]["transformer_options"]["uuids"] != first_uuids
    events.clear()

    state = Marker()
    alive = weakref.ref(state)
    dropped = host.model()

    def hold(executor, *args, _state=(state,), **kwargs):
        executor.class_obj.model_options["transformer_options"]["state"] = Marker()
        held.append(weakref.ref(executor.class_obj.model_options["transformer_options"]["state"]))
        return executor(*args, **kwargs)

    held = []
    dropped.add_wrapper_with_key(host.extension.WrappersMP.OUTER_SAMPLE, "hold", hold)
    host.ksampler(dropped, positive, negative, latent, steps=1)
    gc.collect()
    facts["the host drops the run's options"] = held[0]() is None
    del dropped, hold, state
    gc.collect()
    facts["the host drops a dropped patcher"] = alive() is None
    return facts


def _endings(host, positive, negative, latent) -> dict:
    """What fires when a run does not end well, and that the host is usable afterwards."""
    facts = {}
    for name in ("interrupt", "error"):
        model, events = observed(host.model(), host)
        count = []

        def override(func, *args, _name=name, _count=count, **kwargs):
            _count.append(1)
            if len(_count) == 3:
                if _name == "error":
                    raise KeyError("in the middle")
                host.interrupt.set()
            return func(*args, **kwargs)

        model.model_options["transformer_options"]["optimized_attention_override"] = override
        caught = None
        try:
            host.ksampler(model, positive, negative, latent, steps=3)
        except BaseException as error:  # noqa: BLE001 - an interrupt is a BaseException: its kind is the fact here
            caught = error
        host.interrupt.set(False)
        facts[f"{name}: raised"] = type(caught).__name__
        facts[f"{name}: is an Exception"] = isinstance(caught, Exception)
        facts[f"{name}: last events"] = [n for n in names(events)[-6:] if n != "attention"]
        events.clear()
    whole = host.ksampler(host.model(), positive, negative, latent, steps=1)
    facts["usable afterwards"] = bool(torch.isfinite(whole).all())
    return facts
