"""The fidelity laboratory: its emulation is the reference's arithmetic, its measures are the node pack's."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from vc_attention import group_values
from vc_attention.attend.exact import exact_attention
from vc_attention.attend.reference import attend4, attend8, attend8_precise
from vc_attention.quantize.reference import quantize4, quantize8, quantize8_precise
from vc_attention.testing import clustered_qkv, relative_l2

from .triton_compile import skip_without_triton

ROOT = Path(__file__).parents[2]
GRID = (3, 8, 11)


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def node_module(name):
    spec = importlib.util.spec_from_file_location(f"vc_test_{name}", ROOT / "nodes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def call():
    """q, k, v with a short last block, and a grouping's permutation."""
    q, k, v = clustered_qkv(GRID, heads=2, dtype=torch.bfloat16)
    return q, k, v, group_values(v, clusters=3).permutation


def emulated(call, kinds, demean=True, grid=GRID):
    from laboratory.attend import attend

    return attend(*call[:3], kinds, call[3], demean, grid)


@pytest.mark.parametrize("demean", [True, False])
@pytest.mark.parametrize("probabilities", ["expcast", "exp2"])
def test_8bit_emulation_is_the_reference(call, probabilities, demean):
    from laboratory.formats import OURS_8BIT

    q, k, v, permutation = call
    expected = attend8(quantize8(q, k, v, permutation, "int8", demean), q.shape[-1] ** -0.5, probabilities)
    kinds = OURS_8BIT if probabilities == "expcast" else OURS_8BIT.but(probabilities="e4m3")
    # Float32 against float64 products: a few codes lie on the other side of a tie.
    assert relative_l2(emulated(call, kinds, demean), expected) < 2e-3


@pytest.mark.parametrize("demean", [True, False])
def test_precise_emulation_is_the_reference(call, demean):
    from laboratory.formats import OURS_PRECISE

    q, k, v, _ = call
    expected = attend8_precise(quantize8_precise(q, k, v), q.shape[-1] ** -0.5)
    # The emulation orders keys by groups, which gives their blocks other scales, and rounds values without their means.
    emulation = emulated((q, k, v, None), OURS_PRECISE, demean)
    assert relative_l2(emulation, expected) < 2e-3


def test_int8_throughout_has_steps_of_a_half_percent(call):
    from laboratory.formats import INT8_THROUGHOUT, OURS_PRECISE

    exact = exact_attention(*call[:3])
    throughout, precise = (relative_l2(emulated(call, kinds), exact) for kinds in (INT8_THROUGHOUT, OURS_PRECISE))
    assert precise < throughout < 1.8e-2


@pytest.mark.parametrize("demean", [True, False])
@pytest.mark.parametrize("own", [True, False], ids=["own block", "no own block"])
def test_4bit_emulation_is_the_reference(call, own, demean):
    from laboratory.formats import FAR_4BIT, OURS_4BIT

    q, k, v, permutation = call
    expected = attend4(quantize4(q, k, v, permutation, demean, own), q.shape[-1] ** -0.5)
    # A tie away is 1.4e-4; the reference rounds the probabilities of the own block to the dtype of v.
    assert relative_l2(emulated(call, OURS_4BIT if own else FAR_4BIT, demean), expected) < 5e-4


@pytest.mark.parametrize("own", ["block", "cube"])
def test_an_own_block_changes_no_exact_attention(call, own):
    from laboratory.formats import SIXTEEN_BIT

    assert relative_l2(emulated(call, SIXTEEN_BIT.but(own=own), demean=False), exact_attention(*call[:3])) < 1e-3


@pytest.mark.parametrize("kind", ["PLAIN_FP8", "SAGE_ATTENTION_2", "COMFY_INT8", "OURS_8BIT", "INT8_THROUGHOUT"])
@pytest.mark.parametrize("demean", [True, False])
def test_an_own_block_brings_every_format_nearer(call, kind, demean):
    from laboratory import formats

    exact = exact_attention(*call[:3])
    kinds = getattr(formats, kind)
    without, with_own = (relative_l2(emulated(call, kinds.but(own=own), demean), exact) for own in ("none", "block"))
    assert with_own < 0.8 * without


def test_one_block_is_attended_to_as_without_own_blocks():
    from laboratory.formats import FAR_4BIT, OURS_4BIT

    q, k, v = clustered_qkv((2, 8, 8), dtype=torch.bfloat16)
    with_own, without = (emulated((q, k, v, None), kinds, grid=(2, 8, 8)) for kinds in (OURS_4BIT, FAR_4BIT))
    assert torch.equal(with_own, without)


