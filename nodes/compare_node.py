"""The VC Attention Compare node: two clips side by side, their difference, and how large it is."""

from __future__ import annotations

import json

from comfy_api.latest import io

from .compare_picture import difference, draw_curves, draw_strip
from .comparison import check_clips, compare, spread
from .pictures import as_image, preview

MOST_FRAMES = 4096
MOST_SHOWN = 12
MOST_AMPLIFICATION = 64


class VCAttentionCompare(io.ComfyNode):
    """Widgets and outputs never change their order."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VCAttentionCompare",
            display_name="VC Attention Compare",
            category="image/analysis",
            description=(
                "Compares two renders of the same length and size, for example with and without VC Attention: PSNR, "
                "SSIM and FLIP per frame, an amplified difference, and a strip of both. Another sample is not a "
                "worse sample: compare several seeds before judging."
            ),
            inputs=[
                io.Image.Input("reference", tooltip="The frames to compare with, for example rendered with mode off."),
                io.Image.Input("other", tooltip="The frames that are compared. As many, and as large."),
                *_widgets(),
            ],
            outputs=[
                io.Image.Output("strip", display_name="strip", tooltip="Both clips and their difference."),
                io.Image.Output("curves", display_name="curves", tooltip="PSNR, SSIM and FLIP frame by frame."),
                io.Image.Output("difference", display_name="difference", tooltip="The frame that differs most."),
                io.String.Output("json", display_name="json", tooltip="All numbers, for scripts."),
            ],
            is_output_node=True,
            search_aliases=["vc attention compare", "psnr", "ssim", "flip", "compare videos", "image difference"],
        )

    @classmethod
    def execute(cls, reference, other, measured_frames=12, shown_frames=5, amplification=8) -> io.NodeOutput:
        check_clips(reference, other)
        result = compare(reference, other, spread(len(reference), measured_frames))
        result["amplification"] = amplification
        shown = spread(len(reference), shown_frames)
        strip = as_image(draw_strip(reference, other, shown, amplification, result))
        curves = as_image(draw_curves(result))
        worst = difference(reference, other, result["most_different_frame"], amplification)
        return io.NodeOutput(strip, curves, worst, json.dumps(result), ui=preview(strip))


def _widgets() -> list:
    return [
        io.Int.Input(
            "measured_frames",
            default=12,
            min=1,
            max=MOST_FRAMES,
            optional=True,
            tooltip=(
                "Measure at most so many frames, spread evenly over the clip. More is more exact and takes longer: "
                "about one to four seconds a frame at 720p on two CPU cores."
            ),
        ),
        io.Int.Input(
            "shown_frames",
            default=5,
            min=1,
            max=MOST_SHOWN,
            optional=True,
            tooltip="So many frames stand side by side in the strip, from the first to the last.",
        ),
        io.Int.Input(
            "amplification",
            default=8,
            min=1,
            max=MOST_AMPLIFICATION,
            optional=True,
            tooltip="Differences are drawn so many times as strong, around middle gray.",
        ),
    ]
