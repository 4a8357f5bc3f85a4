"""The whole path: a ComfyUI server, a prompt over HTTP, the text on the node over the websocket."""

import json
import math
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


def test_status_goes_out_and_is_kept_for_a_reloaded_page(server):
    ours = server.run(wan(REFERENCE, seed=50))
    assert ours.events.count("vc_attention.status") >= 2
    status, answer = server.get("/vc_attention/status")
    assert status == 200
    (kept,) = [s for s in answer["statuses"] if s["node"] == PATCH]
    assert (kept["state"], kept["prompt"], kept["workflow"]) == ("done", ours.id, None)
    assert kept["client"] == ours.client
    assert (kept["accelerated"], kept["declined"]) == (8, 8)
    assert "\n".join(kept["lines"]) == ours.texts[0][0]


def with_report(graph: dict, report="20") -> dict:
    """A report behind the sampler, and its JSON readable in the history."""
    text = {"class_type": "PreviewAny", "inputs": {"source": [report, 2]}}
    return {
        **graph,
        report: {"class_type": "VCAttentionReport", "inputs": {"latent": ["5", 0]}},
        f"{report}1": text,
    }


def report_of(run, report="20") -> dict:
    outputs = run.history["outputs"]
    assert outputs[report]["images"], "the picture on the node"
    return json.loads(outputs[f"{report}1"]["text"][0])


def test_report_in_a_prompt(server):
    """It runs after the sampler and tells of this prompt; from the cache it is shown again as it was."""
    first = server.run(with_report(wan(REFERENCE, seed=51)))
    assert first.ending == "execution_success", first.data
    report = report_of(first)
    assert report["prompt"] == first.id
    assert [(r["node"], r["steps"], r["accelerated"]) for r in report["runs"]] == [(PATCH, 4, 8)]
    again = server.run(with_report(wan(REFERENCE, seed=51)))
    assert report_of(again) == report


def test_report_added_to_a_cached_sampler_says_that_nothing_ran(server):
    server.run(wan(REFERENCE, seed=52))
    late = server.run(with_report(wan(REFERENCE, seed=52), report="30"))
    assert late.ending == "execution_success", late.data
    report = report_of(late, "30")
    assert report["runs"] == []
    assert "cache" in report["note"]


def test_compare_in_a_prompt(server):
    """Through the real executor: a gray clip against a brighter one; and clips of unlike size are refused by name."""

    def picture(color, width=64):
        inputs = {"width": width, "height": 48, "batch_size": 2, "color": color}
        return {"class_type": "EmptyImage", "inputs": inputs}

    inputs = {"reference": ["1", 0], "other": ["2", 0], "measured_frames": 2, "shown_frames": 2, "amplification": 4}
    graph = {
        "1": picture(0x808080),
        "2": picture(0x8A8A8A),
        "3": {"class_type": "VCAttentionCompare", "inputs": inputs},
        "4": {"class_type": "PreviewAny", "inputs": {"source": ["3", 3]}},
    }
    done = server.run(graph)
    assert done.ending == "execution_success", done.data
    assert done.history["outputs"]["3"]["images"]
    result = json.loads(done.history["outputs"]["4"]["text"][0])
    assert result["psnr"] == pytest.approx(-20 * math.log10(10 / 255), abs=0.01)
    refused = server.run({**graph, "2": picture(0x8A8A8A, width=32)})
    assert refused.ending == "execution_error"
    for shape in ("[2, 48, 64, 3]", "[2, 48, 32, 3]"):
        assert shape in refused.data["exception_message"]


def test_log_level_of_the_settings(server):
    assert server.send("/vc_attention/log_level", {"level": "warning"}) == (200, {"level": "warning"})
    before = len(summary_lines(server.log()))
    server.run(wan(REFERENCE, seed=53))
    assert len(summary_lines(server.log())) == before
    status, answer = server.send("/vc_attention/log_level", {"level": "loud"})
    assert status == 400
    assert "loud" in answer["error"]
    assert server.send("/vc_attention/log_level", {"level": "default"})[0] == 200
    server.run(wan(REFERENCE, seed=54))
    assert len(summary_lines(server.log())) == before + 1


def test_translations_are_served(server):
    status, answer = server.get("/i18n")
    assert status == 200
    assert answer["fr"]["nodeDefs"]["VCAttentionPatch"]["inputs"]["mode"]["name"] == "mode"
    assert answer["en"]["settings"]["VCAttention_LogLevel"]["name"]


def test_no_traceback_in_the_log(server):
    """Last: nothing above left one."""
    refused = "VC Attention Compare: [frames, height, width, channels]"  # test_compare_in_a_prompt asked for it
    tracebacks = server.log().split("Traceback")[1:]
    assert [text for text in tracebacks if refused not in text] == []
    assert "Error while calling comfy_entrypoint" not in server.log()
