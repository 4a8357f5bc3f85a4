"""The demo's nodes: the shipped model through ComfyUI's own loader, and the clip that diffusers renders from it."""

import json

import pytest
import torch

from .pack import REPOSITORY

RECORDED = REPOSITORY / "tests" / "demo_render.json"  # written by tests/torch_cpu/test_demo.py


def module(pack, name):
    return next(m for m in pack.modules() if m.__name__.endswith(f".nodes.{name}"))


def test_a_latent_has_the_size_of_its_pixels(host, pack):
    sizes = {"width": 160, "height": 96, "frames": 5, "batch_size": 2}
    (latent,) = host.execute("VCAttentionDemoLatent", sizes)
    assert latent["samples"].shape == (2, 16, 5, 24, 40)
    assert not latent["samples"].any()


def test_every_prompt_of_the_list_has_its_embedding(host, pack):
    (choice,) = pack.nodes["VCAttentionDemoPrompt"].GET_SCHEMA().inputs
    positives = []
    for text in choice.options:
        (positive,), (negative,) = host.execute("VCAttentionDemoPrompt", {"prompt": text})
        assert positive[0].shape == negative[0].shape == (1, 8, 64)
        positives.append(positive[0])
    assert len(positives) == 15
    assert choice.default == json.loads(RECORDED.read_text(encoding="utf-8"))["prompt"]
    assert len({tuple(p.flatten().tolist()) for p in positives}) == 15


@pytest.mark.comfy
def test_decoding_undoes_comfyui_s_latent_scale(host, pack):
    import comfy.latent_formats

    clip = torch.rand(1, 3, 3, 4, 4).repeat_interleave(4, -1).repeat_interleave(4, -2)
    latents = comfy.latent_formats.Wan21().process_out(module(pack, "demo_latents").encode(clip))
    (frames,) = host.execute("VCAttentionDemoDecode", {"latent": {"samples": latents}})
    assert frames.shape == (3, 16, 16, 3)
    assert torch.allclose(frames, clip[0].movedim(1, -1), atol=1e-5)


@pytest.mark.comfy
def test_comfyui_renders_the_recorded_clip(host, pack):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    with torch.inference_mode():
        (model,) = host.execute("VCAttentionDemoModel", {})
    positive, negative = host.execute("VCAttentionDemoPrompt", {"prompt": recorded["prompt"]})
    (latent,) = host.execute("VCAttentionDemoLatent", recorded["size"])
    samples = host.ksampler(
        host.set_shift(model, recorded["shift"]),
        positive,
        negative,
        latent["samples"],
        steps=recorded["steps"],
        cfg=recorded["guidance"],
        seed=recorded["seed"],
    )
    (frames,) = host.execute("VCAttentionDemoDecode", {"latent": {"samples": samples}})
    cells = frames.view(len(frames), *frames.shape[1:3], 3).movedim(-1, 1)
    means = torch.nn.functional.avg_pool2d(cells, recorded["cell"]).movedim(1, -1)
    assert torch.allclose(means, torch.tensor(recorded["means"]), atol=recorded["tolerance"])


@pytest.mark.comfy
def test_the_patch_serves_the_demo_model(host, pack):
    """The tiny workflow's chain: every self-attention call accelerated, a picture close to the plain one.

    6 layers and 6 steps, both prompts in one batch; as many calls again are cross-attention.
    """
    with torch.inference_mode():
        (model,) = host.execute("VCAttentionDemoModel", {})
    model = host.set_shift(model, 3.0)
    positive, negative = host.execute("VCAttentionDemoPrompt", {"prompt": "fish swim through green water"})
    (latent,) = host.execute("VCAttentionDemoLatent", {"width": 64, "height": 64, "frames": 4, "batch_size": 1})

    def frames(model):
        samples = host.ksampler(model, positive, negative, latent["samples"], steps=6)
        return host.execute("VCAttentionDemoDecode", {"latent": {"samples": samples}})[0]

    plain = frames(model)
    host.texts.clear()
    ours = frames(pack.patch(model, mode="8-bit", implementation="reference", min_tokens=64))
    assert "36 of 72 attention calls" in host.texts[-1][0], host.texts[-1][0]
    assert "cross-attention (36)" in host.texts[-1][0], host.texts[-1][0]
    error = (ours - plain).square().mean()
    assert error > 0
    assert -10 * torch.log10(error) > 29  # 35.0 was measured
