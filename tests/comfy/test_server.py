"""The whole path: a ComfyUI server, a prompt over HTTP, the text on the node over the websocket."""

from pathlib import Path

import pytest

from . import checkpoints
from .conftest import COMFYUI_PATH
from .renders import cosine
from .server import Server, summary_lines

pytestmark = pytest.mark.comfy

PATCH = "7"


@pytest.fixture(scope="module")
def server(_hosts, tmp_path_factory):
    """One server for this file. Its checkpoints are those of the in-process host."""
    host, _ = _hosts("real")
    for kind in ("wan", "hv15"):
        checkpoints.build(kind, host.base / "models" / "diffusion_models")
    made = Server(Path(COMFYUI_PATH).resolve(), tmp_path_factory.mktemp("server"), host.base / "models")
    try:
        made.wait_until_up()
        yield made
    finally:
        made.stop()


def wan(patch: dict | None, steps=4, seed=3, prefix="wan"):
    """KSampler on the tiny Wan; ``patch`` holds our node's widgets, None is a graph without our node."""
    graph = {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "tiny_wan.safetensors", "weight_dtype": "default"}},
        "2": {"class_type": "TestConditioning", "inputs": {"tokens": 32, "channels": 4096, "seed": 1}},
        "3": {"class_type": "TestConditioning", "inputs": {"tokens": 32, "channels": 4096, "seed": 2}},
        "4": {
            "class_type": "EmptyHunyuanLatentVideo",
            "inputs": {"width": 128, "height": 128, "length": 9, "batch_size": 1},
        },
        "5": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0],
                "positive": ["2", 0],
                "negative": ["3", 0],
                "latent_image": ["4", 0],
                "seed": seed,
                "steps": steps,
                "cfg": 3.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
        "6": {"class_type": "SaveLatent", "inputs": {"samples": ["5", 0], "filename_prefix": f"latents/{prefix}"}},
    }
    if patch is not None:
        graph[PATCH] = {"class_type": "VCAttentionPatch", "inputs": {"model": ["1", 0], **patch}}
        graph["5"]["inputs"]["model"] = [PATCH, 0]
    return graph


def hunyuan(patch: dict | None):
    """The HunyuanVideo 1.5 template's shape: SamplerCustomAdvanced, sigmas from the model before the shift."""
    graph = {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "tiny_hv15.safetensors", "weight_dtype": "default"}},
        "2": {"class_type": "TestConditioning", "inputs": {"tokens": 30, "channels": 3584, "seed": 1}},
        "3": {"class_type": "TestConditioning", "inputs": {"tokens": 17, "channels": 3584, "seed": 2}},
        "4": {
            "class_type": "EmptyHunyuanVideo15Latent",
            "inputs": {"width": 128, "height": 128, "length": 9, "batch_size": 1},
        },
        "5": {"class_type": "ModelSamplingSD3", "inputs": {"model": ["1", 0], "shift": 7.0}},
        "8": {
            "class_type": "CFGGuider",
            "inputs": {"model": ["5", 0], "positive": ["2", 0], "negative": ["3", 0], "cfg": 6.0},
        },
        "9": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
        "10": {
            "class_type": "BasicScheduler",
            "inputs": {"model": ["1", 0], "scheduler": "simple", "steps": 4, "denoise": 1.0},
        },
        "11": {"class_type": "RandomNoise", "inputs": {"noise_seed": 5}},
        "12": {
            "class_type": "SamplerCustomAdvanced",
            "inputs": {
                "noise": ["11", 0],
                "guider": ["8", 0],
                "sampler": ["9", 0],
                "sigmas": ["10", 0],
                "latent_image": ["4", 0],
            },
        },
        "6": {"class_type": "SaveLatent", "inputs": {"samples": ["12", 0], "filename_prefix": "latents/hv"}},
    }
    if patch is not None:
        graph[PATCH] = {"class_type": "VCAttentionPatch", "inputs": {"model": ["5", 0], **patch}}
        graph["8"]["inputs"]["model"] = [PATCH, 0]
    return graph


REFERENCE = {"mode": "8-bit", "implementation": "reference", "min_tokens": 0}


def test_the_node_is_offered(server):
    status, info = server.get("/object_info/VCAttentionPatch")
    assert status == 200
    node = info["VCAttentionPatch"]
    assert node["display_name"] == "VC Attention Patch"
    assert node["output"] == ["MODEL"]
    assert node["python_module"] == "custom_nodes.comfyui-vc-attention"
    names = [name for group in ("required", "optional") for name in node["input"].get(group, {})]
    assert names[:4] == ["model", "mode", "grouping_window", "refresh_interval"]


