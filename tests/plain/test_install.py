"""What an install from the Comfy registry carries: git's files less `.comfyignore`, all that runs and nothing else."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = {"__init__.py", "nodes", "kernels", "web", "locales", "workflows", "pyproject.toml", "requirements.txt"}
TOLD = {"LICENSE", "README.md", "CHANGELOG.md"}
WEIGHTS = "demo/weights/"
MOST_BYTES = 1_500_000  # without the demo's weights

pytestmark = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs git and a git checkout"
)


def git_files(*arguments: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def carried() -> set[str]:
    return git_files() - git_files("--ignored", "--exclude-from=.comfyignore")


def test_all_that_comfyui_reads_is_carried(carried):
    needed = {name for name in git_files() if name.split("/")[0] in NEEDED | TOLD}
    assert needed <= carried
    assert {name.split("/")[0] for name in needed} == NEEDED | TOLD


def test_nothing_else_is_carried(carried):
    assert {
        name for name in carried if name.split("/")[0] not in NEEDED | TOLD and not name.startswith(WEIGHTS)
    } == set()


def test_every_name_in_the_list_is_there():
    """A folder renamed would be carried again without a word."""
    names = [line.strip("!/*\n") for line in (ROOT / ".comfyignore").open() if line.startswith(("/", "!"))]
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_it_is_small(carried):
    sizes = {name: (ROOT / name).stat().st_size for name in carried if not name.startswith(WEIGHTS)}
    assert sum(sizes.values()) < MOST_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:10]
