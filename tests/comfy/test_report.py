"""What a user is told: the log, the text on the node; and what he is told about wrong values and old workflows."""

import pytest
import torch

from .pack import NODE_ID
from .renders import at_call_sites, prompts, render, watched
from .watch import watching


def test_one_line_in_the_log_and_one_text_on_the_node(host, pack):
    with pack.log() as records:
        _, watch = watched(host, pack, pack.patch(host.model(), unique_id="42"), steps=4)
    assert len(records) == 1
    assert records[0].levelname == "INFO"
    ((text, node),) = host.texts
    assert node == "42"
    for said in (records[0].getMessage(), text):
        assert "8-bit" in said
        assert str(len(watch.accelerated())) in said
        assert f"of {len(watch.calls)}" in said
        assert "2 of 2 blocks" in said or "2/2 blocks" in said or "2 blocks" in said
        assert "cross-attention" in said
        assert str(len(watch.declined())) in said
        assert "grouped" in said
    assert "\n" not in records[0].getMessage()


def test_each_render_has_its_own_line(host, pack):
    """Counters are of one run: ten renders do not add up."""
    model = pack.patch(host.model())
    with pack.log() as records:
        for _ in range(3):
            render(host, model, steps=2)
    assert len(records) == len(host.texts) == 3
    stripped = {"".join(c for c in r.getMessage().split(" s of ")[0] if c != ".").rsplit(";", 1)[0] for r in records}
    assert len(stripped) == 1


def test_reasons_are_counted(host, pack):
    """Two reasons in one render, each with its number."""
    model = pack.patch(host.model(), skip_blocks="0", start_percent=0.5)
    render(host, model, steps=4)
    text = host.texts[-1][0]
    # 8 cross-attention calls; 4 self-attention calls before start_percent; 2 after it in the skipped block.
    assert "8" in text
    assert "start_percent" in text
    assert "skip_blocks" in text
    assert "2 of 16" in text


