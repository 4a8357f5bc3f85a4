"""Build ``workflows/`` anew: a real server, the real frontend, our descriptions, and what the frontend saves.

In the repository's root, with ComfyUI's Python (playwright and Chromium needed):

    COMFYUI_PATH=~/ComfyUI PYTHONPATH=build/comfy-tools ~/ComfyUI/venv/bin/python -m tests.comfy.browser.build_workflows

All of them, or those named on the command line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from ...conftest import missing_browser, missing_comfy
from ..pack import REPOSITORY
from ..server import Server
from . import chromium, graphs, stand_ins
from .thumbnails import draw_thumbnail

WORKFLOWS = REPOSITORY / "workflows"
SCREEN = {"width": 2400, "height": 1100}


def main() -> int:
    reason = missing_comfy() or missing_browser()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    described = {name: graphs.GRAPHS[name]() for name in sys.argv[1:] or graphs.GRAPHS}
    with tempfile.TemporaryDirectory(prefix="vc-attention-workflows-") as folder:
        models = Path(folder) / "names"
        models.mkdir()
        for graph in described.values():
            stand_ins.write_names(graphs.files(graph), models)
        comfyui = Path(os.environ["COMFYUI_PATH"]).resolve()
        server = Server(comfyui, Path(folder) / "base", models)
        chromium.write_settings(server.base)
        stand_ins.copy_example_image(comfyui, server.base)
        try:
            server.wait_until_up()
            build(server, described, Path(folder))
        finally:
            server.stop()
    return 0


def build(server: Server, described: dict, scratch: Path) -> None:
    browser = chromium.Chromium()
    try:
        browser.do(lambda page: page.set_viewport_size(SCREEN))
        WORKFLOWS.mkdir(exist_ok=True)
        for name, graph in described.items():
            path = WORKFLOWS / f"{name}.json"
            browser.open(server.address)  # anew: previews of another graph would stay
            browser.js("() => { app.extensionManager.focusMode = true; }")
            browser.js("graph => vc.build(graph)", graph)
            browser.js("() => vc.fit()")
            browser.pause(800)
            workflow = browser.workflow()
            if path.exists():  # the same workflow as before, for who has it open
                workflow["id"] = json.loads(path.read_text(encoding="utf-8"))["id"]
            text = json.dumps(workflow, ensure_ascii=False, indent=1)
            path.write_text(text + "\n", encoding="utf-8")
            picture = scratch / f"{name}.png"
            browser.do(lambda page, picture=picture: page.locator("#graph-canvas").screenshot(path=picture))
            draw_thumbnail(picture, path.with_suffix(".jpg"), graph["name"], graph["facts"])
            print(f"{path.relative_to(REPOSITORY)}: {len(workflow['nodes'])} nodes, {len(text) // 1024} KB")
        if browser.errors:
            raise RuntimeError("the page had errors:\n" + "\n".join(browser.errors))
    finally:
        browser.close()


if __name__ == "__main__":
    raise SystemExit(main())
