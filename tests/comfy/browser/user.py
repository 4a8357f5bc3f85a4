"""A user's hands: a graph put up, the mouse and the keyboard on our node, Run pressed, and what is then read."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from ..server import Run
from .graphs import column, node

WIDGETS = {
    "mode": "4-bit",
    "grouping_window": 0.5,
    "refresh_interval": 2,
    "start_percent": 0.1,
    "end_percent": 0.9,
    "skip_blocks": "0,double:3-4",
    "clusters": 48,
    "implementation": "reference",
    "min_tokens": 64,
}
RENDERED = {"mode": "8-bit", "implementation": "reference", "min_tokens": 64}
OURS = "vc.byType('VCAttentionPatch')"
# SCREENSHOTS=docs: keep pictures of the node there.
SCREENSHOTS = os.environ.get("SCREENSHOTS")

FOUND_MS = 15_000  # on a busy machine the search box takes seconds
FOCUS_MS = 4_000
ATTEMPTS = 10


def graph(steps=4, prefix="editor", **widgets) -> dict:
    """A KSampler on the tiny Wan with our node before it; latents are saved, there is no VAE.

    Each prefix has a seed of its own: the server would answer a graph it has rendered from its cache.
    """
    seed = zlib.crc32(prefix.encode())
    fixed = {"control_after_generate": "fixed"}
    sources = column(
        None,
        320,
        node("unet", "UNETLoader", unet_name="tiny_wan.safetensors"),
        node("positive", "TestConditioning", seed=1, **fixed),
        node("negative", "TestConditioning", seed=2, **fixed),
        node("latent", "EmptyHunyuanLatentVideo", width=128, height=128, length=9),
    )
    ours = column(None, 320, node("patch", "VCAttentionPatch", **{**RENDERED, **widgets}))
    sampling = column(
        None,
        320,
        node("sampler", "KSampler", seed=seed, steps=steps, cfg=3.0, sampler_name="euler", scheduler="simple", **fixed),
        node("save", "SaveLatent", filename_prefix=f"latents/{prefix}"),
    )
    links = [
        ("unet", "MODEL", "patch", "model"),
        ("patch", "MODEL", "sampler", "model"),
        ("positive", "CONDITIONING", "sampler", "positive"),
        ("negative", "CONDITIONING", "sampler", "negative"),
        ("latent", "LATENT", "sampler", "latent_image"),
        ("sampler", "LATENT", "save", "samples"),
    ]
    return {"columns": [[sources], [ours], [sampling]], "links": links}


def build(editor, **settings):
    editor.js("graph => { vc.build(graph); vc.view(110, 130); vc.watch(); }", graph(**settings))
    editor.pause(400)


def widgets(editor, index=0) -> dict:
    shown = editor.js(f"index => vc.widgets({OURS}[index])", index)
    return {name: shown[name] for name in WIDGETS}


def set_widgets(editor, **values):
    editor.js(f"values => Object.entries(values).forEach(([k, v]) => vc.setWidget({OURS}[0], k, v))", values)


def on_widget(editor, name: str, share: float) -> tuple[float, float]:
    """A point of a widget's row: ``share`` of the node's width from its left edge."""
    return editor.js(
        f"""([name, share]) => {{
            const node = {OURS}[0];
            return vc.onScreen(node, [node.size[0] * share, vc.widget(node, name).last_y + 10]);
        }}""",
        [name, share],
    )


def click_title(editor):
    x, y = editor.js(f"() => vc.onScreen({OURS}[0], [80, -12])")
    editor.do(lambda page: page.mouse.click(x, y))
    editor.pause(200)


def click_empty_canvas(editor):
    editor.do(lambda page: page.mouse.click(760, 780))
    editor.pause(200)


def click_for_input(editor, x: float, y: float, clicks: int = 1):
    """Click until an input has the focus: on a busy machine a click may pass for a drag, two for two single ones.

    A widget wants one: its dialog opens under the mouse, and a late second click would take the focus off the input.
    """
    for _ in range(ATTEMPTS):
        editor.do(lambda page: page.mouse.click(x, y, click_count=clicks))
        for _ in range(FOCUS_MS // 100):
            editor.pause(100)
            if editor.js("() => ['INPUT', 'TEXTAREA'].includes(document.activeElement?.tagName)"):
                return
        editor.press("Escape")
    pytest.fail(f"no input got the focus after {ATTEMPTS} attempts")


def type_into_widget(editor, name: str, text: str):
    click_for_input(editor, *on_widget(editor, name, 0.5))
    editor.press("Control+a")
    editor.do(lambda page: page.keyboard.type(text))
    editor.press("Enter")
    editor.pause(200)


def press_run(editor):
    editor.do(lambda page: page.click("[data-testid=queue-button]"))


def queue(editor) -> str:
    """Press Run and wait for the end; how it ended."""
    editor.js("() => vc.watch()")
    press_run(editor)
    editor.wait("() => vc.endings.length > 0", seconds=60)
    editor.pause(300)
    return editor.js("() => vc.endings[0]")


def status(editor) -> str:
    return editor.js(f"() => vc.status({OURS}[0])")


def last_latent(server):
    """The newest result, read from the server's history."""
    _, history = server.get("/history")
    run = Run()
    run.history = max(history.values(), key=lambda entry: entry["prompt"][0])
    return server.latent(run)


def picture_of_node(editor, name: str):
    picture_of(editor, "VCAttentionPatch", name)


def picture_of(editor, kind: str, name: str):
    """The first node of a kind, kept for the documentation when SCREENSHOTS names a folder."""
    if SCREENSHOTS is None:
        return
    editor.pause(2500)  # the notices about the job go away
    x, y = editor.js("kind => vc.onScreen(vc.byType(kind)[0], [-16, -56])", kind)
    width, height = editor.js("kind => { const [w, h] = vc.byType(kind)[0].size; return [w + 32, h + 76]; }", kind)
    editor.screenshot(Path(SCREENSHOTS) / f"{name}.png", clip={"x": x, "y": y, "width": width, "height": height})
