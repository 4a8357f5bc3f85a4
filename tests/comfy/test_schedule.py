"""When: refreshes, the two experts of Wan2.2, samplers that repeat or go back, start and end, blocks left alone."""

import pytest
import torch

from .renders import at_call_sites, cosine, prompts, render, watched
from .watch import watching


def grouped(host, pack, *, model=None, kind="wan", steps, window=1.0, interval=4, **keywords):
    patched = pack.patch(model or host.model(kind), grouping_window=window, refresh_interval=interval)
    return watched(host, pack, patched, kind, steps=steps, **keywords)[1]


@pytest.mark.parametrize(
    ("steps", "window", "interval", "expected"),
    [
        (10, 1.0, 4, [0, 4, 8]),
        (20, 0.25, 4, [0, 4]),
        (20, 0.25, 1, [0, 1, 2, 3, 4]),  # 25 % of 20 steps is 5 steps, not 6
        (40, 0.25, 4, [0, 4, 8]),  # the paper's Wan2.2
        (50, 0.25, 4, [0, 4, 8, 12]),  # the paper's LongCat
        (4, 0.25, 4, [0]),  # a 4-step LoRA
        (6, 1.0, 50, [0]),
        (6, 0.0, 1, []),
    ],
)
def test_refreshes_happen_at_these_steps(host, pack, steps, window, interval, expected):
    watch = grouped(host, pack, steps=steps, window=window, interval=interval)
    assert watch.grouped_steps() == expected
    # Every layer, both prompts, once each.
    assert set(watch.grouped().values()) <= {2}
    assert len(watch.grouped()) == 2 * len(expected)


def test_refreshes_start_from_the_grouping_held(host, pack):
    watch = grouped(host, pack, steps=6, interval=2)
    for call in watch.accelerated():
        for group in call.groups:
            assert group.previous == (call.step > 0)


def follows_itself(watch) -> int:
    """Checks that each regrouping starts from the one before of the same layer and prompt; how many rows were checked.

    Calls of a block are told apart by their order, prompts by theirs in the call (the chunks do not change here).
    """
    held, ordinals, checked = {}, {}, 0
    for call in watch.calls:
        if not call.groups:
            continue
        place = (call.block, call.step, tuple(call.options["uuids"]))
        ordinal = ordinals[place] = ordinals.get(place, -1) + 1
        for prompt, group in enumerate(call.groups):
            key = (call.block, ordinal, tuple(call.options["uuids"]), prompt)
            if key in held:
                assert torch.equal(group.started_from.centroids, held[key].centroids), key
                checked += group.shape[0]
            held[key] = group.result
    return checked


@pytest.mark.parametrize("kind", ["wan", "joint"])
def test_each_layer_and_prompt_regroups_its_own(host, pack, kind):
    """Warm starts must not come from the other prompt, another block or another block type with the same index."""
    model = pack.patch(host.model(kind), grouping_window=1.0, refresh_interval=1, clusters=4)
    with watching(host, pack) as watch:
        watch.keep_results = True
        render(host, model, kind, steps=3, conds=(host.cond(kind, 32, 1), host.cond(kind, 17, 2)))
    assert follows_itself(watch) == (host.blocks[kind] + host.refiner_calls[kind]) * 2 * 2


def test_host_that_names_no_blocks(host, pack):
    """Wan up to ComfyUI 0.3.75, MiniMax-H3 in 0.33: layers are told apart by the order of calls in a forward."""

    def nameless(original):
        def attention(*args, **keywords):
            hidden = ("block_index", "block_type", "total_blocks")
            options = keywords["transformer_options"]
            keywords["transformer_options"] = {k: v for k, v in options.items() if k not in hidden}
            return original(*args, **keywords)

        return attention

    expected = render(host, pack.patch(host.model(), grouping_window=1.0, refresh_interval=1, clusters=4), steps=3)
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=1, clusters=4)
    with watching(host, pack) as watch, at_call_sites(host, nameless):
        watch.keep_results = True
        ours = render(host, model, steps=3)
    assert {call.block for call in watch.calls} == {None}
    assert follows_itself(watch) == 2 * 2 * 2
    assert torch.equal(ours, expected)


def test_attention_called_per_group_of_heads(host, pack):
    """A low-memory patch calls attention twice in one layer: the halves must not share a grouping."""

    def halves(original):
        def attention(q, k, v, heads, **keywords):
            parts = [t.chunk(2, -1) for t in (q, k, v)]
            return torch.cat([original(*part, heads=1, **keywords) for part in zip(*parts, strict=True)], -1)

        return attention

    plain = render(host, host.model(), steps=3)
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=1, clusters=4)
    with watching(host, pack) as watch, at_call_sites(host, halves):
        watch.keep_results = True
        ours = render(host, model, steps=3)
    assert follows_itself(watch) == 2 * 2 * 2 * 2
    assert cosine(ours, plain) > 0.9995


