"""Whole renders: which calls are ours, how close the picture stays, and when it must not change at all."""

import pytest
import torch

from .pack import NODE_ID
from .renders import at_call_sites, cosine, probed, prompts, render, watched
from .watch import watching

# Measured on both hosts over all kinds, seed 1, 4 steps: worst 0.99989 (8-bit) and 0.9980 (4-bit).
CLOSE = {"8-bit": 0.9995, "4-bit": 0.995}


def accelerated_rows(watch) -> int:
    return sum(len(call.chunks) for call in watch.accelerated())


@pytest.mark.parametrize("cfg", [3.0, 1.0])
def test_every_self_attention_is_accelerated_and_no_cross_attention(host, pack, cfg):
    """blocks x steps x conds: prompts that share a forward share a call, so chunks are counted."""
    _, watch = watched(host, pack, pack.patch(host.model()), steps=3, cfg=cfg)
    chunks = 1 if cfg == 1.0 else 2
    assert accelerated_rows(watch) == 2 * 3 * chunks
    assert all(call.self_attention for call in watch.accelerated())
    assert len(watch.declined()) == 2 * 3
    assert not any(call.self_attention for call in watch.declined())
    assert watch.stray == []
    assert all(len(call.kernel) == 1 for call in watch.accelerated())


def test_joint_text_and_video_blocks_are_accelerated(host, pack):
    """HunyuanVideo: text tokens are in the sequence; double and single blocks, and the refiner at min_tokens 0."""
    _, watch = watched(host, pack, pack.patch(host.model("joint")), "joint", steps=2)
    blocks = [call for call in watch.accelerated() if call.block is not None]
    assert sum(len(call.chunks) for call in blocks) == 4 * 2 * 2
    assert {call.block for call in blocks} == {("double", 0), ("double", 1), ("single", 0), ("single", 1)}
    refiner = [call for call in watch.calls if call.block is None]
    assert len(refiner) == 2 * 2


def test_min_tokens_leaves_short_calls_alone(host, pack):
    """The refiner's 32 text tokens stay exact, the joint sequence does not."""
    _, watch = watched(host, pack, pack.patch(host.model("joint"), min_tokens=100), "joint", steps=1)
    assert {call.block is None for call in watch.declined()} == {True}
    assert len(watch.accelerated()) == 4
    _, watch = watched(host, pack, pack.patch(host.model("joint"), min_tokens=100000), "joint", steps=1)
    assert watch.accelerated() == []


@pytest.mark.parametrize("kind", ["wan", "joint"])
@pytest.mark.parametrize("mode", ["8-bit", "4-bit"])
def test_picture_stays_close_and_does_change(host, pack, kind, mode):
    plain = render(host, host.model(kind), kind)
    ours, watch = watched(host, pack, pack.patch(host.model(kind), mode=mode), kind)
    assert ours.shape == plain.shape
    assert ours.dtype == plain.dtype
    assert torch.isfinite(ours).all()
    assert cosine(ours, plain) > CLOSE[mode]
    assert (ours - plain).abs().max() > 1e-3  # equal pictures would mean that the kernels were not used
    modes = {call.kernel[0].keywords["mode"] for call in watch.accelerated()}
    assert modes == {mode}


def test_modes_are_different_pictures(host, pack):
    eight, four = (render(host, pack.patch(host.model(), mode=mode)) for mode in ("8-bit", "4-bit"))
    assert not torch.equal(eight, four)


def test_grouping_makes_a_difference(host, pack):
    """Window 0 and window 1 differ, or the window would have no effect on the picture."""
    with_groups, without = (
        render(host, pack.patch(host.model(), grouping_window=window, clusters=8)) for window in (1.0, 0.0)
    )
    assert not torch.equal(with_groups, without)
    assert cosine(with_groups, without) > CLOSE["8-bit"]


def test_same_seed_is_the_same_picture(host, pack):
    model = pack.patch(host.model(), grouping_window=1.0)
    assert torch.equal(render(host, model), render(host, model))


@pytest.mark.parametrize("mode", ["auto", "8-bit", "4-bit"])
@pytest.mark.parametrize("kind", ["wan", "joint"])
def test_auto_on_the_cpu_renders_bit_identically(host, pack, kind, mode):
    """No GPU implementation for this device: the unpatched picture to the last bit, and a sentence says why."""
    plain = render(host, host.model(kind), kind)
    ours, watch = watched(host, pack, pack.patch(host.model(kind), implementation="auto", mode=mode), kind)
    assert torch.equal(ours, plain)
    assert watch.accelerated() == []
    (text, _) = host.texts[-1]
    assert "CPU" in text


def test_named_implementation_that_cannot_run_here(host, pack):
    """Every choice of the drop-down works on this machine or says why not; none falls back to another one."""
    offered = {i.id: i for i in pack.nodes[NODE_ID].GET_SCHEMA().inputs}["implementation"].options
    plain = render(host, host.model(), steps=2)
    for name in set(offered) - {"auto", "reference"}:
        ours, watch = watched(host, pack, pack.patch(host.model(), implementation=name), steps=2)
        assert torch.equal(ours, plain), name
        assert watch.accelerated() == []
        assert name in host.texts[-1][0]


