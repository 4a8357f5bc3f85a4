"""What a user does with the node in the page: real mouse and keyboard, a real server, renders on the tiny Wan.

The ``editor`` fixture fails every test that leaves an error in the page.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..renders import cosine
from .user import (
    FOUND_MS,
    OURS,
    WIDGETS,
    build,
    click_empty_canvas,
    click_for_input,
    click_title,
    last_latent,
    on_widget,
    picture_of_node,
    press_run,
    queue,
    set_widgets,
    status,
    type_into_widget,
    widgets,
)

pytestmark = [pytest.mark.comfy, pytest.mark.browser]


def search(editor, words):
    """Open the node search by a double click on the canvas and type."""
    click_for_input(editor, 700, 500, clicks=2)
    editor.do(lambda page: page.keyboard.type(words, delay=20))


def test_added_from_the_search_box(editor):
    search(editor, "vc attention")
    editor.do(lambda page: page.get_by_text("VC Attention Patch").first.wait_for(timeout=FOUND_MS))
    editor.pause(300)
    editor.press("Enter")
    editor.pause(400)
    editor.do(lambda page: page.mouse.move(600, 300))  # the new node hangs on the mouse until it is put down
    editor.do(lambda page: page.mouse.click(600, 300))
    editor.pause(400)
    assert editor.js(f"() => {OURS}.length") == 1
    assert editor.js("() => app.graph._nodes.length") == 1
    assert widgets(editor)["mode"] == "auto"
    assert widgets(editor)["min_tokens"] == 4096


@pytest.mark.parametrize("words", ["vsmooth", "low-bit attention", "expcast"])
def test_found_by_other_names(editor, words):
    search(editor, words)
    editor.do(lambda page: page.get_by_text("VC Attention Patch").first.wait_for(timeout=FOUND_MS))
    editor.press("Escape")


def test_widgets_changed_by_mouse_and_keyboard(editor):
    build(editor)
    before = widgets(editor)
    x, y = on_widget(editor, "mode", 0.92)
    editor.do(lambda page: page.mouse.click(x, y))  # the arrow to the next choice
    editor.pause(300)
    type_into_widget(editor, "clusters", "48")
    type_into_widget(editor, "skip_blocks", "0-2,39")
    type_into_widget(editor, "grouping_window", "0.5")
    changed = {"mode": "4-bit", "clusters": 48, "skip_blocks": "0-2,39", "grouping_window": 0.5}
    assert widgets(editor) == {**before, **changed}
    sent = next(n for n in editor.prompt().values() if n["class_type"] == "VCAttentionPatch")
    assert {name: sent["inputs"][name] for name in changed} == changed


def test_a_number_out_of_range_is_held_at_the_limit(editor):
    build(editor)
    type_into_widget(editor, "refresh_interval", "99")
    assert widgets(editor)["refresh_interval"] == 50


def test_queued_and_read_back(editor, server):
    build(editor, prefix="queued")
    picture_of_node(editor, "node-before")
    assert queue(editor) == "execution_success"
    assert "8-bit" in status(editor)
    assert "8 of 16 calls" in status(editor)
    picture_of_node(editor, "node-after")


def test_nothing_accelerated_is_said(editor):
    build(editor, prefix="idle", min_tokens=1_000_000)
    assert queue(editor) == "execution_success"
    assert "0 of 16 calls" in status(editor)


def test_a_wrong_block_list_is_shown_and_does_not_run(editor):
    build(editor, prefix="wrong")
    set_widgets(editor, skip_blocks="first")
    editor.js("() => vc.watch()")
    press_run(editor)
    editor.pause(1500)
    assert editor.js("() => vc.endings") == []
    assert "skip_blocks" in editor.do(lambda page: page.inner_text("body"))
    # The refusal is the one request that may fail here, and the frontend reports it.
    assert all("/api/prompt" in error or "PromptExecutionError" in error for error in editor.errors), editor.errors
    editor.errors.clear()
    set_widgets(editor, skip_blocks="0")
    assert queue(editor) == "execution_success"


def test_interrupted_in_mid_render_and_rendered_again(editor, server):
    build(editor, prefix="interrupted", steps=600)
    press_run(editor)
    editor.wait("() => vc.progress.some((value) => value >= 3)")
    picture_of_node(editor, "node-during")
    editor.js("() => app.extensionManager.command.execute('Comfy.Interrupt')")
    editor.wait("() => vc.endings.length > 0")
    assert editor.js("() => vc.endings") == ["execution_interrupted"]
    editor.pause(300)
    assert "of 600" in status(editor)
    editor.js("() => vc.setWidget(vc.byType('KSampler')[0], 'steps', 4)")
    assert queue(editor) == "execution_success"
    assert "8 of 16 calls" in status(editor)


def test_undo_and_redo_of_a_widget(editor):
    build(editor)
    editor.js("() => app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState?.()")
    click_empty_canvas(editor)
    before = widgets(editor)
    type_into_widget(editor, "clusters", "48")
    assert widgets(editor)["clusters"] == 48
    click_empty_canvas(editor)
    editor.press("Control+z")
    editor.pause(500)
    assert widgets(editor) == before
    editor.press("Control+y")
    editor.pause(500)
    assert widgets(editor) == {**before, "clusters": 48}


def test_undo_and_redo_of_deleting_the_node(editor):
    build(editor, **WIDGETS)
    click_empty_canvas(editor)
    click_title(editor)
    editor.press("Delete")
    editor.pause(300)
    assert editor.js(f"() => {OURS}.length") == 0
    editor.press("Control+z")
    editor.pause(500)
    assert widgets(editor) == WIDGETS
    assert any(n["class_type"] == "VCAttentionPatch" for n in editor.prompt().values())
    editor.press("Control+y")
    editor.pause(500)
    assert editor.js(f"() => {OURS}.length") == 0


def test_copied_and_pasted_with_every_widget(editor):
    build(editor, **WIDGETS)
    click_title(editor)
    editor.press("Control+c")
    click_empty_canvas(editor)
    editor.press("Control+v")
    editor.pause(500)
    assert editor.js(f"() => {OURS}.length") == 2
    assert widgets(editor, 0) == widgets(editor, 1) == WIDGETS


def test_saved_and_reloaded_with_every_widget(editor, server):
    """Ctrl+S to the server, a fresh page, opened again."""
    build(editor, **WIDGETS)
    click_empty_canvas(editor)
    editor.press("Control+s")
    editor.pause(700)
    editor.do(lambda page: page.keyboard.type("kept"))
    editor.press("Enter")
    editor.pause(1000)
    file = server.base / "user" / "default" / "workflows" / "kept.json"
    saved = next(n for n in json.loads(file.read_text())["nodes"] if n["type"] == "VCAttentionPatch")
    assert saved["widgets_values"] == list(WIDGETS.values())
    editor.open(server.address)
    editor.js("() => app.graph.clear()")
    editor.load_workflow(file)
    assert widgets(editor) == WIDGETS
    sent = next(n for n in editor.prompt().values() if n["class_type"] == "VCAttentionPatch")
    assert {name: sent["inputs"][name] for name in WIDGETS} == WIDGETS


def test_inside_a_subgraph(editor, server):
    build(editor, prefix="subgraph")
    click_title(editor)
    editor.press("Control+Shift+e")
    editor.pause(800)
    assert editor.js(f"() => {OURS}.length") == 0
    keys = [key for key, n in editor.prompt().items() if n["class_type"] == "VCAttentionPatch"]
    assert len(keys) == 1
    assert ":" in keys[0]
    assert queue(editor) == "execution_success"
    inner = editor.js(
        "() => app.graph._nodes.find((n) => n.subgraph).subgraph.nodes.filter((n) => n.type === 'VCAttentionPatch')"
        ".map((n) => vc.status(n))"
    )
    assert len(inner) == 1
    assert "8 of 16 calls" in inner[0]


def test_exported_in_api_format(editor, server):
    """What the menu exports runs over HTTP as it is."""
    build(editor, prefix="exported")

    def export(page):
        with page.expect_download() as download:
            page.evaluate("() => { app.extensionManager.command.execute('Comfy.ExportWorkflowAPI'); }")
            page.wait_for_timeout(600)
            page.keyboard.press("Enter")  # the offered file name
        return download.value.path()

    prompt = json.loads(Path(editor.do(export)).read_text())
    sent = next(n for n in prompt.values() if n["class_type"] == "VCAttentionPatch")
    assert set(sent["inputs"]) == {*WIDGETS, "model"}
    run = server.run(prompt)
    assert run.ending == "execution_success"
    assert "8 of 16" in run.texts[0][0]


def test_bypassed_is_the_plain_render(editor, server):
    import torch

    build(editor, prefix="on")
    assert queue(editor) == "execution_success"
    on = last_latent(server)
    click_title(editor)
    editor.press("Control+b")
    editor.pause(300)
    assert "VCAttentionPatch" not in {n["class_type"] for n in editor.prompt().values()}
    assert queue(editor) == "execution_success"
    bypassed = last_latent(server)
    editor.press("Control+b")
    editor.pause(300)
    set_widgets(editor, mode="off")
    assert queue(editor) == "execution_success"
    off = last_latent(server)
    assert torch.equal(bypassed, off)
    assert not torch.equal(on, off)
    assert cosine(on, off) > 0.999


def test_the_status_follows_the_node_into_a_subgraph(editor):
    """Rendered, then moved into a subgraph, which gives it another id, and rendered with another seed."""
    build(editor, prefix="moved")
    assert queue(editor) == "execution_success"
    click_title(editor)
    editor.press("Control+Shift+e")
    editor.pause(800)
    editor.js("() => vc.setWidget(vc.byType('KSampler')[0], 'seed', 77)")
    assert queue(editor) == "execution_success"
    assert "8 of 16 calls" in editor.js("() => vc.status(app.graph._nodes.find((n) => n.subgraph).subgraph.nodes[0])")


def test_two_nodes_each_say_their_own(editor):
    """Wan2.2's shape: one model, two patches, two samplers."""
    build(editor, prefix="two")
    editor.js(
        """() => {
            const [first] = vc.byType("VCAttentionPatch"), [sampler] = vc.byType("KSampler");
            const second = vc.addNode({ type: "VCAttentionPatch", widgets: { mode: "4-bit", implementation: "reference",
                                                                           min_tokens: 64 } });
            const next = vc.addNode({ type: "KSampler", widgets: { steps: 2, cfg: 1, denoise: 0.5,
                                                                  control_after_generate: "fixed" } });
            second.pos = [520, 520];
            next.pos = [960, 520];
            vc.byType("UNETLoader")[0].connect(0, second, "model");
            second.connect(0, next, "model");
            const [positive, negative] = vc.byType("TestConditioning");
            positive.connect(0, next, "positive");
            negative.connect(0, next, "negative");
            sampler.connect(0, next, "latent_image");
            next.connect(0, vc.byType("SaveLatent")[0], "samples");
        }"""
    )
    assert queue(editor) == "execution_success"
    texts = editor.js(f"() => {OURS}.map((n) => vc.status(n))")
    assert "8-bit" in texts[0]
    assert "8 of 16 calls" in texts[0]
    assert "4-bit" in texts[1]
    assert "4 of 8 calls" in texts[1]


def test_with_vue_nodes(editor):
    """The frontend's other renderer of nodes."""
    editor.js("() => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', true)")
    try:
        build(editor, prefix="vue")
        assert queue(editor) == "execution_success"
        assert "8 of 16 calls" in editor.do(lambda page: page.inner_text(".vc-attention-status:visible"))
        picture_of_node(editor, "node-after-vue")
    finally:
        editor.js("() => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', false)")
