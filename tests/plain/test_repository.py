"""What the repository declares about itself agrees everywhere, and installing it can replace nothing."""

import ast
import re
from pathlib import Path

import vc_attention

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10: pytest brings tomli
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
NEVER_INSTALLED = {"torch", "torchvision", "torchaudio", "triton", "triton-windows", "cuda-python", "numpy"}


def requirement_names(lines) -> set[str]:
    """Distribution names of requirement lines, normalized."""
    names = set()
    for line in lines:
        text = line.partition("#")[0].strip()
        if text:
            names.add(re.split(r"[\s\[<>=!~;@]", text)[0].lower().replace("_", "-"))
    return names


def test_reading_requirement_lines():
    assert requirement_names(["# none", "Torch>=2.5 # why", "triton_windows ; x", ""]) == {"torch", "triton-windows"}


def test_requirements_never_name_what_comfyui_brings():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert not requirement_names(lines) & NEVER_INSTALLED
    assert not [line for line in lines if line.lstrip().startswith(("-", "git+", "http"))]


def test_the_package_depends_on_nothing_comfyui_brings():
    assert not requirement_names(PROJECT.get("dependencies", [])) & NEVER_INSTALLED


def test_project_fields():
    assert PROJECT["name"] == "vc-attention"
    assert PROJECT["requires-python"] == ">=3.10"
    assert len(PROJECT["description"]) > 20
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    for minor in range(10, 14):
        assert f"Programming Language :: Python :: 3.{minor}" in PROJECT["classifiers"]


def test_declared_files_exist():
    for path in (PROJECT["readme"], *PROJECT["license-files"]):
        assert (ROOT / path).is_file()


def test_licence_is_apache_2():
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()


def test_comfy_fields():
    comfy = PYPROJECT["tool"]["comfy"]
    assert comfy["PublisherId"]
    assert comfy["DisplayName"]
    assert comfy["requires-comfyui"].startswith(">=")
    assert "comfyui" not in PROJECT["name"].lower()  # registry rule
    assert "web" not in comfy  # with WEB_DIRECTORY every script would be listed twice


def test_every_kernels_package_is_installed_and_none_else():
    with_code = {path.parent.relative_to(ROOT / "kernels") for path in (ROOT / "kernels").rglob("*.py")}
    expected = {".".join(("vc_attention", *folder.parts)) for folder in with_code}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == expected
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == {"vc_attention": "kernels"}
    for folder in with_code:
        assert (ROOT / "kernels" / folder / "__init__.py").is_file()


def test_version_is_equal_everywhere():
    assert vc_attention.__version__ == PROJECT["version"]


def test_operator_namespace_carries_the_version():
    tree = ast.parse((ROOT / "kernels" / "ops.py").read_text())
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    major, minor, _ = PROJECT["version"].split(".")
    assert constants["NAMESPACE"].startswith(f"vc_attention_{major}_{minor}")


def test_pytest_cannot_put_the_root_on_the_path():
    # nodes/ would shadow ComfyUI's nodes.py and kernels/ the package of that name.
    options = PYPROJECT["tool"]["pytest"]["ini_options"]
    assert "pythonpath" not in options
    assert "--import-mode=importlib" in options["addopts"]
    assert "--strict-markers" in options["addopts"]


def test_at_most_one_template_folder():
    claimed = ("example_workflows", "example", "examples", "workflow", "workflows")
    assert len([name for name in claimed if (ROOT / name).is_dir()]) <= 1
