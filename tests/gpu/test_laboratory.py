"""The laboratory's GPU emulation computes what its plain torch twin does, for every format."""

from pathlib import Path

import pytest
import torch
from vc_attention import group_values
from vc_attention.formats import nvfp4_scale
from vc_attention.quantize.nvfp4 import closest_nvfp4, fed_back_nvfp4, query_feedback
from vc_attention.testing import clustered_qkv, relative_l2

pytestmark = [pytest.mark.gpu, pytest.mark.triton]

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
KINDS = ("SIXTEEN_BIT", "PLAIN_FP8", "SAGE_ATTENTION_2", "COMFY_INT8")
KINDS += ("OURS_8BIT", "OURS_PRECISE", "INT8_THROUGHOUT", "OURS_4BIT", "NVFP4_AT_6")


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("grid", [(4, 8, 8), (5, 8, 11)], ids=["whole blocks", "short last block"])
@pytest.mark.parametrize("demean", [True, False])
@pytest.mark.parametrize("own", ["none", "block", "cube"])
@pytest.mark.parametrize("kind", KINDS)
def test_emulation_on_the_gpu_is_the_plain_torch_one(kind, own, demean, grid, dtype):
    from laboratory import formats
    from laboratory.attend_torch import attend_torch
    from laboratory.attend_triton import attend_triton
    from laboratory.operands import prepare
    from laboratory.own_block import own_order

    kinds = getattr(formats, kind).but(own=own)
    q, k, v = clustered_qkv(grid, heads=2, dtype=dtype, device="cuda")
    order = None if own == "none" else own_order(own, grid, q.device)
    operands = prepare(q, k, v, kinds, group_values(v).permutation, demean, order)
    # What is left is the order of additions and, where a code is a tie away, another code.
    limit = 3e-3 if kinds.probabilities in ("16-bit", "expcast", "nvfp4") else 1e-3
    assert relative_l2(attend_triton(operands, kinds), attend_torch(operands, kinds)) < limit


def test_rounding_on_the_gpu_is_the_packages():
    from laboratory.nvfp4_triton import fed_back_numbers_triton, nvfp4_numbers_triton

    q, k, _ = clustered_qkv((4, 8, 8), heads=3, device="cuda")
    scale, weights = nvfp4_scale(q, (2, 3)), query_feedback(k)
    expected = fed_back_nvfp4(q, scale, weights).numbers()
    found = fed_back_numbers_triton(q * (1 / scale), weights)
    assert relative_l2(found, expected) < 0.02  # a tie on the other side is carried on along its row
    assert (found != expected).float().mean() < 5e-3
    closest = nvfp4_numbers_triton(q * (1 / scale), closest=True)
    assert (closest.float() != closest_nvfp4(q, scale).numbers()).float().mean() < 1e-4