def test_a_cube_is_a_block_of_tokens_in_cubes():
    from laboratory.formats import SAGE_ATTENTION_2
    from laboratory.orders import cube_order

    grid = (2, 16, 8)
    q, k, v = clustered_qkv(grid, dtype=torch.bfloat16)
    order = cube_order(grid).long()
    kinds = SAGE_ATTENTION_2.but(qk="16-bit")  # blocks, which differ between the two, play no part in these formats
    cubes = emulated((q, k, v, None), kinds.but(own="cube"), demean=False, grid=grid)
    in_cubes = (*(x[:, :, order] for x in (q, k, v)), None)
    blocks = emulated(in_cubes, kinds.but(own="block"), demean=False, grid=grid)
    assert relative_l2(cubes[:, :, order], blocks) < 1e-3


def test_a_row_that_sees_its_own_block_alone_is_exact():
    from laboratory.formats import OURS_4BIT

    own = torch.eye(2).repeat_interleave(128, 0) @ torch.randn(2, 128, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(3, 256, 128, generator=torch.Generator().manual_seed(1))
    q, k, v = (40 * own + noise[0], own + 0.1 * noise[1], noise[2])
    q, k, v = (x[None, None].bfloat16() for x in (q, k, v))
    output = emulated((q, k, v, None), OURS_4BIT, grid=(1, 16, 16))
    assert relative_l2(output, exact_attention(q, k, v)) < 1e-3


def test_16bit_emulation_is_exact_attention(call):
    from laboratory.formats import SIXTEEN_BIT

    assert relative_l2(emulated(call, SIXTEEN_BIT, demean=False), exact_attention(*call[:3])) < 1e-3


def test_formats_stand_in_the_order_of_their_steps(call):
    from laboratory import formats

    exact = exact_attention(*call[:3])
    errors = [
        relative_l2(emulated(call, kinds, demean=False), exact)
        for kinds in (formats.COMFY_INT8, formats.SAGE_ATTENTION_2, formats.PLAIN_FP8, formats.FAR_4BIT)
    ]
    assert errors == sorted(errors)
    assert errors[0] < 0.02 < errors[1] < 0.035 < errors[2] < 0.08 < errors[3] < 0.2


@pytest.mark.parametrize(
    ("kind", "measured"),
    [("SAGE_ATTENTION_2", 0.039), ("COMFY_INT8", 0.017), ("OURS_8BIT", 0.0437)],
    ids=["SageAttention 2.2", "comfy-kitchen 0.2.40", "our CUDA kernel"],
)
def test_emulated_formats_have_the_errors_of_the_kernels(kind, measured):
    # Measured on an H200 on normal inputs, relative L2 against float32: the kernels themselves.
    from dataclasses import replace

    from laboratory import formats
    from laboratory.attend_torch import attend_torch
    from laboratory.operands import prepare

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 8192, 128, generator=generator).bfloat16() for _ in range(3))
    operands = prepare(q, k, v, getattr(formats, kind), None, False)
    rows = replace(operands, q=operands.q[:, :, :128], q_scale=operands.q_scale[:, :, :128])
    output = attend_torch(rows, getattr(formats, kind))
    assert relative_l2(output, exact_attention(q[:, :, :128], k, v)) == pytest.approx(measured, rel=0.1)


def test_one_operand_at_a_time_explains_the_whole(call):
    from laboratory.formats import OURS_8BIT, SIXTEEN_BIT

    exact = exact_attention(*call[:3])
    same = {"smooth_keys": True, "rotate": True}
    parts = [
        SIXTEEN_BIT.but(qk="int8", **same),
        SIXTEEN_BIT.but(probabilities="expcast", exact_sums=False),
        SIXTEEN_BIT.but(values="e4m3"),
    ]
    energy = sum(relative_l2(emulated(call, kinds, demean=False), exact) ** 2 for kinds in parts)
    whole = relative_l2(emulated(call, OURS_8BIT, demean=False), exact)
    assert whole == pytest.approx(energy**0.5, rel=0.15)


def test_a_scale_is_shared_by_the_rows_of_one_thread():
    from laboratory.operands import shared_maxima

    rows = torch.arange(1.0, 81.0).view(1, 1, 80)
    of_q, of_k = shared_maxima(rows, "thread", (8, 1))[0, 0], shared_maxima(rows, "thread", (4, 2))[0, 0]
    assert of_q[:8].tolist() == [25, 26, 27, 28, 29, 30, 31, 32]
    assert of_q[24] == of_q[0]
    assert of_k[:8].tolist() == [58, 58, 60, 60, 62, 62, 64, 64]
    assert of_q[64:].tolist() == [73, 74, 75, 76, 77, 78, 79, 80] * 2  # a short last group
    assert shared_maxima(rows, "head", (8, 1))[0, 0].tolist() == [80] * 80
    assert shared_maxima(rows, "block", (8, 1))[0, 0].tolist() == [80] * 80


