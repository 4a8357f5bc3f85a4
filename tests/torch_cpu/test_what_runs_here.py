"""``python -m vc_attention``: the command that every failed self-test asks the user to run."""

import subprocess
import sys

import pytest
import torch
from vc_attention import __main__ as command
from vc_attention import arch
from vc_attention.arch import MODES
from vc_attention.dispatch import IMPLEMENTATIONS
from vc_attention.group import dispatch as group_dispatch


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "vc_attention"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("vc_attention ")
    assert torch.__version__ in done.stdout


@pytest.fixture
def cards(monkeypatch):
    """Two cards of different families; ``asked`` collects what was tested, ``answers`` says what came out of it."""
    asked, answers = [], {}

    def readiness(name):
        def why_not(device, dtype, *choices):
            asked.append((name, device.index, dtype, *choices))
            answer = answers.get(name)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return why_not

    places = {row.readiness: row.name for row in IMPLEMENTATIONS if row.readiness}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    monkeypatch.setattr(arch, "device_capability", lambda device: ((9, 0), (12, 0))[device.index])
    monkeypatch.setattr("vc_attention.dispatch._load", lambda place: readiness(places[place]))
    monkeypatch.setattr(group_dispatch, "why_cuda_is_unavailable", readiness("cuda"))
    monkeypatch.setattr(group_dispatch, "why_grouping_is_unavailable", readiness("grouping"))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device, **how: Elsewhere(empty(*sizes, **how), device))
    return asked, answers


class Elsewhere:
    """A tensor that says it is on another device."""

    def __init__(self, tensor, device):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, device


def lines(capsys) -> list[str]:
    assert command.main() == 0
    return capsys.readouterr().out.splitlines()


def test_every_card_implementation_mode_and_dtype_has_its_line(cards, capsys):
    asked, answers = cards
    answers["triton4"] = "needs Triton, which is not installed"
    said = lines(capsys)
    for index, name in ((0, "sm_90"), (1, "sm_120")):
        start = said.index(f"cuda:{index}: card {index}, family {name}")
        mine = said[start + 1 : start + 1 + 2 * len(IMPLEMENTATIONS) * len(MODES) + 4]
        assert all(line.startswith("  ") for line in mine)
        assert ("  cuda, 8-bit precise, float16: ready" in mine) == (index == 0)
        assert ("  triton4, 4-bit, bfloat16: needs Triton, which is not installed" in mine) == (index == 1)
        assert ("  grouping by cuda, bfloat16: ready" in mine) == (index == 0)
        assert "  grouping by triton, float16: ready" in mine
        assert "  reference, 4-bit, bfloat16: ready" in mine
    assert "  grouping by cuda, float16: runs on sm_90, not on sm_120" in said
    assert ("cuda", 0, "bfloat16", "8-bit precise", None) in asked
    assert ("triton8", 1, "float16") in asked


def test_a_card_that_a_render_has_filled_is_said_and_the_rest_goes_on(cards, capsys):
    _, answers = cards
    answers["cuda"] = torch.OutOfMemoryError("CUDA out of memory")
    said = lines(capsys)
    assert "  cuda, 8-bit, bfloat16: not tested, no memory is left for it (CUDA out of memory)" in said
    assert "  grouping by cuda, bfloat16: not tested, no memory is left for it (CUDA out of memory)" in said
    assert "  triton8, 8-bit, bfloat16: ready" in said
    assert "cuda:1: card 1, family sm_120" in said
