"""The ComfyUI room: the same tests against the double (always) and against a real ComfyUI (COMFYUI_PATH).

One process holds one host. Without COMFYUI_PATH the tests run against the double and the real room is skipped, loudly;
with it they run against the real host. ``test_contract.py`` holds both to one recording, and so the double to ComfyUI.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..conftest import missing_comfy
from .pack import Pack, copy_pack

COMFYUI_PATH = os.environ.get("COMFYUI_PATH", "")


def pytest_generate_tests(metafunc):
    if "host" not in metafunc.fixturenames:
        return
    real_only = metafunc.definition.get_closest_marker("comfy") is not None
    names = ["real"] if real_only or missing_comfy() is None else ["double", "real"]
    metafunc.parametrize(
        "host", [pytest.param(n, marks=[pytest.mark.comfy] if n == "real" else []) for n in names], indirect=True
    )


def pytest_terminal_summary(terminalreporter):
    skipped = [r for r in terminalreporter.getreports("skipped") if "COMFYUI_PATH" in str(r.longrepr)]
    if skipped:
        terminalreporter.write_sep("=", "ComfyUI was NOT tested", yellow=True, bold=True)
        terminalreporter.write_line(
            f"{len(skipped)} tests skipped: the node ran against the double only. The real room {missing_comfy()}."
        )


@pytest.fixture(scope="session")
def _hosts(tmp_path_factory):
    """Hosts and their loaded packs, made on first use."""
    made = {}

    def get(name: str):
        if name not in made:
            if name == "double":
                from .double import Double

                host = Double()
            else:
                from .real_host import Real

                host = Real(Path(COMFYUI_PATH).resolve(), tmp_path_factory.mktemp("comfyui"))
            with host.installed():
                # A real user's folder: a hyphen in its name, and a dot above it.
                made[name] = (host, Pack(host, copy_pack(tmp_path_factory.mktemp("custom.nodes"))))
        return made[name]

    return get


@pytest.fixture
def host(request, _hosts):
    """The host under test, importable while the test runs; its memory of sent texts is empty."""
    import torch

    host, _ = _hosts(request.param)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    try:
        with host.installed():
            host.texts.clear()
            host.events.clear()
            host.interrupt.set(False)
            yield host
            host.interrupt.set(False)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def pack(host, _hosts):
    """Our pack, loaded by this host's loader from a folder with a hyphen in its name."""
    return _hosts(host.name)[1]


@pytest.fixture
def conds(host):
    """A positive and a negative prompt for the Wan-like model."""
    return host.cond(seed=1), host.cond(seed=2)
