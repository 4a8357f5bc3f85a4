"""Kernels without a GPU: every build is clean, the cache survives everything, what is missing is said; the guard.

Needs cuda-bindings, NVRTC and nvdisasm. tests/requirements.txt brings them on Linux x86-64: missing there is a failure.
"""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import platform
import re
import shutil
import struct
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from vc_attention import cuda_driver, guard, nvrtc, ops, support, verdicts
from vc_attention.attend import api, tile_schedule
from vc_attention.attend import cuda as attend_host
from vc_attention.attend import hopper as hopper_specification
from vc_attention.attend import precise as precise_specification
from vc_attention.attend import precise_cuda as precise_host
from vc_attention.attend.settings import PROBABILITIES
from vc_attention.errors import KernelUnavailable, UnsupportedCall
from vc_attention.group import cuda as group_host
from vc_attention.group.reference import group_reference
from vc_attention.nvrtc import Source
from vc_attention.quantize import cuda as prepare_host
from vc_attention.quantize import precise as precise_operands
from vc_attention.quantize.hopper import hopper_operands
from vc_attention.testing import random_qkv

DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENTS = (16, 8, 4, 2)


def missing(what: str):
    """Fail where the requirements bring it, else skip."""
    machine = f"{sys.platform} {platform.machine()}"
    if machine == "linux x86_64":
        pytest.fail(f"needs {what}: pip install -r tests/requirements.txt", pytrace=False)
    pytest.skip(f"needs {what}, which tests/requirements.txt installs on linux x86_64 only, not on {machine}")


@pytest.fixture
def compiler():
    try:
        from cuda.bindings import nvrtc as bindings

        bindings.nvrtcVersion()
    except Exception as error:  # noqa: BLE001  a missing library raises different types in different versions
        missing(f"cuda-bindings and NVRTC ({type(error).__name__}: {error})")


# Builds


@functools.cache
def built(source: Source) -> tuple[bytes, str]:
    """Machine code, and what ptxas says about registers and spills."""
    return nvrtc.compile_cubin(dataclasses.replace(source, flags=(*source.flags, "--ptxas-options=-v")))


# Most registers that leave room for the blocks per multiprocessor which the kernel is made for: 65,536 divided by them
# and their threads. Measured with NVRTC 13.0.88: what the comments say.
ATTENTION_REGISTERS = {
    "attention_fwd_kernel": 168,  # 168: one block of 384 threads, which then share them anew
    "attention_combine_kernel": 64,  # 32
}
PRECISE_REGISTERS = {"attention_precise_fwd_kernel": 168}  # 168
PREPARE_REGISTERS = {
    16: {"stats": 128, "finish": 64, "write": 168},  # 128, 28, 168; precise 128, 28, 142
    8: {"stats": 168, "finish": 64, "write": 255},  # 149, 28, 243; precise 149, 28, 140
    4: {"stats": 255, "finish": 64, "write": 255},  # 149, 28, 245; precise 149, 28, 139
    2: {"stats": 255, "finish": 64, "write": 255},  # 172 and 202, 28, 245; precise 165, 28, 152
}
GROUP_REGISTERS = {
    **{"init": 64, "assign": 128, "assign_wide": 128, "scan": 128},  # 24, 96 to 108, 96 to 108, 64
    **{"scatter": 128, "segment_sum": 128, "update": 128, "distances": 128, "chain": 128},  # 64, 72 to 105, 32, 64, 118
}
BUILDS = {
    **{
        f"attention-{str(dtype)[6:]}-{'means' if means else 'bare'}-{probabilities}": (
            attend_host.build(dtype, means, probabilities),
            ATTENTION_REGISTERS,
        )
        for dtype in DTYPES
        for means in (True, False)
        for probabilities in PROBABILITIES["8-bit"]
    },
    **{f"precise-{str(dtype)[6:]}": (precise_host.build(dtype), PRECISE_REGISTERS) for dtype in DTYPES},
    **{
        f"prepare{'-precise' * precise}-{str(dtype)[6:]}-{alignment}": (
            prepare_host.build(dtype, alignment, precise),
            PREPARE_REGISTERS[alignment],
        )
        for dtype in DTYPES
        for alignment in ALIGNMENTS
        for precise in (False, True)
    },
    **{
        f"group-{str(dtype)[6:]}-{alignment}": (group_host.build(dtype, alignment), GROUP_REGISTERS)
        for dtype in DTYPES
        for alignment in ALIGNMENTS
    },
}


