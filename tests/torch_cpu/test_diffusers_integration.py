"""VC-Attention in diffusers' Wan transformer: what is served, what is declined, what is left behind."""

import importlib.util

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if importlib.util.find_spec("diffusers") is None:
    pytest.skip("needs diffusers, which is not installed", allow_module_level=True)

import vc_attention  # noqa: E402
from diffusers import WanTransformer3DModel  # noqa: E402
from vc_attention.integrations import diffusers as integration  # noqa: E402

LAYERS = 2
SHAPE = (1, 16, 3, 12, 12)
TOKENS = 3 * 6 * 6
SIGMAS = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.2, 0.0]


@pytest.fixture(scope="module")
def shared_model():
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        text_dim=32,
        freq_dim=64,
        ffn_dim=64,
        num_layers=LAYERS,
        rope_max_seq_len=32,
    )
    return model.requires_grad_(False).eval()


@pytest.fixture
def model(shared_model):
    """The model; the test must leave it as it was."""
    before = processors(shared_model)
    yield shared_model
    assert processors(shared_model) == before
    assert not shared_model._forward_pre_hooks


def processors(model):
    return [layer.processor for block in model.blocks for layer in (block.attn1, block.attn2)]


def evaluate(model, sigma=1.0, batch=1, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    latents = torch.randn(batch, *SHAPE[1:], generator=random).to(dtype)
    text = torch.randn(batch, 7, 32, generator=random).to(dtype)
    with torch.no_grad():
        return model(latents, torch.full((batch,), 1000.0 * sigma), text, return_dict=False)[0]


def apply(model, **settings):
    return integration.apply(model, **{"implementation": "reference", "min_tokens": 1, **settings})


def relative_error(output, expected):
    return float((output - expected).norm() / expected.norm())


@pytest.fixture
def exact_attention(monkeypatch):
    """Replaces low-bit attention by exact attention, to see everything around it by itself."""
    calls = []

    def exact(q, k, v, *, layout, **kwargs):
        calls.append(kwargs)
        assert layout == "BSHD"
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()

    monkeypatch.setattr(integration, "attention", exact)
    return calls


# What it computes


def test_everything_around_attention_is_the_models_own(model, exact_attention):
    expected = evaluate(model)
    with apply(model):
        output = evaluate(model)
    assert len(exact_attention) == LAYERS
    assert torch.allclose(output, expected, rtol=1e-4, atol=1e-5)


def test_fused_projections(model, exact_attention):
    expected = evaluate(model)
    model.fuse_qkv_projections()
    try:
        with apply(model):
            output = evaluate(model)
    finally:
        model.unfuse_qkv_projections()
    assert len(exact_attention) == LAYERS
    assert torch.allclose(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mode", "bound"), [("8-bit", 0.05), ("4-bit", 0.3)])
def test_low_bit_output_is_close_but_not_equal(model, mode, bound):
    expected = evaluate(model)
    with apply(model, mode=mode) as handle:
        output = evaluate(model)
    assert 0 < relative_error(output, expected) < bound
    report = handle.report()
    assert (report.mode, report.implementation) == (mode, "reference")
    assert (report.layers, report.calls, report.served) == (LAYERS, LAYERS, LAYERS)


def test_bfloat16_in_and_out(shared_model):
    model = WanTransformer3DModel(**shared_model.config).requires_grad_(False).eval()
    model.load_state_dict(shared_model.state_dict())
    model.to(torch.bfloat16)
    expected = evaluate(model, dtype=torch.bfloat16)
    with apply(model) as handle:
        output = evaluate(model, dtype=torch.bfloat16)
    assert output.dtype == torch.bfloat16
    assert handle.report().served == LAYERS
    assert relative_error(output.float(), expected.float()) < 0.1


# Applying and removing


def test_remove_restores_processors_and_output(model):
    before, expected = processors(model), evaluate(model)
    handle = apply(model)
    assert processors(model) != before
    handle.remove()
    handle.remove()
    assert processors(model) == before
    assert torch.equal(evaluate(model), expected)


def test_an_exception_inside_the_context_removes_it_too(model):
    with pytest.raises(RuntimeError, match="interrupted"), apply(model):
        raise RuntimeError("interrupted")


def test_only_self_attention_of_the_wanted_layers_is_touched(model):
    before = processors(model)
    with apply(model, skip_layers=[0]) as handle:
        changed = [new is not old for new, old in zip(processors(model), before, strict=True)]
        assert changed == [False, False, True, False]
        evaluate(model)
    assert handle.report().calls == 1


def test_no_other_model_is_touched(model):
    other = WanTransformer3DModel(**model.config)
    names = {type(processor) for processor in processors(other)}
    with apply(model):
        assert {type(processor) for processor in processors(other)} == names
        assert {type(processor) for processor in processors(WanTransformer3DModel(**model.config))} == names


def test_two_handles_may_be_removed_in_any_order(model):
    expected = evaluate(model)
    first, second = apply(model), apply(model)
    evaluate(model)
    assert (first.report().calls, second.report().served) == (0, LAYERS)
    first.remove()
    second.remove()  # gives back the first one's processors, which now pass everything on
    assert torch.equal(evaluate(model), expected)
    for block in model.blocks:
        block.attn1.set_processor(block.attn1.processor.previous)


def test_a_processor_set_later_is_kept(model):
    handle = apply(model)
    layer = model.blocks[0].attn1
    ours, mine = layer.processor, type(layer.processor.previous)()
    layer.set_processor(mine)
    handle.remove()
    assert layer.processor is mine
    layer.set_processor(ours.previous)


def test_backend_choice_reaches_the_previous_processor(model):
    with apply(model):
        layer = model.blocks[0].attn1
        previous = layer.processor.previous
        layer.processor._attention_backend = "native"
        assert previous._attention_backend == "native"
        layer.processor._attention_backend = None
    assert previous._attention_backend is None


# Declining


def test_auto_on_the_cpu_declines_every_call_and_changes_nothing(model):
    expected = evaluate(model)
    with apply(model, implementation="auto") as handle:
        assert torch.equal(evaluate(model), expected)
        report = handle.report()
    assert (report.calls, report.served, sum(report.declined.values())) == (LAYERS, 0, LAYERS)
    assert "CPU" in str(report)


def test_short_sequences_are_left_alone(model):
    expected = evaluate(model)
    with apply(model, min_tokens=TOKENS + 1) as handle:
        assert torch.equal(evaluate(model), expected)
    assert handle.report().declined == {f"{TOKENS} tokens are fewer than min_tokens": LAYERS}


def test_values_that_are_not_finite_go_to_the_previous_processor(model):
    # Infinite inputs reach the layers; whatever the model makes of them, ours must make the same.
    latents = torch.full(SHAPE, float("inf"))
    text = torch.zeros(1, 7, 32)

    def render():
        return model(latents, torch.tensor([1000.0]), text, return_dict=False)[0]

    expected = render()
    with apply(model) as handle:
        output = render()
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)
    report = handle.report()
    assert (report.served, sum(report.declined.values())) == (0, LAYERS)
    assert all("NaN" in reason for reason in report.declined)


def test_calls_with_a_mask_or_unknown_arguments_or_other_tokens_go_to_the_previous_processor(model):
    layer = model.blocks[0].attn1
    tokens = torch.randn(1, 20, 128)
    mask = torch.zeros(1, 1, 20, 20)
    seen = []

    class Watched:
        def __call__(self, attn, *arguments, **keywords):
            seen.append((arguments, keywords))
            return "from the previous processor"

    original = layer.processor
    layer.set_processor(Watched())
    with apply(model) as handle:
        for arguments, keywords in (
            ((tokens, tokens, None, None), {}),
            ((tokens, None, mask, None), {}),
            ((tokens, None, None, None), {"extra": 1}),
            ((tokens.clone().requires_grad_(), None, None, None), {}),
        ):
            assert layer.processor(layer, *arguments, **keywords) == "from the previous processor"
            assert seen[-1][1] == keywords
            assert all(got is given for got, given in zip(seen[-1][0], arguments, strict=True))
    layer.set_processor(original)
    reasons = " / ".join(handle.report().declined)
    for word in ("cross-attention", "mask", "extra", "gradients"):
        assert word in reasons
    assert handle.report().served == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "2-bit"}, "mode"),
        ({"implementation": "magic"}, "implementation"),
        ({"window": 1.5}, "window"),
        ({"interval": 0}, "interval"),
        ({"clusters": 0}, "clusters"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_changed(model, settings, message):
    with pytest.raises(vc_attention.InvalidArgument, match=message):
        apply(model, **settings)


def test_another_model_is_refused():
    with pytest.raises(vc_attention.InvalidArgument, match="WanTransformer3DModel, got Linear"):
        integration.apply(torch.nn.Linear(2, 2))


# Groupings and renders


def run(model, handle, sigmas=SIGMAS, prompts=2):
    for sigma in sigmas[:-1]:
        for prompt in range(prompts):
            evaluate(model, sigma, seed=prompt)
    return handle.report()


@pytest.mark.parametrize(
    ("window", "interval", "steps"),
    [(0.25, 4, [0]), (1.0, 4, [0, 4]), (0.5, 2, [0, 2]), (1.0, 1, range(8)), (0, 4, [])],
)
def test_values_are_grouped_at_the_scheduled_steps_per_layer_and_prompt(model, window, interval, steps):
    with apply(model, window=window, interval=interval) as handle, handle.render(SIGMAS):
        report = run(model, handle)
    assert report.groupings == len(steps) * LAYERS * 2
    assert report.served == report.calls == LAYERS * 2 * 8


def test_attention_gets_the_held_grouping_of_its_layer_and_prompt(model, exact_attention):
    with apply(model, window=0.25) as handle, handle.render(SIGMAS):
        run(model, handle)
    groupings = [call["grouping"] for call in exact_attention]
    per_evaluation = [tuple(map(id, groupings[i : i + LAYERS])) for i in range(0, len(groupings), LAYERS)]
    assert len(set(per_evaluation)) == 2
    assert per_evaluation == per_evaluation[:2] * 8
    assert len(set(per_evaluation[0] + per_evaluation[1])) == 2 * LAYERS


def test_a_refresh_starts_from_the_grouping_before_and_keeps_the_cluster_count(model, monkeypatch):
    starts = []
    group_values = integration.group_values

    def watched(v, previous=None, **kwargs):
        starts.append(previous)
        return group_values(v, previous, **kwargs)

    monkeypatch.setattr(integration, "group_values", watched)
    with apply(model, window=1.0, interval=4, clusters=5) as handle, handle.render(SIGMAS):
        run(model, handle, prompts=1)
    assert [start is None for start in starts] == [True] * LAYERS + [False] * LAYERS
    assert starts[-1].clusters == 5


def test_more_clusters_than_tokens_are_as_many_as_tokens(model):
    with apply(model, clusters=10_000) as handle:
        evaluate(model)
    assert handle.report().served == LAYERS


def interrupted_render(model, handle):
    with handle.render(SIGMAS):
        evaluate(model)
        assert handle._run.held
        raise KeyboardInterrupt


def test_groupings_are_freed_and_counts_kept_when_a_render_ends_also_by_an_exception(model):
    with apply(model) as handle:
        with handle.render(SIGMAS):
            run(model, handle)
            assert handle._run.held
        assert not handle._run.held
        assert handle.report().groupings == 2 * LAYERS
        with pytest.raises(KeyboardInterrupt):
            interrupted_render(model, handle)
        assert not handle._run.held
        assert handle.report().calls == LAYERS


def test_two_renders_are_equal_and_the_second_starts_afresh(model):
    with apply(model) as handle:
        outputs = []
        for _ in range(2):
            with handle.render(SIGMAS):
                evaluate(model, 1.0)
                outputs.append(evaluate(model, 0.9))
                reports = handle.report()
                assert (reports.calls, reports.groupings) == (2 * LAYERS, LAYERS)
    assert torch.equal(*outputs)


def test_a_noise_level_back_at_the_start_begins_a_new_render(model):
    with apply(model) as handle:
        handle.new_render(SIGMAS)
        run(model, handle)
        evaluate(model, SIGMAS[0])
        report = handle.report()
    assert (report.calls, report.groupings) == (LAYERS, LAYERS)


def test_without_a_schedule_each_layer_is_grouped_once(model):
    with apply(model) as handle:
        report = run(model, handle)
    assert report.groupings == 2 * LAYERS


def test_the_precise_mode_groups_nothing(model):
    with apply(model, mode="8-bit precise") as patch:
        evaluate(model)
    assert patch.report().served == LAYERS
    assert patch.report().groupings == 0


def test_another_shape_gets_its_own_grouping(model):
    with apply(model) as handle:
        evaluate(model, 0.9, batch=1)
        evaluate(model, 0.8, batch=2)
        assert handle.report().served == 2 * LAYERS
        assert handle.report().groupings == 2 * LAYERS


def test_the_second_model_of_wan22_is_not_grouped_by_an_early_window(model):
    with apply(model, window=0.25) as handle, handle.render(SIGMAS):
        evaluate(model, 0.5)
        evaluate(model, 0.4)
    assert handle.report().groupings == 0
    assert handle.report().served == 2 * LAYERS


def test_compiled_models_give_the_same(model):
    with apply(model) as handle:
        expected = evaluate(model)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager")
        handle.new_render()
        output = evaluate(compiled)
        assert handle.report().served == LAYERS
    assert torch.allclose(output, expected, rtol=1e-4, atol=1e-5)
