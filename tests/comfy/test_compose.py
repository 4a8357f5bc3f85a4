"""Together with other nodes: two of ours, an attention selector before and after, foreign overrides of every kind."""

import copy

import pytest
import torch

from .renders import Recorder, cosine, render, watched, with_override
from .watch import watching


def basic(host):
    """Another backend of this host, whose result differs in the last bits from the default one."""
    return host.attention.attention_basic


def test_two_of_our_nodes_act_as_the_last_one(host, pack):
    """B058: not doubled, not mixed. One report, from the last."""
    alone = render(host, pack.patch(host.model(), mode="4-bit", skip_blocks="1"))
    first = pack.patch(host.model(), mode="8-bit", unique_id="1")
    host.texts.clear()
    with pack.log() as records:
        both, watch = watched(host, pack, pack.patch(first, mode="4-bit", skip_blocks="1", unique_id="2"))
    assert torch.equal(both, alone)
    assert {call.kernel[0].keywords["mode"] for call in watch.accelerated()} == {"4-bit"}
    assert all(len(call.kernel) == 1 for call in watch.accelerated())
    assert len(watch.accelerated()) == 4
    assert [node for _, node in host.texts] == ["2"]
    assert len(records) == 1


def test_first_of_two_stays_usable_alone(host, pack):
    first = pack.patch(host.model(), mode="8-bit")
    expected = render(host, first)
    pack.patch(first, mode="4-bit")
    assert torch.equal(render(host, first), expected)


def test_last_node_set_to_off_means_off(host, pack):
    """'Two of our nodes in a chain act as the last one', also when the last one is off."""
    plain = render(host, host.model())
    model = pack.patch(pack.patch(host.model()), mode="off")
    ours, watch = watched(host, pack, model)
    assert watch.accelerated() == []
    assert torch.equal(ours, plain)


def test_declined_calls_of_the_last_node_do_not_reach_the_first(host, pack):
    """The last one leaves block 0 alone: so does the pair, although the first would take it."""
    model = pack.patch(pack.patch(host.model()), skip_blocks="0")
    _, watch = watched(host, pack, model, steps=1)
    assert {call.block for call in watch.accelerated()} == {("double", 1)}


def test_three_in_a_chain_around_a_foreign_override(host, pack):
    """Ours, a foreign override that chains, ours: the outer one decides and the inner one stays silent."""
    inner = pack.patch(host.model(), mode="8-bit", unique_id="1")
    chained = inner.model_options["transformer_options"]["optimized_attention_override"]
    recorder = Recorder(chained)
    outer = pack.patch(with_override(inner, recorder), mode="4-bit", skip_blocks="0", unique_id="2")
    _, watch = watched(host, pack, outer, steps=2)
    assert {call.kernel[0].keywords["mode"] for call in watch.accelerated()} == {"4-bit"}
    assert {call.block for call in watch.accelerated()} == {("double", 1)}
    assert len(recorder.calls) == len(watch.declined())
    assert [node for _, node in host.texts] == ["2"]
    assert f"{len(watch.accelerated())} of {len(watch.calls)} attention calls" in host.texts[0][0], "each counted once"


def test_selector_before_ours_gets_the_declined_calls(host, pack):
    """The user chose a backend upstream: what we leave alone goes there, not to the default."""
    selected = host.select_attention(host.model(), basic(host))
    plain = render(host, selected)
    assert not torch.equal(plain, render(host, host.model()))  # the selection shows in the bits
    ours, watch = watched(host, pack, pack.patch(selected))
    assert len(watch.accelerated()) == 8
    assert cosine(ours, plain) > 0.9995
    # With nothing accelerated the picture is the selector's own, to the last bit.
    assert torch.equal(render(host, pack.patch(selected, implementation="auto")), plain)