def test_cubes_are_blocks():
    from laboratory.orders import cube_order

    grid = (4, 16, 8)
    order = cube_order(grid).long()
    assert order.sort().values.tolist() == list(range(4 * 16 * 8))
    frames, rows, columns = order // (16 * 8), order // 8 % 16, order % 8
    for block in range(4):
        part = slice(128 * block, 128 * (block + 1))
        assert [int(x[part].max() - x[part].min()) for x in (frames, rows, columns)] == [1, 7, 7]


def test_balanced_clusters_are_equal_and_near():
    from laboratory.orders import balanced, equal_labels

    v = clustered_qkv((4, 8, 16), heads=2, dtype=torch.bfloat16)[2]
    found = group_values(v, clusters=4)
    order = balanced(v, found).permutation
    assert torch.equal(order.sort(-1).values, torch.arange(512).expand(1, 2, 512).int())
    distance = torch.tensor([[[0.0, 9.0], [0.1, 9.0], [0.2, 1.0], [0.3, 9.0]]])
    assert equal_labels(distance, 2).tolist() == [[0, 0, 1, 1]]


@pytest.fixture(scope="module")
def clips():
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(2, 3, 3, 24, 32, generator=generator)
    return base, (base + 0.03 * torch.randn(base.shape, generator=generator)).clamp(0, 1)


def test_psnr_and_ssim_are_the_node_packs(clips):
    from laboratory import metrics

    nodes = node_module("metrics")
    for clip, (a, b) in enumerate(zip(*clips, strict=True)):
        first, second = (np.float64(255.0) * x.permute(0, 2, 3, 1).numpy().astype(np.float64) for x in (a, b))
        assert metrics.psnr(*clips)[clip].item() == pytest.approx(nodes.psnr(first, second), abs=1e-3)
        assert metrics.ssim(*clips)[clip].item() == pytest.approx(nodes.ssim(first, second), abs=1e-5)


def test_flip_of_many_frames_at_once_is_flip_of_each(clips):
    from laboratory import metrics

    flip = node_module("flip").flip
    expected = [
        np.mean([flip(a, b).mean().item() for a, b in zip(*pair, strict=True)]) for pair in zip(*clips, strict=True)
    ]
    assert metrics.flip(*clips).tolist() == pytest.approx(expected, abs=1e-5)


def test_a_plan_groups_where_it_says():
    from laboratory.variants import ALL, LATE, Plan

    assert Plan().refreshes(20) == [0, 4]
    assert Plan().refreshes(40) == [0, 4, 8]
    assert Plan(window=LATE).refreshes(20) == [15, 19]
    assert Plan(window=ALL, interval=8).refreshes(20) == [0, 8, 16]
    assert Plan(order="cube").refreshes(20) == []
    assert Plan(order="balanced").refreshes(20) == [0, 4]
    assert [Plan(demean="window").removes_means(step, 20) for step in (0, 4, 5, 19)] == [True, True, False, False]


def test_titles_name_one_row_each():
    from laboratory import variants

    for made in (variants.render_variants(), variants.ablation_variants(), variants.schedule_variants()):
        titles = [variant.title for variant in made]
        assert len(set(titles)) == len(titles)


def test_a_title_tells_whether_there_is_an_own_block():
    from laboratory import variants

    for made in (variants.render_variants(), variants.ablation_variants(), variants.schedule_variants()):
        for variant in made:
            own = variant.formats.own if variant.formats else "none"
            named = variant.title.split(",")[0] == "4-bit" or ", own block" in variant.title
            assert own == ("cube" if ", own cube" in variant.title else "block" if named else "none"), variant.title


def test_rows_from_before_the_own_block_are_those_of_the_mode_without_it(tmp_path):
    import fidelity
    import rows
    from laboratory.variants import render_variants

    clips = fidelity.CLIPS["renders"]
    jobs = {v.title: fidelity.job_key(fidelity.Job("renders", v), clips) for v in render_variants()}
    row = {
        "operation": "fidelity_renders",
        "settings": "4-bit, means stay",
        "family": "4-bit",
        "model": "m",
    } | clips.row()
    path = tmp_path / "rows.jsonl"
    rows.append([row], path)
    assert fidelity.finished([path], "m") == {jobs["4-bit without own block, means stay"]}
    rows.append([row | {"own": "block"}], path)
    assert jobs["4-bit, means stay"] in fidelity.finished([tmp_path / "none.jsonl", path], "m")
    assert fidelity.finished([path], "other") == set()


