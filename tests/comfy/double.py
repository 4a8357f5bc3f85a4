"""A small double of the host: the part of ComfyUI's contract that an attention node meets, and no more.

Ours, written from observed behaviour (order of events, who rebuilds which dict, what is shared between clones), not
from ComfyUI's text. ``test_contract.py`` holds it to a recording of the real thing.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import math
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F

from . import double_api

HEADS, HEAD_DIM, DIM = 2, 128, 256
TEXT_DIM = 64


# --- wrappers and callbacks -------------------------------------------------------------------------------------


class WrappersMP:
    OUTER_SAMPLE = "outer_sample"
    PREPARE_SAMPLING = "prepare_sampling"
    SAMPLER_SAMPLE = "sampler_sample"
    PREDICT_NOISE = "predict_noise"
    CALC_COND_BATCH = "calc_cond_batch"
    APPLY_MODEL = "apply_model"
    DIFFUSION_MODEL = "diffusion_model"


class CallbacksMP:
    ON_CLONE = "on_clone"
    ON_LOAD = "on_load_after"
    ON_DETACH = "on_detach_after"
    ON_CLEANUP = "on_cleanup"
    ON_PRE_RUN = "on_pre_run"
    ON_PREPARE_STATE = "on_prepare_state"


class WrapperExecutor:
    """What a wrapper is handed: call it to go one layer in; ``class_obj`` is the object whose method is wrapped."""

    def __init__(self, original, class_obj, wrappers):
        self.original, self.class_obj, self._rest = original, class_obj, list(wrappers)

    def __call__(self, *args, **kwargs):
        if not self._rest:
            return self.original(*args, **kwargs)
        return self._rest[0](WrapperExecutor(self.original, self.class_obj, self._rest[1:]), *args, **kwargs)


def all_wrappers(kind: str, options: dict, is_model_options: bool = False) -> list:
    if is_model_options:
        options = options.get("transformer_options", {})
    return [wrapper for group in options.get("wrappers", {}).get(kind, {}).values() for wrapper in group]


def add_wrapper_with_key(kind, key, wrapper, options, is_model_options=False):
    if is_model_options:
        options = options.setdefault("transformer_options", {})
    options.setdefault("wrappers", {}).setdefault(kind, {}).setdefault(key, []).append(wrapper)


def around(kind, original, class_obj, options, is_model_options=False):
    return WrapperExecutor(original, class_obj, all_wrappers(kind, options, is_model_options))


def copy_containers(value):
    """Dicts and lists are copied, whatever else is shared. So plain functions and objects live in every clone."""
    if isinstance(value, dict):
        return {key: copy_containers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_containers(item) for item in value]
    return value


# --- attention --------------------------------------------------------------------------------------------------


def hooked(raw):
    """The one gate: an override in the call's transformer_options gets the raw backend and every argument."""

    @functools.wraps(raw)
    def entry(*args, **kwargs):
        if "_inside_attn_wrapper" in kwargs:
            return raw(*args, **kwargs)
        kwargs["_inside_attn_wrapper"] = True
        override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
        return raw(*args, **kwargs) if override is None else override(raw, *args, **kwargs)

    entry.raw = raw
    return entry


def _as_heads(q, k, v, heads, skip_reshape):
    if skip_reshape:
        return q, k, v
    head_dim = q.shape[-1] // heads
    return tuple(t.reshape(t.shape[0], t.shape[1], -1, head_dim).transpose(1, 2) for t in (q, k, v))


def _four_dims(mask):
    while mask is not None and mask.ndim < 4:
        mask = mask.unsqueeze(0 if mask.ndim == 2 else 1)
    return mask


@hooked
def attention_pytorch(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
):
    q, k, v = _as_heads(q, k, v, heads, skip_reshape)
    extra = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=_four_dims(mask), **extra)
    return out if skip_output_reshape else out.transpose(1, 2).reshape(out.shape[0], -1, heads * out.shape[-1])


