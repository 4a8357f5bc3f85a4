"""docs/fidelity.md is filled from rows: the page and the rows agree, and the arithmetic of its tables is right."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("fidelity_page")


def row(settings, psnr, operation="renders", model="m", **more):
    plan = {"order": "k-means", "window": [0.0, 0.25], "interval": 4, "warm": True}
    measured = {"psnr_mean": sum(psnr) / len(psnr), "each": {"psnr": psnr, "latent_error": [0.1] * len(psnr)}}
    head = {"operation": f"fidelity_{operation}", "settings": settings, "model": model, "family": "8-bit", "plan": plan}
    return head | measured | more


def test_page_is_what_the_rows_say(page, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fidelity_page.py", "--check"])
    assert page.main() == 0, "run `make table`"


def test_a_changed_row_is_noticed(page, monkeypatch, tmp_path):
    rows = page.pages.read(page.ROWS)
    last = [each for each in rows if each["operation"] == "fidelity_renders"][-1]
    last["psnr_mean"] += 1
    changed = tmp_path / "fidelity.jsonl"
    changed.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    monkeypatch.setattr(page, "ROWS", changed)
    monkeypatch.setattr(sys, "argv", ["fidelity_page.py", "--check"])
    assert page.main() == 1


def test_the_main_table_has_the_wanted_clips(page):
    renders = page.of(page.newest(page.pages.read(page.ROWS)), "renders")
    (clips,) = {each["clips"] for each in renders}
    assert clips >= 64
    assert all(len(each["each"]["psnr"]) == each["clips"] for each in renders)


def test_pictures_and_pages_that_are_linked_exist(page):
    text = page.PAGE.read_text(encoding="utf-8")
    links = [part.partition(")")[0].partition("#")[0] for part in text.split("](")[1:]]
    assert links
    for link in links:
        assert (page.DOCS / link).is_file()


def test_newest_takes_the_last_row_of_the_last_model(page):
    rows = [row("a", [1.0], model="old"), row("a", [2.0]), row("a", [3.0]), row("b", [4.0], "schedule", model="old")]
    assert [each["psnr_mean"] for each in page.newest(rows)] == [3.0, 4.0]
    assert [each["psnr_mean"] for each in page.earlier(rows)] == [1.0]


def test_rows_from_before_the_own_block_have_other_names(page):
    old = row("4-bit, largest at 6", [1.0], family="4-bit, largest at 6")
    assert page.named_as_now(old)["settings"] == "4-bit without own block, largest at 6"
    assert page.named_as_now(old)["family"] == "4-bit without own block, largest at 6"
    probes = {"settings": "prompt rows", "errors": {"4-bit": [], "4-bit, only V": [], "8-bit": []}}
    named = page.named_as_now(probes)
    assert list(named["errors"]) == ["4-bit without own block", "4-bit without own block, only V", "8-bit"]
    assert named["settings"] == "prompt rows"
    new = row("4-bit", [1.0], own="block")
    assert page.named_as_now(new) is new


def test_families_stand_in_their_order(page):
    families = ("study", "4-bit without own block", "4-bit", "8-bit", "others")
    rows = [row(name, [1.0], family=name) for name in families]
    assert [each["settings"] for each in page.newest(rows)] == [*reversed(families[1:]), "study"]


def test_the_own_block_is_compared_over_the_same_clips(page):
    rows = [row("4-bit", [31.0, 42.0]), row("4-bit without own block", [29.0, 39.0])]
    assert "| 4-bit | +2.50 ± 0.50 dB | 2 of 2 | +0.00 dB |" in page.own_table(rows)
    assert "| 8-bit precise | not run |  |  |" in page.own_table(rows)
    text = page.four_bit_text(rows)
    assert "PSNR of 36.50 dB against 16 bit, without the own block 34.00 dB" in text
    assert max(map(len, text.splitlines())) <= 120


def test_versions_of_rows_are_told_apart(page):
    about = {"size": [1, 2, 3], "tokens": 4096, "steps": 20, "clips": 2, "prompts": 1, "seconds": 3.0, "dirty": False}
    about |= {"gpu": "G", "torch": "t", "date": "2026-01-02T00"}
    rows = [row(name, [1.0], commit=commit, **about) for name, commit in (("a", "one"), ("b", "one"), ("c", "two"))]
    lines = page.run_table(rows).splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| renders: 2", "| renders: 1"]
    assert "6 s | G, torch t, 2026-01-02, commit one" in lines[0]


def test_targets_compare_the_same_clips(page):
    rows = [row("8-bit", [30.0, 42.0]), row("8-bit, means stay", [29.0, 39.0])]
    assert "| +1.0 dB | +2.00 ± 1.00 dB | 2 of 2 | +0.00 dB | met |" in page.targets_table(rows)
    rows[0]["each"]["psnr"] = [29.1, 39.1]
    assert "| 2 of 2 | +0.00 dB | missed |" in page.targets_table(rows)


def test_a_target_out_of_reach_by_less_than_two_errors_says_so(page):
    rows = [row("8-bit", [29.0, 40.0]), row("8-bit, means stay", [29.0, 39.0])]
    assert "+0.50 ± 0.50 dB | 1 of 2 | +0.00 dB | missed, within the error |" in page.targets_table(rows)


def test_cost_counts_one_cold_grouping_and_the_rest_warm(page):
    times = {("regroup_extra", "cold"): 2.0, ("regroup_extra", "warm"): 1.0, ("complete_call", "held grouping"): 10.0}
    speed = [
        {"operation": name, "settings": settings, "implementation": "cuda", "shape": [1, 40, 75600, 128], "ms_p50": ms}
        for (name, settings), ms in times.items()
    ]
    plan = {"order": "k-means", "window": [0.0, 0.25], "interval": 4, "warm": True}
    assert page.refreshes(plan, 40) == 3
    assert page.grouping_cost(plan, speed) == "1.00%"
    assert page.grouping_cost(plan | {"warm": False}, speed) == "1.50%"
    assert page.grouping_cost(plan | {"order": "sequence"}, speed) == "0"


def test_rank_correlation_looks_at_the_order_only(page):
    assert page.rank_correlation([1.0, 2.0, 30.0], [5.0, 6.0, 7.0]) == pytest.approx(1.0)
    assert page.rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)


def test_share_and_gain_of_the_values(page):
    errors = {"x, only Q and K": 0.3, "x, only P": 0.0, "x, only V": 0.4, "x, only V, V-Smooth": 0.2}
    errors |= {"x, means stay": 0.5, "x": 0.25}
    made = page.operands_table([{"errors": {name: [[value, None]] for name, value in errors.items()}}])
    assert "| x | 0.3000 | 0.0000 | 0.4000 | 0.2000 | 0.5000 | 0.2500 | 64% | +6.02 dB |" in made