def test_off_renders_bit_identically(host, pack):
    plain = render(host, host.model())
    with pack.log() as records:
        ours, watch = watched(host, pack, pack.patch(host.model(), mode="off"))
    assert torch.equal(ours, plain)
    assert watch.accelerated() == []
    assert records == []


def test_bypass_leaves_the_model_as_it_was(host, pack):
    """Bypassing is using the model that went in: patching must not have touched it. And A, B, A, B in one prompt."""
    base = host.model()
    plain = render(host, base)
    patched = pack.patch(base)
    for _ in range(2):
        with watching(host, pack) as watch:
            assert torch.equal(render(host, base), plain)
        assert watch.accelerated() == []
        with watching(host, pack) as watch:
            assert not torch.equal(render(host, patched), plain)
        assert len(watch.accelerated()) == 8


def test_the_input_model_is_not_written_to(host, pack):
    base = host.model()
    before = (repr(base.model_options), dict(base.wrappers), dict(base.callbacks), dict(base.object_patches))
    assert pack.patch(base) is not base
    after = (repr(base.model_options), dict(base.wrappers), dict(base.callbacks), dict(base.object_patches))
    assert before == after


def test_batch_of_two_equals_each_alone(host, pack):
    """Rows are chunk-major. Scales, means and groups belong to one sample: its neighbour may be anything (B071)."""
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=1)
    positive, negative = prompts(host)
    latent = host.latent(batch=2)
    noise = host.noise(latent, 5)
    noise[1] = noise[1] * 30 + 4  # a neighbour of quite other size

    def run(rows):
        guider = host.guider(model, positive, negative)
        sigmas = host.sigmas(model, 3)
        return host.run_guider(guider, latent[rows], sigmas, noise=noise[rows])

    both = run(slice(0, 2))
    for row in (0, 1):
        alone = run(slice(row, row + 1))
        # Not bitwise: the host's own linear layers round by batch size.
        assert cosine(both[row], alone[0]) > 0.999999


@pytest.mark.parametrize("mode", ["8-bit", "4-bit"])
def test_kernel_call_does_not_mix_rows(host, pack, mode):
    """The same at the call itself: cond, uncond and batch share no statistics, only the last bit of a matmul."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(4, 150, 256, generator=generator) for _ in range(3))
    v[2:] = v[2:] * 100 + 7
    outputs = {}

    def probe(attention, options):
        if "all" not in outputs:
            outputs["all"] = attention(q, k, v, heads=2, transformer_options=options)

    def probe_row(attention, options):
        one = {**options, "cond_or_uncond": [0], "uuids": options["uuids"][:1]}
        for row in range(4):
            if row not in outputs:
                rows = [t[row : row + 1] for t in (q, k, v)]
                outputs[row] = attention(*rows, heads=2, transformer_options=one)

    for one in (probe, probe_row):
        model = pack.patch(probed(host, host.model(), one), grouping_window=0.0, mode=mode)
        render(host, model, steps=1)
    for row in range(4):
        # A scale or mean shared with the neighbour of 100 times the size would show at 1e-2.
        limit = 1e-6 * outputs[row].abs().max()
        assert (outputs["all"][row] - outputs[row][0]).abs().max() <= limit, row


@pytest.mark.parametrize("kind", ["wan", "joint"])
def test_prompts_of_unequal_length(host, pack, kind):
    """Two forwards a step, on HunyuanVideo with two sequence lengths: each keeps its own grouping."""
    unequal = (host.cond(kind, 32, 1), host.cond(kind, 17, 2))
    plain = render(host, host.model(kind), kind, conds=unequal, steps=5)
    model = pack.patch(host.model(kind), grouping_window=1.0, refresh_interval=2)
    ours, watch = watched(host, pack, model, kind, conds=unequal, steps=5)
    assert cosine(ours, plain) > CLOSE["8-bit"]
    assert {len(call.chunks) for call in watch.calls} == {1}
    blocks = [call for call in watch.accelerated() if call.block is not None]
    assert len(blocks) == host.blocks[kind] * 5 * 2
    rows = {key: count for key, count in watch.grouped().items() if key[1] is not None}
    assert {step for step, _ in rows} == {0, 2, 4}
    assert set(rows.values()) == {2}
    # After the first, a grouping starts from the one held for the same prompt.
    for call in blocks:
        assert all(group.previous == (call.step > 0) for group in call.groups)


def rows_agree(pack):
    """A kernel that compares each row's grouping with one made of that row alone, and the shares of equal positions."""
    original, same = pack.kernels.attention, []

    def attention(q, k, v, *, grouping, layout, **keywords):
        for row in range(v.shape[0]):
            own = pack.kernels.group_values(
                v[row : row + 1], clusters=grouping.clusters, layout=layout, implementation="reference"
            )
            same.append((own.permutation[0] == grouping.permutation[row]).float().mean().item())
        return original(q, k, v, grouping=grouping, layout=layout, **keywords)

    return attention, same