def test_selector_after_ours_wins_and_we_say_so(host, pack):
    """Trap 1: it replaces the override. The render is the selector's; 0 calls are said loudly, with the cause."""
    plain = render(host, host.select_attention(host.model(), basic(host)))
    model = host.select_attention(pack.patch(host.model()), basic(host))
    with pack.log() as records:
        ours, watch = watched(host, pack, model)
    if watch.accelerated():  # a pack may also put itself back on top; then it must not be half and half
        assert len(watch.accelerated()) == 8
        return
    assert torch.equal(ours, plain)
    warning = [r.getMessage() for r in records if r.levelname == "WARNING"]
    assert len(warning) == 1
    text = host.texts[-1][0]
    for said in (warning[0], text):
        assert "0" in said
        assert "replaced" in said or "after" in said


def test_host_that_clones_by_deepcopy(host, pack):
    """ComfyUI 0.3.75 and older deep-copy model_options in every clone: our parts must stand that."""
    model = pack.patch(with_override(host.model(), Recorder()), grouping_window=1.0)
    expected = render(host, model)
    old = model.clone()
    old.model_options = copy.deepcopy(model.model_options)
    ours, watch = watched(host, pack, old)
    assert len(watch.accelerated()) == 8
    assert torch.equal(ours, expected)


class CallableObject:
    """KJ style or not: an override may be an object."""

    def __init__(self):
        self.calls = 0

    def __call__(self, func, *args, **kwargs):
        self.calls += 1
        return func(*args, **kwargs)


def test_foreign_override_object_before_ours(host, pack):
    foreign = CallableObject()
    _, watch = watched(host, pack, pack.patch(with_override(host.model(), foreign)), steps=2)
    assert foreign.calls == len(watch.declined()) == 4
    assert len(watch.accelerated()) == 4


def test_foreign_override_that_chains_ours_from_above(host, pack):
    """A pack that installs itself on top and delegates: ours still works below it."""
    model = pack.patch(host.model())
    recorder = Recorder(model.model_options["transformer_options"]["optimized_attention_override"])
    ours, watch = watched(host, pack, with_override(model, recorder))
    assert len(watch.accelerated()) == 8
    assert len(recorder.calls) == 16
    assert torch.equal(ours, render(host, pack.patch(host.model())))


def test_foreign_override_that_returns_early_is_not_overruled(host, pack):
    """Below ours: it only sees what we decline, and its answer is final."""
    seen = []

    def zeros(func, q, *args, **kwargs):
        seen.append(1)
        return torch.zeros_like(q)

    expected = render(host, with_override(host.model(), zeros), steps=1)
    seen.clear()
    declined = render(host, pack.patch(with_override(host.model(), zeros), implementation="auto"), steps=1)
    assert torch.equal(declined, expected)
    assert len(seen) == 4


def test_error_of_the_previous_override_is_not_swallowed(host, pack):
    """What the attention before ours raises is its user's business."""

    def broken(func, *args, **kwargs):
        raise KeyError("foreign")

    model = pack.patch(with_override(host.model(), broken))
    with pytest.raises(KeyError, match="foreign"):
        render(host, model, steps=1)


def test_override_installed_by_the_host_during_the_run_is_respected(host, pack):
    """Upstream's sparse node re-installs itself on top at every step (ON_PREPARE_STATE), chaining what it finds."""
    model, seen = pack.patch(host.model()), []

    def on_prepare_state(patcher, timestep, model_options):
        options = model_options["transformer_options"]
        previous = options.get("optimized_attention_override")
        if getattr(previous, "of_the_test", False):
            return

        def sparse(func, *args, **kwargs):
            seen.append(1)
            return previous(func, *args, **kwargs)

        sparse.of_the_test = True
        options["optimized_attention_override"] = sparse

    model.add_callback_with_key(host.extension.CallbacksMP.ON_PREPARE_STATE, "sparse", on_prepare_state)
    with watching(host, pack) as watch:
        render(host, model, steps=2)
    assert len(watch.accelerated()) == 4
    assert len(seen) == 8


@pytest.mark.parametrize("ours_first", [True, False])
def test_order_with_another_patch_does_not_matter(host, pack, ours_first):
    """B058: a LoRA or shift before or after ours: the same latents."""
    expected = render(host, pack.patch(host.set_shift(host.model(), 3.0)))
    model = host.model()
    model = host.set_shift(pack.patch(model), 3.0) if ours_first else pack.patch(host.set_shift(model, 3.0))
    assert torch.equal(render(host, model), expected)
