"""Whether Triton can be used, how a launch is made, and what a user reads where it cannot."""

import contextlib
import sys
import types

import pytest
import torch
from vc_attention import UnsupportedCall, attention, dispatch, guard_triton, ops, support, triton_support
from vc_attention.arch import EIGHT_BIT, FOUR_BIT
from vc_attention.dispatch import IMPLEMENTATIONS, Call, choose
from vc_attention.quantize.triton8 import _signs
from vc_attention.testing import random_qkv
from vc_attention.triton_support import LaunchSettings, aligned, launch, why_missing, word_strides

CUDA = types.SimpleNamespace(type="cuda", index=1)


@pytest.fixture
def triton_version(monkeypatch):
    """Make a Triton of some version the one that is installed."""

    def put(version):
        monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version))
        monkeypatch.setattr(triton_support.util, "find_spec", lambda name: object())

    return put


@pytest.mark.parametrize(
    ("version", "works"), [("3.4.0", False), ("2.5.0", False), ("3.5.0", True), ("3.6.0", True), ("3.10.0+git1", True)]
)
def test_versions(triton_version, version, works):
    triton_version(version)
    reason = why_missing()
    assert works == (reason is None)
    if not works:
        assert version in reason
        assert "3.5 or newer" in reason


def test_4_bit_needs_a_newer_one(triton_version):
    triton_version("3.5.1")
    assert why_missing() is None
    reason = guard_triton.why_triton4_is_unavailable(CUDA, "bfloat16")
    assert "needs Triton 3.6 or newer, found 3.5.1" in reason
    assert "torch 2.10 or newer" in reason


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        ("linux", "found 3.4.0; torch 2.9 or newer brings it"),
        ("win32", 'found 3.4.0; it goes with torch 2.9 or newer; then: pip install "triton-windows<3.7"'),
    ],
)
def test_an_old_triton_is_updated_with_torch(triton_version, monkeypatch, platform, words):
    """Every torch asks for its own Triton: a newer one alone would break it."""
    triton_version("3.4.0")
    monkeypatch.setattr(sys, "platform", platform)
    assert why_missing().endswith(words)


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        ("linux", 'pip install "triton>=3.5"'),
        ("win32", 'pip install "triton-windows<3.7"'),
        ("darwin", "there is none for macOS"),
    ],
)
def test_a_missing_triton_is_said_with_its_install_line(monkeypatch, platform, words):
    monkeypatch.setattr(triton_support.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "platform", platform)
    reason = why_missing()
    assert words in reason
    assert "not installed" in reason
    assert "\n" not in reason
    assert guard_triton.why_triton8_is_unavailable(CUDA, "bfloat16") == reason


def test_a_broken_triton_is_said_too(monkeypatch):
    def broken(name):
        raise OSError("libcuda.so cannot be found")

    monkeypatch.setattr(triton_support.util, "find_spec", lambda name: object())
    monkeypatch.setattr(triton_support, "import_module", broken)
    assert "libcuda.so cannot be found" in why_missing()


@pytest.mark.parametrize("attributes", [{}, {"__spec__": object()}, {"__spec__": object(), "__version__": None}])
def test_what_another_pack_puts_in_tritons_place_is_said_too(monkeypatch, attributes):
    stub = types.ModuleType("triton")  # its __spec__ is None, for which find_spec raises
    vars(stub).update(attributes)
    monkeypatch.setitem(sys.modules, "triton", stub)
    reason = why_missing()
    assert reason.startswith("needs Triton")
    assert "pip install" in reason or "brings it" in reason


# Readiness


@pytest.fixture
def ready_machine(monkeypatch, triton_version):
    """A machine with two CUDA devices and Triton; ``asked`` collects which were tested."""
    triton_version("3.6.0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device}")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(guard_triton, "_verdicts", {})
    machine = types.SimpleNamespace(asked=[], fault=None, error=None)

    def self_test(device, dtype):
        machine.asked.append((device.index, dtype))
        if machine.error is not None:
            raise machine.error
        return machine.fault

    monkeypatch.setattr(guard_triton, "import_module", lambda *_: types.SimpleNamespace(self_test=self_test))
    return machine


def test_each_device_dtype_and_implementation_is_tested_once(ready_machine):
    for _ in range(2):
        for index in (0, 1, None):
            device = types.SimpleNamespace(type="cuda", index=index)
            for dtype in ("bfloat16", "float16"):
                assert guard_triton.why_triton8_is_unavailable(device, dtype) is None
        assert guard_triton.why_triton4_is_unavailable(CUDA, "bfloat16") is None
    assert len(ready_machine.asked) == 5
    assert len(set(ready_machine.asked)) == 4


