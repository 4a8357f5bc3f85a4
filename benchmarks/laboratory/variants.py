"""What is rendered: formats, order of tokens, and when values are grouped."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import formats
from .formats import Formats

GROUPED = ("k-means", "balanced")  # "balanced": k-means with clusters of equal size
EARLY, LATE, HALF, ALL, NEVER = (0.0, 0.25), (0.75, 1.0), (0.0, 0.5), (0.0, 1.0), (0.0, 0.0)


@dataclass(frozen=True)
class Plan:
    """What happens to the values before they are quantized.

    Attributes:
        demean: block means are taken out: "always", "window" (only inside it, as the paper does) or "never".
        order: of keys and values, "sequence", "cube" or one of GROUPED; before the first grouping it is the sequence.
        window: first and last share of the steps between which values are grouped.
        interval: steps for which a grouping is held.
        warm: a grouping starts from the one before it.
    """

    demean: str = "always"
    order: str = "k-means"
    window: tuple[float, float] = EARLY
    interval: int = 4
    warm: bool = True

    def in_window(self, step: int, steps: int) -> bool:
        return self.window[0] * steps - 1e-9 <= step < self.window[1] * steps - 1e-9

    def regroups(self, step: int, steps: int, last: int | None) -> bool:
        """Whether step ``step`` of ``steps`` makes a grouping; ``last`` is the step of the one held."""
        wanted = self.order in GROUPED and self.in_window(step, steps)
        return wanted and (last is None or step - last >= self.interval)

    def removes_means(self, step: int, steps: int) -> bool:
        return self.demean == "always" or (self.demean == "window" and self.in_window(step, steps))

    def refreshes(self, steps: int) -> list[int]:
        """The steps that make a grouping."""
        made: list[int] = []
        for step in range(steps):
            if self.regroups(step, steps, made[-1] if made else None):
                made.append(step)
        return made


MEANS_STAY = Plan(demean="never", order="sequence")


@dataclass(frozen=True)
class Variant:
    """One way to render; ``title`` names it in rows and tables.

    Attributes:
        formats: number formats; None is torch's own 16-bit attention.
        plan: order and means of the values.
        kernel: "emulated", or the mode of the package's own CUDA kernel.
        start_noise: standard deviation of what is added to the start noise (whose own is 1).
        precision: dtype of the model and of the attention's inputs, by torch's name.
        family: what it belongs to in the tables.
    """

    title: str
    family: str
    formats: Formats | None = None
    plan: Plan = field(default=MEANS_STAY)
    kernel: str = "emulated"
    start_noise: float = 0.0
    precision: str = "float16"


PRECISE = "8-bit precise"
OURS = {
    "8-bit": formats.OURS_8BIT,
    "INT8 throughout": formats.INT8_THROUGHOUT,
    "4-bit": formats.OURS_4BIT,
}
FAR_ALONE = "4-bit without own block"
AT_6 = f"{FAR_ALONE}, largest at 6"
ROW_MAXIMUM = "INT8 throughout, u8 of the row's maximum"
CHANNEL_ROW_MAXIMUM = "INT8 by channel, u8 of the row's maximum"
EARLIER_4BIT = {FAR_ALONE: formats.FAR_4BIT, AT_6: formats.NVFP4_AT_6}
OWN_STUDIES = {
    "4-bit, own cube": formats.OURS_4BIT.but(own="cube"),
    "8-bit, own block": formats.OURS_8BIT.but(own="block"),
    "INT8 throughout, own block": formats.INT8_THROUGHOUT.but(own="block"),
}
OTHERS = {
    "plain FP8": formats.PLAIN_FP8,
    "SageAttention2's formats": formats.SAGE_ATTENTION_2,
    "ComfyUI's INT8 formats": formats.COMFY_INT8,
}


def render_variants() -> list[Variant]:
    """The main table: controls, the formats of others, ours with and without V-Smooth."""
    return [
        Variant("16 bit, another kernel", "control", formats.SIXTEEN_BIT),
        Variant("bf16 in the place of fp16", "control", precision="bfloat16"),
        Variant("16 bit, start noise + 0.001", "control", start_noise=1e-3),
        *(Variant(name, "others", kinds) for name, kinds in OTHERS.items()),
        Variant(PRECISE, "8-bit", formats.OURS_PRECISE),
        *(variant for name, kinds in OURS.items() for variant in _with_and_without(name, kinds)),
        *(variant for name, kinds in EARLIER_4BIT.items() for variant in _with_and_without(name, kinds)),
        *(variant for name, kinds in OWN_STUDIES.items() for variant in _with_and_without(name, kinds)),
        Variant(f"{PRECISE}, own block", "8-bit, own block", formats.OURS_PRECISE.but(own="block")),
        Variant(CHANNEL_ROW_MAXIMUM, "study", formats.COMFY_INT8.but(probabilities="u8")),
        *_with_and_without(ROW_MAXIMUM, formats.INT8_THROUGHOUT.but(probabilities="u8")),
        Variant("8-bit, CUDA kernel", "8-bit", formats.OURS_8BIT, Plan(), kernel="8-bit"),
        Variant("8-bit precise, CUDA kernel", "8-bit", formats.OURS_PRECISE, Plan(), kernel=PRECISE),
    ]


def _with_and_without(name: str, kinds: Formats) -> list[Variant]:
    return [Variant(name, name, kinds, Plan()), Variant(f"{name}, means stay", name, kinds)]


def ablation_variants() -> list[Variant]:
    """What else the values' order and format could be, and what V-Smooth does to the formats of others."""
    made = []
    for name, kinds in {**OURS, FAR_ALONE: formats.FAR_4BIT}.items():
        rotated = kinds.but(rotate_values=True)
        made += _with_and_without(name, kinds)
        made += [
            Variant(f"{name}, sequence order", name, kinds, Plan(order="sequence")),
            Variant(f"{name}, static cube", name, kinds, Plan(order="cube")),
            Variant(f"{name}, balanced k-means", name, kinds, Plan(order="balanced")),
            Variant(f"{name}, Hadamard on V, means stay", name, rotated),
            Variant(f"{name}, Hadamard on V", name, rotated, Plan()),
        ]
    cast = formats.OURS_8BIT.but(probabilities="e4m3")
    made += _with_and_without("8-bit, exponential and cast", cast)
    made.append(Variant("8-bit, CUDA kernel, means stay", "8-bit", formats.OURS_8BIT, kernel="8-bit"))
    for name, kinds in OTHERS.items():
        made += [Variant(name, "others", kinds), Variant(f"{name}, V-Smooth", "others", kinds, Plan())]
    return made