@hooked
def attention_basic(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
):
    """A second backend with other rounding, so that tests can tell whose result they see."""
    q, k, v = _as_heads(q, k, v, heads, skip_reshape)
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q.double() @ k.double().transpose(-1, -2) * kwargs.get("scale", q.shape[-1] ** -0.5)
    if mask is not None:
        mask = _four_dims(mask)
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    out = (scores.softmax(-1) @ v.double()).to(v.dtype)
    return out if skip_output_reshape else out.transpose(1, 2).reshape(out.shape[0], -1, heads * out.shape[-1])


# --- models -----------------------------------------------------------------------------------------------------


class InterruptProcessingException(BaseException):
    pass


class Interrupt:
    wanted = False

    def set(self, value=True):
        self.wanted = value

    def check(self):
        if self.wanted:
            self.wanted = False
            raise InterruptProcessingException()


class FlowSampling:
    """Rectified flow with a time shift."""

    sigma_max = torch.tensor(1.0)
    sigma_min = torch.tensor(0.001)

    def __init__(self, shift=8.0):
        self.shift = shift

    def level(self, time: float) -> float:
        return self.shift * time / (1 + (self.shift - 1) * time)

    def percent_to_sigma(self, percent: float) -> float:
        return 1.0 if percent <= 0 else 0.0 if percent >= 1 else self.level(1.0 - percent)

    def schedule(self, steps: int) -> torch.Tensor:
        return torch.tensor([self.level(1 - i / steps) for i in range(steps)] + [0.0])


