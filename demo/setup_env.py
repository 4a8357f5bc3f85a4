"""Make a virtual environment and install a requirements file and this package into it.

    python3 demo/setup_env.py demo/requirements.txt

Needs Python 3.10 or newer with pip, nothing else: where the system has no ensurepip (Debian and Ubuntu without
python3-venv), pip is put into the environment by the system's pip. Work done before is not done again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 10)
ERROR_LINES = 30


class SetupError(Exception):
    """A step failed; the message is for a person."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("requirements", type=Path, help="requirements file to install")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    options = parser.parse_args()
    try:
        set_up(options.requirements.resolve(), options.venv.resolve())
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    return 0


def set_up(requirements: Path, venv: Path) -> None:
    """Bring ``venv`` to the state that ``requirements`` and the package's own files ask for."""
    if sys.version_info < OLDEST:
        wanted, have = (".".join(map(str, version)) for version in (OLDEST, sys.version_info[:2]))
        raise SetupError(f"Python {wanted} or newer is needed, {sys.executable} is {have}")
    if not requirements.is_file():
        raise SetupError(f"{requirements} does not exist")
    python = venv_python(venv)
    if not _runs(python, "-m", "pip", "--version"):
        create_venv(venv)
    name = requirements.relative_to(ROOT) if requirements.is_relative_to(ROOT) else requirements
    _once(
        venv / f"installed-{str(name).replace(os.sep, '-')}.stamp",
        _fingerprint(requirements_text(requirements)),
        f"Installing {name} (the first time this fetches torch, which takes minutes)",
        [str(python), "-m", "pip", "install", "-r", str(requirements)],
    )
    _once(
        venv / "installed-package.stamp",
        _fingerprint((ROOT / "pyproject.toml").read_text(encoding="utf-8") + str(ROOT)),
        "Installing vc_attention from this folder",
        [str(python), "-m", "pip", "install", "--no-deps", "--editable", str(ROOT)],
    )


def venv_python(venv: Path) -> Path:
    """The environment's interpreter."""
    return venv / "Scripts" / "python.exe" if os.name == "nt" else venv / "bin" / "python"


def create_venv(venv: Path) -> None:
    """A fresh environment with pip in it, also where Python comes without ensurepip."""
    say(f"Creating {venv}")
    if venv.exists():
        shutil.rmtree(venv)
    if importlib.util.find_spec("ensurepip") and _runs(sys.executable, "-m", "venv", str(venv)):
        return
    if not _runs(sys.executable, "-m", "pip", "--version"):
        raise SetupError(
            f"{sys.executable} has neither ensurepip nor pip; on Debian and Ubuntu: apt install python3-pip"
        )
    _run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(venv)])
    question = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = subprocess.run(
        [venv_python(venv), "-c", question], check=True, capture_output=True, text=True
    ).stdout.strip()
    _run([sys.executable, "-m", "pip", "install", "--target", site_packages, "pip"])


def requirements_text(path: Path) -> str:
    """The text of a requirements file and of every file it includes."""
    text = path.read_text(encoding="utf-8")
    included = [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("-r ")]
    return text + "".join(requirements_text(path.parent / name.strip()) for name in included)


def _fingerprint(text: str) -> str:
    return hashlib.sha256(f"{sys.version_info[:2]}\n{text}".encode()).hexdigest()


def _once(stamp: Path, fingerprint: str, title: str, command: list[str]) -> None:
    """Run a command unless it succeeded before with the same fingerprint."""
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == fingerprint:
        return
    say(title)
    start = time.monotonic()
    _run(command)
    stamp.write_text(fingerprint, encoding="utf-8")
    say(f"  done in {time.monotonic() - start:.0f} s")


def _run(command: list[str]) -> None:
    """Run a command; on a terminal its newest line is shown in place. Its last lines appear only on failure."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    )
    tail: deque[str] = deque(maxlen=ERROR_LINES)
    live = sys.stdout.isatty()
    room = shutil.get_terminal_size().columns - 4
    for line in process.stdout:
        tail.append(line.rstrip())
        if live and tail[-1]:
            print(f"\r\033[K  {tail[-1][:room]}", end="", flush=True)
    if live:
        print("\r\033[K", end="", flush=True)
    if process.wait() != 0:
        lines = "\n".join(f"    {line}" for line in tail)
        raise SetupError(f"{' '.join(command)}\n{lines}")


def _runs(*command: object) -> bool:
    try:
        return subprocess.run([str(part) for part in command], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def say(text: str) -> None:
    """One line for the person at the terminal."""
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