def test_a_failed_self_test_is_one_sentence_and_not_repeated(ready_machine):
    ready_machine.fault = "attention: relative error 2.0e-02, allowed 5e-03"
    for _ in range(2):
        reason = guard_triton.why_triton8_is_unavailable(CUDA, "bfloat16")
        assert "self-test failed (attention: relative error 2.0e-02" in reason
        assert "python -m kernels" in reason
    assert len(ready_machine.asked) == 1


def test_a_kernel_that_does_not_compile_is_one_sentence(ready_machine):
    ready_machine.error = RuntimeError("PassManager::run failed\nwith a very long\nexplanation " + "x" * 5000)
    reason = guard_triton.why_triton8_is_unavailable(CUDA, "bfloat16")
    assert "does not compile or run here (RuntimeError: PassManager::run failed with a very long" in reason
    assert "\n" not in reason
    assert len(reason) < 500


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no memory"), RuntimeError("Triton Error [CUDA]: out of memory")],
    ids=["torch", "driver"],
)
def test_out_of_memory_is_no_verdict(ready_machine, error):
    ready_machine.error = error
    with pytest.raises(torch.OutOfMemoryError):
        guard_triton.why_triton8_is_unavailable(CUDA, "bfloat16")
    ready_machine.error = None
    assert guard_triton.why_triton8_is_unavailable(CUDA, "bfloat16") is None


def test_no_first_use_inside_a_graph_capture(ready_machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "before a CUDA graph" in guard_triton.why_triton8_is_unavailable(CUDA, "bfloat16")
    assert ready_machine.asked == []


def test_matrices_of_signs_are_never_made_again():
    # Six a card, made by its self-test. One that is made in a graph capture dies with the graph.
    first = _signs(64, torch.bfloat16, torch.device("cpu"))
    for size in range(1, 40):
        _signs(size, torch.float64, torch.device("cpu"))
    assert _signs(64, torch.bfloat16, torch.device("cpu")) is first


# The choice


@pytest.mark.parametrize(
    ("families", "expected"),
    [(("sm_90", "sm_120"), ("cuda", "triton4")), (("sm_120", "sm_89"), ("triton4", "triton8"))],
)
def test_two_different_cards_in_one_machine(families, expected):
    modes = {"sm_120": FOUR_BIT}
    calls = [Call(name, modes.get(name, EIGHT_BIT), "bfloat16", 128) for name in families]
    assert tuple(choose(call).name for call in calls) == expected


def test_a_render_without_triton_is_declined_with_the_sentence(monkeypatch):
    monkeypatch.setattr(triton_support.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ops, "family", lambda device: "sm_89")
    monkeypatch.setattr("vc_attention.attend.api.family", lambda device: "sm_89")
    q, k, v = random_qkv((1, 1, 3, 128), dtype=torch.bfloat16)
    answer = support(q, k, v)
    assert not answer
    assert answer.why.startswith("triton8 needs Triton, which is not installed; ")
    with pytest.raises(UnsupportedCall, match="needs Triton"):
        attention(q, k, v)


def test_every_family_of_a_triton_row_has_launch_settings():
    from vc_attention.attend import triton8

    row = next(row for row in IMPLEMENTATIONS if row.name == "triton8")
    assert set(triton8.SETTINGS) == set(row.families)
    assert dispatch.IMPLEMENTATIONS.index(row) > 0  # behind `cuda`


# Launches


def test_a_launch_passes_settings_and_constants():
    seen = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: seen.update(grid=grid, arguments=arguments, options=options)

    settings = LaunchSettings(num_warps=4, num_stages=2, arch="sm120")
    launch(Kernel(), torch.device("cpu"), 7, "a", 3, settings=settings, D=64)
    assert seen["grid"] == (7,)
    assert seen["arguments"] == ("a", 3)
    assert seen["options"] == {"num_warps": 4, "num_stages": 2, "arch": "sm120", "D": 64}


def test_aligned_copies_only_what_cannot_be_read_in_words():
    x = torch.zeros(2, 40, 3, 64, dtype=torch.bfloat16)
    view = x.transpose(1, 2)
    assert aligned(view) is view
    assert word_strides(view) == (40 * 3 * 8, 8, 3 * 8)
    one_head = torch.zeros(1, 1, 5, 64, dtype=torch.bfloat16).as_strided((1, 1, 5, 64), (7, 3, 64, 1))
    assert aligned(one_head) is one_head  # strides of a single entry do not matter
    begins_in_between = torch.zeros(2 * 3 * 40 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 3, 40, 64)
    assert begins_in_between.is_contiguous()
    narrow = torch.zeros(2, 3, 40, 66).bfloat16()[..., :64]
    for bad in (x[..., 1:33], x.transpose(2, 3), narrow, begins_in_between):
        copy = aligned(bad)
        assert copy is not bad
        assert copy.data_ptr() % 16 == 0
        assert copy.is_contiguous()
        assert torch.equal(copy, bad)
