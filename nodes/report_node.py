"""The VC Attention Report node: what the runs of this prompt did, as a picture and as JSON."""

from __future__ import annotations

import json

from comfy_api.latest import io

from .host import prompt_id
from .pictures import as_image, preview
from .record import RECORD
from .report_picture import draw_report

NOTHING_RAN = (
    "No sampler with VC Attention Patch ran in this prompt. Either no such node is in the model line, or ComfyUI took "
    "the sampler's result from its cache: change the seed and queue again."
)


class VCAttentionReport(io.ComfyNode):
    """Passes the latent through, so that it runs after the sampler. Outputs never change their order."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VCAttentionReport",
            display_name="VC Attention Report",
            category="model/patch",
            description=(
                "Shows what VC Attention did in this prompt's renders: per block and step which calls were "
                "accelerated, how long they took, what was left alone and why. Put it behind the (last) sampler."
            ),
            inputs=[
                io.Latent.Input("latent", tooltip="From the sampler. It passes through unchanged."),
            ],
            outputs=[
                io.Latent.Output("latent", display_name="latent"),
                io.Image.Output("picture", display_name="picture"),
                io.String.Output("json", display_name="json"),
            ],
            is_output_node=True,
            search_aliases=["vc attention report", "attention statistics", "low-bit attention report"],
        )

    @classmethod
    def execute(cls, latent) -> io.NodeOutput:
        prompt = prompt_id()
        runs = RECORD.runs(prompt)
        report = {"version": 1, "prompt": prompt, "runs": runs}
        if not runs:
            report["note"] = NOTHING_RAN
        picture = as_image(draw_report(runs, NOTHING_RAN))
        return io.NodeOutput(latent, picture, json.dumps(report), ui=preview(picture))