@pytest.mark.parametrize("name", list(BUILDS))
def test_build_spills_nothing_and_keeps_wgmma_asynchronous(name, compiler, record_property):
    source, most = BUILDS[name]
    code, messages = built(source)
    assert code[:4] == b"\x7fELF"
    assert "C75" not in messages, messages  # ptxas serialized wgmma
    assert "warning" not in messages.lower(), messages
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", messages)
    names = re.findall(r"Compiling entry function '(\w+)'", messages)
    registers = dict(zip(names, map(int, re.findall(r"Used (\d+) registers", messages)), strict=True))
    record_property("registers", str(registers))
    assert set(registers) == set(most)
    assert len(spilled) == len(most)
    assert set(spilled) == {("0", "0")}, messages
    assert set(re.findall(r"(\d+) bytes stack frame", messages)) == {"0"}, messages
    for kernel, used in registers.items():
        assert used <= most[kernel], f"{kernel} uses {used} registers, made for {most[kernel]}"


def disassembled(code: bytes, folder: Path) -> str:
    tool = shutil.which("nvdisasm")
    if tool is None:
        try:
            files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
        except importlib.metadata.PackageNotFoundError:
            missing("nvidia-cuda-nvdisasm")
        tool = next(str(file.locate()) for file in files if file.stem == "nvdisasm")
    path = folder / "kernel.cubin"
    path.write_bytes(code)
    return subprocess.run([tool, "-c", path], check=True, capture_output=True, text=True).stdout


def disassembly(code: bytes, folder: Path) -> tuple[list[str], list[tuple[int, int]]]:
    """Opcodes in order, and loops as (first, last) instruction: the spans of backward branches."""
    labels, opcodes, branches = {}, [], []
    for line in disassembled(code, folder).splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(opcodes)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*?);", line):
            if instruction[1].startswith("BRA") and (target := re.search(r"`\((\.L_\w+)\)", instruction[2])):
                branches.append((target[1], len(opcodes)))
            opcodes.append(instruction[1])
    return opcodes, [(labels[target], place) for target, place in branches if labels[target] <= place]


def products(opcodes: list[str]) -> dict[str, int]:
    return {kind: sum(opcode.startswith(kind) for opcode in opcodes) for kind in ("IGMMA", "QGMMA", "HGMMA")}


# Instructions of the loop over four key tiles, slow paths among them; a fifth step empties the accumulator, behind the
# mean product. Measured with NVRTC 13.0.88: 2176 and 2041. A limit 1 % above: a spill, a serialized wgmma or a
# conversion more per score (16 a step) breaks it.
MOST_LOOP_INSTRUCTIONS = {True: 2200, False: 2070}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("means", [True, False])
def test_attention_is_made_of_tensor_core_products(means, dtype, compiler, tmp_path, record_property):
    code, _ = built(attend_host.build(dtype, means))
    opcodes, loops = disassembly(code, tmp_path)
    assert len(opcodes) > 1000
    assert not {"STL", "LDL"} & {opcode.split(".")[0] for opcode in opcodes}
    in_all = products(opcodes)
    assert in_all["IGMMA"] >= 16
    assert in_all["QGMMA"] >= 16
    assert (in_all["HGMMA"] > 0) == means
    bodies = [opcodes[first : last + 1] for first, last in loops]
    main_loop = min((body for body in bodies if products(body)["QGMMA"] >= 16), key=len)
    record_property("main_loop_instructions", len(main_loop))
    assert products(main_loop) == {"IGMMA": 20, "QGMMA": 20, "HGMMA": int(means)}
    assert len(main_loop) <= MOST_LOOP_INSTRUCTIONS[means], f"{len(main_loop)} instructions in the main loop"


@pytest.mark.parametrize("dtype", DTYPES)
def test_precise_attention_spends_three_and_a_half_instructions_on_a_score(dtype, compiler, tmp_path, record_property):
    code, _ = built(precise_host.build(dtype))
    opcodes, loops = disassembly(code, tmp_path)
    assert not {"STL", "LDL"} & {opcode.split(".")[0] for opcode in opcodes}
    bodies = [opcodes[first : last + 1] for first, last in loops]
    main_loop = min((body for body in bodies if products(body)["HGMMA"] >= 16), key=len)
    assert products(main_loop) == {"IGMMA": 8, "QGMMA": 0, "HGMMA": 16}
    waits = [place for place, opcode in enumerate(main_loop) if opcode.startswith("WARPGROUP.DEPBAR")]
    assert len(waits) == 4
    # From the wait for the scores to the branch that a raised maximum takes, before the wait for P V. A conversion, a
    # comparison or a clearing more per score (32 or 64) breaks the limit; measured with NVRTC 13.0.88: 228 and 229.
    for first, last in zip(waits[::2], waits[1::2], strict=True):
        branch = next(place for place in range(first, last) if main_loop[place] == "BRA")
        softmax = main_loop[first:branch]
        record_property("softmax_instructions", len(softmax))
        assert sum(opcode == "MUFU.EX2" for opcode in softmax) == 64
        assert len(softmax) <= 245


