"""The ComfyUI pack and the pip package in one process, and the package without what it does not need."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"

LOAD = """
import importlib, json, sys, types
def load(path):
    # As ComfyUI does: the package's name is its absolute path with dots replaced.
    name = path.replace(".", "_x_")
    parent = types.ModuleType(name)
    parent.__path__ = [path]
    sys.modules[name] = parent
    return importlib.import_module(name + ".kernels")
"""


@pytest.fixture
def pack(tmp_path) -> Path:
    """A copy of the kernels in a folder with a hyphen under a path with a dot."""
    folder = tmp_path / "custom.nodes" / "ComfyUI-VC-Attention"
    shutil.copytree(KERNELS, folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run_python(code: str, *arguments) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("first", ["pack", "pip"])
def test_both_copies_compute_through_one_operator_and_raise_the_callers_own_class(pack, first):
    code = (
        LOAD
        + """
import torch
pack = load(sys.argv[1])
import vc_attention as pip
copies = [pack, pip] if sys.argv[2] == "pack" else [pip, pack]
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 2, 200, 16, generator=generator) for _ in range(3))
outputs = []
for copy in copies:
    grouping = copy.group_values(v)
    assert type(grouping).__module__.startswith(copy.__name__)
    outputs.append(copy.attention(q, k, v, grouping=grouping, implementation="reference"))
assert torch.equal(*outputs)
# A grouping of one copy is taken by the other.
assert torch.equal(pack.attention(q, k, v, grouping=pip.group_values(v), implementation="reference"), outputs[0])
warm = pip.group_values(v, pack.group_values(v))
assert type(warm) is pip.Grouping
operators = [importlib.import_module(copy.__name__ + ".ops") for copy in copies]
assert operators[0] is not operators[1]
assert operators[0].attention_operator is operators[1].attention_operator
assert operators[0].group_operator is operators[1].group_operator

assert pack.UnsupportedCall is not pip.UnsupportedCall
bad = q.clone()
bad[0, 0, 3, 3] = torch.nan
wide = torch.randn(1, 1, 20, 300)
seen = []
for copy in copies:
    for call in (
        lambda: copy.attention(q, k, v),
        lambda: copy.attention(q, bad, v, implementation="reference"),
        lambda: copy.attention(wide, wide, wide, implementation="reference"),
        lambda: copy.group_values(bad),
    ):
        try:
            call()
        except copy.UnsupportedCall as error:
            seen.append(error.reasons)
    # Known before the operator is called, and known to it alone: which mode "auto" is.
    for wrong in ({"mode": "x"}, {"qk_format": "nvfp4"}):
        try:
            copy.attention(q, k, v, implementation="reference", **wrong)
        except copy.InvalidArgument as error:
            assert next(iter(wrong)) in str(error)
        else:
            raise AssertionError(f"{wrong} was taken")
print(json.dumps(seen))
"""
    )
    seen = json.loads(run_python(code, pack, first))
    assert len(seen) == 8
    assert seen[:4] == seen[4:]
    assert "CPU" in seen[0]["auto"]
    assert seen[1] == {"reference": "k holds NaN or infinity"}
    assert "300" in seen[2]["reference"]
    assert seen[3] == {"reference": "v holds NaN or infinity"}


def test_every_module_imports_with_the_optional_ones_blocked():
    code = """
import importlib, pkgutil, sys
blocked = ("triton", "cuda", "cutlass", "numpy", "diffusers", "comfy", "comfy_api", "nodes", "folder_paths")
for name in blocked:
    sys.modules[name] = None
import vc_attention
names = [module.name for module in pkgutil.walk_packages(vc_attention.__path__, "vc_attention.")]
names = [name for name in names if "triton_kernels." not in name]  # device code, imported inside functions
for name in names:
    importlib.import_module(name)
for name in vc_attention.__all__:
    getattr(vc_attention, name)
import torch
q = torch.randn(1, 1, 20, 16)
vc_attention.attention(q, q, q, grouping=vc_attention.group_values(q), implementation="reference")
print(len(names))
"""
    assert int(run_python(code)) > 15


def test_importing_the_modules_touches_no_device_and_starts_no_compiler():
    # torch._dynamo alone takes seconds to import. Integrations are imported by those who use that library.
    code = """
import importlib, logging, pkgutil, sys
import torch
def touched(*args, **kwargs):
    raise AssertionError("a device was asked at import")
torch.cuda.is_available = torch.cuda.get_device_capability = torch.cuda.init = torch.cuda.device_count = touched
import vc_attention
for module in pkgutil.walk_packages(vc_attention.__path__, "vc_attention."):
    if not {"integrations", "triton_kernels"} & set(module.name.split(".")):
        importlib.import_module(module.name)
        assert "torch._dynamo" not in sys.modules, module.name
assert not logging.getLogger().handlers
print(sorted({"triton", "diffusers", "comfy"} & set(sys.modules)))
"""
    assert run_python(code).strip() == "[]"
