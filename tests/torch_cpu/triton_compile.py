"""Compiles Triton kernels for cards that are not here, and reads what came out: PTX, SASS, registers, memory, counts.

Counts are kept in triton_counts.json; ``UPDATE_COUNTS=1 pytest tests/torch_cpu -k compiled`` rewrites what ran.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from vc_attention.triton_support import why_missing

COUNTS = Path(__file__).with_name("triton_counts.json")
# Shared memory that one program may have (CUDA programming guide, compute capabilities).
SHARED_BYTES = {"sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_103": 227 << 10}
SHARED_BYTES |= {"sm_120": 99 << 10, "sm_121": 99 << 10}
GROWTH = 1.02  # ptxas may schedule a little differently


def skip_without_triton() -> None:
    """Skip the test, or the module that is being imported, where Triton is missing or too old; it says which."""
    reason = why_missing()
    if reason is not None:
        pytest.skip(reason, allow_module_level=True)


@dataclass(frozen=True)
class Compiled:
    """A kernel for one family.

    Attributes:
        ptx: what Triton wrote.
        cubin: what ptxas made of it.
        shared_bytes: dynamic shared memory of a program.
    """

    ptx: str
    cubin: bytes
    shared_bytes: int

    @cached_property
    def sass(self) -> str:
        """Disassembly."""
        return _tool("nvdisasm", self.cubin, "-c")

    @cached_property
    def registers(self) -> int:
        return int(re.search(r"REG:(\d+)", self._resources)[1])

    @cached_property
    def stack_bytes(self) -> int:
        """Memory for registers that did not fit: 0 where nothing was spilled."""
        return int(re.search(r"STACK:(\d+)", self._resources)[1])

    @cached_property
    def _resources(self) -> str:
        return _tool("cuobjdump", self.cubin, "--dump-resource-usage")

    @cached_property
    def instructions(self) -> list[str]:
        return [line for line, _ in self._lines]

    def loop(self, instruction: str) -> list[str]:
        """Instructions of the smallest loop in which ``instruction`` (a pattern) occurs, address by address."""
        address = {label: index for index, (_, labels) in enumerate(self._lines) for label in labels}
        found = []
        for end, (line, _) in enumerate(self._lines):
            jump = re.search(r"BRA.*?(\.L_x_\d+)", line)
            start = address.get(jump[1], end + 1) if jump else end + 1
            body = self.instructions[start : end + 1]
            if any(re.search(instruction, inside) for inside in body):
                found.append(body)
        assert found, f"no loop has {instruction}"
        return min(found, key=len)

    @cached_property
    def _lines(self) -> list[tuple[str, list[str]]]:
        lines, labels = [], []
        for line in self.sass.splitlines():
            label = re.match(r"(\.L_x_\d+):", line.strip())
            if label:
                labels.append(label[1])
            instruction = re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
            if instruction:
                lines.append((instruction[1], labels))
                labels = []
        return lines


def compile_for(kernel, family: str, dtypes: dict[str, str], constants: dict, settings, **options) -> Compiled:
    """Compile a ``triton.jit`` function as a launch on a card of ``family`` would.

    Args:
        dtypes: Triton types of the parameters that have no annotation, ``{"q": "*bf16"}``.
        constants: the constexpr parameters.
        settings: LaunchSettings.
        options: more of Triton's options.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {}
    for parameter in kernel.params:
        known = "constexpr" if parameter.is_constexpr else parameter.annotation_type
        signature[parameter.name] = known or dtypes[parameter.name]
    # Tensors are 16-byte aligned; nothing is known of the numbers.
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    target = GPUTarget("cuda", int(family.removeprefix("sm_")), 32)
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=target, options=settings.options() | options)
    return Compiled(made.asm["ptx"], made.asm["cubin"], made.metadata.shared)


def check_counts(key: str, compiled: Compiled, instruction: str) -> None:
    """Fail if registers, shared memory or instructions of the loop around ``instruction`` grew since recorded."""
    counts = {
        "loop_instructions": len(compiled.loop(instruction)),
        "registers": compiled.registers,
        "shared_bytes": compiled.shared_bytes,
    }
    check_recorded(key, counts)


def check_recorded(key: str, counts: dict[str, int]) -> None:
    """Fail if a count grew since recorded."""
    kept = recorded()
    if os.environ.get("UPDATE_COUNTS"):
        COUNTS.write_text(json.dumps({**kept, key: counts}, indent=1, sort_keys=True) + "\n")
        return
    assert key in kept, f"UPDATE_COUNTS=1 records {key}"
    grown = {name: (kept[key][name], now) for name, now in counts.items() if now > kept[key][name] * GROWTH}
    assert not grown, f"{key} grew (before, now): {grown}"


def recorded() -> dict[str, dict[str, int]]:
    """Counts by key."""
    return json.loads(COUNTS.read_text()) if COUNTS.exists() else {}


def _tool(name: str, cubin: bytes, *options: str) -> str:
    """Output of one of NVIDIA's tools: the wheel's where there is one, which knows sm_121, else Triton's."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
        tool = next((file.locate() for file in files if file.stem == name), tool)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([tool, *options, path], capture_output=True, text=True, check=True).stdout