def test_every_call_declined_is_a_warning_on_the_node(host, pack):
    """B012: everything falls back for 20 steps: at most three lines, a number, a reason, and the node says it."""
    with pack.log() as records:
        render(host, pack.patch(host.model(), min_tokens=10**6), steps=20)
    assert 1 <= len(records) <= 3
    warnings = [r for r in records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    text, _ = host.texts[-1]
    for said in (warnings[0].getMessage(), text):
        assert "0 %" in said or "0%" in said
        assert "80" in said, "the number of calls"
        assert "min_tokens" in said, "the likely cause"


def test_all_calls_masked(host, pack):
    """The likely cause is the mask, not the cross-attention that every render has."""

    def masking(original):
        """What HunyuanVideo does with padded text."""

        def attention(q, k, *rest, **keywords):
            keywords["mask"] = torch.zeros(1, 1, q.shape[-2], k.shape[-2])
            return original(q, k, *rest, **keywords)

        return attention

    model = pack.patch(host.model())
    with pack.log() as records, watching(host, pack) as watch, at_call_sites(host, masking):
        render(host, model, steps=3)
    assert watch.accelerated() == []
    assert len(records) <= 3
    assert "mask" in records[-1].getMessage()
    assert "mask" in host.texts[-1][0]


def test_unsupported_device_gets_a_sentence(host, pack):
    """No log of one line per call, no silence: one sentence that names the device."""
    with pack.log() as records:
        render(host, pack.patch(host.model(), implementation="auto"), steps=5)
    assert len(records) == 1
    assert "CPU" in records[0].getMessage()
    assert "CPU" in host.texts[-1][0]


def test_no_text_without_a_server(host, pack, monkeypatch):
    """In-process use (scripts, tests of others): PromptServer may have no instance. The render must not care."""
    import sys

    server = sys.modules["server"].PromptServer
    monkeypatch.delattr(server, "instance")
    assert torch.isfinite(render(host, pack.patch(host.model()), steps=1)).all()


def test_a_broken_server_does_not_lose_the_render(host, pack, monkeypatch):
    import sys

    def broken(*args, **kwargs):
        raise ConnectionError("gone")

    monkeypatch.setattr(sys.modules["server"].PromptServer.instance, "send_progress_text", broken)
    expected = render(host, pack.patch(host.model()), steps=1)
    assert torch.isfinite(expected).all()


def test_a_node_without_an_id_renders(host, pack):
    model = host.execute(NODE_ID, pack.inputs(host.model()), unique_id=None)[0]
    with watching(host, pack) as watch:
        render(host, model, steps=1)
    assert len(watch.accelerated()) == 2
    assert host.texts == []


# --- wrong values -------------------------------------------------------------------------------------------------

WRONG = [
    ("mode", "9-bit"),
    ("mode", 3),
    ("mode", None),
    ("implementation", "cuda13"),
    ("grouping_window", 1.5),
    ("grouping_window", -0.1),
    ("grouping_window", float("nan")),
    ("grouping_window", "early"),
    ("refresh_interval", 0),
    ("refresh_interval", 51),
    ("refresh_interval", None),
    ("start_percent", 1.2),
    ("end_percent", -0.5),
    ("skip_blocks", "first two"),
    ("skip_blocks", "3-1"),
    ("skip_blocks", "-1"),
    ("skip_blocks", "1;2"),
    ("clusters", -1),
    ("clusters", "many"),
    ("min_tokens", -1),
]


@pytest.mark.parametrize(("widget", "value"), WRONG, ids=[f"{w}={v}" for w, v in WRONG])
def test_wrong_widget_value_in_a_prompt_is_refused_by_name(host, pack, widget, value):
    """The host's own validation, before anything runs; NaN gets past its comparison and must be caught by the node."""
    errors = host.validate(NODE_ID, pack.inputs(["1", 0], **{widget: value}))
    if value != value:
        return
    assert errors
    assert any(widget in error for error in errors), errors


def executed(host, pack, **widgets):
    """The node run without the host's validation: the model, or the message of a ValueError or TypeError."""
    try:
        return host.execute(NODE_ID, pack.inputs(host.model(), **widgets))[0], None
    except (ValueError, TypeError) as error:
        return None, str(error)


@pytest.mark.parametrize(("widget", "value"), WRONG, ids=[f"{w}={v}" for w, v in WRONG])
def test_wrong_widget_value_past_the_validation_is_named_or_harmless(host, pack, widget, value):
    """A front end or a link can bring any value: an error that names the widget, never a failure inside the render."""
    model, refusal = executed(host, pack, **{widget: value})
    if refusal is None:
        assert torch.isfinite(render(host, model, steps=1)).all()
        return
    assert widget in refusal
    assert "expected" in refusal or "must" in refusal


def test_error_message_says_what_was_expected_and_what_came(host, pack):
    with pytest.raises(ValueError, match=r"skip_blocks.*0-2,39.*first two") as caught:
        host.execute(NODE_ID, pack.inputs(host.model(), skip_blocks="first two"))
    assert "\n" not in str(caught.value)


def test_start_after_end_is_named(host, pack):
    """Or it is taken for an empty range: no accelerated call, said loudly."""
    model, refusal = executed(host, pack, start_percent=0.8, end_percent=0.2)
    if refusal is not None:
        assert "percent" in refusal
        return
    _, watch = watched(host, pack, model, steps=2)
    assert watch.accelerated() == []
    assert "percent" in host.texts[-1][0]


def test_numbers_arrive_as_text(host, pack):
    """The host casts what a saved workflow holds as text."""
    model = host.run_node(NODE_ID, pack.inputs(host.model(), refresh_interval="2", grouping_window="1.0"))[0]
    _, watch = watched(host, pack, model, steps=5)
    assert watch.grouped_steps() == [0, 2, 4]


# --- older workflows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "missing",
    [["min_tokens"], ["clusters", "implementation", "min_tokens"], ["skip_blocks"], ["mode"]],
    ids=", ".join,
)
def test_workflow_saved_before_a_widget_existed(host, pack, missing):
    """It renders as the widget's default would."""
    inputs = pack.inputs(host.model())
    defaults = {i.id: i.default for i in pack.nodes[NODE_ID].GET_SCHEMA().inputs[1:]}
    with_defaults = {**inputs, **{name: defaults[name] for name in missing}}
    for name in missing:
        del inputs[name]
    assert host.validate(NODE_ID, inputs) == []
    old, new = host.run_node(NODE_ID, inputs)[0], host.run_node(NODE_ID, with_defaults)[0]
    assert torch.equal(render(host, old, steps=1), render(host, new, steps=1))


def test_workflow_with_a_widget_that_is_gone(host, pack):
    inputs = {**pack.inputs(host.model()), "smoothing": 0.5, "dry_run": True}
    assert host.validate(NODE_ID, inputs) == []
    expected = render(host, pack.patch(host.model()), steps=1)
    assert torch.equal(render(host, host.run_node(NODE_ID, inputs)[0], steps=1), expected)


def test_model_alone_is_enough(host, pack):
    """An API prompt with nothing but the model."""
    assert host.validate(NODE_ID, {"model": ["1", 0]}) == []
    model = host.run_node(NODE_ID, {"model": host.model()})[0]
    assert torch.equal(render(host, model, steps=1), render(host, host.model(), steps=1))


def test_prompts_are_not_changed_by_a_render(host, pack):
    positive, negative = prompts(host)
    copies = [positive[0][0].clone(), negative[0][0].clone()]
    render(host, pack.patch(host.model()), conds=(positive, negative), steps=1)
    assert torch.equal(positive[0][0], copies[0])
    assert torch.equal(negative[0][0], copies[1])