def test_clip_sets_show_new_prompts_and_about_as_many_clips_as_ever():
    import fidelity

    assert {name: clips.clips for name, clips in fidelity.CLIPS.items()} == {
        **{"renders": 75, "ablations": 24, "schedule": 12, "long": 4, "probes": 12},
    }
    assert fidelity.CLIPS["renders"].prompts == range(15)
    assert all(max(clips.prompts) >= 13 for clips in fidelity.CLIPS.values())  # a photograph
    assert fidelity.CLIPS["ablations"].row()["prompts"] == 12


def test_a_clip_set_takes_its_prompts_in_turn(monkeypatch):
    from laboratory.renders import ClipSet, Studio, sampling

    studio = Studio(torch.device("cpu"))
    asked = []
    monkeypatch.setattr(sampling, "sample", lambda model, noise, text, *rest, **more: asked.append(text) or noise)
    clips = ClipSet(range(2, 9, 3), seeds=2, size=(1, 16, 16), batch=4)
    assert studio.render(clips).shape == (6, 16, 1, 4, 4)
    assert torch.equal(torch.cat(asked), studio.table[[2, 5, 8, 2, 5, 8]])
    known = len(studio.texts)
    with pytest.raises(ValueError, match=f"prompt {known} is asked for, the model knows {known} from 0 on"):
        studio.render(ClipSet(range(known + 1), seeds=1, size=(1, 16, 16)))


def test_the_gpu_emulation_interpreted_is_the_plain_torch_one():
    skip_without_triton()
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from laboratory import formats
from laboratory.attend_torch import attend_torch
from laboratory.attend_triton import attend_triton
from laboratory.operands import prepare
from laboratory.own_block import own_order
from vc_attention import group_values
from vc_attention.testing import clustered_qkv, relative_l2
grid = (2, 9, 8)
q, k, v = clustered_qkv(grid, heads=1, dtype=torch.float16)
permutation = group_values(v, clusters=2).permutation
for kind in ("SIXTEEN_BIT", "PLAIN_FP8", "OURS_8BIT", "INT8_THROUGHOUT", "OURS_4BIT"):
    kinds = getattr(formats, kind)
    for demean, own in ((True, None), (False, None), (True, "block"), (False, "cube")):
        order = own and own_order(own, grid, q.device)
        operands = prepare(q, k, v, kinds, permutation if demean else None, demean, order)
        print(relative_l2(attend_triton(operands, kinds), attend_torch(operands, kinds)))
"""
    errors = [float(line) for line in interpreted(code)]
    assert len(errors) == 20
    assert max(errors) < 1e-3


def test_the_gpu_rounding_interpreted_is_the_packages():
    skip_without_triton()
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from laboratory.nvfp4_triton import fed_back_numbers_triton, nvfp4_numbers_triton
from vc_attention.formats import nvfp4_scale
from vc_attention.quantize.nvfp4 import closest_nvfp4, fed_back_nvfp4, query_feedback
generator = torch.Generator().manual_seed(0)
x, k = torch.randn(2, 1, 2, 128, 64, generator=generator)
x = x * torch.rand(1, 2, 128, 1, generator=generator) ** 20  # groups whose scales are subnormal or zero
x[..., :16] *= 0
scale, weights = nvfp4_scale(x, (2, 3)), query_feedback(k)
unit = x * (1 / scale)
expected = fed_back_nvfp4(x, scale, weights).numbers()
print(float((fed_back_numbers_triton(unit, weights) != expected).float().mean()))
print(float((nvfp4_numbers_triton(unit, closest=True).float() != closest_nvfp4(x, scale).numbers()).float().mean()))
print(float((expected == 0).float().mean()))
"""
    fed_back, closest, zeros = (float(line) for line in interpreted(code))
    assert fed_back < 1e-3  # ties
    assert closest == 0
    assert zeros > 0.3


def interpreted(code):
    """Lines printed by ``code`` under Triton's interpreter, with the path of benchmarks/ as its argument."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "benchmarks")],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_second_run_adds_nothing(tmp_path):
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "fidelity.py"), "--quick"]
    command += ["--only", "renders", "--match", "another kernel"]
    elsewhere = ["--output", str(tmp_path / "more.jsonl"), "--made", str(output)]
    for options in (["--output", str(output)], ["--output", str(output)], elsewhere):
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        assert len(output.read_text().splitlines()) == 1
    assert not (tmp_path / "more.jsonl").exists()
