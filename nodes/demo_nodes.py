"""The demo's nodes: a small video model that lies in this pack, its prompts, its clip sizes and its decoder.

With them a workflow renders on any machine without a download.
"""

from __future__ import annotations

import torch
from comfy_api.latest import io

from . import demo_files, demo_latents

CATEGORY = "VC Attention/demo"
MISSING = "the files in demo/weights are missing"
TOKEN = 2 * demo_latents.CELL  # pixels along a side of one token
MOST_PIXELS = 512
MOST_FRAMES = 128


class VCAttentionDemoModel(io.ComfyNode):
    """Loads the trained model through ComfyUI's own loader."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VCAttentionDemoModel",
            display_name="VC Attention Demo Model",
            category=CATEGORY,
            description=(
                "Loads the small Wan model that comes with this pack: 7 million weights, trained by the project on "
                "drawn clips and photographs. It knows only the prompts of VC Attention Demo Prompt."
            ),
            inputs=[],
            outputs=[io.Model.Output("model", display_name="model")],
            search_aliases=["vc attention demo", "tiny video model", "load demo model"],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        import comfy.sd

        return io.NodeOutput(comfy.sd.load_diffusion_model(str(demo_files.MODEL)))


class VCAttentionDemoPrompt(io.ComfyNode):
    """A stored prompt in the place of a text encoder. Widgets and outputs never change their order."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VCAttentionDemoPrompt",
            display_name="VC Attention Demo Prompt",
            category=CATEGORY,
            description="One of the prompts that the demo model was trained on. No text encoder is needed.",
            inputs=[
                io.Combo.Input(
                    "prompt",
                    options=list(demo_files.prompt_texts()) or [MISSING],
                    default=demo_files.DEFAULT_PROMPT if demo_files.prompt_texts() else MISSING,
                    tooltip="What the clip shows. Each seed gives another clip of the same kind.",
                )
            ],
            outputs=[
                io.Conditioning.Output("positive", display_name="positive", tooltip="The chosen prompt."),
                io.Conditioning.Output("negative", display_name="negative", tooltip="The empty prompt."),
            ],
            search_aliases=["vc attention demo prompt", "stored prompt", "prompt without text encoder"],
        )

    @classmethod
    def execute(cls, prompt) -> io.NodeOutput:
        return io.NodeOutput(*([[embedding, {}]] for embedding in demo_files.prompt_embeddings(prompt)))


class VCAttentionDemoLatent(io.ComfyNode):
    """An empty clip of the demo model. Widgets never change their order."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VCAttentionDemoLatent",
            display_name="VC Attention Demo Empty Latent",
            category=CATEGORY,
            description=(
                "Size and length of a clip of the demo model. Tokens of attention: frames x width / 8 x height / 8. "
                "The model was trained on 8 to 64 frames of 128 x 128 and on 16 frames of 256 x 256."
            ),
            inputs=[
                _size("width", "Width of the clip in pixels."),
                _size("height", "Height of the clip in pixels."),
                io.Int.Input("frames", default=16, min=1, max=MOST_FRAMES, tooltip="Frames, 16 a second."),
                io.Int.Input("batch_size", default=1, min=1, max=64, tooltip="Clips that are rendered at once."),
            ],
            outputs=[io.Latent.Output("latent", display_name="latent")],
            search_aliases=["vc attention demo latent", "empty latent video", "tiny clip size"],
        )

    @classmethod
    def execute(cls, width=128, height=128, frames=16, batch_size=1) -> io.NodeOutput:
        cell = demo_latents.CELL
        shape = (batch_size, demo_latents.CHANNELS, frames, height // cell, width // cell)
        return io.NodeOutput({"samples": torch.zeros(shape)})


class VCAttentionDemoDecode(io.ComfyNode):
    """The demo model's latents as frames, by a fixed linear transform in the place of a VAE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VCAttentionDemoDecode",
            display_name="VC Attention Demo Decode",
            category=CATEGORY,
            description="Turns the demo model's latents into frames. A fixed formula; no VAE is needed.",
            inputs=[io.Latent.Input("latent", tooltip="From the sampler.")],
            outputs=[io.Image.Output("frames", display_name="frames", tooltip="All frames of all clips.")],
            search_aliases=["vc attention demo decode", "decode without vae", "tiny video decode"],
        )

    @classmethod
    def execute(cls, latent) -> io.NodeOutput:
        import comfy.latent_formats

        samples = comfy.latent_formats.Wan21().process_in(latent["samples"].float().cpu())
        frames = demo_latents.decode(samples).flatten(0, 1)
        return io.NodeOutput(frames.movedim(1, -1).contiguous())


def _size(name: str, tooltip: str):
    return io.Int.Input(name, default=128, min=32, max=MOST_PIXELS, step=TOKEN, tooltip=tooltip)


DEMO_NODES = (VCAttentionDemoModel, VCAttentionDemoPrompt, VCAttentionDemoLatent, VCAttentionDemoDecode)