def test_web_files_are_served(server):
    """Help pages and scripts below web/, under the folder's name."""
    files = [p for p in (server.pack / "web").rglob("*") if p.is_file()]
    for path in files:
        status, body = server.get(f"/extensions/comfyui-vc-attention/{path.relative_to(server.pack / 'web')}")
        assert status == 200, path
        assert body


def test_wan_prompt(server):
    """The reference renders close to the plain graph, and the node says what it did."""
    plain = server.run(wan(None))
    assert plain.ending == "execution_success", plain.data
    assert plain.texts == []
    before = len(summary_lines(server.log()))
    ours = server.run(wan(REFERENCE))
    assert ours.ending == "execution_success", ours.data
    a, b = server.latent(plain), server.latent(ours)
    assert cosine(a, b) > 0.9995
    assert (a - b).abs().max() > 1e-3
    ((text, node),) = ours.texts
    assert node == PATCH
    assert "8 of 16" in text
    assert "8-bit" in text
    lines = summary_lines(server.log())[before:]
    assert len(lines) == 1
    assert "8 of 16" in lines[0]


def test_auto_without_a_gpu_is_bit_identical(server):
    import torch

    plain = server.run(wan(None, seed=4))
    ours = server.run(wan({}, seed=4))
    assert torch.equal(server.latent(plain), server.latent(ours))
    ((text, _),) = ours.texts
    assert "0 %" in text or "0 of" in text


def test_hunyuan_video_15_prompt_through_sampler_custom_advanced(server):
    plain, ours = server.run(hunyuan(None)), server.run(hunyuan({**REFERENCE, "min_tokens": 100}))
    assert ours.ending == "execution_success", ours.data
    assert cosine(server.latent(plain), server.latent(ours)) > 0.9995
    ((text, _),) = ours.texts
    assert "of 32" in text  # 2 blocks and 2 refiner calls, 4 steps, 2 prompts


def test_requeued_prompt_with_another_seed(server):
    """The node's output is cached: only the sampler runs again. The text comes again, the counts do not add up."""
    first = server.run(wan(REFERENCE, seed=10))
    second = server.run(wan(REFERENCE, seed=11))
    assert "execution_cached" in second.events
    assert "8 of 16" in first.texts[0][0]
    assert "8 of 16" in second.texts[0][0]


def test_cancel_and_render_again(server):
    """B041: cancel in mid-render; the next render gives the bits of one without a cancel before it."""
    import torch

    expected = server.latent(server.run(wan(REFERENCE, seed=20)))
    stopped = server.run(wan(REFERENCE, seed=21, steps=400), interrupt_after=3)
    assert stopped.ending == "execution_interrupted"
    # Another prefix, so that the result is not the cached file.
    again = server.run(wan(REFERENCE, seed=20, prefix="again"))
    assert torch.equal(server.latent(again), expected)


@pytest.mark.parametrize(
    ("widget", "value"),
    [("mode", "9-bit"), ("refresh_interval", 0), ("grouping_window", 2.0), ("skip_blocks", "first"), ("clusters", -1)],
)
def test_wrong_value_in_a_prompt_is_refused_by_name(server, widget, value):
    status, answer = server.post(wan({**REFERENCE, widget: value}))
    assert status == 400
    errors = answer["node_errors"][PATCH]["errors"]
    assert any(widget in f"{e['details']} {e['extra_info'].get('input_name')}" for e in errors)


def test_old_and_foreign_inputs_in_a_prompt(server):
    """A workflow from before a widget existed, and one with a widget that is gone."""
    old = server.run(wan({"mode": "8-bit"}, seed=30))
    assert old.ending == "execution_success"
    newer = server.run(wan({**REFERENCE, "smoothing": 0.5}, seed=30))
    assert newer.ending == "execution_success"
    assert "8 of 16" in newer.texts[0][0]


def test_bypassed_after_use(server):
    """B013: the same graph without the node, after renders with it, is the plain picture."""
    import torch

    before = server.latent(server.run(wan(None, seed=40, prefix="before")))
    server.run(wan(REFERENCE, seed=40))
    after = server.latent(server.run(wan(None, seed=40, prefix="after")))
    off = server.latent(server.run(wan({**REFERENCE, "mode": "off"}, seed=40)))
    assert torch.equal(before, after)
    assert torch.equal(before, off)


def test_no_traceback_in_the_log(server):
    """Last: nothing above left one."""
    assert "Traceback" not in server.log()
    assert "Error while calling comfy_entrypoint" not in server.log()
