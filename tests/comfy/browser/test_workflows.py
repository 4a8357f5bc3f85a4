"""Every workflow of ``workflows/`` in the real frontend: valid against the server, and rendered to the end.

What a render here replaces is said in ``stand_ins.py``: tiny models under the official names, and test nodes in the
place of text encoders and VAEs. The clip is made small through the widgets, as a user would.
"""

from __future__ import annotations

import json
import re

import pytest

from ..pack import REPOSITORY
from . import graphs
from .object_info import complaints
from .stand_ins import replace_loaders

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

WORKFLOWS = sorted((REPOSITORY / "workflows").glob("*.json"))
SAMPLERS = ("KSampler", "KSamplerAdvanced", "CFGGuider", "BasicGuider")
MOST_BYTES = 60_000
every_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def load(path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def of_type(prompt: dict, kind: str) -> dict[str, dict]:
    return {key: node for key, node in prompt.items() if node["class_type"] == kind}


def test_the_folder_holds_what_the_builder_describes():
    assert {path.stem for path in WORKFLOWS} == set(graphs.GRAPHS)


def test_the_template_browser_offers_them(server):
    status, offered = server.get("/api/workflow_templates")
    assert status == 200
    assert sorted(offered["comfyui-vc-attention"]) == [path.stem for path in WORKFLOWS]
    for path in WORKFLOWS:
        for suffix in (".json", ".jpg"):
            status, body = server.get(f"/api/workflow_templates/comfyui-vc-attention/{path.stem}{suffix}")
            assert status == 200
            assert body
            assert path.with_suffix(suffix).stat().st_size < MOST_BYTES


@every_workflow
def test_every_node_and_widget_fits_the_server(editor, object_info, path):
    editor.load_workflow(path)
    assert editor.js("() => app.graph._nodes.filter(n => !(n.type in LiteGraph.registered_node_types)).length") == 0
    prompt = editor.prompt()
    assert complaints(prompt, object_info) == []
    assert len(of_type(prompt, "VCAttentionPatch")) == (2 if "wan2_2" in path.stem else 1)


@every_workflow
def test_loading_and_saving_keeps_every_node_widget_and_link(editor, path):
    editor.load_workflow(path)
    saved, file = editor.workflow(), load(path)
    for key in ("id", "last_node_id", "last_link_id", "groups"):
        assert saved[key] == file[key], key
    assert sorted(saved["links"]) == sorted(file["links"])
    for before, after in zip(*(sorted(w["nodes"], key=lambda n: n["id"]) for w in (file, saved)), strict=True):
        for key in ("id", "type", "title", "widgets_values", "properties", "mode", "color"):
            assert after.get(key) == before.get(key), (before["type"], key)


@every_workflow
def test_the_patch_is_the_last_node_before_the_sampler(editor, path):
    """Where another node could replace the attention, the render would silently be the plain one."""
    editor.load_workflow(path)
    prompt = editor.prompt()
    for key in of_type(prompt, "VCAttentionPatch"):
        takers = [node["class_type"] for node in prompt.values() if [key, 0] in node["inputs"].values()]
        assert len(takers) == 1
        assert takers[0] in SAMPLERS
    for node in prompt.values():
        if node["class_type"] in SAMPLERS:
            assert prompt[node["inputs"]["model"][0]]["class_type"] == "VCAttentionPatch"


@every_workflow
def test_every_model_file_has_an_address_and_is_in_the_note(path):
    """The frontend offers to fetch what is missing; the note says the same in words."""
    nodes = load(path)["nodes"]
    files = {file["name"]: file for node in nodes for file in node["properties"].get("models", [])}
    named = {v for node in nodes for v in node.get("widgets_values") or [] if str(v).endswith(".safetensors")}
    assert set(files) == named
    notes = "\n".join(node["widgets_values"][0] for node in nodes if node["type"] == "MarkdownNote")
    for file in files.values():
        assert file["url"].endswith(f"/{file['name']}")
        assert file["url"] in notes


SMALL = """(fast) => {
  const sizes = { EmptyHunyuanLatentVideo: [128, 9], WanImageToVideo: [128, 9], EmptyHunyuanVideo15Latent: [256, 9],
                  MiniMaxH3ImageToVideo: [256, 5] };
  for (const node of app.graph._nodes) {
    if (node.type in sizes) {
      const [side, length] = sizes[node.type];
      vc.setWidget(node, "width", side);
      vc.setWidget(node, "height", side);
      vc.setWidget(node, "length", length);
    }
    if (node.type === "VCAttentionDemoLatent") {
      vc.setWidget(node, "width", 64);
      vc.setWidget(node, "height", 64);
      vc.setWidget(node, "frames", 5);
    }
    if (node.type === "KSampler") vc.setWidget(node, "steps", 6);
    if (node.type === "VCAttentionPatch") {
      vc.setWidget(node, "mode", "8-bit");
      vc.setWidget(node, "implementation", "reference");
      vc.setWidget(node, "min_tokens", 64);
    }
    if (node.type === "PrimitiveBoolean") vc.setWidget(node, "value", fast);
    if (node.type === "PrimitiveInt" && node.title === "Steps (20 steps)") vc.setWidget(node, "value", 6);
    if (node.type === "PrimitiveInt" && node.title === "High-noise steps (20 steps)") vc.setWidget(node, "value", 3);
    if (node.type === "BasicScheduler") vc.setWidget(node, "steps", 6);
  }
}"""
SWITCHED = ("wan2_2_14B_t2v", "wan2_2_14B_i2v", "minimax_h3_t2v")  # with a LoRA for few steps
RENDERS = [(path, fast) for path in WORKFLOWS for fast in ((False, True) if path.stem in SWITCHED else (False,))]


@pytest.mark.parametrize(("path", "fast"), RENDERS, ids=[f"{p.stem}{'-lora' if fast else ''}" for p, fast in RENDERS])
def test_renders_to_the_end(editor, server, path, fast):
    editor.load_workflow(path)
    editor.js(SMALL, fast)
    prompt = replace_loaders(editor.prompt())
    run = server.run(prompt)
    assert run.ending == "execution_success", run.data
    patches = of_type(prompt, "VCAttentionPatch")
    texts = {node: text for text, node in run.texts}
    assert set(texts) == set(patches)
    for text in texts.values():
        assert int(re.search(r"(\d+) of \d+", text)[1]) > 0, text
    (video,) = [f for output in run.history["outputs"].values() for f in output.get("images", [])]
    assert frames(server.base / "output" / video["subfolder"] / video["filename"]) >= 5


def frames(path) -> int:
    import av

    with av.open(str(path)) as video:
        return sum(1 for _ in video.decode(video=0))


def test_no_traceback_in_the_log(server):
    assert "Traceback" not in server.log()
