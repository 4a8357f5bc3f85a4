"""The VC Attention Patch node."""

from __future__ import annotations

from comfy_api.latest import io

from .model_patch import patch_model, unpatch_model
from .settings import IMPLEMENTATIONS, MIN_TOKENS, MODES, MOST_CLUSTERS, MOST_TOKENS, Settings, parse_blocks
from .status import LiveStatus


class VCAttentionPatch(io.ComfyNode):
    """Widgets are optional so that a workflow saved before one existed gets its default; never reorder them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VCAttentionPatch",
            display_name="VC Attention Patch",
            category="model/patch",
            description=(
                "Speeds up the attention of video models (Wan, HunyuanVideo, MiniMax-H3) with 8-bit or 4-bit "
                "arithmetic on supported NVIDIA GPUs. Put it last, directly before the sampler or guider; on "
                "Wan2.2 one for each of the two models. After a render it says what it did."
            ),
            inputs=[io.Model.Input("model"), *_main_widgets(), *map(_advanced, _advanced_widgets())],
            outputs=[io.Model.Output()],
            hidden=[io.Hidden.unique_id],
            # Two equal nodes must not share one cached output: each run reports to the node it was made by.
            not_idempotent=True,
            search_aliases=[
                "vc attention",
                "vsmooth",
                "expcast",
                "low-bit attention",
                "int8 attention",
                "fp8 attention",
                "fp4 attention",
                "faster attention",
                "speed up video",
            ],
        )

    @classmethod
    def validate_inputs(cls, skip_blocks=None):
        """ComfyUI checks every other widget by itself, before a prompt runs."""
        try:
            parse_blocks(skip_blocks or "")
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        model,
        mode="auto",
        grouping_window=0.25,
        refresh_interval=4,
        start_percent=0.0,
        end_percent=1.0,
        skip_blocks="",
        clusters=0,
        implementation="auto",
        min_tokens=MIN_TOKENS,
    ) -> io.NodeOutput:
        settings = Settings(
            mode,
            grouping_window,
            refresh_interval,
            start_percent,
            end_percent,
            skip_blocks,
            clusters,
            implementation,
            min_tokens,
        )
        node_id = getattr(cls.hidden, "unique_id", None)
        if settings.mode == "off":
            LiveStatus(node_id).off()
            return io.NodeOutput(unpatch_model(model))
        return io.NodeOutput(patch_model(model, settings, node_id))


def _main_widgets() -> list:
    return [
        io.Combo.Input(
            "mode",
            options=list(MODES),
            default="auto",
            optional=True,
            tooltip=(
                "auto: what fits your GPU (4-bit on RTX 50, RTX PRO and DGX Spark, 8-bit on RTX 40 and data-center "
                "cards; other hardware renders as without this node).\n"
                "8-bit: close to the original picture.\n"
                "4-bit: for cards with 4-bit arithmetic; changes the picture more.\n"
                "off: the model passes through unchanged.\n"
                "8-bit precise: on H100 and H200, a quarter of 8-bit's error, in 1.5 times its time; groups nothing."
            ),
        ),
        io.Float.Input(
            "grouping_window",
            default=0.25,
            min=0.0,
            max=1.0,
            step=0.05,
            round=0.01,
            optional=True,
            tooltip=(
                "Share of the steps, from the start of the render, in which similar tokens are sorted together so "
                "that low-bit numbers lose less detail. The early steps decide the picture: 0.25 is a good trade, "
                "1.0 sorts to the end and costs time, 0 switches sorting off."
            ),
        ),
        io.Int.Input(
            "refresh_interval",
            default=4,
            min=1,
            max=50,
            optional=True,
            tooltip=(
                "Inside the grouping window, sort anew every so many steps. Smaller follows the values more closely, "
                "larger is faster."
            ),
        ),
    ]


def _advanced_widgets() -> list:
    return [
        io.Float.Input(
            "start_percent",
            default=0.0,
            min=0.0,
            max=1.0,
            step=0.01,
            round=0.001,
            optional=True,
            tooltip="Leave the render untouched before this share of the steps. 0 starts at once.",
        ),
        io.Float.Input(
            "end_percent",
            default=1.0,
            min=0.0,
            max=1.0,
            step=0.01,
            round=0.001,
            optional=True,
            tooltip="Leave the render untouched after this share of the steps. 1 goes on to the last step.",
        ),
        io.String.Input(
            "skip_blocks",
            default="",
            optional=True,
            tooltip=(
                "Blocks of the model to leave untouched, counted from 0: '0-2,39'. With a block type in front it "
                "means only those: 'double:0-2,single:37'. Empty: none."
            ),
        ),
        io.Int.Input(
            "clusters",
            default=0,
            min=0,
            max=MOST_CLUSTERS,
            optional=True,
            tooltip="Into how many groups tokens are sorted. 0 chooses by the length of the clip.",
        ),
        io.Combo.Input(
            "implementation",
            options=list(IMPLEMENTATIONS),
            default="auto",
            optional=True,
            tooltip=(
                "auto: the fastest GPU kernel for your card, or none where none runs.\n"
                "cuda (H100, H200), triton8 (8-bit), triton4 (4-bit): only this kernel, or none; to compare kernels or "
                "trace a fault.\n"
                "reference: the same numbers in plain PyTorch on any machine. Very slow; for comparing pictures."
            ),
        ),
        io.Int.Input(
            "min_tokens",
            default=MIN_TOKENS,
            min=0,
            max=MOST_TOKENS,
            optional=True,
            tooltip=(
                "Leave attention over fewer tokens than this untouched: it is fast anyway, and preparing it can "
                "cost more than it saves. A 5-second 640x640 Wan clip has 33600 tokens."
            ),
        ),
    ]


def _advanced(widget):
    """Fold the widget away; a later ComfyUI than 0.3.75 has an argument for this, but reads it from here too."""
    widget.extra_dict["advanced"] = True
    return widget
