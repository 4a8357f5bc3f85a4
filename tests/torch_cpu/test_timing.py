"""benchmarks/timing.py with a GPU of paper: what alternates, what has work queued before it, what waits."""

import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


class Card:
    """Time passes only in calls; what happens is noted in order."""

    def __init__(self):
        self.now, self.noted = 0.0, []

    def call(self, name, seconds):
        def run():
            self.now += seconds
            self.noted.append(name)

        return run

    def event(self, **_):
        return _Event(self)


class _Event:
    def __init__(self, card):
        self.card = card

    def record(self):
        self.at = self.card.now

    def synchronize(self):
        self.card.noted.append("wait for one")

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


@pytest.fixture
def card(monkeypatch):
    made = Card()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.noted.append("wait for all"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: made.noted.append("work"))
    return made


@pytest.fixture
def timing(monkeypatch, card):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import timing

    monkeypatch.setattr(timing.time, "monotonic", lambda: card.now)
    monkeypatch.setattr(timing._PowerMeter, "_read", lambda meter: None)
    return timing


@pytest.fixture
def bench(timing):
    import bench

    return bench


def test_calls_of_a_turn_alternate_and_turns_follow_each_other(timing, card):
    calls = {name: card.call(name, seconds) for name, seconds in (("a", 0.01), ("b", 0.02), ("c", 0.03))}
    samples = timing.interleave([{"a": calls["a"], "b": calls["b"]}, {"c": calls["c"]}], 2, 0.06)
    order = [name for name in card.noted if name in calls]
    # A fifth of a second untimed, then 0.06 seconds a call: four times a and b, twice c.
    one_round = ["a", "b"] * 7 + ["a", "b"] * 4 + ["c"] * 7 + ["c"] * 2
    assert order == one_round * 2
    assert {name: len(found.ms) for name, found in samples.items()} == {"a": 8, "b": 8, "c": 4}
    assert samples["b"].ms == pytest.approx([20.0] * 8)


def test_a_turn_that_occurs_twice_has_two_medians(timing, card):
    slow, fast = ({name: card.call(name, seconds)} for name, seconds in (("a", 0.02), ("b", 0.01)))
    samples = timing.interleave(2 * [slow, fast], 3, 0.06)
    order = [name for name in card.noted if name in ("a", "b")]
    assert [name for name, before in zip(order, ["", *order], strict=False) if name != before] == ["a", "b"] * 6
    assert samples["a"].medians == pytest.approx([20.0] * 6)
    assert len(samples["a"].ms) == 6 * 3


@pytest.mark.parametrize(
    ("seconds", "empty", "begins"),
    [
        (0.01, False, ["call", "call", "call", "call", "wait for one"]),  # three are queued while a fourth is made
        (0.2, False, ["call", "call", "wait for one", "call"]),
        (0.001, False, ["work", "call", "work", "call"]),  # the host is slower than the GPU
        (0.001, True, ["wait for all", "call", "wait for all", "call"]),
        (0.2, True, ["wait for all", "call", "wait for all", "call"]),
    ],
)
def test_the_queue_is_never_empty_unless_asked(seconds, empty, begins, timing, card):
    turn = {"timed": card.call("call", seconds)}
    timing.interleave([turn], 1, 0.5, on_empty_queue=lambda name: empty and name == "timed")
    after_lead_in = card.noted[card.noted.index("work") + 1 :]
    assert after_lead_in[: len(begins)] == begins


def test_factors_are_of_neighbouring_turns(bench, timing):
    def turns(*medians):
        return timing.Samples(medians=list(medians))

    timed = {bench.KERNEL: turns(1.0, 2.0, 1.0), bench.CALL: turns(2.0, 2.0, 2.0)}
    assert bench.factor_rows(timed, (1, 2, 3, 128)) == []
    timed[bench.BASELINE_CALL] = turns(2.0, 7.0, 5.0, 3.0, 3.0, 8.0)  # behind the kernel, behind the call, and so on
    kernel, call = bench.factor_rows(timed, (1, 2, 3, 128))
    assert [kernel[name] for name in ("factor_least", "factor", "factor_largest", "turns")] == [2.0, 2.5, 3.0, 3]
    assert [call[name] for name in ("operation", "factor")] == ["call_over_cudnn", 3.5]


def test_kernel_and_call_are_followed_by_the_baseline_each(bench, monkeypatch):
    kernel, call, alternating, other = ({name: len} for name in (bench.KERNEL, "call", "alternating", "other"))
    monkeypatch.setattr(bench, "our_turns", lambda *inputs: [kernel, call, alternating, other])
    monkeypatch.setattr(bench.peers, "found", lambda *inputs: {bench.BASELINE: max, "slower": min})
    baseline, peer = {bench.BASELINE_CALL: max}, {("complete_call", "slower", ""): min}
    turns = bench.all_turns(None, None, None, None, quick=False, ablations=False)
    assert turns == [kernel, baseline, call, baseline] * 4 + [alternating] * 4 + [other, peer]
    monkeypatch.setattr(bench, "ablated", lambda *inputs: {"means off": abs})
    grouping = types.SimpleNamespace(permutation=None)
    *_, shipped, off = bench.all_turns(None, None, None, grouping, quick=False, ablations=True)
    assert shipped == {("attention_kernel", "cuda", "nothing off"): kernel[bench.KERNEL]}
    assert off == {("attention_kernel", "cuda", "means off"): abs}
    assert bench.all_turns(None, None, None, None, quick=True, ablations=True) == [kernel, call] * 4 + [
        alternating
    ] * 4 + [other]


def test_shares_are_of_calls_that_alternate(bench):
    def timed(operation, settings, ms):
        return {"operation": operation, "settings": settings, "implementation": "cuda", "ms_p50": ms}

    rows = [timed("attention_kernel", "as shipped", 7.0), timed("complete_call", "held grouping", 7.0)]
    rows += [
        timed("attention_kernel", "as shipped, alternating", 10.0),
        timed("complete_call", "held grouping, alternating", 10.4),
        timed("complete_call", "warm regrouping, alternating", 10.92),
        timed("regroup_extra", "cold", 1.0),
        timed("regroup_extra", "warm", 0.5),
    ]
    call, regrouping, *averages = bench.share_rows(rows, (1, 2, 3, 128))
    assert (round(call["share_of_kernel"], 6), round(regrouping["share_of_call"], 6)) == (0.04, 0.05)
    assert [round(row["share_of_call"] * 40 * 10.4, 6) for row in averages] == [1 + 2 * 0.5, 1 + 9 * 0.5]