def schedule_variants() -> list[Variant]:
    """The table of schedules: windows and intervals warm, some cold, and means in the window only, as in the paper."""
    plans = [MEANS_STAY, Plan(window=NEVER, order="sequence")]
    for window in (EARLY, ALL):
        plans += [Plan(window=window, interval=interval) for interval in (1, 2, 4, 8)]
    plans.append(Plan(window=HALF))
    plans.append(Plan(window=LATE))
    plans += [Plan(window=window, warm=False) for window in (EARLY, ALL)]
    plans += [Plan(window=window, demean="window") for window in (EARLY, LATE)]
    modes = {"8-bit": formats.OURS_8BIT, "4-bit": formats.OURS_4BIT, FAR_ALONE: formats.FAR_4BIT}
    return [Variant(f"{mode}, {_named(plan)}", mode, kinds, plan) for mode, kinds in modes.items() for plan in plans]


def _named(plan: Plan) -> str:
    if plan.demean == "never":
        return "means stay"
    if plan.order == "sequence":
        return "sequence order"
    start = "warm" if plan.warm else "cold"
    means = ", means in the window only" if plan.demean == "window" else ""
    return f"window {plan.window[0]:g} to {plan.window[1]:g}, interval {plan.interval}, {start}{means}"


def long_variants() -> list[Variant]:
    """The main table once more, for longer clips."""
    return render_variants()