def test_grouping_scores_on_the_tensor_cores(compiler, tmp_path):
    opcodes, _ = disassembly(built(group_host.build(torch.bfloat16, 16))[0], tmp_path)
    assert products(opcodes)["HGMMA"] >= 8


TOUCHES_MEMORY = r"/\s+(?:@!?U?P\w+ )?\s*(?:LDG|STG|LD|ST|ATOM|ATOMG|RED|REDG|UTMALDG|UBLKCP|EXIT)\b"


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in BUILDS
        if re.match(r"(prepare.*|group)-bfloat16-(16|2)$|attention-bfloat16-means-expcast$", name)
    ],
)
def test_a_kernel_that_may_begin_early_waits_before_it_touches_memory(name, compiler, tmp_path):
    source, kernels = BUILDS[name]
    found = re.split(r"^\.text\.(\w+):$", disassembled(built(source)[0], tmp_path), flags=re.MULTILINE)
    bodies = dict(zip(found[1::2], found[2::2], strict=True))
    assert set(bodies) == set(kernels)
    bodies.pop("attention_fwd_kernel", None)  # behind the preparation's end
    for kernel, body in bodies.items():
        wait = body.index(" ACQBULK ")  # griddepcontrol.wait
        touched = re.search(TOUCHES_MEMORY, body).start()
        assert wait < touched, f"{kernel}: {body[touched : touched + 60]}"


def text_of(source: Source) -> str:
    """The source file and the headers that it includes."""
    return "\n".join(text.decode() for text in source.texts().values())


def test_structures_have_the_sizes_that_the_sources_assert():
    for host in (prepare_host, group_host):
        text = text_of(host.build(torch.bfloat16, 16))
        size = int(re.search(r"static_assert\(sizeof\(Params\) == (\d+)", text)[1])
        assert ctypes.sizeof(host._Params) == size
        declared = re.search(r"struct Params \{(.*?)\n\};", text, re.DOTALL)[1]
        declared = re.sub(r"//[^\n]*", "", declared)
        names = re.findall(r"(\w+)\s*[,;]", declared)
        assert [name for name, _ in host._Params._fields_] == names  # the same fields in the same order


def test_the_schedule_is_that_of_the_source():
    text = re.sub(r"//[^\n]*", "", text_of(attend_host.build(torch.bfloat16, True)))
    size = int(re.search(r"static_assert\(sizeof\(TileSchedule\) == (\d+)", text)[1])
    assert ctypes.sizeof(attend_host._TileSchedule) == size
    c_types = {"int": ctypes.c_int, "float": ctypes.c_float}  # others are pointers
    for structure in (attend_host._TileSchedule, attend_host._PartRow):
        declared = re.search(rf"struct {structure.__name__[1:]} \{{(.*?)\n\}};", text, re.DOTALL)[1]
        fields = re.findall(r"(\w+\*?) (\w+);", declared)
        assert [(name, c_types.get(kind, ctypes.c_void_p)) for kind, name in fields] == list(structure._fields_)