def test_grouping_is_held_between_refreshes(host, pack):
    """Every call inside the window uses one, not only those that make one."""
    watch = grouped(host, pack, steps=6, interval=3)
    assert all(call.kernel[0].keywords["grouping"] for call in watch.accelerated())


def test_the_precise_mode_groups_nothing(host, pack, caplog):
    """It keeps the values in 16 bits: a grouping would cost time and memory for nothing."""
    caplog.set_level("INFO", "VC Attention")
    model = pack.patch(host.model(), mode="8-bit precise", grouping_window=1.0, refresh_interval=1)
    _, watch = watched(host, pack, model, "wan", steps=3)
    assert watch.accelerated()
    assert not watch.grouped()
    assert "values not grouped (this mode keeps them in 16 bits)" in caplog.text


def two_experts(host, pack, split, steps=10, shift=5.0, **widgets):
    """The Wan2.2 chain: KSamplerAdvanced on the high-noise expert, then on the low-noise one, a node on both."""
    positive, negative = prompts(host)
    high = pack.patch(host.set_shift(host.model(), shift), unique_id="1", **widgets)
    low = pack.patch(host.set_shift(host.model(), shift), unique_id="2", **widgets)
    with watching(host, pack) as first:
        noisy = host.ksampler(high, positive, negative, host.latent(), steps=steps, start=0, last=split)
    with watching(host, pack) as second:
        done = host.ksampler(low, positive, negative, noisy, steps=steps, start=split, add_noise=False)
    return done, first, second


def test_second_expert_of_wan22_does_not_group(host, pack):
    """Its slice of the schedule looks like a whole one; only the noise level says that it is late."""
    _, first, second = two_experts(host, pack, split=5, steps=10, refresh_interval=1)
    # Shift 5: 25 % of the schedule is above sigma 0.9375, which is between steps 2 and 3 of 10.
    assert first.grouped_steps() == [0, 1, 2]
    assert second.grouped_steps() == []
    assert len(first.accelerated()) == len(second.accelerated()) == 2 * 5
    assert {text_id for _, text_id in host.texts} == {"1", "2"}


def test_two_experts_with_a_4_step_lora(host, pack):
    """Levels 1, 0.9375 | 0.8333, 0.625: step 0 only; 0.9375 is the threshold itself."""
    _, first, second = two_experts(host, pack, split=2, steps=4)
    assert first.grouped_steps() == [0]
    assert second.grouped_steps() == []


def test_the_chain_is_close_to_the_plain_chain(host, pack):
    positive, negative = prompts(host)
    model = host.set_shift(host.model(), 5.0)
    noisy = host.ksampler(model, positive, negative, host.latent(), steps=6, start=0, last=3)
    plain = host.ksampler(model, positive, negative, noisy, steps=6, start=3, add_noise=False)
    ours, _, _ = two_experts(host, pack, split=3, steps=6)
    whole = host.ksampler(model, positive, negative, host.latent(), steps=6)
    assert cosine(plain, whole) > 0.9999  # the chain itself is the whole render, or the harness lies
    assert cosine(ours, plain) > 0.9995


def test_threshold_of_a_slice_is_strict(host, pack):
    """sigma[5] of 20 equals percent_to_sigma(0.25): five steps group, not six; also when the schedule is a slice."""
    _, first, _ = two_experts(host, pack, split=10, steps=20, refresh_interval=1)
    assert first.grouped_steps() == [0, 1, 2, 3, 4]


def test_shift_set_after_our_node_counts(host, pack):
    """The noise scale is read when sampling starts: node order does not matter."""
    before = pack.patch(host.set_shift(host.model(), 5.0), refresh_interval=1)
    after = host.set_shift(pack.patch(host.model(), refresh_interval=1), 5.0)
    seen = []
    for model in (before, after):
        watch = watched(host, pack, model, steps=10, start=0, last=6)[1]
        seen.append(watch.grouped_steps())
    assert seen[0] == seen[1] == [0, 1, 2]


def test_denoise_below_one_starts_late(host, pack):
    """denoise 0.5 enters the model's schedule at its middle: an early window is over."""
    watch = grouped(host, pack, steps=4, window=0.25, denoise=0.5)
    assert watch.grouped_steps() == []
    watch = grouped(host, pack, steps=4, window=1.0, interval=2, denoise=0.5)
    assert watch.grouped_steps() == [0, 2]


