"""Compile CUDA C++ with NVRTC at first use and keep the machine code on disk. Needs no GPU and no nvcc.

NVRTC comes with every CUDA build of torch; NVIDIA's cuda-bindings calls it. Neither is imported before the first use.
The cache is safe with several processes, notices damaged files, and does without a writable disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .errors import KernelUnavailable

CACHE_VARIABLE = "VC_ATTENTION_CACHE"

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Source:
    """One source file, compiled with fixed settings.

    Attributes:
        path: the .cu file; headers it includes with quotes are looked up beside it.
        arch: real architecture such as "sm_90a".
        flags: further NVRTC options, for instance ("-DMEANS=0",).
    """

    path: Path
    arch: str
    flags: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        return [f"--gpu-architecture={self.arch}", "--std=c++17", *self.flags]

    def texts(self) -> dict[str, bytes]:
        """The file and every header it includes with quotes, by name."""
        texts: dict[str, bytes] = {}
        waiting = [self.path.name]
        while waiting:
            name = waiting.pop()
            if name not in texts:
                texts[name] = (self.path.parent / name).read_bytes()
                waiting += _INCLUDE.findall(texts[name].decode())
        return texts


def cubin(source: Source) -> bytes:
    """Machine code, from the cache directory or freshly compiled (two to four seconds).

    Raises:
        KernelUnavailable: cuda-bindings or NVRTC is missing, or the source does not compile.
    """
    path = _cache_path(source)
    code = _read_cache(path)
    if code is None:
        code, _ = compile_cubin(source)
        _write_cache(path, code)
    return code


def compile_cubin(source: Source) -> tuple[bytes, str]:
    """Machine code and the compiler's messages, without the cache."""
    nvrtc = _nvrtc()
    headers = source.texts()
    text = headers.pop(source.path.name)
    names = [name.encode() for name in headers]
    program = _check(
        nvrtc.nvrtcCreateProgram(text, source.path.name.encode(), len(names), list(headers.values()), names)
    )
    try:
        options = [option.encode() for option in source.options]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        messages = log.rstrip(b"\0 \n").decode(errors="replace")
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelUnavailable(
                f"NVRTC could not compile {source.path.name} for {source.arch}: {messages or error.name}"
            )
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), messages
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cache_directory() -> Path:
    """$VC_ATTENTION_CACHE, or a folder in the user's cache directory of this platform."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vc-attention"


def _cache_path(source: Source) -> Path | None:
    """Where the code of these texts, settings and compiler lies; None for a user without a home directory."""
    key = hashlib.sha256()
    version = repr(_check(_nvrtc().nvrtcVersion()))
    texts = [part for name, text in sorted(source.texts().items()) for part in (name.encode(), text)]
    for part in (version.encode(), *(option.encode() for option in source.options), *texts):
        key.update(len(part).to_bytes(8, "little") + part)
    try:
        return cache_directory() / f"{source.path.stem}-{source.arch}-{key.hexdigest()[:32]}.cubin"
    except RuntimeError:
        return None


def _read_cache(path: Path | None) -> bytes | None:
    """The code; None where there is none or its checksum does not fit."""
    try:
        data = path.read_bytes() if path else b""
    except OSError:
        return None
    digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write_cache(path: Path | None, code: bytes) -> None:
    """Checksum and code, beside the target and renamed, so that another process sees all of it or nothing."""
    if path is None:
        return
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False) as file:
            temporary = file.name
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    except OSError:  # a full or read-only disk costs a compilation in the next process, nothing else
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _nvrtc():
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library
    except Exception as error:  # a missing library raises different types in different versions
        raise KernelUnavailable(install_sentence()) from error
    return nvrtc


def install_sentence() -> str:
    """How to get cuda-bindings, and NVRTC of the CUDA version that torch was built with."""
    try:
        import torch

        version = torch.version.cuda
    except ImportError:
        version = None
    pin = f'"cuda-bindings=={version.split(".")[0]}.*"' if version else "cuda-bindings"
    return f"the CUDA kernels need NVIDIA's cuda-bindings and NVRTC: pip install {pin}"


def _check(result):
    nvrtc = _nvrtc()
    error, *values = result
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC call failed: {error.name}")
    return values[0] if len(values) == 1 else values


def _text(size_of, fill, program) -> bytes:
    buffer = bytearray(_check(size_of(program)))  # not bytes: the call writes into it
    _check(fill(program, buffer))
    return bytes(buffer)
