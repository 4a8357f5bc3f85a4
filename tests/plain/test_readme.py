"""The README's tables are drawn from rows: dispatch rows for support, result rows for speed."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("table")


def test_readme_is_what_the_rows_say(table, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table.py", "--check"])
    assert table.main() == 0, "run `make table`"


@pytest.mark.parametrize(
    ("page", "path", "cell"), [("README", "README.md", "| RTX 40"), ("HOPPER", "docs/hopper.md", "| nothing |")]
)
def test_a_changed_table_is_noticed(page, path, cell, table, monkeypatch, tmp_path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert cell in text
    changed = tmp_path / "page.md"
    changed.write_text(text.replace(cell, "| changed "), encoding="utf-8")
    monkeypatch.setattr(table, page, changed)
    monkeypatch.setattr(sys, "argv", ["table.py", "--check"])
    assert table.main() == 1


def test_every_family_and_every_implementation_has_a_line(table):
    from vc_attention.arch import FAMILIES
    from vc_attention.dispatch import IMPLEMENTATIONS

    made = table.support_table()
    for family in FAMILIES:
        for mode in (family.mode, *family.other_modes):
            how = "`auto`" if mode == family.mode else "by hand"
            assert f"| {family.cards} | {family.family} | {mode}, {how} |" in made
    for row in IMPLEMENTATIONS:
        assert f"`{row.name}`" in made
        for family in FAMILIES:
            for mode in (family.mode, *family.other_modes):
                if row.families is not None and family.family in row.families and mode in row.modes:
                    assert f"`{row.name}` {row.status_on(family.family, mode)}" in made


def test_speed_table_takes_the_newest_run_and_names_the_baseline(table, monkeypatch, tmp_path):
    def row(run, implementation, settings, ms):
        shape = [1, 12, 32768, 128]
        common = {"run": run, "date": "2026-01-02T03:04:05Z", "gpu": "Card", "driver": "1", "torch": "2", "commit": "c"}
        return {**common, "operation": "complete_call", "implementation": implementation, "settings": settings} | {
            "shape": shape,
            "ms_p50": ms,
            "rel_l2": 0.0435,
        }

    rows = [row("old", "cuda", "held grouping", 99.0), row("new", "sdpa_cudnn", "", 20.0)]
    rows += [row("new", "sdpa_flash", "", 30.0), row("new", "cuda", "held grouping", 8.0)]
    (tmp_path / "card.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    made = table.speed_tables()
    assert "99" not in made
    assert "| **VC Attention, 8-bit, grouping held** | 8.0 ms (2.50) | 0.0435 | - |" in made
    assert "cuDNN" in made
    assert "30.0 ms (0.67)" in made
    paired = {**rows[-1], "operation": "call_over_cudnn", "factor": 2.25}
    (tmp_path / "card.jsonl").write_text("\n".join(map(json.dumps, [*rows, paired])) + "\n")
    assert "8.0 ms (2.25)" in table.speed_tables()


def test_tricks_are_compared_with_the_kernel_timed_beside_them(table):
    def row(operation, settings, **values):
        common = {"date": "2026-01-02T03:04:05Z", "gpu": "Card", "driver": "1", "torch": "2", "commit": "c"}
        return {**common, "operation": operation, "settings": settings, "shape": [1, 2, 3, 128], **values}

    rows = [row("attention_kernel", settings, ms_p50=9.0, rel_l2=0.04) for settings in table.TRICKS]
    assert "| nothing | 9.0 ms | 0.0400 |" in table._tricks_table(rows)
    rows += [row("attention_kernel", table.NOTHING_OFF, ms_p50=8.5, rel_l2=0.05)]
    assert "| nothing | 8.5 ms | 0.0400 |" in table._tricks_table(rows)
    assert "| means | 9.0 ms |" in table._tricks_table(rows)


@pytest.mark.parametrize(
    ("version", "label"), [(None, "SageAttention 1"), ("1.0.6", "SageAttention 1"), ("2.2.0", "SageAttention 2")]
)
def test_speed_table_names_the_version_that_was_timed(version, label, table):
    row = {"implementation": "sageattention", "operation": "complete_call", "settings": ""}
    row |= {} if version is None else {"version": version}
    assert table._variants([row]) == [(label, "sageattention", "")]
