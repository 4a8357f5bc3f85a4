"""The study of the 4-bit mode computes the mode: nothing rounded is exact attention, all of it is the reference."""

import argparse
import importlib
import sys
from pathlib import Path
from zlib import crc32

import pytest
import torch
from vc_attention.attend.exact import exact_attention
from vc_attention.attend.reference import attend4
from vc_attention.quantize.reference import quantize4
from vc_attention.testing import clustered_qkv, relative_l2

ROOT = Path(__file__).parents[2]
GRID = (2, 16, 16)


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("fourbit")


@pytest.fixture
def calls(study):
    return study.Calls.of(clustered_qkv(GRID, heads=2, dtype=torch.bfloat16), GRID, queries=256)


@pytest.mark.parametrize("own", ["none", "own key", "64", "128", "256", "2 x 8 x 8"])
@pytest.mark.parametrize("order", ["sequence", "k-means"])
def test_nothing_rounded_is_exact(study, calls, own, order):
    method = study.Method(order=order, own=own, terms=())
    output = study.attended(calls, method, calls.permutation(order))
    assert relative_l2(output, calls.exact) < 1e-5


@pytest.mark.parametrize("own", ["none", "128"])
@pytest.mark.parametrize("demean", [True, False])
@pytest.mark.parametrize("order", ["sequence", "k-means"])
def test_the_mode_is_the_reference(study, calls, own, demean, order):
    permutation = calls.permutation(order)
    method = study.Method(order=order, demean=demean, own=own)
    operands = quantize4(calls.q, calls.k, calls.v, permutation, demean, own != "none")
    expected = study.chosen(attend4(operands, calls.q.shape[-1] ** -0.5), calls.blocks)
    found = study.attended(calls, method, permutation)
    # What is left is one row maximum for all tiles in the place of a running one: other ties of the probabilities.
    assert relative_l2(found, expected) < 0.25 * relative_l2(expected, calls.exact)
    assert relative_l2(found, calls.exact) == pytest.approx(relative_l2(expected, calls.exact), rel=0.03)


def test_shipped_is_the_packages_default(study, calls, monkeypatch):
    """What the kernels are asked for is what the rows call shipped."""
    asked = []
    monkeypatch.setattr(study.run_triton4, "run", lambda *arguments: asked.append(arguments[5]))
    study.kernels(calls, calls.permutation("k-means"))
    (settings,) = asked
    assert (settings.mode, settings.demean, settings.own_block) == ("4-bit", True, True)
    assert (study.SHIPPED.demean, study.SHIPPED.own, study.SHIPPED.shift) == (True, "128", True)


@pytest.mark.parametrize(("own", "size"), [("own key", 1), ("64", 64), ("128", 128), ("256", 256), ("2 x 8 x 8", 128)])
def test_own_keys_are_a_set_that_holds_the_query(study, calls, own, size):
    rows = torch.arange(calls.q.shape[2]).unflatten(0, (-1, 128))[calls.blocks].flatten()
    in_sequence = calls.own_keys(own, None)
    assert (in_sequence.sum(-1) == size).all()
    assert in_sequence.gather(-1, rows[:, None]).all()
    permutation = calls.permutation("k-means")
    permuted = calls.own_keys(own, permutation)
    expected = in_sequence.expand(*permuted.shape).gather(3, permutation[:, :, None].long().expand(*permuted.shape))
    assert torch.equal(permuted, expected)


def test_a_cube_reaches_over_two_frames(study, calls):
    frames, rows, columns = GRID
    keys = calls.own_keys("2 x 8 x 8", None)[0].unflatten(0, GRID)
    assert keys.any((1, 2)).sum() == 2
    assert keys.any((0, 2)).sum() == 8
    assert keys.any((0, 1)).sum() == 8


def test_without_an_own_block_no_key_is_left_out(study, calls):
    assert not calls.own_keys("none", None).any()


def test_the_shift_takes_off_what_rounding_queries_costs(study, calls):
    method = study.replace(study.SHIPPED, order="sequence", demean=False, terms=("Q",))
    without, shifted = (
        relative_l2(study.attended(calls, study.replace(method, shift=shift), None), calls.exact)
        for shift in (False, True)
    )
    assert shifted < 0.95 * without


def test_every_table_is_made_from_the_rows_of_a_run(study, monkeypatch):
    """No computing: which rows there are."""
    page = sys.modules["fourbit_page"]

    def made_up(calls, method, permutation):
        return calls.exact * (1.01 + crc32(repr(method).encode()) % 99 / 999)

    monkeypatch.setattr(study, "attended", made_up)
    q, k, v = clustered_qkv((2, 16, 8), dtype=torch.bfloat16)
    calls = study.Calls.of([q, k, v], (2, 16, 8), queries=128)
    names = ("random", "clustered", study.WIDE, study.DEMO)
    rows = [row | {"run": "r"} for name in names for row in study.input_rows(name, calls)]
    made = page.tables(rows) | page.sentences(rows)
    assert all(made[name] for name in made if name != "kernels")


def test_inputs_are_two_shapes_of_clustered_calls(study):
    arguments = argparse.Namespace(frames=2, rows=16, columns=16, heads=1, queries=128, drawn_only=True)
    made = dict(study.inputs(arguments, "cpu"))
    assert {name: calls.grid for name, calls in made.items()} == {
        "random": (2, 16, 16),
        "clustered": (2, 16, 16),
        "clustered, wide": (1, 16, 40),
    }
    for calls in made.values():
        assert relative_l2(calls.exact, exact_attention(calls.q, calls.k, calls.v)[:, :, :128]) == 0