def test_constants_are_those_of_the_sources():
    prepare = text_of(prepare_host.build(torch.bfloat16, 16))
    sizes = ("HEAD_DIM", "BLOCK", "KEY_CHUNK", "VALUE_CHUNK", "WRITE_ROWS", "VALUE_BLOCKS", "MEANS_GROUP")
    for name in (*sizes, "THREADS", "FINISH_THREADS"):
        assert int(re.search(rf"constexpr int {name} = (\d+);", prepare)[1]) == getattr(prepare_host, name)
    attention = text_of(attend_host.build(torch.bfloat16, True))
    for name in ("CLUSTER", "THREADS", "COMBINE_THREADS"):
        assert int(re.search(rf"constexpr int {name} = (\d+);", attention)[1]) == getattr(attend_host, name)
    assert int(re.search(r"constexpr int STAGES = (\d+);", attention)[1]) == tile_schedule.STEP_TILES
    kilobytes = int(re.search(r"constexpr int SHARED_BYTES = (\d+) \* 1024;", attention)[1])
    assert kilobytes * 1024 == attend_host.SHARED_BYTES
    for name in ("MAX_CODE", "LAST_CODE", "SHORT_TILES", "NO_MAX_YET"):
        assert int(re.search(rf"constexpr \w+ {name} = (\d+)\b", attention)[1]) == getattr(hopper_specification, name)
    room = int(re.search(r"constexpr int ROOM_256THS = (\d+);", attention)[1])
    assert room / 256 == hopper_specification.ROOM
    precise = text_of(precise_host.build(torch.bfloat16))
    for name in ("CLUSTER", "THREADS"):
        assert int(re.search(rf"constexpr int {name} = (\d+);", precise)[1]) == getattr(attend_host, name)
    kilobytes = int(re.search(r"constexpr int SHARED_BYTES = (\d+) \* 1024;", precise)[1])
    assert kilobytes * 1024 == precise_host.SHARED_BYTES
    assert float(re.search(r"constexpr float TOP = ([\d.]+)f;", precise)[1]) == precise_specification.TOP
    limit = float(re.search(r"constexpr float SUM_LIMIT = ([\d.]+)f;", precise)[1])
    assert limit == 2.0**precise_specification.LIMIT
    magic = re.search(r"constexpr u32 MAGIC = 0x(\w+);\nconstexpr float MAGIC_FLOAT = ([\d.]+)f;", precise)
    assert struct.unpack(">f", bytes.fromhex(magic[1]))[0] == float(magic[2]) == precise_specification.MAGIC
    for name in ("Q_SCALE_MIN", "K_SCALE_MIN"):
        exponent = re.search(rf"constexpr float {name} = (?:PRECISE \? )?0x1p-(\d+)f", prepare)[1]
        assert 2.0 ** -int(exponent) == getattr(precise_operands, name)
    carries = re.search(r"PAIR_VALUE_LIMIT_CARRIES = INPUT_FP16 \? 0x(\w{4})\1 : 0x(\w{4})\2;", prepare)
    for dtype, carry in zip((torch.float16, torch.bfloat16), carries.groups(), strict=True):
        smallest_declined = torch.tensor(0x8000 - int(carry, 16), dtype=torch.int16).view(dtype)
        assert smallest_declined.item() == precise_operands.VALUE_LIMIT[dtype]
    group = group_host.SOURCE.read_text()
    for name in ("SEGMENT", "MOST_CLUSTERS", "WARPS", "SCATTER_WARPS", "PRODUCT_CLUSTERS"):
        assert int(re.search(rf"constexpr int {name} = (\d+);", group)[1]) == getattr(group_host, name)


def test_shared_memory_fits_a_multiprocessor():
    bytes_of_centroids = [1024 + clusters * 264 for clusters in (group_host.WIDE_FROM, group_host.MOST_CLUSTERS)]
    blocks = [
        attend_host.SHARED_BYTES,
        precise_host.SHARED_BYTES,
        2 * bytes_of_centroids[0],
        bytes_of_centroids[1],
    ]  # two blocks of `assign`
    assert max(blocks) <= 227 * 1024


# The cache

TINY = '#include "value.cuh"\nextern "C" __global__ void tiny(int* x) { x[0] = VALUE + EXTRA; }\n'


@pytest.fixture
def tiny(tmp_path, monkeypatch, compiler) -> Source:
    """A source that compiles in a moment, with a cache of its own."""
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "tiny.cu").write_text(TINY)
    (tmp_path / "value.cuh").write_text("#pragma once\n#define VALUE 7\n")
    return Source(tmp_path / "tiny.cu", "sm_90a", ("-DEXTRA=1",))


@pytest.fixture
def compilations(monkeypatch) -> list[Source]:
    made, compile_cubin = [], nvrtc.compile_cubin

    def counted(source):
        made.append(source)
        return compile_cubin(source)

    monkeypatch.setattr(nvrtc, "compile_cubin", counted)
    return made


