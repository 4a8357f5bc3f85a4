"""Build the wheel, install it into an empty folder and import every module of it from there, and only there.

.venv/bin/python tests/check_wheel.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKED = ("*.py", "*.cu", "*.cuh")
OPTIONAL = ("triton", "comfy", "diffusers")

# Runs isolated, without site-packages' editable finder: torch comes from the folder named second, after ours.
IMPORT_ALL = """
import importlib, pathlib, sys
installed, site_packages, *modules = sys.argv[1:]
sys.path[:0] = [installed]
sys.path.append(site_packages)
for name in modules:
    found = pathlib.Path(importlib.import_module(name).__file__).resolve()
    assert found.is_relative_to(pathlib.Path(installed).resolve()), f"{name} came from {found}"
print(f"wheel: {len(modules)} modules imported from the installed copy")
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        names = zipfile.ZipFile(wheel).namelist()
        check_contents(names)
        installed = Path(folder) / "installed"
        pip("install", "--no-deps", "--no-index", "--target", str(installed), str(wheel))
        modules = [module_name(name) for name in names if name.endswith(".py") and not needs_optional(name)]
        site_packages = next(path for path in map(Path, sys.path) if (path / "torch" / "__init__.py").is_file())
        subprocess.run(
            [sys.executable, "-S", "-I", "-c", IMPORT_ALL, installed, site_packages, *modules],
            check=True,
            cwd=folder,
        )


def build(folder: Path) -> Path:
    """The wheel, from a copy of the sources: setuptools leaves a build folder that a later wheel would pick up."""
    source = folder / "source"
    shutil.copytree(ROOT / "kernels", source / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source / name)
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    return next(folder.glob("*.whl"))


def check_contents(names: list[str]) -> None:
    """Every source file of kernels/ is in, and nothing beside the package and its metadata."""
    files = (path for pattern in PACKED for path in (ROOT / "kernels").rglob(pattern))
    sources = {path.relative_to(ROOT / "kernels").as_posix() for path in files}
    packed = {name.removeprefix("vc_attention/") for name in names if name.startswith("vc_attention/")}
    missing = sources - packed
    stray = {name for name in names if not name.startswith(("vc_attention/", "vc_attention-"))}
    if missing or stray:
        raise SystemExit(f"wheel: missing {sorted(missing)}, not ours {sorted(stray)}")


def module_name(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def needs_optional(name: str) -> bool:
    """Whether a file is the door to a library that a plain machine lacks."""
    return Path(name).stem in OPTIONAL and "integrations" not in name


def pip(*arguments: str) -> None:
    """Run pip; what it says is shown only when it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}")


if __name__ == "__main__":
    main()
