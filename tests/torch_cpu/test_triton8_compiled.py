"""The 8-bit Triton kernels compiled for every family, without a GPU: instructions, spills, memory, counts."""

import re

import pytest
from vc_attention.arch import EIGHT_BIT, FAMILIES
from vc_attention.attend.settings import AUTO, resolve
from vc_attention.attend.triton8 import SETTINGS, sums_by_dot
from vc_attention.group.triton import ASSIGN, HEAD_DIMS, UPDATE
from vc_attention.quantize.triton8 import SETTINGS as PREPARE_SETTINGS

from .triton_compile import SHARED_BYTES, check_counts, compile_for, skip_without_triton

skip_without_triton()

FAMILY_NAMES = [row.family for row in FAMILIES]
# Preparation and grouping: for every family, and half the width for one family of each generation, to save time.
SMALL_KERNELS = [(family, 128) for family in FAMILY_NAMES]
SMALL_KERNELS += [(family, 64) for family in FAMILY_NAMES if family not in ("sm_103", "sm_121")]
# What multiplies E4M3 in PTX and in SASS, and INT8 where the family takes q and k as INT8.
E4M3 = {
    "sm_89": (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32", r"\bQMMA\.16832\.F32\.E4M3\.E4M3"),
    "sm_90": (r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", r"\bQGMMA\.64x128x32\.F32\.E4M3\.E4M3"),
    "sm_100": (r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4", r"\bUTCQMMA\b"),
}
INT8 = {
    "sm_89": (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s(32|atfinite).*\.s8\.s8\.s32", r"\bIMMA\.16832\.S8\.S8"),
    "sm_90": (r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.s32\.s8\.s8", r"\bIGMMA\.64x128x32\.S8\.S8"),
}
INT8["sm_120"] = INT8["sm_121"] = INT8["sm_89"]
E4M3 |= {"sm_103": E4M3["sm_100"], "sm_120": E4M3["sm_89"], "sm_121": E4M3["sm_89"]}


def attention_constants(family, head_dim, settings):
    return {
        "D": head_dim,
        "BLOCK_Q": SETTINGS[family].block_q,
        "INT8": settings.qk_format == "int8",
        "EXPCAST": settings.probabilities == "expcast",
        "MEANS": settings.demean,
        "EMULATE": False,
        "SUM_BY_DOT": sums_by_dot(family),
    }


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention(family, head_dim):
    from vc_attention.triton_kernels.attention8 import attention8_fwd_kernel

    settings = resolve(EIGHT_BIT, AUTO, AUTO, True, family)
    constants = attention_constants(family, head_dim, settings)
    made = compile_for(attention8_fwd_kernel, family, {"out": "*bf16"}, constants, SETTINGS[family])
    in_ptx, in_sass = E4M3[family]
    if head_dim == 64:
        in_ptx, in_sass = in_ptx.replace("n128", "n64"), in_sass.replace("64x128", "64x64")
    loop = "\n".join(made.loop(in_sass))
    assert_has(made.ptx, in_ptx)
    if settings.qk_format == "int8":
        int8_in_ptx, int8_in_sass = INT8[family]
        assert_has(made.ptx, int8_in_ptx)
        assert_has(loop, int8_in_sass)
    assert ("MUFU.EX2" in loop and loop.count("MUFU.EX2") > 4) == (settings.probabilities == "exp2")
    assert made.stack_bytes == 0
    assert made.registers <= 255
    assert made.shared_bytes <= SHARED_BYTES[family]
    check_counts(f"attention8/{family}/D{head_dim}", made, in_sass)


@pytest.mark.parametrize(("family", "head_dim"), SMALL_KERNELS)
def test_preparation(family, head_dim):
    from vc_attention.triton_kernels import prepare8

    int8 = resolve(EIGHT_BIT, AUTO, AUTO, True, family).qk_format == "int8"
    rows = {"D": head_dim, "INT8": int8, "CENTRE": True, "GATHER": True, "EMULATE": False}
    values = {"D": head_dim, "MEANS": True, "GATHER": True, "EMULATE": False}
    for kernel, dtypes, constants in (
        (prepare8.quantize_rows_kernel, {"x": "*bf16", "signs": "*bf16"}, rows),
        (prepare8.value_blocks_kernel, {"v": "*bf16", "means": "*bf16"}, values),
        (prepare8.quantize_values_kernel, {"v": "*bf16", "means": "*bf16"}, values),
    ):
        made = compile_for(kernel, family, dtypes, constants, PREPARE_SETTINGS)
        check_memory(made, family)
        if kernel is not prepare8.value_blocks_kernel and not (int8 and kernel is prepare8.quantize_rows_kernel):
            assert_has(made.ptx, r"cvt\.rn\.satfinite\.e4m3x2")


@pytest.mark.parametrize(("family", "head_dim"), SMALL_KERNELS)
def test_grouping(family, head_dim):
    from vc_attention.triton_kernels import group

    for kernel, settings, constants in (
        (group.assign_kernel, ASSIGN, {"D": head_dim, "EMULATE": False}),
        (group.update_kernel, UPDATE, {"D": head_dim}),
    ):
        made = compile_for(kernel, family, {"v": "*bf16", "centroids": "*bf16"}, constants, settings)
        check_memory(made, family)


def check_memory(made, family):
    """Rows are read 16 bytes at a time, nothing is spilled, and a program fits a multiprocessor."""
    assert_has(made.sass, r"LDG\.E\.128|LDGSTS\.E\.BYPASS\.(LTC128B\.)?128")
    assert made.stack_bytes == 0
    assert made.shared_bytes <= SHARED_BYTES[family]


def assert_has(text, pattern):
    assert re.search(pattern, text), f"no {pattern}"