def cached(tmp_path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


def test_the_second_time_nothing_is_compiled(tiny, compilations, tmp_path):
    code = nvrtc.cubin(tiny)
    assert code[:4] == b"\x7fELF"
    assert nvrtc.cubin(tiny) == code
    assert len(compilations) == 1
    assert [path.suffix for path in cached(tmp_path)] == [".cubin"]


def test_texts_settings_and_compiler_make_the_key(tiny, compilations, tmp_path, monkeypatch):
    nvrtc.cubin(tiny)
    nvrtc.cubin(dataclasses.replace(tiny, flags=("-DEXTRA=2",)))
    nvrtc.cubin(dataclasses.replace(tiny, arch="sm_80"))
    (tmp_path / "value.cuh").write_text("#pragma once\n#define VALUE 8\n")
    nvrtc.cubin(tiny)
    (tmp_path / "tiny.cu").write_text(TINY + "// changed\n")
    nvrtc.cubin(tiny)
    from cuda.bindings import nvrtc as bindings

    monkeypatch.setattr(bindings, "nvrtcVersion", lambda: (bindings.nvrtcResult.NVRTC_SUCCESS, 99, 1))
    nvrtc.cubin(tiny)
    assert len(compilations) == 6
    assert len(cached(tmp_path)) == 6


DAMAGE = {
    "empty": lambda data: b"",
    "checksum alone": lambda data: data[:32],
    "cut in the checksum": lambda data: data[:20],
    "cut in the code": lambda data: data[:-1],
    "wrong checksum": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "one bit of the code": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "something else": lambda data: b"<html>not a cubin</html>" * 99,
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_file_is_compiled_anew_and_healed(damage, tiny, compilations, tmp_path):
    code = nvrtc.cubin(tiny)
    (path,) = cached(tmp_path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert nvrtc.cubin(tiny) == code
    assert len(compilations) == 2
    assert nvrtc.cubin(tiny) == code
    assert len(compilations) == 2
    assert cached(tmp_path) == [path]


def test_a_directory_that_cannot_be_made_costs_only_time(tiny, compilations, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    code = nvrtc.cubin(tiny)
    assert nvrtc.cubin(tiny) == code
    assert len(compilations) == 2
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_full_disk_costs_only_time_and_leaves_nothing(tiny, compilations, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nvrtc.os, "replace", full)
    assert nvrtc.cubin(tiny)[:4] == b"\x7fELF"
    assert cached(tmp_path) == []


def test_a_disk_that_fills_up_in_the_middle_of_a_file_leaves_nothing(tiny, compilations, tmp_path):
    resource = pytest.importorskip("resource", reason="needs a limit on the size of files, which Windows has not")
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, kept[1]))
    try:
        assert nvrtc.cubin(tiny)[:4] == b"\x7fELF"
        left = cached(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert left == []
    nvrtc.cubin(tiny)
    assert len(compilations) == 2
    assert [path.suffix for path in cached(tmp_path)] == [".cubin"]


def test_two_processes_at_once(tiny, tmp_path):
    work = (
        "import hashlib, sys; from pathlib import Path; from vc_attention import nvrtc\n"
        f"source = nvrtc.Source(Path({str(tiny.path)!r}), 'sm_90a', ('-DEXTRA=1',))\n"
        "for _ in range(20):\n"
        "    code = nvrtc.cubin(source)\n"
        "    for path in nvrtc.cache_directory().glob('*.cubin'): path.unlink(missing_ok=True)\n"
        "print(hashlib.sha256(nvrtc.cubin(source)).hexdigest())\n"
        "assert 'torch' not in sys.modules\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", work], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    digest = hashlib.sha256(nvrtc.cubin(tiny)).hexdigest()
    assert [out.strip() for out, _ in answers] == [digest, digest]
    assert [path.suffix for path in cached(tmp_path)] == [".cubin"]


def test_where_the_cache_lies(monkeypatch, tmp_path):
    for name in (nvrtc.CACHE_VARIABLE, "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nvrtc.Path, "home", lambda: tmp_path)
    answers = {}
    for system in ("linux", "darwin", "win32"):
        monkeypatch.setattr(nvrtc.sys, "platform", system)
        answers[system] = nvrtc.cache_directory().relative_to(tmp_path).as_posix()
    assert answers == {
        "linux": ".cache/vc-attention",
        "darwin": "Library/Caches/vc-attention",
        "win32": "AppData/Local/vc-attention",
    }
    monkeypatch.setattr(nvrtc.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert nvrtc.cache_directory() == tmp_path / "xdg" / "vc-attention"
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path / "own"))
    assert nvrtc.cache_directory() == tmp_path / "own"


def test_a_user_without_a_home(tiny, compilations, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(nvrtc.CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(nvrtc.Path, "home", homeless)
    assert nvrtc.cubin(tiny)[:4] == b"\x7fELF"
    assert nvrtc.cubin(tiny)
    assert len(compilations) == 2


def test_a_source_that_does_not_compile_says_so(tiny, tmp_path):
    (tmp_path / "tiny.cu").write_text("this is no CUDA")
    with pytest.raises(KernelUnavailable, match=r"NVRTC could not compile tiny\.cu for sm_90a: .*error"):
        nvrtc.cubin(tiny)
    assert not (tmp_path / "cache").exists()


# What is missing


@pytest.fixture
def no_bindings(monkeypatch):
    for name in ("cuda.bindings", "cuda.bindings.nvrtc", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def no_nvrtc(monkeypatch, compiler):
    from cuda.bindings import nvrtc as bindings

    def not_found():
        raise RuntimeError("Failed to dlopen libnvrtc.so.13")

    monkeypatch.setattr(bindings, "nvrtcVersion", not_found)


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors pass for those of an H200, and torch.cuda answers as if it had one."""
    monkeypatch.setattr(api, "family", lambda device: "sm_90")
    monkeypatch.setattr(ops, "family", lambda device: "sm_90")
    for name, answer in {
        "current_device": 0,
        "is_current_stream_capturing": False,
        "get_device_name": "NVIDIA H200 (pretended)",
        "device": contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    verdict = guard._verdict
    monkeypatch.setattr(guard, "_verdict", lambda device, *rest: verdict(torch.device("cpu"), *rest))
    monkeypatch.setattr(guard, "_verdicts", {})
    return random_qkv((1, 2, 64, 128), dtype=torch.bfloat16)


@pytest.fixture(params=["no_bindings", "no_nvrtc"])
def something_missing(request, monkeypatch):
    request.getfixturevalue(request.param)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_missing_parts_are_named_with_the_install_line(something_missing):
    with pytest.raises(KernelUnavailable) as caught:
        nvrtc.cubin(attend_host.build(torch.bfloat16, True))
    assert 'pip install "cuda-bindings==13.*"' in caught.value.reason
    assert "NVRTC" in caught.value.reason


def test_support_says_what_is_missing_in_one_sentence(something_missing, hopper):
    for name in ("auto", "cuda"):
        answer = support(*hopper, implementation=name)
        assert not answer
        assert answer.reasons["cuda"] == nvrtc.install_sentence()
        assert "\n" not in answer.why
    with pytest.raises(UnsupportedCall, match="cuda: the CUDA kernels need"):
        ops.attention_operator(*hopper, None, 0.1, "BHSD", "auto", "auto", "auto", True, True, "auto")


def fake_driver(launched):
    """NVIDIA's module, but a launch only notes its settings and its kernel."""
    bindings = pytest.importorskip("cuda.bindings.driver")

    class Driver:
        CUlaunchConfig = bindings.CUlaunchConfig

        @staticmethod
        def cuLaunchKernelEx(config, function, arguments, extra):
            grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
            block = (config.blockDimX, config.blockDimY, config.blockDimZ)
            ids = [attribute.id for attribute in config.attrs]
            assert ids == [bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]
            assert config.attrs[0].value.programmaticStreamSerializationAllowed == 1
            launched.append((function, grid, block, config.sharedMemBytes, int(config.hStream), config.numAttrs))
            return (0,)

    return Driver


def test_a_sequence_of_launches_starts_when_all_kernels_are_loaded(monkeypatch, tmp_path):
    launched, asked = [], []
    module = fake_driver(launched)

    def function(kernel, device_index):
        if kernel.name == "broken":
            raise KernelUnavailable("does not compile")
        return kernel.name

    def driver():
        asked.append("driver")
        return module

    for name, answer in {"current_device": 0, "device": contextlib.nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=7))
    cuda_driver._programmatic_launch()  # kept
    for name, stand_in in {"_function": function, "_bind_context": lambda index: None, "driver": driver}.items():
        monkeypatch.setattr(cuda_driver, name, stand_in)

    def steps(*names):
        kernels = [cuda_driver.Kernel(Source(tmp_path / "x.cu", "sm_90a"), name, 64) for name in names]
        return [
            cuda_driver.Launch(kernel, (n, 2, 3), 128 * n, [ctypes.c_int(n)], joins=n == 2)
            for n, kernel in enumerate(kernels, 1)
        ]

    cuda_driver.launch_all("cuda", steps("first", "second", "last"))
    assert launched == [
        ("first", (1, 2, 3), (128, 1, 1), 64, 7, 0),
        ("second", (2, 2, 3), (256, 1, 1), 64, 7, 1),
        ("last", (3, 2, 3), (384, 1, 1), 64, 7, 0),
    ]
    assert asked == ["driver"]  # looking it up takes longer than a launch
    with pytest.raises(KernelUnavailable):
        cuda_driver.launch_all("cuda", steps("fourth", "broken"))
    assert len(launched) == 3


def test_kernels_are_loaded_and_launched_on_the_tensors_device_not_the_current_one(monkeypatch, tmp_path):
    current, seen = [0], []

    @contextlib.contextmanager
    def device(asked):
        kept, current[0] = current[0], asked.index
        yield
        current[0] = kept

    module = fake_driver(seen)
    cuda_driver._programmatic_launch()  # kept

    def stream():
        return types.SimpleNamespace(cuda_stream=70 + current[0])

    for name, stand_in in {"device": device, "current_device": lambda: current[0], "current_stream": stream}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(cuda_driver, "_function", lambda kernel, index: f"{kernel.name} of {index}")
    monkeypatch.setattr(cuda_driver, "_bind_context", lambda index: None)
    monkeypatch.setattr(cuda_driver, "driver", lambda: module)
    kernel = cuda_driver.Kernel(Source(tmp_path / "x.cu", "sm_90a"), "kernel")
    for index in (1, 0):
        cuda_driver.launch(kernel, torch.device("cuda", index), (1, 1, 1), 32, [ctypes.c_int(0)])
    assert [(function, stream) for function, _, _, _, stream, _ in seen] == [("kernel of 1", 71), ("kernel of 0", 70)]
    assert current == [0]


@pytest.mark.parametrize(
    ("code", "kind", "sentence"),
    [
        (2, torch.cuda.OutOfMemoryError, "CUDA_ERROR_OUT_OF_MEMORY"),  # ComfyUI makes room and tries again
        (209, RuntimeError, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        (99999, RuntimeError, "error 99999"),  # of a driver newer than the bindings
    ],
)
def test_a_failed_driver_call_names_the_error(code, kind, sentence):
    pytest.importorskip("cuda.bindings.driver")
    with pytest.raises(RuntimeError, match=rf"^CUDA driver call failed: {sentence}$") as caught:
        cuda_driver.check((code,))
    assert caught.type is kind
    assert cuda_driver.check((0, "handle")) == "handle"
    assert cuda_driver.check((0, 1, 2)) == [1, 2]


def test_the_install_line_names_torchs_cuda_version(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert nvrtc.install_sentence().endswith('pip install "cuda-bindings==12.*"')
    monkeypatch.setattr(torch.version, "cuda", None)
    assert nvrtc.install_sentence().endswith("pip install cuda-bindings")


# The guard, with mocked device functions


def stand_in_attend(operands, out, **switches):
    out.copy_(hopper_specification.attend_hopper(operands, out.shape[2], **switches).view_as(out))


@pytest.fixture
def sound(monkeypatch, hopper):
    """Plain torch in place of the kernels, which agrees with itself."""
    monkeypatch.setattr(prepare_host, "prepare", hopper_operands)
    monkeypatch.setattr(group_host, "group_cuda", group_reference)
    monkeypatch.setattr(attend_host, "attend_cuda", stand_in_attend)
    return hopper


CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("probabilities", [None, *PROBABILITIES["8-bit"]])
def test_self_test_passes_for_sound_kernels(probabilities, dtype, sound):
    assert guard.self_test(CPU, dtype, probabilities=probabilities) is None
    assert support(*(x.to(dtype) for x in sound)).implementation == "cuda"


@contextlib.contextmanager
def default_dtype(dtype):
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


SURROUNDINGS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "half by default": lambda: default_dtype(torch.float16),
    "another default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("name", list(SURROUNDINGS))
def test_the_callers_settings_do_not_enter_the_self_test(name, sound):
    with SURROUNDINGS[name]():
        assert guard.self_test(CPU, torch.bfloat16) is None


def changed(field, change):
    """Preparation with one of its outputs changed."""

    def prepare(*tensors, **arguments):
        operands = hopper_operands(*tensors, **arguments)
        return dataclasses.replace(operands, **{field: change(getattr(operands, field).clone())})

    return prepare_host, "prepare", prepare


def one_repeated(x):
    x[0, 5] = x[0, 7]
    return x


def other_scale(*tensors, scale, **arguments):
    return hopper_operands(*tensors, scale=1.02 * scale, **arguments)


def written(change):
    """The attention kernel with something done to its output."""

    def attend_cuda(operands, out, **switches):
        stand_in_attend(operands, out, **switches)
        change(out)

    return attend_host, "attend_cuda", attend_cuda


def first_maxima_too_low(operands, out, **switches):
    room = hopper_specification._Rows._room
    with mock.patch.object(hopper_specification._Rows, "_room", lambda rows, scores: 5.5 * room(rows, scores)):
        stand_in_attend(operands, out, **switches)


def parts_not_weighed(operands, out, **switches):
    def average(parts, q_scale):
        return torch.stack([part.out for part in parts]).mean(0)

    with mock.patch.object(hopper_specification, "_combine", average):
        stand_in_attend(operands, out, **switches)


def means_shifted_in_later_parts(operands, out, **switches):
    restore = hopper_specification._Rows._restore_means

    def of_the_group_before(rows, means, group):
        restore(rows, means, max(group - (rows.tiles.start > 0), 0))

    with mock.patch.object(hopper_specification._Rows, "_restore_means", of_the_group_before):
        stand_in_attend(operands, out, **switches)


def grouped(change):
    def group_cuda(*arguments):
        permutation, centroids = group_reference(*arguments)
        return change(permutation), centroids

    return group_host, "group_cuda", group_cuda


FAULTS = {
    "softmax scale": (prepare_host, "prepare", other_scale),
    "q8, one row": changed("q8", one_repeated),
    "k8, one row": changed("k8", one_repeated),
    "v8, one channel": changed("v8", one_repeated),
    "q_scale": changed("q_scale", lambda x: x * 1.02),
    "v_scale": changed("v_scale", lambda x: x * 1.02),
    "v_scale, one channel": changed("v_scale", one_repeated),
    "v_scale, not a number": changed("v_scale", lambda x: x * float("nan")),
    "q_scale, not a number": changed("q_scale", lambda x: x * float("nan")),
    "means": changed("means", lambda x: x * 0.98),
    "no means": changed("means", torch.zeros_like),
    "first maxima": (attend_host, "attend_cuda", first_maxima_too_low),
    "weights of split rows": (attend_host, "attend_cuda", parts_not_weighed),
    "means of split rows": (attend_host, "attend_cuda", means_shifted_in_later_parts),
    "output scale": written(lambda out: out.mul_(1.02)),
    "one head twice": written(lambda out: out[:, 1].copy_(out[:, 0])),
    "last rows unwritten": written(lambda out: out[:, :, -1].fill_(float("nan"))),
    "nothing written": written(lambda out: out.fill_(float("nan"))),
    "no permutation": grouped(torch.zeros_like),
    "no grouping": grouped(lambda order: torch.arange(order.shape[2], dtype=order.dtype).expand_as(order)),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_mismatch_disables_the_kernels_with_a_sentence(fault, sound, monkeypatch):
    module, name, faulty = FAULTS[fault]
    monkeypatch.setattr(module, name, faulty)
    answer = support(*sound)
    assert not answer
    assert answer.why.startswith("cuda self-test failed (")
    assert verdicts.HOW_TO_REPORT in answer.why
    assert "\n" not in answer.why


@pytest.fixture
def tests_run(monkeypatch, hopper):
    """Self-tests asked for, which answer with ``outcome``."""
    asked, outcome = [], {}

    def self_test(device, dtype, mode, probabilities):
        asked.append(dtype)
        answer = outcome.get(dtype)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(guard, "self_test", self_test)
    return asked, outcome


def ask(index=0, dtype="bfloat16"):
    return guard.why_cuda_is_unavailable(torch.device("cuda", index), dtype)


def test_verdict_is_kept_per_device_and_dtype(tests_run):
    asked, outcome = tests_run
    outcome[torch.float16] = "attention: relative error 1.0e-01, allowed 5e-03"
    for _ in range(3):
        assert ask() is None
        assert "self-test failed (attention" in ask(dtype="float16")
        assert ask(1) is None
    assert asked == [torch.bfloat16, torch.float16, torch.bfloat16]
    assert guard.why_cuda_is_unavailable(torch.device("cuda"), "bfloat16") is None  # the current device, 0
    assert len(asked) == 3


def test_a_crash_disables_and_is_kept(tests_run):
    asked, outcome = tests_run
    outcome[torch.bfloat16] = RuntimeError("CUDA driver call failed: CUDA_ERROR_NO_BINARY_FOR_GPU")
    for _ in range(2):
        assert "self-test could not run (RuntimeError: CUDA driver call failed" in ask()
    assert len(asked) == 1


def test_missing_parts_are_the_verdict(tests_run):
    _, outcome = tests_run
    outcome[torch.bfloat16] = KernelUnavailable("the CUDA kernels need something")
    assert ask() == "the CUDA kernels need something"


def test_out_of_memory_passes_through_and_is_no_verdict(tests_run):
    asked, outcome = tests_run
    outcome[torch.bfloat16] = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        ask()
    outcome.clear()
    assert ask() is None
    assert len(asked) == 2


def test_threads_that_ask_at_once_test_once(tests_run, monkeypatch):
    # ComfyUI's multi-GPU runs one thread per device; two may share one.
    asked, outcome = tests_run
    outcome[torch.bfloat16] = "attention: relative error 1.0e-01, allowed 5e-03"
    self_test = guard.self_test

    def slow(*arguments):
        time.sleep(0.2)
        return self_test(*arguments)

    monkeypatch.setattr(guard, "self_test", slow)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [future.result() for future in [pool.submit(ask) for _ in range(4)]]
    assert len(asked) == 1
    assert len(set(answers)) == 1
    assert "self-test failed" in answers[0]


def test_nothing_is_tested_while_a_graph_is_captured(tests_run, monkeypatch):
    asked, _ = tests_run
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "before a CUDA graph is captured" in ask()
    assert asked == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert ask() is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert ask() is None
