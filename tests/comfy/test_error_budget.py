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


def test_a_layer_inside_the_budget_is_accelerated_and_measured_once(host, pack):
    probe = Probe(host, pack, qkv())
    assert probe.left == []
    assert len(probe.kernel) == len(probe.outputs)
    assert "largest sampled error of an attention output" in probe.text
    assert not [record for record in probe.records if record.levelname == "WARNING"]


def test_every_render_judges_anew(host, pack):
    """State dies with the run: a layer left alone in one render is tried again in the next."""
    args = hard_for_keys()
    assert len(Probe(host, pack, args).kernel) == 1
    assert len(Probe(host, pack, args).kernel) == 1
    assert Probe(host, pack, qkv()).left == []
