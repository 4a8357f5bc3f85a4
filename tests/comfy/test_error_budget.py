"""A layer that low-bit attention would change too much keeps the attention it had, and the report says so."""

import pytest
import torch

from .renders import Recorder, probed, render, with_override
from .test_calls import HEADS, qkv
from .watch import watching


def hard_for_keys():
    """One K channel far above the others, with q small there: the score needs what 8 bits lose."""
    q, k, v = qkv()
    q, k = q.unflatten(-1, (HEADS, -1)), k.unflatten(-1, (HEADS, -1))
    q[..., 5] *= 1e-4
    k[..., 5] *= 3e4
    return q.flatten(2), k.flatten(2), v


class Probe:
    """The same call in every evaluation of a render of three steps."""

    def __init__(self, host, pack, args, **widgets):
        self.outputs, self.previous = [], Recorder()

        def probe(attention, options):
            self.outputs.append(attention(*args, HEADS, transformer_options=options))

        model = pack.patch(probed(host, with_override(host.model(), self.previous), probe), **widgets)
        with pack.log() as records, watching(host, pack) as watch:
            render(host, model, steps=3)
        self.records = records
        self.kernel = [call for call in watch.stray if call.function == "attention"]
        self.left = [call for call in self.previous.calls if call[1][0] is args[0]]
        self.text = host.texts[-1][0]


@pytest.mark.parametrize("mode", ["8-bit", "4-bit"])
def test_a_layer_over_the_budget_keeps_its_attention(host, pack, mode):
    args = hard_for_keys()
    probe = Probe(host, pack, args, mode=mode)
    expected = host.attention.attention_pytorch(*args, HEADS)
    assert len(probe.left) == len(probe.outputs) >= 3
    for output in probe.outputs:
        torch.testing.assert_close(output, expected)
    assert len(probe.kernel) == 1, "tried once, then left alone"
    assert f"in a block where {mode} attention would change the output by more than" in probe.text
    warnings = [record for record in probe.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "probe block 0 keeps its attention" in warnings[0].getMessage()
    assert "left alone for their error: probe block 0" in probe.text


def test_a_layer_inside_the_budget_is_accelerated_and_measured_once(host, pack):
    probe = Probe(host, pack, qkv())
    assert probe.left == []
    assert len(probe.kernel) == len(probe.outputs)
    assert "largest sampled error of an attention output" in probe.text
    assert not [record for record in probe.records if record.levelname == "WARNING"]


def test_many_layers_over_the_budget_are_one_warning(host, pack, monkeypatch):
    """B012: a model that stands no low-bit numbers at all. The report names the blocks."""
    module = next(m for m in pack.modules() if m.__name__.endswith(".nodes.error_budget"))
    monkeypatch.setattr(module, "BUDGET", 0.0)
    with pack.log() as records:
        render(host, pack.patch(host.model("joint")), "joint", steps=2)
    warnings = [record.getMessage() for record in records if record.levelname == "WARNING"]
    assert len([text for text in warnings if "keeps its attention" in text]) == 1
    assert len(records) <= 3
    named = "double block 0, double block 1, single block 0, single block 1"
    assert named in host.texts[-1][0]
    assert "ACTIVE ON 0 %" in host.texts[-1][0]
    assert "in a block where 8-bit attention would change the output" in host.texts[-1][0]


def test_an_output_that_is_not_finite_is_called_so(host, pack):
    """A kernel that writes NaN: the render is the one without it, and nobody reads of an error of inf percent."""
    plain = render(host, host.model(), steps=2)
    attention = pack.kernels.attention
    broken = pack.replaced(attention=lambda *args, **keywords: attention(*args, **keywords) * float("nan"))
    with broken, pack.log() as records:
        ours = render(host, pack.patch(host.model()), steps=2)
    assert torch.equal(ours, plain)
    assert "its low-bit output is not finite" in records[0].getMessage()


def with_errors(host, pack, errors, **widgets) -> int:
    """A render of the two-block Wan whose layers have these sampled errors; how often one was asked for."""
    asked = []

    def sampled_error(*args, **keywords):
        asked.append(1)
        return torch.tensor(errors[(len(asked) - 1) % len(errors)])

    with pack.replaced(sampled_error=sampled_error):
        render(host, pack.patch(host.model(), **widgets), steps=3)
    return len(asked)


@pytest.mark.parametrize(("mode", "accelerated"), [("8-bit", 0), ("8-bit precise", 0), ("4-bit", 6)])
def test_four_bits_may_err_more(host, pack, mode, accelerated):
    with_errors(host, pack, [0.3], mode=mode)
    assert f"{accelerated} of 12" in host.texts[-1][0]


def test_a_layer_is_measured_once_in_a_render(host, pack):
    """Each measurement waits for the GPU."""
    assert with_errors(host, pack, [0.05]) == 2


def test_the_largest_error_is_that_of_an_accelerated_layer(host, pack):
    with_errors(host, pack, [0.05, 0.9])
    assert "largest sampled error of an attention output 5.0% (double block 0)" in host.texts[-1][0]
    assert "left alone for their error: double block 1" in host.texts[-1][0]


def test_calls_of_a_layer_over_the_budget_are_not_timed(host, pack):
    """Their output is thrown away: the share of the time on the row is that of accelerated calls."""
    record = next(m for m in pack.modules() if m.__name__.endswith(".nodes.record"))
    with_errors(host, pack, [0.9])
    (left,) = record.RECORD.runs(None)[-1:]
    assert (left["accelerated"], left["seconds"]) == (0, 0)
    with_errors(host, pack, [0.05, 0.9])
    used, left = record.RECORD.runs(None)[-1]["rows"]
    assert all(seconds > 0 for seconds in used["seconds"])
    assert left["seconds"] == [0, 0, 0]


def test_a_layer_over_the_budget_holds_no_grouping(host, pack):
    record = next(m for m in pack.modules() if m.__name__.endswith(".nodes.record"))

    def held(errors):
        with_errors(host, pack, errors, grouping_window=1.0, refresh_interval=1)
        return record.RECORD.runs(None)[-1]["held_bytes"]

    both = held([0.05, 0.05])
    assert held([0.9, 0.9]) == 0
    assert held([0.05, 0.9]) == both / 2 > 0


def test_every_render_judges_anew(host, pack):
    """State dies with the run: a layer left alone in one render is tried again in the next."""
    args = hard_for_keys()
    assert len(Probe(host, pack, args).kernel) == 1
    assert len(Probe(host, pack, args).kernel) == 1
    assert Probe(host, pack, qkv()).left == []
