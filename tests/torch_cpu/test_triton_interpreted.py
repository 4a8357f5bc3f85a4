"""Runs tests/interpreted in processes of their own, where Triton interprets its kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .triton_compile import skip_without_triton

skip_without_triton()

ROOM = Path(__file__).parents[1] / "interpreted"
MODULES = sorted(path.name for path in ROOM.glob("test_*.py"))


@pytest.fixture(scope="module")
def running():
    """A process a module, side by side."""
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [Path(sys.executable).with_name("pytest"), "-q", "--tb=short", "-p", "no:cacheprovider"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = {name: subprocess.Popen([*command, ROOM / name], env=environment, **pipes) for name in MODULES}
    yield processes
    for process in processes.values():
        process.kill()


@pytest.mark.parametrize("module", MODULES)
def test_kernels_in_the_interpreter(running, module):
    output, _ = running[module].communicate(timeout=300)
    assert running[module].returncode == 0, output[-4000:]
    assert " passed" in output
    assert "skipped" not in output
