"""One real server and one headless Chromium for all tests of this folder; a fresh page for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..conftest import COMFYUI_PATH
from ..server import Server
from . import chromium, graphs, stand_ins


@pytest.fixture(scope="session")
def server(_hosts, tmp_path_factory):
    """A real server with tiny models under the official names, and ``tiny_wan.safetensors``."""
    host, _ = _hosts("real")  # the classes of the tiny models
    models, made = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("made")
    for make in graphs.GRAPHS.values():
        stand_ins.write_models(graphs.files(make()), models, made)
    (models / "diffusion_models" / "tiny_wan.safetensors").hardlink_to(made / "tiny_wan.safetensors")
    comfyui = Path(COMFYUI_PATH).resolve()
    made_server = Server(comfyui, tmp_path_factory.mktemp("server"), models)
    chromium.write_settings(made_server.base)
    stand_ins.copy_example_image(comfyui, made_server.base)
    try:
        made_server.wait_until_up()
        yield made_server
    finally:
        made_server.stop()


@pytest.fixture(scope="session")
def browser(server):
    made = chromium.Chromium()
    yield made
    made.close()


@pytest.fixture
def editor(browser, server):
    """The page, freshly loaded; a test that leaves an error in it fails."""
    browser.open(server.address)
    # And a server that remembers no output: it would answer a node with what another test's equal node gave.
    browser.js("() => app.api.fetchApi('/free', { method: 'POST', body: JSON.stringify({ free_memory: true }) })")
    browser.js("() => app.graph.clear()")
    yield browser
    errors = browser.errors[:]
    browser.errors.clear()
    assert not errors


@pytest.fixture(scope="session")
def object_info(server):
    status, info = server.get("/object_info")
    assert status == 200
    return info
