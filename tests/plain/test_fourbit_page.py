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


def test_the_gain_of_v_smooth_is_that_of_equal_rounding(page, rows):
    of = {"input": "clustered", "table": "main", "smoothing": page.SMOOTHED, "rounding": "fed back"}
    plain, shipped = (page.error(rows, values=values, **of) for values in (page.PLAIN, page.SHIPPED))
    assert f"| {plain:.4f} to {shipped:.4f}: {100 * (plain - shipped) / plain:.1f} % |" in page.v_smooth_table(rows)


def test_numbers_of_the_text_are_those_of_the_tables(page, rows):
    text = re.sub(r"\s+", " ", page.PAGE.read_text(encoding="utf-8"))
    of = {"table": "main", "smoothing": page.SMOOTHED}
    gains, against_before = [], []
    for name in ("clustered", "demo model"):
        plain, shipped = (
            page.error(rows, input=name, values=values, rounding="fed back", **of)
            for values in (page.PLAIN, page.SHIPPED)
        )
        before = page.error(rows, input=name, values=page.PLAIN, rounding="to 6", **of)
        gains.append(100 * (1 - shipped / plain))
        against_before.append(100 * (1 - shipped / before))
    assert f"**Reached: {gains[0]:.1f} % on clustered inputs, {gains[1]:.1f} % on the demo model's" in text
    assert (
        f"by {against_before[0]:.0f} % on clustered inputs and by {against_before[1]:.0f} % on the demo model's" in text
    )


def test_kernels_and_torch_agree(page, rows):
    """The kernels keep a running maximum, which moves the error itself by a little only."""
    for name in page.inputs(rows):
        in_torch = page.error(
            rows, input=name, table="main", smoothing=page.SMOOTHED, values=page.SHIPPED, rounding="fed back"
        )
        assert page.error(rows, input=name, table="kernels") == pytest.approx(in_torch, rel=0.02)
