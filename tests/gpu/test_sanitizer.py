"""compute-sanitizer finds nothing in small calls of every kernel, and finds the faults that are planted."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..conftest import find_sanitizer

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]

LIMIT_S = 150
SANITIZER_S = 110
CALLS = Path(__file__).with_name("sanitized_calls.py")
TOOLS = ("memcheck", "racecheck", "synccheck")
RUNS = [(tool, "cuda") for tool in TOOLS] + [("memcheck", "cuda planted")]
TRITON_RUNS = [(tool, "triton") for tool in TOOLS] + [("memcheck", "triton planted")]
# What else runs there is torch's: sorting, distances, scales.
TRITON_KERNELS = ("assign_kernel", "update_kernel", "quantize_rows_kernel", "value_blocks_kernel")
TRITON_KERNELS += ("quantize_values_kernel", "attention8_fwd_kernel")


def command(tool: str, call: str) -> list[str]:
    options = ["--tool", tool, "--print-limit", "20", "--target-processes", "application-only"]
    if tool == "memcheck":
        # cuda-bindings asks for functions of newer drivers: errors of the API that are none. Without padding a write
        # past the end may hit the next tensor.
        options += ["--report-api-errors", "no", "--padding", "65536"]
    if call.startswith("triton"):
        options += [word for name in TRITON_KERNELS for word in ("--kernel-name", f"kns={name}")]
    return [find_sanitizer(), *options, sys.executable, str(CALLS), call]


@pytest.fixture(scope="module")
def sanitized(request):
    """Outputs of all runs that were collected, which go side by side: each spends its time in starting."""
    # torch's allocator would hide a write past the end of a tensor.
    environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    wanted = [item.callspec.params for item in request.session.items if item.path == request.path]
    processes = {
        (run["tool"], run["call"]): subprocess.Popen(command(**run), env=environment, start_new_session=True, **pipes)
        for run in wanted
    }
    outputs, end = {}, time.monotonic() + SANITIZER_S
    for key, process in processes.items():
        try:
            outputs[key] = process.communicate(timeout=max(0.1, end - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and the Python below it
            outputs[key] = process.communicate()[0] + f"\nstopped after {SANITIZER_S} s"
    return outputs


def verdict(output: str) -> bool:
    """Whether the sanitizer found nothing."""
    summary = [line for line in output.splitlines() if "SUMMARY" in line]
    assert summary, output[-3000:]
    return re.search(r"\b0 (errors|hazards)", summary[-1]) is not None


def check(output: str, call: str) -> None:
    if call.endswith("planted"):  # or silence would mean nothing
        assert not verdict(output), output[-3000:]
    else:
        assert verdict(output), output[-3000:]
        assert "finished" in output, output[-3000:]


@pytest.mark.parametrize(("tool", "call"), RUNS)
def test_cuda_kernels(sanitized, tool, call):
    check(sanitized[tool, call], call)


@pytest.mark.triton
@pytest.mark.parametrize(("tool", "call"), TRITON_RUNS)
def test_triton_kernels(sanitized, tool, call):
    check(sanitized[tool, call], call)