class TinyModel:
    """Random weights, seeded. Subclasses differ in how they call attention, as the real families do."""

    dtype = torch.float32
    latent_channels = 16

    def __init__(self, host, seed=0):
        self.host, self.weights, self.generator = host, {}, torch.Generator().manual_seed(seed)
        self.model_sampling, self.current_patcher = FlowSampling(), None
        self.latent_format = SimpleNamespace(latent_channels=self.latent_channels)
        self.diffusion_model = self
        self.build()

    def linear(self, name, x, n_out=DIM):
        key = (name, x.shape[-1], n_out)
        if key not in self.weights:
            raise KeyError(f"weight {key} was not built")
        self.host.interrupt.check()
        return x @ self.weights[key]

    def new(self, name, n_in, n_out=DIM):
        self.weights[name, n_in, n_out] = torch.randn(n_in, n_out, generator=self.generator) / n_in**0.5

    def apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        inner = around(WrappersMP.APPLY_MODEL, self._apply_model, self, transformer_options)
        return inner(x, t, c_concat, c_crossattn, control, transformer_options, **kwargs)

    def _apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        options = transformer_options.copy()
        inner = around(WrappersMP.DIFFUSION_MODEL, self._forward, self, options)
        velocity = inner(x, t, c_crossattn, transformer_options=options, **kwargs)
        return x - t.reshape(-1, 1, 1, 1, 1) * velocity

    def patches(self, x):
        b, c, f, h, w = x.shape
        return x.reshape(b, c, f, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6).reshape(b, -1, c * 4)

    def pixels(self, tokens, shape):
        b, c, f, h, w = shape
        return tokens.reshape(b, f, h // 2, w // 2, c, 2, 2).permute(0, 4, 1, 2, 5, 3, 6).reshape(shape)

    @staticmethod
    def norm(x):
        return F.rms_norm(x, x.shape[-1:])

    def time(self, t, like):
        angles = t.reshape(-1, 1, 1).float() * torch.arange(1, DIM + 1) * 0.05
        return (angles.sin() * 0.3).to(like.dtype)


class TinyWan(TinyModel):
    """Two blocks; self-attention and cross-attention with ``heads`` by keyword, (B, L, heads*D)."""

    blocks = 2

    def build(self):
        self.new("in", 64)
        self.new("text", TEXT_DIM)
        self.new("out", DIM, 64)
        for i in range(self.blocks):
            for name in ("q", "k", "v", "o", "cq", "ck", "cv", "co", "ffn"):
                self.new(f"{i}.{name}", DIM)

    def _forward(self, x, t, context, transformer_options=None, **kwargs):
        shape, attention = x.shape, self.host.call_site
        x = self.linear("in", self.patches(x))
        context = self.linear("text", context)
        transformer_options["total_blocks"] = self.blocks
        transformer_options["block_type"] = "double"
        for i in range(self.blocks):
            transformer_options["block_index"] = i
            y = self.norm(x) + self.time(t, x)
            q, k = self.norm(self.linear(f"{i}.q", y)), self.norm(self.linear(f"{i}.k", y))
            y = attention.optimized_attention(
                q, k, self.linear(f"{i}.v", y), heads=HEADS, transformer_options=transformer_options
            )
            x = x + self.linear(f"{i}.o", y)
            q, k = self.norm(self.linear(f"{i}.cq", self.norm(x))), self.norm(self.linear(f"{i}.ck", context))
            y = attention.optimized_attention(
                q, k, self.linear(f"{i}.cv", context), heads=HEADS, transformer_options=transformer_options
            )
            x = x + self.linear(f"{i}.co", y)
            x = x + self.linear(f"{i}.ffn", F.gelu(self.norm(x)))
        return self.pixels(self.linear("out", self.norm(x), 64), shape)


class TinyJoint(TinyModel):
    """HunyuanVideo's manner: a text refiner without block index, text first in the joint sequence, (B, H, L, D) with
    ``heads`` positional; single blocks count from 0 again and their v is a strided view of a fused projection."""

    doubles, singles = 2, 2

    def build(self):
        self.new("in", 64)
        self.new("text", TEXT_DIM)
        self.new("out", DIM, 64)
        for name in ("r0", "r1", "d0", "d1", "s0", "s1"):
            self.new(f"{name}.qkv", DIM, 3 * DIM)
            self.new(f"{name}.o", DIM)

    def attend(self, name, x, options, fused_view):
        qkv = self.linear(f"{name}.qkv", self.norm(x), 3 * DIM)
        q, k, v = qkv.view(*x.shape[:2], 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        q, k = self.norm(q), self.norm(k)
        if not fused_view:
            v = v.contiguous()
        y = self.host.call_site.optimized_attention(
            q, k, v, HEADS, mask=None, skip_reshape=True, transformer_options=options
        )
        return x + self.linear(f"{name}.o", y)

    def _forward(self, x, t, context, transformer_options=None, **kwargs):
        shape = x.shape
        options = transformer_options.copy()  # as HunyuanVideo does: the block keys are set on its own copy
        text = self.linear("text", context)
        for name in ("r0", "r1"):
            text = self.attend(name, text, options, True)
        x = torch.cat([text, self.linear("in", self.patches(x)) + self.time(t, x)], 1)
        for block_type, count in (("double", self.doubles), ("single", self.singles)):
            options["total_blocks"], options["block_type"] = count, block_type
            if block_type == "single":
                options["img_slice"] = [text.shape[1], x.shape[1]]
            for i in range(count):
                options["block_index"] = i
                x = self.attend(f"{block_type[0]}{i}", x, options, block_type == "single")
        return self.pixels(self.linear("out", self.norm(x[:, text.shape[1] :]), 64), shape)


MODELS = {"wan": TinyWan, "joint": TinyJoint}


# --- patcher ----------------------------------------------------------------------------------------------------


class ModelPatcher:
    def __init__(self, model):
        self.model = model
        self.load_device = self.offload_device = torch.device("cpu")
        self.model_options = {"transformer_options": {}}
        self.wrappers, self.callbacks, self.object_patches, self.attachments = {}, {}, {}, {}
        self.parent = None

    def clone(self):
        new = ModelPatcher(self.model)
        new.parent = self
        for name in ("model_options", "wrappers", "callbacks"):
            setattr(new, name, copy_containers(getattr(self, name)))
        new.object_patches, new.attachments = self.object_patches.copy(), self.attachments.copy()
        for callback in self.get_all_callbacks(CallbacksMP.ON_CLONE):
            callback(self, new)
        return new

    def add_wrapper(self, kind, wrapper):
        self.add_wrapper_with_key(kind, None, wrapper)

    def add_wrapper_with_key(self, kind, key, wrapper):
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind, key):
        self.wrappers.get(kind, {}).pop(key, None)

    def get_wrappers(self, kind, key):
        return self.wrappers.get(kind, {}).get(key, [])

    def get_all_wrappers(self, kind):
        return [wrapper for group in self.wrappers.get(kind, {}).values() for wrapper in group]

    def add_callback(self, kind, callback):
        self.add_callback_with_key(kind, None, callback)

    def add_callback_with_key(self, kind, key, callback):
        self.callbacks.setdefault(kind, {}).setdefault(key, []).append(callback)

    def remove_callbacks_with_key(self, kind, key):
        self.callbacks.get(kind, {}).pop(key, None)

    def get_all_callbacks(self, kind):
        return [callback for group in self.callbacks.get(kind, {}).values() for callback in group]

    def add_object_patch(self, name, value):
        self.object_patches[name] = value

    def get_model_object(self, name):
        return self.object_patches.get(name) or functools.reduce(getattr, name.split("."), self.model)

    def model_dtype(self):
        return self.model.dtype

    def set_model_optimized_attention(self, function):
        def replacement(_, *args, **kwargs):
            return function(*args, **kwargs)

        self.model_options["transformer_options"]["optimized_attention_override"] = replacement

    def fire(self, kind, *args):
        for callback in self.get_all_callbacks(kind):
            callback(self, *args)


# --- samplers ---------------------------------------------------------------------------------------------------


def _slope(x, denoised, sigma):
    return (x - denoised) / sigma


def euler(model, x, sigmas, callback):
    for i in range(len(sigmas) - 1):
        denoised = model(x, sigmas[i])
        callback(i, denoised)
        x = x + _slope(x, denoised, sigmas[i]) * (sigmas[i + 1] - sigmas[i])
    return x


def heun(model, x, sigmas, callback):
    """Two evaluations a step; the second carries the next step's level, so inner levels repeat."""
    for i in range(len(sigmas) - 1):
        denoised = model(x, sigmas[i])
        callback(i, denoised)
        slope, width = _slope(x, denoised, sigmas[i]), sigmas[i + 1] - sigmas[i]
        if sigmas[i + 1] > 0:
            ahead = x + slope * width
            slope = (slope + _slope(ahead, model(ahead, sigmas[i + 1]), sigmas[i + 1])) / 2
        x = x + slope * width
    return x


def heunpp2(model, x, sigmas, callback):
    """Looks two levels ahead and comes back: levels 0, 1, 2, 1, 2, 3, 2, ..."""
    for i in range(len(sigmas) - 1):
        denoised = model(x, sigmas[i])
        callback(i, denoised)
        slopes, y = [_slope(x, denoised, sigmas[i])], x
        for j in (i + 1, i + 2):
            if j < len(sigmas) and sigmas[j] > 0:
                y = y + slopes[-1] * (sigmas[j] - sigmas[j - 1])
                slopes.append(_slope(y, model(y, sigmas[j]), sigmas[j]))
        x = x + sum(slopes) / len(slopes) * (sigmas[i + 1] - sigmas[i])
    return x


def dpm_2(model, x, sigmas, callback):
    """A second evaluation at a level between two of the schedule."""
    for i in range(len(sigmas) - 1):
        denoised = model(x, sigmas[i])
        callback(i, denoised)
        slope = _slope(x, denoised, sigmas[i])
        if sigmas[i + 1] > 0:
            middle = (sigmas[i] * sigmas[i + 1]).sqrt()
            y = x + slope * (middle - sigmas[i])
            slope = _slope(y, model(y, middle), middle)
        x = x + slope * (sigmas[i + 1] - sigmas[i])
    return x


SAMPLERS = {"euler": euler, "heun": heun, "heunpp2": heunpp2, "dpm_2": dpm_2}


class Sampler:
    def __init__(self, name):
        self.function = SAMPLERS[name]

    def sample(self, guider, sigmas, extra_args, callback, noise, latent_image=None, denoise_mask=None, *rest):
        def evaluate(x, sigma):
            return guider(x, sigma * x.new_ones(x.shape[0]), **extra_args)

        x = sigmas[0] * noise + (1 - sigmas[0]) * latent_image
        x = self.function(evaluate, x, sigmas, callback or (lambda *args: None))
        return x / (1 - sigmas[-1])  # so that a second sampler can start where this one stops


class CFGGuider:
    def __init__(self, model_patcher):
        self.model_patcher, self.model_options = model_patcher, model_patcher.model_options
        self.original_conds, self.cfg = {}, 1.0

    def set_conds(self, positive, negative):
        for kind, conds in (("positive", positive), ("negative", negative)):
            self.original_conds[kind] = [{**c[1], "cross_attn": c[0], "uuid": uuid.uuid4()} for c in conds]

    def set_cfg(self, cfg):
        self.cfg = cfg

    def __call__(self, x, timestep, model_options=None, seed=None):
        inner = around(WrappersMP.PREDICT_NOISE, self.predict_noise, self, self.model_options, True)
        return inner(x, timestep, model_options, seed)

    def predict_noise(self, x, timestep, model_options=None, seed=None):
        conds = [self.conds["positive"], self.conds["negative"] if self.cfg != 1.0 else None]
        inner = around(WrappersMP.CALC_COND_BATCH, self.calc_cond_batch, None, model_options, True)
        cond, uncond = inner(self.inner_model, conds, x, timestep, model_options)
        return uncond + (cond - uncond) * self.cfg

    def calc_cond_batch(self, model, conds, x, timestep, model_options):
        sums, counts, waiting = [torch.zeros_like(x) for _ in conds], [1e-37] * len(conds), []
        percent_to_sigma = model.model_sampling.percent_to_sigma
        for index, kind in enumerate(conds):
            for cond in kind or ():
                if timestep[0] > percent_to_sigma(cond.get("start_percent", 0.0)):
                    continue
                if timestep[0] < percent_to_sigma(cond.get("end_percent", 1.0)):
                    continue
                waiting.append((cond, index))
        self.model_patcher.fire(CallbacksMP.ON_PREPARE_STATE, timestep, model_options)
        while waiting:
            shape = waiting[0][0]["cross_attn"].shape
            chunks = [item for item in waiting if item[0]["cross_attn"].shape == shape][::-1]
            waiting = [item for item in waiting if item[0]["cross_attn"].shape != shape]
            options = copy_containers(model_options["transformer_options"])  # a new dict for every evaluation
            options["cond_or_uncond"] = [index for _, index in chunks]
            options["uuids"] = [cond["uuid"] for cond, _ in chunks]
            options["sigmas"] = timestep
            context = torch.cat([c["cross_attn"].expand(x.shape[0], -1, -1) for c, _ in chunks])
            out = model.apply_model(
                torch.cat([x] * len(chunks)),
                torch.cat([timestep] * len(chunks)),
                c_crossattn=context,
                transformer_options=options,
            )
            for piece, (_, index) in zip(out.chunk(len(chunks)), chunks, strict=True):
                sums[index] += piece
                counts[index] += 1
        return [total / count for total, count in zip(sums, counts, strict=True)]

    def prepare_sampling(self, model, noise_shape, conds, model_options=None, **kwargs):
        model.fire(CallbacksMP.ON_LOAD, model.load_device, 0, False, False)
        return model.model, conds, []

    def inner_sample(self, noise, latent_image, sampler, sigmas, denoise_mask, callback, disable_pbar, seed):
        options = copy_containers(self.model_options)
        options.setdefault("transformer_options", {})["sample_sigmas"] = sigmas
        extra_args = {"model_options": options, "seed": seed}
        inner = around(WrappersMP.SAMPLER_SAMPLE, sampler.sample, sampler, options, True)
        return inner(self, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar)

    def outer_sample(
        self,
        noise,
        latent_image,
        sampler,
        sigmas,
        denoise_mask=None,
        callback=None,
        disable_pbar=False,
        seed=None,
        latent_shapes=None,
    ):
        prepare = around(WrappersMP.PREPARE_SAMPLING, self.prepare_sampling, None, self.model_options, True)
        self.inner_model, self.conds, _ = prepare(
            self.model_patcher,
            noise.shape,
            self.conds,
            model_options=self.model_options,
            force_full_load=False,
            force_offload=False,
        )
        original = self.inner_model.model_sampling
        sampling = self.model_patcher.get_model_object("model_sampling")
        try:
            self.inner_model.current_patcher = self.model_patcher
            self.inner_model.model_sampling = sampling
            self.model_patcher.fire(CallbacksMP.ON_PRE_RUN)
            output = self.inner_sample(noise, latent_image, sampler, sigmas, denoise_mask, callback, disable_pbar, seed)
        finally:
            self.inner_model.model_sampling = original
            self.inner_model.current_patcher = None
            self.model_patcher.fire(CallbacksMP.ON_CLEANUP)
        del self.inner_model
        return output

    def sample(
        self,
        noise,
        latent_image,
        sampler,
        sigmas,
        denoise_mask=None,
        callback=None,
        disable_pbar=False,
        seed=None,
    ):
        if len(sigmas) == 0:
            return latent_image
        self.conds = {kind: [cond.copy() for cond in conds] for kind, conds in self.original_conds.items()}
        original = self.model_options
        try:
            self.model_options = copy_containers(original)
            options = self.model_options["transformer_options"]
            for name in ("wrappers", "callbacks"):
                target = options.setdefault(name, {})
                for kind, groups in getattr(self.model_patcher, name).items():
                    for key, functions in groups.items():
                        target.setdefault(kind, {}).setdefault(key, []).extend(functions)
            inner = around(WrappersMP.OUTER_SAMPLE, self.outer_sample, self, self.model_options, True)
            shapes = [latent_image.shape]
            return inner(
                noise,
                latent_image,
                sampler,
                sigmas,
                denoise_mask,
                callback,
                disable_pbar,
                seed,
                latent_shapes=shapes,
            )
        finally:
            self.model_options = original
            self.conds = None


# --- the host ---------------------------------------------------------------------------------------------------


class Double:
    name = "double"
    is_real = False
    kinds = ("wan", "joint")
    blocks = {"wan": 2, "joint": 4}
    refiner_calls = {"wan": 0, "joint": 2}
    InputRefused = ValueError

    def __init__(self):
        self.interrupt, self.texts, self.events = Interrupt(), [], []
        self._models, self.nodes, self._prompt = {}, {}, None
        self.modules = self._make_modules()
        self.attention = self.modules["comfy.ldm.modules.attention"]
        self.extension = self.modules["comfy.patcher_extension"]
        self.call_site = self.modules["comfy.ldm.wan.model"]
        self.call_sites = [self.call_site]
        self.InterruptProcessingException = InterruptProcessingException

    def _make_modules(self) -> dict[str, ModuleType]:
        def module(name, **members):
            made = ModuleType(name)
            made.__dict__.update(members)
            return made

        def send(text, node_id, sid=None):
            self.texts.append((text, node_id))

        def send_event(event, data, sid=None):
            self.events.append((event, data))

        server = SimpleNamespace(send_progress_text=send, send_sync=send_event, client_id=None)
        io, ui = (
            double_api.make_io(),
            SimpleNamespace(PreviewText=double_api.PreviewText, PreviewImage=double_api.PreviewImage),
        )
        extension = module(
            "comfy.patcher_extension",
            WrappersMP=WrappersMP,
            CallbacksMP=CallbacksMP,
            WrapperExecutor=WrapperExecutor,
            add_wrapper_with_key=add_wrapper_with_key,
            get_all_wrappers=all_wrappers,
            copy_nested_dicts=copy_containers,
        )
        management = module(
            "comfy.model_management",
            InterruptProcessingException=InterruptProcessingException,
            OOM_EXCEPTION=torch.cuda.OutOfMemoryError,
            is_oom=lambda error: isinstance(error, torch.cuda.OutOfMemoryError),
            interrupt_current_processing=self.interrupt.set,
            processing_interrupted=lambda: self.interrupt.wanted,
            throw_exception_if_processing_interrupted=self.interrupt.check,
            get_torch_device=lambda: torch.device("cpu"),
            soft_empty_cache=lambda force=False: None,
        )

        def raise_non_oom(error):
            if not management.is_oom(error):
                raise error

        management.raise_non_oom = raise_non_oom
        attention = module(
            "comfy.ldm.modules.attention",
            optimized_attention=attention_pytorch,
            optimized_attention_masked=attention_pytorch,
            attention_pytorch=attention_pytorch,
            attention_basic=attention_basic,
            wrap_attn=hooked,
        )
        made = {
            "comfy": module("comfy"),
            "comfy.patcher_extension": extension,
            "comfy.model_management": management,
            "comfy.model_patcher": module(
                "comfy.model_patcher",
                ModelPatcher=ModelPatcher,
                create_model_options_clone=copy_containers,
            ),
            "comfy.samplers": module("comfy.samplers", CFGGuider=CFGGuider),
            "comfy.utils": module("comfy.utils", deepcopy_list_dict=copy_containers),
            "comfy.cli_args": module("comfy.cli_args", args=SimpleNamespace(cpu=True)),
            "comfy.ldm": module("comfy.ldm"),
            "comfy.ldm.modules": module("comfy.ldm.modules"),
            "comfy.ldm.modules.attention": attention,
            "comfy.ldm.wan": module("comfy.ldm.wan"),
            "comfy.ldm.wan.model": module("comfy.ldm.wan.model", optimized_attention=attention_pytorch),
            "comfy_execution": module("comfy_execution"),
            "comfy_execution.utils": module("comfy_execution.utils", get_executing_context=lambda: self._prompt),
            "comfy_api": module("comfy_api"),
            "comfy_api.latest": module(
                "comfy_api.latest",
                io=io,
                ui=ui,
                IO=io,
                UI=ui,
                ComfyExtension=double_api.ComfyExtension,
            ),
            "server": module("server", PromptServer=SimpleNamespace(instance=server)),
        }
        for name, one in made.items():
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(made[parent], leaf, one)
                made[parent].__path__ = []
        return made

    @contextmanager
    def installed(self):
        """The stub modules are importable inside this block only: other tests must not find a ComfyUI."""
        missing = object()
        before = {name: sys.modules.get(name, missing) for name in self.modules}
        sys.modules.update(self.modules)
        try:
            yield self
        finally:
            for name, module in before.items():
                if module is missing:
                    sys.modules.pop(name, None)
                else:
                    sys.modules[name] = module

    @contextmanager
    def in_prompt(self, prompt_id: str, node_id: str = "5"):
        """What is done inside belongs to this prompt, as if its executor did it."""
        before, self._prompt = self._prompt, SimpleNamespace(prompt_id=prompt_id, node_id=node_id, list_index=0)
        try:
            yield
        finally:
            self._prompt = before

    # the pack ---------------------------------------------------------------------------------------------------

    def load_pack(self, folder: Path):
        """As ComfyUI loads a folder: the path, dots replaced, is the package's name."""
        name = str(folder).replace(".", "_x_")
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        if getattr(module, "NODE_CLASS_MAPPINGS", None) is not None:
            raise AssertionError("NODE_CLASS_MAPPINGS hides comfy_entrypoint")

        async def nodes():
            extension = module.comfy_entrypoint()
            if inspect.isawaitable(extension):
                extension = await extension
            if not isinstance(extension, double_api.ComfyExtension):
                raise TypeError("comfy_entrypoint did not return a ComfyExtension")
            await extension.on_load()
            return await extension.get_node_list()

        found = asyncio.run(nodes())
        self.nodes = {node.GET_SCHEMA().node_id: node for node in found}
        return module, self.nodes

    def validate(self, node_id: str, inputs: dict) -> list[str]:
        return double_api.validate_v3(self.nodes[node_id], inputs)[1]

    def run_node(self, node_id: str, inputs: dict, unique_id="7") -> tuple:
        """Run as the executor would run a prompt: refused inputs raise, unknown ones are dropped."""
        seen, errors = double_api.validate_v3(self.nodes[node_id], inputs)
        if errors:
            raise self.InputRefused("; ".join(errors))
        return double_api.run_v3(self.nodes[node_id], unique_id, seen)

    def execute(self, node_id: str, inputs: dict, unique_id="7") -> tuple:
        """Run without the host's validation, as a broken or foreign front end would."""
        return double_api.run_v3(self.nodes[node_id], unique_id, inputs)

    # models and sampling ----------------------------------------------------------------------------------------

    def model(self, kind="wan") -> ModelPatcher:
        if kind not in self._models:
            self._models[kind] = ModelPatcher(MODELS[kind](self))
        return self._models[kind].clone()

    def set_shift(self, model, shift):
        model = model.clone()
        model.add_object_patch("model_sampling", FlowSampling(shift))
        return model

    def select_attention(self, model, function):
        """What the core node ModelAttentionBackend does."""
        model = model.clone()
        model.set_model_optimized_attention(function)
        return model

    def cond(self, kind="wan", length=32, seed=0, **extra):
        generator = torch.Generator().manual_seed(1000 + seed)
        return [[torch.randn(1, length, TEXT_DIM, generator=generator), extra]]

    def latent(self, kind="wan", batch=1, frames=3, size=16):
        return torch.zeros(batch, 16, frames, size, size)

    def noise(self, latent, seed):
        return torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed))

    def sigmas(self, model, steps, denoise=1.0):
        whole = model.get_model_object("model_sampling").schedule(int(steps / denoise))
        return whole[-(steps + 1) :]

    def sampler(self, name="euler"):
        return Sampler(name)

    def guider(self, model, positive, negative, cfg=3.0):
        guider = CFGGuider(model)
        guider.set_conds(positive, negative)
        guider.set_cfg(cfg)
        return guider

    def run_guider(self, guider, latent, sigmas, sampler="euler", seed=1, noise=None, callback=None):
        noise = self.noise(latent, seed) if noise is None else noise
        with torch.inference_mode():
            return guider.sample(noise, latent, self.sampler(sampler), sigmas, callback=callback, seed=seed)

    def ksampler(
        self,
        model,
        positive,
        negative,
        latent,
        *,
        steps=4,
        cfg=3.0,
        sampler="euler",
        seed=1,
        denoise=1.0,
        start=None,
        last=None,
        add_noise=True,
        noise=None,
        callback=None,
    ):
        """KSampler, and with start/last KSamplerAdvanced."""
        sigmas = self.sigmas(model, steps + 1 if sampler == "dpm_2" else steps, denoise)
        if sampler == "dpm_2":
            sigmas = torch.cat([sigmas[:-2], sigmas[-1:]])
        sigmas = sigmas[: None if last is None else last + 1]
        if start is not None:
            if start >= len(sigmas) - 1:
                return latent
            sigmas = sigmas[start:]
        if noise is None:
            noise = self.noise(latent, seed) if add_noise else torch.zeros_like(latent)
        guider = self.guider(model, positive, negative, cfg)
        return self.run_guider(guider, latent, sigmas, sampler, seed, noise, callback)