@pytest.mark.parametrize("sampler", ["euler", "heun", "heunpp2", "dpm_2"])
def test_repeated_and_backward_levels_do_not_refresh_early(host, pack, sampler):
    """A step is its noise level: heun visits levels twice, heunpp2 goes back, dpm_2 visits levels in between."""
    watch = grouped(host, pack, steps=9, interval=4, sampler=sampler)
    assert watch.grouped_steps() == [0, 4, 8]
    counts = watch.grouped()
    assert set(counts.values()) == {2}, "each layer and prompt is grouped once per refresh"


def test_a_noise_level_is_read_once_an_evaluation(host, pack, monkeypatch):
    """Reading it waits for the GPU. Prompts of unequal length are two forwards of one evaluation."""
    module = next(m for m in pack.modules() if m.__name__.endswith(".nodes.run_state"))
    locate, located = module.locate, []
    monkeypatch.setattr(module, "locate", lambda *args: located.append(1) or locate(*args))
    watch = grouped(host, pack, steps=3, conds=(host.cond(length=32, seed=1), host.cond(length=17, seed=2)))
    assert {len(call.chunks) for call in watch.calls} == {1}
    assert len(located) == 3


def test_skipped_forwards_do_not_lose_a_refresh(host, pack):
    """A step cache drops whole forwards: the refresh comes with the next forward that runs."""
    seen = []
    model = host.model()

    def skip(executor, x, *args, **kwargs):
        """Runs forwards 0, 1, 2, 7, 8, 9 and repeats the last result in between: step 4 never happens."""
        seen.append(1)
        if len(seen) in (4, 5, 6, 7):
            return skip.last
        skip.last = executor(x, *args, **kwargs)
        return skip.last

    model.add_wrapper_with_key(host.extension.WrappersMP.DIFFUSION_MODEL, "cache", skip)
    watch = grouped(host, pack, model=model, steps=10, interval=4)
    assert sorted({call.step for call in watch.calls}) == [0, 1, 2, 7, 8, 9]
    assert watch.grouped_steps() == [0, 7]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0.0, 1.0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (0.25, 0.75, [2, 3, 4, 5]),
        (0.0, 0.5, [0, 1, 2, 3]),
        (0.5, 1.0, [4, 5, 6, 7]),
        (0.13, 1.0, [2, 3, 4, 5, 6, 7]),
    ],
)
def test_start_and_end_percent_give_exactly_these_steps(host, pack, start, end, expected):
    model = pack.patch(host.model(), start_percent=start, end_percent=end)
    _, watch = watched(host, pack, model, steps=8)
    assert watch.positions() == {(s, ("double", b)) for s in expected for b in (0, 1)}


@pytest.mark.parametrize(
    ("skip", "expected"),
    [("", {0, 1}), ("0", {1}), ("1", {0}), ("0-1", set()), ("0,1", set()), ("5-39", {0, 1}), (" 0 - 0 , 7 ", {1})],
)
def test_skip_blocks_gives_exactly_these_blocks(host, pack, skip, expected):
    _, watch = watched(host, pack, pack.patch(host.model(), skip_blocks=skip), steps=2)
    assert watch.positions() == {(s, ("double", b)) for s in (0, 1) for b in expected}


def test_skip_blocks_in_a_model_with_two_block_types(host, pack):
    _, watch = watched(host, pack, pack.patch(host.model("joint"), skip_blocks="0"), "joint", steps=1)
    blocks = {call.block for call in watch.accelerated() if call.block}
    assert blocks == {("double", 1), ("single", 1)}


def test_steps_and_blocks_together_with_start_percent(host, pack):
    model = pack.patch(host.model(), start_percent=0.5, skip_blocks="1")
    _, watch = watched(host, pack, model, steps=4)
    assert watch.positions() == {(2, ("double", 0)), (3, ("double", 0))}


def test_calls_outside_the_range_are_exact(host, pack):
    """Steps before start_percent give the unpatched latents to the last bit."""
    kept = {}
    for name, model in (("plain", host.model()), ("ours", pack.patch(host.model(), start_percent=0.5))):
        kept[name] = []
        guider = host.guider(model, *prompts(host))
        host.run_guider(
            guider, host.latent(), host.sigmas(model, 4), callback=lambda i, x, n=name: kept[n].append(x.clone())
        )
    same = [torch.equal(a, b) for a, b in zip(kept["plain"], kept["ours"], strict=True)]
    assert same == [True, True, False, False]


def test_start_beyond_the_end_does_nothing(host, pack):
    """KSampler returns the latent without any event: nothing to report, nothing to trip over."""
    latent = torch.full_like(host.latent(), 0.5)
    with pack.log() as records:
        out = render(host, pack.patch(host.model()), latent=latent, steps=4, start=4, add_noise=False)
    assert torch.equal(out, latent)
    assert records == []
