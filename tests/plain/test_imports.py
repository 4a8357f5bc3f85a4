"""Arrows between rooms and the cost of an import: read from the source, and seen in fresh processes."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import vc_attention

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels"
NODES = ROOT / "nodes"

HOST = {"comfy", "comfy_api", "comfy_extras", "comfy_execution", "nodes", "folder_paths", "server", "execution"}
OPTIONAL = {"triton", "cuda", "cutlass", "diffusers", "transformers", "numpy", *HOST}
# Implementation by the stem of a file, also with run_ before.
IMPLEMENTATIONS = {
    "reference": "reference",
    **dict.fromkeys(("cuda", "precise_cuda", "hopper", "precise"), "cuda"),
    "triton": "triton",
    **dict.fromkeys(("triton8", "attention8", "prepare8"), "triton8"),
    **dict.fromkeys(("triton4", "attention4", "prepare4", "feedback4", "own_block4"), "triton4"),
}
WITHOUT_TORCH = ["__init__.py", "arch.py", "dispatch.py", "errors.py", "schedule.py"]
DEVICE_CODE = KERNELS / "triton_kernels"  # the only modules that import triton when they are imported
DIFFUSERS_DOOR = KERNELS / "integrations" / "diffusers.py"


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def implementation_of(module: str) -> str | None:
    """Which it is ("triton8" for run_triton8); None for modules shared by implementations."""
    return IMPLEMENTATIONS.get(module.removeprefix("run_"))


def imports(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def absolute_names(nodes) -> set[str]:
    """First parts of absolutely imported modules."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


