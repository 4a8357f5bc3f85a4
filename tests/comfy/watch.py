"""Watches attention from outside the pack: every call a model makes, and whether our kernels served it."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class KernelCall:
    """One call of ``kernels.attention`` or ``kernels.group_values``."""

    function: str
    shape: tuple
    keywords: dict
    previous: bool = False
    result: object = None  # result and started_from are kept only while Watch.keep_results
    started_from: object = None


@dataclass
class Call:
    """One attention call of the model, seen at the call site."""

    q: tuple
    k: tuple
    options: dict
    keywords: frozenset
    step: int
    sigma: float
    kernel: list[KernelCall] = field(default_factory=list)
    groups: list[KernelCall] = field(default_factory=list)

    @property
    def block(self):
        if self.options.get("block_index") is None:
            return None
        return (self.options.get("block_type"), self.options["block_index"])

    @property
    def accelerated(self) -> bool:
        return bool(self.kernel)

    @property
    def self_attention(self) -> bool:
        return self.q[-2] == self.k[-2]

    @property
    def chunks(self) -> list:
        return self.options["cond_or_uncond"]


def step_of(sigma: float, schedule: list[float]) -> int:
    """The last schedule step whose level is not below ``sigma``; written apart from the pack's own rule."""
    found = 0
    for i, level in enumerate(schedule[:-1]):
        if level >= sigma - 1e-4:
            found = i
    return found


class Watch:
    def __init__(self):
        self.calls: list[Call] = []
        self.current: Call | None = None
        self.stray: list[KernelCall] = []  # kernel calls outside any attention call
        self.before = None  # called with each Call before it runs: where tests interrupt or raise
        self.in_kernel = None  # called with each KernelCall before it runs: where tests break the kernel
        self.keep_results = False

    def accelerated(self) -> list[Call]:
        return [call for call in self.calls if call.accelerated]

    def declined(self) -> list[Call]:
        return [call for call in self.calls if not call.accelerated]

    def grouped(self) -> Counter:
        """Rows (cond chunks times latent batch) that were grouped, by (step, block)."""
        rows = Counter()
        for call in self.calls:
            for group in call.groups:
                rows[call.step, call.block] += group.shape[0]
        return rows

    def grouped_steps(self) -> list[int]:
        return sorted({step for step, _ in self.grouped()})

    def positions(self) -> set:
        """(step, block) of the accelerated calls."""
        return {(call.step, call.block) for call in self.accelerated()}


def _options(options: dict) -> dict:
    kept = ("block_type", "block_index", "total_blocks", "cond_or_uncond", "uuids", "context_window", "img_slice")
    return {key: options[key] for key in kept if key in options}


@contextmanager
def watching(host, pack=None):
    """Record every attention call of the host's models, and every use of the pack's kernels inside them."""
    watch = Watch()

    def at_call_site(original):
        def optimized_attention(q, k, *args, **kwargs):
            options = kwargs.get("transformer_options") or {}
            sigmas, schedule = options.get("sigmas"), options.get("sample_sigmas")
            sigma = float(sigmas.flatten()[0]) if sigmas is not None else -1.0
            step = step_of(sigma, [float(s) for s in schedule]) if schedule is not None else -1
            shapes = [tuple((t.peek() if hasattr(t, "peek") else t).shape) for t in (q, k)]
            call = Call(*shapes, _options(options), frozenset(kwargs), step, sigma)
            watch.calls.append(call)
            outer, watch.current = watch.current, call
            try:
                if watch.before is not None:
                    watch.before(call)
                return original(q, k, *args, **kwargs)
            finally:
                watch.current = outer

        return optimized_attention

    def spy(function, name):
        def kernel(*args, **kwargs):
            tensor = args[0] if args else kwargs["q" if name == "attention" else "v"]
            seen = KernelCall(name, tuple(tensor.shape), dict(kwargs))
            if name == "group_values":
                previous = args[1] if len(args) > 1 else kwargs.get("previous")
                seen.previous = previous is not None
                if watch.keep_results:
                    seen.started_from = previous
            seen.keywords = {k: v for k, v in seen.keywords.items() if not isinstance(v, torch.Tensor)}
            seen.keywords.pop("previous", None)
            seen.keywords["grouping"] = kwargs.get("grouping") is not None
            if watch.in_kernel is not None:
                watch.in_kernel(seen)
            result = function(*args, **kwargs)
            if watch.keep_results:
                seen.result = result
            home = watch.current
            if home is None:
                watch.stray.append(seen)
            else:
                (home.kernel if name == "attention" else home.groups).append(seen)
            return result

        return kernel

    with ExitStack() as stack:
        if pack is not None:
            names = ("attention", "group_values")
            stack.enter_context(pack.replaced(**{n: spy(getattr(pack.kernels, n), n) for n in names}))
        undo = []
        for module in host.call_sites:
            undo.append((module, module.optimized_attention))
            module.optimized_attention = at_call_site(module.optimized_attention)
        try:
            yield watch
        finally:
            for module, original in undo:
                module.optimized_attention = original