def test_groupings_belong_to_their_rows(host, pack):
    """Two prompts of two samples are chunk-major rows [u0, u1, c0, c1]: each row is ordered by its own values."""
    attention, same = rows_agree(pack)
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=50, clusters=8)
    with pack.replaced(attention=attention):
        render(host, model, latent=host.latent(batch=2), steps=1)
    assert len(same) == 2 * 4
    assert min(same) > 0.9, same  # a wrong row would agree in a few tokens by chance


def test_two_chunks_of_one_call_may_share_an_identity(host, pack):
    """An area prompt: core copies it to the other side, uuid and all, so [1, 0] comes with [a, a]. Two groupings."""
    attention, same = rows_agree(pack)
    one_uuid = []

    def sharing(original):
        def call(*args, **keywords):
            options = keywords["transformer_options"]
            if len(options["uuids"]) == 2:
                one_uuid.append(1)
                keywords["transformer_options"] = {**options, "uuids": [options["uuids"][0]] * 2}
            return original(*args, **keywords)

        return call

    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=50, clusters=8)
    with pack.replaced(attention=attention), at_call_sites(host, sharing):
        render(host, model, steps=1)
    assert one_uuid
    assert min(same) > 0.9, same


def test_regional_prompts(host, pack):
    """Three chunks in a call, two of them positive."""
    positive, negative = prompts(host)
    conds = (positive + host.cond(seed=3), negative)
    plain = render(host, host.model(), conds=conds)
    ours, watch = watched(host, pack, pack.patch(host.model(), grouping_window=1.0), conds=conds, latent=host.latent())
    assert cosine(ours, plain) > CLOSE["8-bit"]
    assert {tuple(call.chunks) for call in watch.accelerated()} == {(1, 0, 0)}
    assert {rows for rows in watch.grouped().values()} == {3}


def test_a_prompt_that_ends_in_mid_render(host, pack):
    """A prompt with a time range leaves: the groupings of the others stay theirs, rows are not mixed up."""
    positive, negative = prompts(host)
    conds = (positive + host.cond(seed=3, end_percent=0.5), negative)
    plain = render(host, host.model(), conds=conds, steps=6)
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=50)
    ours, watch = watched(host, pack, model, conds=conds, steps=6)
    assert cosine(ours, plain) > CLOSE["8-bit"]
    assert {len(call.chunks) for call in watch.accelerated()} == {2, 3}
    assert watch.grouped_steps() == [0]
    assert all(call.kernel[0].keywords["grouping"] for call in watch.accelerated())


def test_a_prompt_that_begins_in_mid_render(host, pack):
    """The newcomer has no grouping yet: it gets one when it comes, the others keep theirs."""
    positive, negative = prompts(host)
    conds = (positive + host.cond(seed=3, start_percent=0.2), negative)
    plain = render(host, host.model(), conds=conds, steps=6)
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=50)
    ours, watch = watched(host, pack, model, conds=conds, steps=6)
    assert cosine(ours, plain) > CLOSE["8-bit"]
    first, later = watch.grouped_steps()
    assert first == 0
    assert {rows for (step, _), rows in watch.grouped().items() if step == later} == {1}


def test_a_prompt_that_begins_after_the_grouping_window(host, pack):
    """It never gets a grouping; the prompts in the same call that hold one are not the worse for it."""
    positive, negative = prompts(host)
    conds = (positive + host.cond(seed=3, start_percent=0.6), negative)
    plain = render(host, host.model(), conds=conds, steps=6)
    model = pack.patch(host.model(), grouping_window=0.3, refresh_interval=50, clusters=8)
    ours, watch = watched(host, pack, model, conds=conds, steps=6)
    assert cosine(ours, plain) > CLOSE["8-bit"]
    assert watch.grouped_steps() == [0]
    assert {len(call.chunks) for call in watch.accelerated()} == {2, 3}


def test_another_length_on_the_same_model(host, pack):
    """B040: a second sampler with a bigger latent and fewer steps, then the first again."""
    model = pack.patch(host.model(), grouping_window=1.0)
    small, large = host.latent(), host.latent(frames=4, size=20)
    first = render(host, model, latent=small, steps=3)
    second = render(host, model, latent=large, steps=2)
    assert torch.equal(render(host, model, latent=small, steps=3), first)
    assert torch.equal(render(host, model, latent=large, steps=2), second)


def test_cluster_count_reaches_the_kernel(host, pack):
    _, watch = watched(host, pack, pack.patch(host.model(), clusters=7), steps=1)
    asked = {group.keywords.get("clusters") for call in watch.calls for group in call.groups}
    assert asked == {7}
    # More clusters than tokens is a wish that a short clip cannot grant, not an error.
    ours, watch = watched(host, pack, pack.patch(host.model(), clusters=1000), steps=1)
    assert len(watch.accelerated()) == 2
    assert torch.isfinite(ours).all()
