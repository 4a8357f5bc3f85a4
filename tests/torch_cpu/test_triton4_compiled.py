"""The 4-bit Triton kernels compiled for workstation Blackwell without a GPU: instructions, spills, memory, counts."""

import re

import pytest
from vc_attention.attend.triton4 import OWN_BLOCK, OWN_BLOCK_ROWS, SETTINGS
from vc_attention.quantize.nvfp4 import SAMPLED_BLOCKS
from vc_attention.quantize.triton4 import (
    BIAS,
    BIAS_ROWS,
    HEAD_DIMS,
    NATIVE_FAMILIES,
    PREPARE,
    REGISTERS,
    ROUND,
    ROUND_REGISTERS,
    ROUND_ROWS,
)

from .triton_compile import SHARED_BYTES, check_counts, check_recorded, compile_for, recorded, skip_without_triton

skip_without_triton()

PRODUCT_PTX = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
PRODUCT = r"\bOMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X\b"
# Queries and keys of 128 x 128 by 16 x 8 x 64 (D = 128: two steps), probabilities and values likewise; 8 warps.
PRODUCTS = {128: 64, 64: 32}
ROUNDING = ("queries4_kernel", "keys4_kernel", "values4_kernel")
ROUNDING_SASS = r"F2FP\.SATFINITE\.E2M1"
SUMS = 4  # by the product with 16 columns of ones, where no means are removed


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("means", [True, False], ids=["means", "plain"])
@pytest.mark.parametrize("own", [True, False], ids=["own", "all"])
def test_attention(family, head_dim, means, own):
    from vc_attention.triton_kernels.attention4 import attention4_fwd_kernel

    settings = SETTINGS[family]
    constants = {"D": head_dim, "MEANS": means, "OWN": own, "EMULATE": False, "STAGES": settings.num_stages}
    made = compile_for(attention4_fwd_kernel, family, {"p_out": "*bf16"}, constants, settings)
    assert f".target {family}a" in made.ptx
    assert set(re.findall(r"mma\.sync[\w.:]+", made.ptx)) == {PRODUCT_PTX}
    assert "cvt.rn.satfinite.e2m1x2.f32" in made.ptx
    loop = made.loop(PRODUCT)
    assert sum(bool(re.search(PRODUCT, line)) for line in loop) == PRODUCTS[head_dim] + (0 if means else SUMS)
    if head_dim == 128:  # P stays in registers
        assert not [line for line in loop if line.startswith(("STS", "STL", "LDL"))]
    assert made.stack_bytes == 0
    assert made.registers <= 255
    assert made.shared_bytes <= SHARED_BYTES[family]
    check_counts(key_of(family, head_dim, means, own), made, PRODUCT)


def key_of(family, head_dim, means, own):
    return f"attention4/{family}/D{head_dim}/{'means' if means else 'plain'}{'/own' if own else ''}"


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("means", [True, False], ids=["means", "plain"])
def test_the_own_block_adds_nothing_to_the_loop(family, head_dim, means):
    own, without = (recorded()[key_of(family, head_dim, means, own)]["loop_instructions"] for own in (True, False))
    assert own < 1.01 * without  # ptxas schedules it a little differently


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_own_block(family, head_dim, dtype):
    from vc_attention.triton_kernels.own_block4 import own_block4_fwd_kernel

    constants = {"D": head_dim, "EMULATE": False, "ROWS": OWN_BLOCK_ROWS}
    dtypes = dict.fromkeys(("p_q", "p_k", "p_v", "p_out"), f"*{dtype}")
    made = compile_for(own_block4_fwd_kernel, family, dtypes, constants, OWN_BLOCK)
    # Scores, output, and the rotation of a half of the keys inside groups of 16.
    products = [line for line in made.instructions if line.startswith("HMMA.16816")]
    assert len(products) == 2 * (head_dim + head_dim // 16)
    assert made.stack_bytes == 0
    assert made.shared_bytes <= 16 << 10
    counts = {"instructions": len(made.instructions), "registers": made.registers, "shared_bytes": made.shared_bytes}
    check_recorded(f"own_block4/{family}/D{head_dim}/{dtype}", counts)


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_preparation(family, head_dim):
    from vc_attention.triton_kernels import feedback4, prepare4

    capped = {"maxnreg": REGISTERS}
    rows_capped = {"maxnreg": ROUND_REGISTERS}
    for kernel, settings, options in (
        (prepare4.query_maxima_kernel, PREPARE, capped),
        (prepare4.queries4_kernel, ROUND, rows_capped),
        (prepare4.key_maxima_kernel, PREPARE, capped),
        (prepare4.keys4_kernel, ROUND, rows_capped),
        (prepare4.value_maxima_kernel, PREPARE, {}),
        (prepare4.values4_kernel, PREPARE, capped),
        (prepare4.bias_kernel, BIAS, {}),
        (feedback4.covariance_kernel, PREPARE, {}),
        (feedback4.feedback_kernel, PREPARE, {}),
    ):
        made = compile_preparation(kernel, family, head_dim, settings, options)
        rounds = kernel.__name__ in ROUNDING
        assert made.stack_bytes == 0, kernel
        assert made.registers <= options.get("maxnreg", 255), kernel
        assert made.shared_bytes <= SHARED_BYTES[family], kernel
        if rounds:  # its candidate scales are a loop: unrolled, Triton takes half a minute to compile it
            check_counts(f"{kernel.__name__}/{family}/D{head_dim}", made, ROUNDING_SASS)


def compile_preparation(kernel, family, head_dim, settings, options):
    constants = {"D": head_dim, "PERMUTED": True, "DEMEAN": True, "OWN": True, "EMULATE": False}
    constants["ROWS"] = BIAS_ROWS if kernel.__name__ == "bias_kernel" else ROUND_ROWS
    constants |= {"BETWEEN": True, "SAMPLES": SAMPLED_BLOCKS}
    names = [parameter.name for parameter in kernel.params]
    dtypes = dict.fromkeys(("p_q", "p_k", "p_v", "p_x", "p_high", "p_low"), "*bf16")
    constants = {name: value for name, value in constants.items() if name in names}
    return compile_for(kernel, family, dtypes, constants, settings, **options)