def at_import(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """Imports that run when the module is imported: not in functions, not under TYPE_CHECKING."""
    found = []

    def walk(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import | ast.ImportFrom):
                found.append(child)
            walk(child)

    walk(tree)
    return found


def relative_targets(path: Path, tree: ast.AST) -> set[str]:
    """Dotted modules of this repository, from its root, that a file imports relatively."""
    here = path.relative_to(ROOT).parent.parts
    targets = set()
    for node in imports(tree):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        base = here[: len(here) - (node.level - 1)]
        module = (*base, *(node.module.split(".") if node.module else ()))
        targets.add(".".join(module))
        targets |= {".".join((*module, alias.name)) for alias in node.names}
    return targets


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_something_to_read():
    assert len(sources(KERNELS)) > 10
    assert KERNELS.samefile(Path(vc_attention.__file__).parent), "the installed vc_attention is not this checkout"


@pytest.mark.parametrize("path", sources(KERNELS), ids=named)
def test_kernels_know_no_host(path):
    known = absolute_names(imports(ast.parse(path.read_text())))
    assert not known & HOST
    if path != DIFFUSERS_DOOR:
        assert "diffusers" not in known


@pytest.mark.parametrize("path", sources(KERNELS), ids=named)
def test_kernels_reach_each_other_by_relative_imports_only(path):
    # The pack's copy has no importable absolute name.
    assert not absolute_names(imports(ast.parse(path.read_text()))) & {"vc_attention", "kernels"}


@pytest.mark.parametrize("path", sources(KERNELS), ids=named)
def test_importing_a_kernels_module_needs_torch_at_most(path):
    needed = absolute_names(at_import(ast.parse(path.read_text())))
    optional = {"triton"} if path.parent == DEVICE_CODE else set()
    assert needed <= sys.stdlib_module_names | {"torch"} | optional


@pytest.mark.parametrize("path", [path for path in sources(KERNELS) if path.parent != DEVICE_CODE], ids=named)
def test_device_code_is_imported_inside_functions_only(path):
    tree = ast.parse(path.read_text())
    reached = {node.module or "" for node in at_import(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(DEVICE_CODE.name in module.split(".") for module in reached)


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_plain_modules_do_not_import_torch(name):
    assert "torch" not in absolute_names(at_import(ast.parse((KERNELS / name).read_text())))


@pytest.mark.parametrize("path", sources(NODES), ids=named)
def test_importing_a_node_module_needs_nothing_optional(path):
    needed = absolute_names(at_import(ast.parse(path.read_text())))
    assert not needed & {"triton", "cuda", "diffusers"}


@pytest.mark.parametrize("path", sources(NODES), ids=named)
def test_nodes_reach_kernels_by_their_public_names_only(path):
    tree = ast.parse(path.read_text())
    assert not absolute_names(imports(tree)) & {"vc_attention", "kernels"}
    public = {f"kernels.{name}" for name in (*vc_attention.__all__, "__version__")} | {"kernels"}
    reached = {target for target in relative_targets(path, tree) if target.split(".")[0] == "kernels"}
    assert reached <= public
    assert "import_module" not in path.read_text()


@pytest.mark.parametrize("path", sources(KERNELS), ids=named)
def test_kernels_do_not_reach_up_to_nodes(path):
    assert not {target for target in relative_targets(path, ast.parse(path.read_text())) if "nodes" in target}


@pytest.mark.parametrize("path", [path for path in sources(KERNELS) if implementation_of(path.stem)], ids=named)
def test_implementations_do_not_import_each_other(path):
    reached = {part for target in relative_targets(path, ast.parse(path.read_text())) for part in target.split(".")}
    assert {implementation_of(module) for module in reached} <= {None, implementation_of(path.stem)}


def test_every_module_of_an_implementation_is_known_as_one():
    stems = {path.stem for path in sources(KERNELS)}
    shared = {"cuda_driver", "triton_support", "guard_triton", "self_test4", "self_test8", "nvfp4"}
    named_for_one = {stem for stem in stems if re.search(r"cuda|triton|\d$", stem)}
    assert {stem for stem in named_for_one if implementation_of(stem) is None} == shared
    assert stems >= IMPLEMENTATIONS.keys()


@pytest.mark.parametrize("path", [*sources(KERNELS), *sources(NODES)], ids=named)
def test_no_module_configures_logging(path):
    assert "basicConfig" not in path.read_text()


def test_one_way_of_declaring_nodes():
    # NODE_CLASS_MAPPINGS beside comfy_entrypoint makes ComfyUI ignore the latter.
    for path in [ROOT / "__init__.py", *sources(NODES)]:
        assert "NODE_CLASS_MAPPINGS" not in path.read_text()


# Public names


def test_public_names_are_defined_where_the_package_says():
    for name, home in vc_attention._HOME.items():
        path = KERNELS.joinpath(*home.lstrip(".").split(".")).with_suffix(".py")
        defined = {node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")}
        assert name in defined


def test_dir_lists_the_public_names():
    assert {"attention", "group_values", "support", "UnsupportedCall", "InvalidArgument"} <= set(vc_attention.__all__)
    assert set(vc_attention.__all__) <= set(dir(vc_attention))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        vc_attention.atention  # noqa: B018


# Fresh processes


def test_importing_the_package_imports_neither_torch_nor_numpy_nor_a_backend():
    code = f"""
import sys
import vc_attention
from vc_attention import GroupingPolicy, InvalidArgument, Schedule, UnsupportedCall, dispatch, family
vc_attention.__version__, dir(vc_attention)
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {OPTIONAL | {"torch"}!r}))
"""
    assert run_python(code).strip() == "[]"


def test_without_torch_the_plain_modules_work_and_the_rest_says_what_is_missing():
    code = """
import sys
from types import SimpleNamespace
sys.modules["torch"] = None
import vc_attention
assert vc_attention.family(SimpleNamespace(type="mps")) == "mps"
assert vc_attention.Schedule([1.0, 0.5, 0.0]).step(0.5) == 1
try:
    vc_attention.attention
except ImportError as error:
    print(error)
"""
    assert "torch" in run_python(code)


def test_the_door_imported_bare_is_empty():
    # A test runner imports the root __init__.py as a top-level module when the folder's name is no identifier.
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("__init__", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.__package__ == ""
print(hasattr(module, "comfy_entrypoint"), hasattr(module, "WEB_DIRECTORY"))
"""
    assert run_python(code, str(ROOT / "__init__.py")).split() == ["False", "False"]


def test_pack_copy_and_pip_copy_live_in_one_process(tmp_path):
    # ComfyUI names a pack by its absolute path with dots replaced; ours may sit in a folder with a hyphen.
    pack = tmp_path / "custom.nodes" / "ComfyUI-VC-Attention"
    pack.mkdir(parents=True)
    (pack / "kernels").symlink_to(KERNELS, target_is_directory=True)
    code = """
import importlib, sys, types
path = sys.argv[1]
name = path.replace(".", "_x_")
parent = types.ModuleType(name)
parent.__path__ = [path]
sys.modules[name] = parent
pack = importlib.import_module(name + ".kernels")
import vc_attention as pip
assert pack is not pip and pack.__name__ == name + ".kernels"
assert pack.GroupingPolicy is not pip.GroupingPolicy
assert pack.GroupingPolicy.__module__ == name + ".kernels.schedule"
for copy in (pack, pip):
    try:
        copy.GroupingPolicy(window=2.0)
    except ValueError as error:
        assert type(error) is copy.InvalidArgument
    schedule = copy.Schedule([1.0, 0.5, 0.0])
    assert schedule.in_first(0.5, 1.0) and not schedule.in_first(0.5, 0.5)
print("both")
"""
    assert run_python(code, str(pack)).strip() == "both"
