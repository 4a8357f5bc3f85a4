"""A headless Chromium on the page of a real ComfyUI server, driven from a thread of its own.

Playwright's synchronous interface keeps an event loop running in its thread, and other tests of this room use
``asyncio.run``: so it gets a thread, and what is asked of the page goes there and comes back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...conftest import find_chromium

# Without the background-networking flags Chromium looks up hosts of its own at every start.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
READY = "() => window.app?.rootGraphInternal && window.LiteGraph?.registered_node_types?.VCAttentionPatch"
SIZE = {"width": 1600, "height": 900}
SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasInfo": False}
# What the frontend itself asks for and does not find on a server without a user: not errors of a page.
EXPECTED_404 = ("user.css", "/api/userdata", "/api/settings/", "/api/users")
# What frontend 1.49.6 says by itself while it starts, without any custom node: also its default workflow's model files
# are looked for on a hub, which its own security policy refuses.
EXPECTED_MESSAGES = (
    "ComfyApp graph accessed before initialization",
    "Failed to load resource",
    "Connecting to 'https://huggingface.co/",
    "Fetch API cannot load https://huggingface.co/",
)


def write_settings(base: Path) -> None:
    """A user who has seen the greeting; nothing lies over the graph. ``base`` is the server's own directory."""
    settings = base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(SETTINGS), encoding="utf-8")


class Chromium:
    """One browser with one page. ``errors`` collects what went wrong inside the page."""

    def __init__(self):
        self._thread = ThreadPoolExecutor(1)
        self.errors: list[str] = []
        self._thread.submit(self._start).result()

    def _start(self):
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
        self._context = self._browser.new_context(viewport=SIZE, accept_downloads=True)
        # Every page starts as on a new machine; otherwise it would open the graph that the last one left.
        self._context.add_init_script("localStorage.clear(); sessionStorage.clear();")
        self._context.add_init_script(path=Path(__file__).with_name("page.js"))
        self._context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page = self._context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(f"page error: {error}"))
        self.page.on("console", self._take_console)
        self.page.on("response", self._take_response)

    def _take_console(self, message):
        # A failed request is reported with its address by _take_response.
        if message.type == "error" and not message.text.startswith(EXPECTED_MESSAGES):
            self.errors.append(f"console: {message.text} ({message.location})")

    def _take_response(self, response):
        if response.status >= 400 and not any(part in response.url for part in EXPECTED_404):
            self.errors.append(f"{response.status} {response.url}")

    def do(self, action: Callable):
        """Run ``action(page)`` in the browser's thread and return what it returns."""
        return self._thread.submit(action, self.page).result()

    def open(self, address: str):
        """Load the page and wait until nodes can be made."""

        def load(page):
            page.goto(f"http://{address}/")
            page.wait_for_function(READY, timeout=60_000)
            page.wait_for_timeout(500)  # the default workflow arrives after the node types

        self.do(load)

    def js(self, expression: str, argument=None):
        """Evaluate a JavaScript function in the page; waits for a promise."""
        return self.do(lambda page: page.evaluate(expression, argument))

    def wait(self, expression: str, argument=None, seconds=30):
        self.do(lambda page: page.wait_for_function(expression, arg=argument, timeout=1000 * seconds))

    def pause(self, milliseconds: int):
        self.do(lambda page: page.wait_for_timeout(milliseconds))

    def press(self, *keys: str):
        for key in keys:
            self.do(lambda page, key=key: page.keyboard.press(key))
            self.pause(100)

    def screenshot(self, path: Path, clip: dict | None = None):
        self.do(lambda page: page.screenshot(path=path, clip=clip))

    def load_workflow(self, path: Path):
        """Open a workflow file as the menu does."""
        workflow = json.loads(path.read_text(encoding="utf-8"))
        self.js("([data, name]) => app.loadGraphData(data, true, true, name)", [workflow, path.stem])
        self.pause(500)

    def prompt(self) -> dict:
        """The API prompt that the frontend would queue."""
        return json.loads(self.js("async () => JSON.stringify((await app.graphToPrompt()).output)"))

    def workflow(self) -> dict:
        """The workflow that the frontend would save."""
        return json.loads(self.js("async () => JSON.stringify((await app.graphToPrompt()).workflow)"))

    def close(self):
        def stop():
            self._browser.close()
            self._playwright.stop()

        self._thread.submit(stop).result()
        self._thread.shutdown()
