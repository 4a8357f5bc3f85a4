"""docs/blackwell.md is filled from rows: the page and the rows agree, and its comparisons compare like with like."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("fourbit_page")


@pytest.fixture
def rows(page):
    return page.newest(page.pages.read(page.ROWS))


def test_page_is_what_the_rows_say(page, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fourbit_page.py", "--check"])
    assert page.main() == 0, "run `make table`"


def test_a_changed_row_is_noticed(page, rows, monkeypatch, tmp_path):
    rows[0]["error"] += 0.01
    changed = tmp_path / "rows.jsonl"
    changed.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setattr(page, "ROWS", changed)
    monkeypatch.setattr(sys, "argv", ["fourbit_page.py", "--check"])
    assert page.main() == 1


def test_only_the_last_run_counts(page, rows):
    older = [row | {"run": "older", "error": 9.0} for row in rows]
    assert page.newest(older + rows) == rows


def test_an_ambiguous_or_missing_row_is_no_number(page, rows):
    with pytest.raises(ValueError, match="unpack"):
        page.error(rows, input="clustered", table="main")
    with pytest.raises(ValueError, match="unpack"):
        page.error(rows, input="no such input")


@pytest.mark.parametrize("own", ["none", "128"])
def test_the_gain_of_v_smooth_is_that_of_equal_rounding(page, rows, own):
    of = {"input": "clustered", "table": "main", "smoothing": page.SMOOTHED, "rounding": "fed back", "own": own}
    plain, shipped = (page.error(rows, values=values, **of) for values in (page.PLAIN, page.SHIPPED))
    gain = f"| {plain:.4f} to {shipped:.4f}: {100 * (plain - shipped) / plain:.1f} % |"
    (line,) = [line for line in page.v_smooth_table(rows).splitlines() if gain in line]
    assert line.startswith("| **as shipped**") == (own == "128")
    assert f"{100 * (plain - shipped) / plain:.1f} % on clustered inputs" in page.share(rows)


def test_sentences_tell_numbers_of_the_rows(page, rows):
    of = {"table": "main", "smoothing": page.SMOOTHED, "input": "demo model"}
    before = page.error(rows, values=page.PLAIN, rounding="to 6", own="none", **of)
    shipped, far = (
        page.error(rows, values=page.SHIPPED, rounding="fed back", own=own, **of) for own in ("128", "none")
    )
    expected = f"by {100 - 100 * shipped / before:.0f} % on the demo model's (without the own block"
    text = re.sub(r"\s+", " ", page.against_before(rows))
    assert f"{expected} {100 - 100 * far / before:.0f} %)" in text


def test_shares_of_the_rest_add_up(page, rows):
    text = re.sub(r"\s+", " ", page.share(rows))
    shares = [[int(part) for part in re.findall(r"[VKQP] (\d+) %", piece)] for piece in re.split(r": (?=V)", text)[1:]]
    assert [len(each) for each in shares] == [4, 4, 4]
    assert all(98 <= sum(each) <= 102 for each in shares)


def test_own_blocks_stand_without_and_with_the_shift(page, rows):
    lines = page.own_table(rows).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        *("| none", "| own key", "| 64", "| 128", "| 256", "| 2 x 8 x 8"),
    ]
    of = {"table": "own", "own": "128", "input": "random"}
    without, shifted = (page.error(rows, shift=shift, **of) for shift in (False, True))
    assert f"| 128 | {without:.4f} / {shifted:.4f} |" in lines[5]


def test_the_last_step_is_what_ships(page, rows):
    *_, last = page.steps_table(rows).splitlines()
    assert last.split(" | ")[1] == f"{page.main_error(rows, 'random'):.4f}"
    shipped_again = page.error(rows, table="own", own="128", shift=True, input="random")
    assert page.main_error(rows, "random") == pytest.approx(shipped_again, rel=1e-5)


def test_kernels_and_torch_agree(page, rows):
    """The kernels' maximum runs, from the own block's log-sum-exp on: that moves the error itself by a little only."""
    for name in page.inputs(rows):
        in_torch = page.main_error(rows, name)
        assert page.error(rows, input=name, table="kernels") == pytest.approx(in_torch, rel=0.03)
