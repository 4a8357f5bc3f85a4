"""VC-Attention inside diffusers' Wan transformer: an attention processor per self-attention layer.

    from vc_attention.integrations.diffusers import apply

    with apply(pipe.transformer) as handle:
        pipe.scheduler.set_timesteps(40)
        with handle.render(pipe.scheduler.sigmas):
            pipe(prompt, num_inference_steps=40)
        print(handle.report())

Only the given model is touched: its self-attention processors are exchanged and one forward hook reads the noise
level. A call VC-Attention does not serve goes to the processor the layer had, and its reason is counted. Groupings
live in the handle, from one render to the next at most; ``remove`` leaves the model as it was found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..arch import uses_grouping
from ..attend.api import attention, support
from ..errors import InvalidArgument, UnsupportedCall
from ..group.api import Grouping, group_values
from ..schedule import GroupingPolicy, Schedule

LAYOUT = "BSHD"  # what diffusers' Wan projections give without a transpose
TRAIN_TIMESTEPS = 1000.0  # flow-matching models are called with timestep = sigma * 1000
SAME_LEVEL = 1e-6


@dataclass(frozen=True)
class Settings:
    """What ``apply`` was asked for; see there."""

    mode: str
    implementation: str
    policy: GroupingPolicy
    clusters: int | None
    min_tokens: int


@dataclass(frozen=True)
class Report:
    """What happened since the render began.

    Attributes:
        layers: self-attention layers with a VC-Attention processor.
        calls: calls of these layers.
        served: calls that VC-Attention computed; the others went to the layer's own processor.
        declined: how many of the others, by reason.
        groupings: how often values were grouped anew, over all layers and prompts.
        mode, implementation: of the last served call; None when there was none.
    """

    layers: int
    calls: int = 0
    served: int = 0
    declined: dict[str, int] = field(default_factory=dict)
    groupings: int = 0
    mode: str | None = None
    implementation: str | None = None

    def __str__(self) -> str:
        text = f"VC-Attention: {self.served} of {self.calls} self-attention calls in {self.layers} layers"
        if self.served:
            text += f", {self.mode}, {self.implementation}, values grouped {self.groupings} times"
        for reason, count in self.declined.items():
            text += f"; {count} calls left to the model's own attention: {reason}"
        return text


def apply(
    transformer,
    *,
    mode: str = "auto",
    window: float = 0.25,
    interval: int = 4,
    clusters: int | None = None,
    implementation: str = "auto",
    min_tokens: int = 4096,
    skip_layers: Collection[int] = (),
) -> Handle:
    """Put VC-Attention into the self-attention layers of a ``diffusers.WanTransformer3DModel``.

    Args:
        transformer: the model; a pipeline of Wan2.2 has two, each gets its own handle.
        mode: "auto", "8-bit", "4-bit" or "8-bit precise".
        window: share of the schedule, from its start, in which values are grouped anew (0 to 1).
        interval: steps for which a grouping is held.
        clusters: clusters per head; None chooses by the number of tokens.
        implementation: "auto" (a GPU kernel, else the layer's own attention) or "reference" (portable, slow).
        min_tokens: shorter sequences stay with the layer's own attention.
        skip_layers: indices of blocks to leave alone.

    Raises:
        InvalidArgument: the transformer is of another class, or a setting is out of range.
    """
    from diffusers import WanTransformer3DModel

    if not isinstance(transformer, WanTransformer3DModel):
        raise InvalidArgument(
            f"transformer must be a diffusers WanTransformer3DModel, got {type(transformer).__name__}"
        )
    settings = Settings(mode, implementation, GroupingPolicy(window, interval), clusters, min_tokens)
    _check_choices(settings)
    layers = {index: block.attn1 for index, block in enumerate(transformer.blocks) if index not in set(skip_layers)}
    return Handle(transformer, layers, settings)


class Handle:
    """VC-Attention on one model, from ``apply`` to ``remove``. As a context manager it removes itself."""

    def __init__(self, transformer, layers: dict, settings: Settings):
        self._settings = settings
        self._processors = []
        for index, layer in layers.items():
            processor = _Processor(self, index, layer.processor)
            layer.set_processor(processor)
            self._processors.append((layer, processor))
        self._run = _Run(None)
        self._hook = transformer.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self.active = True

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_exception) -> None:
        self.remove()

    def new_render(self, sigmas: Sequence[float] | Tensor | None = None) -> None:
        """Forget groupings and counts; ``sigmas`` are the N + 1 noise levels of the coming render.

        Without sigmas the grouping window cannot be placed: each layer is grouped once, at its first call. A noise
        level back at the start of the schedule begins a new render by itself.
        """
        self._run = _Run(None if sigmas is None else Schedule([float(sigma) for sigma in sigmas]))

    @contextmanager
    def render(self, sigmas: Sequence[float] | Tensor | None = None) -> Iterator[Handle]:
        """One render: a fresh start, and groupings freed at the end, also on an exception. Counts are kept."""
        self.new_render(sigmas)
        try:
            yield self
        finally:
            self._run.held.clear()

    def report(self) -> Report:
        """What happened since the last render began."""
        run = self._run
        return Report(
            layers=len(self._processors),
            calls=run.calls,
            served=run.served,
            declined=dict(run.declined),
            groupings=run.groupings,
            mode=run.mode,
            implementation=run.implementation,
        )

    def remove(self) -> None:
        """Give every layer its processor back and free the groupings. A second call does nothing.

        A layer that got another processor in the meantime keeps it; should that one call ours, ours passes
        everything on.
        """
        if not self.active:
            return
        self.active = False
        self._hook.remove()
        for layer, processor in self._processors:
            if layer.processor is processor:
                layer.set_processor(processor.previous)
        self._run.held.clear()

    def _before_forward(self, _module, args, kwargs) -> None:
        timestep = kwargs["timestep"] if "timestep" in kwargs else args[1]
        sigma = float(timestep.max()) / TRAIN_TIMESTEPS
        if self._run.is_restart(sigma):
            self._run = _Run(self._run.schedule)
        self._run.enter_forward(sigma)

    @torch.compiler.disable
    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """VC-Attention of one call, or None after counting why not."""
        run, settings = self._run, self._settings
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return run.decline("the call needs gradients")
        served_by = support(q, k, v, mode=settings.mode, implementation=settings.implementation, layout=LAYOUT)
        if not served_by:
            return run.decline(served_by.why)
        try:
            grouping = self._grouping(layer, v) if uses_grouping(served_by.mode) else None
            output = attention(
                q,
                k,
                v,
                mode=settings.mode,
                grouping=grouping,
                layout=LAYOUT,
                implementation=settings.implementation,
            )
        except UnsupportedCall as error:
            return run.decline(str(error))
        run.served += 1
        run.mode, run.implementation = served_by.mode, served_by.implementation
        return output

    def _grouping(self, layer: int, v: Tensor) -> Grouping | None:
        run, settings = self._run, self._settings
        key = (layer, run.forward, tuple(v.shape), v.device)
        held = run.held.get(key)
        if not run.regroup(settings.policy, None if held is None else held.step):
            return None if held is None else held.grouping
        tokens = v.shape[1]
        grouping = group_values(
            v,
            None if held is None else held.grouping,
            clusters=None if settings.clusters is None or held else min(settings.clusters, tokens),
            layout=LAYOUT,
            implementation=settings.implementation,
        )
        run.held[key] = _Held(grouping, run.step)
        run.groupings += 1
        return grouping


@dataclass(frozen=True)
class _Held:
    """A grouping and the step it was made at."""

    grouping: Grouping
    step: int


class _Run:
    """State of one render: where the schedule stands, the groupings held, and what was counted.

    ``forward`` numbers the model evaluations at one noise level (prompt, then negative prompt): the order in which
    a pipeline makes them does not change between steps, so it tells their groupings apart.
    """

    def __init__(self, schedule: Schedule | None):
        self.schedule = schedule
        self.held: dict[tuple, _Held] = {}
        self.first_sigma: float | None = None
        self.sigma: float | None = None
        self.forward = 0
        self.step = 0
        self.calls = 0
        self.served = 0
        self.groupings = 0
        self.declined: Counter[str] = Counter()
        self.mode: str | None = None
        self.implementation: str | None = None

    def is_restart(self, sigma: float) -> bool:
        """Whether this noise level can only be the start of another render."""
        return self.sigma is not None and sigma > self.sigma + SAME_LEVEL and sigma >= self.first_sigma

    def enter_forward(self, sigma: float) -> None:
        """Note the noise level of the model evaluation that begins."""
        if self.first_sigma is None:
            self.first_sigma = sigma
        same_level = self.sigma is not None and abs(sigma - self.sigma) <= SAME_LEVEL
        self.forward = self.forward + 1 if same_level else 0
        self.sigma = sigma
        self.step = self.schedule.step(sigma) if self.schedule else 0

    def regroup(self, policy: GroupingPolicy, last_step: int | None) -> bool:
        """Whether values are grouped in this call."""
        if self.schedule is None:
            return policy.window > 0.0 and last_step is None
        in_window = self.sigma is not None and self.schedule.in_first(policy.window, self.sigma)
        return policy.regroup(in_window, self.step, last_step)

    def decline(self, reason: str) -> None:
        """Count a call that goes to the layer's own attention."""
        self.declined[reason] += 1


class _Processor:
    """The processor of one self-attention layer; ``previous`` is the one it had."""

    def __init__(self, handle: Handle, layer: int, previous):
        self.handle = handle
        self.layer = layer
        self.previous = previous

    # diffusers writes its own backend choice and parallel set-up onto processors: both belong to the previous one.
    @property
    def _attention_backend(self):
        return getattr(self.previous, "_attention_backend", None)

    @_attention_backend.setter
    def _attention_backend(self, backend):
        self.previous._attention_backend = backend

    @property
    def _parallel_config(self):
        return getattr(self.previous, "_parallel_config", None)

    @_parallel_config.setter
    def _parallel_config(self, config):
        self.previous._parallel_config = config

    def __call__(
        self,
        attn,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs,
    ) -> Tensor:
        output = None
        if self.handle.active:
            run = self.handle._run
            run.calls += 1
            reason = self._refusal(hidden_states, encoder_hidden_states, attention_mask, kwargs)
            if reason is None:
                output = self.handle._attend(self.layer, *_project(attn, hidden_states, rotary_emb))
            else:
                run.decline(reason)
        if output is None:
            return self.previous(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs)
        output = output.flatten(2)
        for module in attn.to_out:
            output = module(output)
        return output

    def _refusal(self, hidden_states, encoder_hidden_states, attention_mask, kwargs) -> str | None:
        """Why this call is not for VC-Attention, as far as that shows before the projections."""
        if encoder_hidden_states is not None:
            return "the call is cross-attention"
        if attention_mask is not None:
            return "the call has an attention mask"
        if kwargs:
            return f"the call has arguments VC-Attention does not know: {', '.join(sorted(kwargs))}"
        if self._parallel_config is not None:
            return "the sequence is split over several devices"
        tokens = hidden_states.shape[1]
        if tokens < self.handle._settings.min_tokens:
            return f"{tokens} tokens are fewer than min_tokens"
        return None


def _project(attn, tokens: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, S, H, D] of a Wan self-attention layer, normalized and rotated."""
    if attn.fused_projections:
        q, k, v = attn.to_qkv(tokens).chunk(3, dim=-1)
    else:
        q, k, v = attn.to_q(tokens), attn.to_k(tokens), attn.to_v(tokens)
    q, k, v = (part.unflatten(-1, (attn.heads, -1)) for part in (attn.norm_q(q), attn.norm_k(k), v))
    if rotary is not None:
        q, k = _rotate(q, *rotary), _rotate(k, *rotary)
    return q, k, v


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair of channels (2i, 2i + 1) by its angle; the tables [1, S, 1, D] hold every angle twice."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cosine, sine = cosine[..., 0::2], sine[..., 0::2]
    turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def _check_choices(settings: Settings) -> None:
    """Refuse a mode or an implementation that does not exist now, not in the middle of a render."""
    probe = torch.empty(1, 1, 1, 64)
    support(probe, probe, probe, mode=settings.mode, implementation=settings.implementation)
    if settings.clusters is not None and settings.clusters < 1:
        raise InvalidArgument(f"clusters must be at least 1, got {settings.clusters!r}")
