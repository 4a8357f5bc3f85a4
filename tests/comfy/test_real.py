"""What only a real ComfyUI can show: its nodes, its other model families, its samplers."""

import threading

import pytest
import torch

from .renders import cosine, prompts, render, watched, wrapped
from .test_render import rows_agree
from .test_schedule import follows_itself
from .watch import watching

pytestmark = pytest.mark.comfy


def forwards(host, model):
    """A clone that counts evaluations of the model, and the list it counts in."""
    model, seen = model.clone(), []

    def wrapper(executor, *args, **kwargs):
        seen.append(1)
        return executor(*args, **kwargs)

    model.add_wrapper_with_key(host.extension.WrappersMP.DIFFUSION_MODEL, "count", wrapper)
    return model, seen


# --- families ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["8-bit", "4-bit"])
def test_hunyuan_video_15(host, pack, mode):
    """Joint sequence, prompts of unequal length: two forwards with different L."""
    conds = (host.cond("hv15", 30, 1), host.cond("hv15", 17, 2))
    plain = render(host, host.model("hv15"), "hv15", conds=conds, steps=5)
    model = pack.patch(host.model("hv15"), mode=mode, grouping_window=1.0, refresh_interval=2)
    ours, watch = watched(host, pack, model, "hv15", conds=conds, steps=5)
    assert cosine(ours, plain) > (0.9995 if mode == "8-bit" else 0.995)
    blocks = [call for call in watch.accelerated() if call.block is not None]
    assert len(blocks) == 2 * 5 * 2
    assert {call.q[2] for call in blocks} == {192 + 30, 192 + 17}
    assert {step for step, block in watch.grouped() if block is not None} == {0, 2, 4}


def test_hunyuan_video_15_with_a_padding_mask(host, pack):
    """B017: the mask is honoured (declined here), and the reason is said."""
    mask = torch.ones(1, 30)
    mask[:, 20:] = 0
    conds = (host.cond("hv15", 30, 1, attention_mask=mask), host.cond("hv15", 30, 2))
    same = {"conds": conds, "steps": 2, "cfg": 1.0}  # core itself fails on a mask of two rows
    plain = render(host, host.model("hv15"), "hv15", **same)
    ours, watch = watched(host, pack, pack.patch(host.model("hv15")), "hv15", **same)
    masked = [call for call in watch.calls if call.block is not None]
    assert not any(call.accelerated for call in masked)
    assert cosine(ours, plain) > 0.9999
    assert "mask" in host.texts[-1][0]


def test_vace_blocks_keep_their_own_groupings(host, pack):
    """A VACE block reports its main block's index with equal shapes: the ordinal tells them apart."""
    plain = render(host, host.model("vace"), "vace", steps=3)
    model = pack.patch(host.model("vace"), grouping_window=1.0, refresh_interval=1, clusters=4)
    with watching(host, pack) as watch:
        watch.keep_results = True
        ours = render(host, model, "vace", steps=3)
    assert cosine(ours, plain) > 0.9995
    assert sum(len(call.chunks) for call in watch.accelerated()) == 6 * 3 * 2
    assert follows_itself(watch) == 6 * 2 * 2


def h3():
    """MiniMax-H3's latent: video and audio."""
    import comfy.nested_tensor

    video, audio = torch.zeros(1, 24, 5, 8, 8), torch.zeros(1, 32, 2, 8)
    return comfy.nested_tensor.NestedTensor((video, audio))


def test_minimax_h3(host, pack):
    """No block index, packed qkv views handed over in containers, text, audio and video in one sequence."""
    conds = (host.cond("h3", 20, 1), host.cond("h3", 20, 2))
    plain = render(host, host.model("h3"), "h3", conds=conds, latent=h3(), steps=3)
    model = pack.patch(host.model("h3"), grouping_window=1.0, refresh_interval=2, clusters=4)
    with watching(host, pack) as watch:
        watch.keep_results = True
        ours = render(host, model, "h3", conds=conds, latent=h3(), steps=3)
    for stream, expected in zip(ours.unbind(), plain.unbind(), strict=True):
        assert cosine(stream, expected) > 0.9995
        assert not torch.equal(stream, expected)
    assert sum(len(call.chunks) for call in watch.accelerated()) == 2 * 3 * 2
    assert watch.grouped_steps() == [0, 2]
    assert follows_itself(watch) == 2 * 2


def test_minimax_h3_blocks_can_be_skipped(host, pack):
    """Without a block index the order of the calls is the block."""
    conds = (host.cond("h3", 20, 1), host.cond("h3", 20, 2))
    model = pack.patch(host.model("h3"), skip_blocks="0")
    _, watch = watched(host, pack, model, "h3", conds=conds, latent=h3(), steps=2)
    blocks = [call.accelerated for call in watch.calls if call.step >= 0]  # the refiner runs outside a step
    assert blocks == [False, True] * (len(blocks) // 2)
    assert len(blocks) >= 2 * 2


# --- core nodes ----------------------------------------------------------------------------------------------------


def test_core_attention_selector_before_ours(host, pack):
    from comfy_extras.nodes_model_advanced import ModelAttentionBackend

    (selected,) = ModelAttentionBackend().patch(host.model(), "pytorch attention")
    plain = render(host, selected)
    ours, watch = watched(host, pack, pack.patch(selected))
    assert len(watch.accelerated()) == 8
    assert cosine(ours, plain) > 0.9995
    assert torch.equal(render(host, pack.patch(selected, implementation="auto")), plain)


def test_core_attention_selector_after_ours(host, pack):
    from comfy_extras.nodes_model_advanced import ModelAttentionBackend

    (plain,) = ModelAttentionBackend().patch(host.model(), "pytorch attention")
    (model,) = ModelAttentionBackend().patch(pack.patch(host.model()), "pytorch attention")
    with pack.log() as records:
        ours, watch = watched(host, pack, model)
    assert watch.accelerated() == []
    assert torch.equal(ours, render(host, plain))
    assert [r.levelname for r in records] == ["WARNING"]
    assert "replaced" in host.texts[-1][0]


@pytest.mark.parametrize("ours_first", [True, False])
def test_easycache(host, pack, ours_first):
    """Whole forwards are skipped, in both orders of the nodes: counts follow, refreshes come with the next forward."""
    from comfy_extras.nodes_easycache import EasyCacheNode

    def cached(model):
        return EasyCacheNode.execute(model, 3.0, 0.1, 0.95, False)[0]

    widgets = {"grouping_window": 1.0, "refresh_interval": 3}
    model = cached(pack.patch(host.model(), **widgets)) if ours_first else pack.patch(cached(host.model()), **widgets)
    plain = render(host, cached(host.model()), steps=12)
    ours, watch = watched(host, pack, model, steps=12)
    ran = sorted({call.step for call in watch.calls})
    assert 2 <= len(ran) < 12, "the cache did not skip: the test would show nothing"
    expected, last = [], None
    for step in ran:
        if last is None or step - last >= 3:
            expected.append(step)
            last = step
    assert watch.grouped_steps() == expected
    assert sum(len(call.chunks) for call in watch.accelerated()) == 2 * 2 * len(ran)
    assert cosine(ours, plain) > 0.999


@pytest.mark.parametrize("schedule", ["standard_static", "standard_uniform"])
def test_context_windows(host, pack, schedule):
    """B055: several forwards a step, the same prompts, other positions: no group of one window serves another."""
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode as Node

    def windows(model):
        return Node.execute(model, 9, 4, schedule, 1, False, "pyramid", False)[0]

    latent = host.latent(frames=7, size=8)
    plain = render(host, windows(host.model()), latent=latent, steps=5)
    model = pack.patch(windows(host.model()), grouping_window=1.0, refresh_interval=1, start_percent=0.2, clusters=4)
    counted, seen = forwards(host, model)
    with watching(host, pack) as watch:
        watch.keep_results = True
        ours = render(host, counted, latent=latent, steps=5)
    assert len(seen) > 5, "no windows: the test would show nothing"
    assert {call.step for call in watch.accelerated()} == {1, 2, 3, 4}
    inside = [call for call in watch.calls if call.self_attention and call.step > 0]
    assert len(watch.accelerated()) == len(inside)
    assert cosine(ours, plain) > 0.999
    owner = []
    for call in watch.accelerated():
        window = tuple(call.options["context_window"].index_list)
        # At this interval every call is due: one without its own grouping would use another window's.
        if call.kernel[0].keywords["grouping"]:
            assert sum(group.shape[0] for group in call.groups) == len(call.chunks)
        # And what it starts from is nothing, or its own window's.
        for group in call.groups:
            if group.started_from is not None:
                made_by = [w for w, made in owner if torch.equal(made.centroids, group.started_from.centroids)]
                assert window in made_by
            owner.append((window, group.result))


def test_context_windows_after_the_grouping_window(host, pack):
    """They hold nothing, so there is nothing to use any more, and nothing is made."""
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode as Node

    model = Node.execute(host.model(), 9, 4, "standard_static", 1, False, "pyramid", False)[0]
    _, watch = watched(host, pack, pack.patch(model), latent=host.latent(frames=7, size=8), steps=4)
    assert watch.grouped_steps() == [0]
    assert {call.step for call in watch.accelerated() if call.kernel[0].keywords["grouping"]} == {0}


def test_stage_restart_with_ksampler_advanced_nodes_in_one_go(host, pack):
    """B040: two KSamplerAdvanced on one patched model object, second with another latent size."""
    model = pack.patch(host.model(), grouping_window=1.0)
    positive, negative = prompts(host)
    first = host.ksampler(model, positive, negative, host.latent(), steps=6, start=0, last=3)
    second = host.ksampler(model, positive, negative, first, steps=6, start=3, add_noise=False)
    larger = host.ksampler(model, positive, negative, host.latent(size=20), steps=3)
    again = host.ksampler(model, positive, negative, host.latent(), steps=6, start=0, last=3)
    assert torch.equal(first, again)
    assert torch.isfinite(second).all()
    assert torch.isfinite(larger).all()


def test_sampler_custom_advanced(host, pack):
    """The HunyuanVideo 1.5 template's way: guider, sigmas, noise as nodes. The sigmas come from the unpatched model."""
    from comfy_extras.nodes_custom_sampler import (
        BasicScheduler,
        CFGGuider,
        KSamplerSelect,
        RandomNoise,
        SamplerCustomAdvanced,
    )

    def run(model):
        conds = host.cond("hv15", 30, 1), host.cond("hv15", 17, 2)
        base = host.model("hv15")
        sigmas = BasicScheduler.execute(base, "simple", 8, 1.0)[0]
        guider = CFGGuider.execute(host.set_shift(model, 7.0), *conds, 6.0)[0]
        noise, sampler = RandomNoise.execute(5)[0], KSamplerSelect.execute("euler")[0]
        with torch.inference_mode():
            out = SamplerCustomAdvanced.execute(noise, guider, sampler, sigmas, {"samples": host.latent("hv15")})
        return out[0]["samples"]

    plain = run(host.model("hv15"))
    with watching(host, pack) as watch:
        ours = run(pack.patch(host.model("hv15"), refresh_interval=1, min_tokens=100))
    assert cosine(ours, plain) > 0.9995
    assert len(watch.accelerated()) == 2 * 8 * 2
    # A whole schedule: 25 % of its 8 steps, although the shift that made it differs from the model's.
    assert watch.grouped_steps() == [0, 1]


# Evaluations of each sampler differ; what must hold is one accelerated call per block, prompt and evaluation.
SAMPLERS = [
    "euler_ancestral",
    "ddim",
    "dpmpp_2m",
    "dpmpp_2m_sde",
    "dpmpp_sde",
    "uni_pc",
    "res_multistep",
    "lcm",
    "ipndm",
    "er_sde",
    "sa_solver",
    "gradient_estimation",
    "seeds_2",
    "exp_heun_2_x0",
    "dpm_fast",
    "dpm_adaptive",
]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers(host, pack, sampler):
    latent = host.latent(frames=1, size=16)
    plain = render(host, host.model(), latent=latent, steps=4, sampler=sampler)
    counted, seen = forwards(host, pack.patch(host.model(), grouping_window=1.0, refresh_interval=2))
    ours, watch = watched(host, pack, counted, latent=latent, steps=4, sampler=sampler)
    assert torch.isfinite(ours).all() or not torch.isfinite(plain).all()
    assert sum(len(call.chunks) for call in watch.accelerated()) == 2 * 2 * len(seen)
    # At most one grouping per step and layer, whatever the sampler visits; the first forward has one.
    assert watch.calls[0].groups
    assert set(watch.grouped().values()) == {2}
    if sampler not in ("dpm_adaptive", "dpm_fast", "lcm", "euler_ancestral", "dpmpp_sde", "dpmpp_2m_sde", "seeds_2"):
        assert cosine(ours, plain) > 0.999


def test_inpainting_mask(host, pack):
    """A latent with a noise mask samples through another wrapper of the model."""
    latent = host.latent()
    model = pack.patch(host.model())

    def run(model):
        import nodes

        samples = {"samples": latent, "noise_mask": torch.ones(1, 1, 16, 16)}
        with torch.inference_mode():
            return nodes.KSampler().sample(model, 1, 3, 3.0, "euler", "simple", *prompts(host), samples, 1.0)[0][
                "samples"
            ]

    plain = run(host.model())
    with watching(host, pack) as watch:
        ours = run(model)
    assert len(watch.accelerated()) == 2 * 3
    assert cosine(ours, plain) > 0.9995


@pytest.mark.parametrize("ours_first", [True, False])
def test_lora_before_or_after_ours(host, pack, ours_first):
    """B058: bit-identical."""

    def lora(model):
        model = model.clone()
        generator = torch.Generator().manual_seed(4)
        patch = torch.randn(256, 256, generator=generator) * 0.02
        added = model.add_patches({"diffusion_model.blocks.0.self_attn.v.weight": ("diff", (patch,))}, 1.0)
        assert added
        return model

    expected = render(host, pack.patch(lora(host.model())))
    model = lora(pack.patch(host.model())) if ours_first else pack.patch(lora(host.model()))
    assert torch.equal(render(host, model), expected)
    assert not torch.equal(expected, render(host, pack.patch(host.model())))


def test_area_conditioning(host, pack):
    """A prompt for a part of the frame: the crop has fewer tokens, and its own grouping."""
    positive, negative = prompts(host)
    area = host.cond(seed=3, area=(3, 8, 16, 0, 0, 0), strength=1.0, set_area_to_bounds=False)
    conds = (positive + area, negative)
    try:
        plain = render(host, host.model(), conds=conds, steps=4)
    except Exception as error:  # noqa: BLE001 - whatever core says here is not about us
        pytest.skip(f"this ComfyUI does not take a video area without our node either: {error}")
    ours, watch = watched(host, pack, pack.patch(host.model(), grouping_window=1.0, refresh_interval=2), conds=conds)
    assert len({call.q[1] for call in watch.accelerated()}) == 2
    assert cosine(ours, plain) > 0.999
    cropped = [call for call in watch.accelerated() if call.q[1] == 96]
    assert {len(set(call.options["uuids"])) for call in cropped} == {1}, "the fact behind the next line has changed"
    assert {sum(group.shape[0] for group in call.groups) for call in cropped if call.groups} == {2}


def test_torch_compile_of_the_whole_model(host, pack):
    """Core's wrapper with dynamo's eager backend: our decisions are made in every step, not frozen into the graph."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    model = pack.patch(host.model(), start_percent=0.5, grouping_window=0.0).clone()
    expected = render(host, model, steps=4)
    set_torch_compile_wrapper(model=model, backend="eager")
    torch._dynamo.reset()
    try:
        ours, watch = watched(host, pack, model, steps=4)
    finally:
        torch._dynamo.reset()
    kernels = len(watch.accelerated()) + len([call for call in watch.stray if call.function == "attention"])
    assert kernels == 2 * 2
    assert cosine(ours, expected) > 0.99999


def test_post_cfg_pass_with_the_same_prompt(host, pack):
    """PAG-like nodes call the model again in the same step: counted, and no second refresh."""
    import comfy.samplers

    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=1)

    def post_cfg(args):
        extra = comfy.samplers.calc_cond_batch(
            args["model"], [args["cond"]], args["input"], args["sigma"], args["model_options"]
        )
        return args["denoised"] * 0.9 + extra[0] * 0.1

    model.set_model_sampler_post_cfg_function(post_cfg)
    _, watch = watched(host, pack, model, steps=3)
    assert sum(len(call.chunks) for call in watch.accelerated()) == 2 * 3 * 3
    assert set(watch.grouped().values()) == {2}


def test_prompts_evaluated_one_by_one(host, pack):
    """A wrapper that splits the batch leaves the options of the whole: no prompt may get another's grouping."""

    def one_by_one(apply_model, args):
        rows = args["input"].shape[0]

        def row(value, index):
            of_rows = isinstance(value, torch.Tensor) and value.shape[0] == rows
            return value[index : index + 1] if of_rows else value

        return torch.cat(
            [
                apply_model(
                    args["input"][index : index + 1],
                    args["timestep"][index : index + 1],
                    **{name: row(value, index) for name, value in args["c"].items()},
                )
                for index in range(rows)
            ]
        )

    model = host.model()
    model.set_model_unet_function_wrapper(one_by_one)
    attention, same = rows_agree(pack)
    model = pack.patch(model, grouping_window=1.0, refresh_interval=50, clusters=8)
    with pack.replaced(attention=attention), watching(host, pack) as watch:
        render(host, model, steps=1)
    assert {len(call.chunks) for call in watch.calls} == {2}
    assert {call.q[0] for call in watch.calls} == {1}
    assert len(same) == 2 * 2
    assert min(same) > 0.9, same


def test_devices_side_by_side(host, pack, monkeypatch):
    """Core's way with several GPUs: a thread a device, all in one run. Two names of the CPU stand for two GPUs."""
    import comfy.model_management
    import comfy.sampler_helpers

    threads = set()

    def clones(patcher, loaded, model_options):
        other = patcher.clone()
        other.load_device = torch.device("cpu", 0)
        model_options["multigpu_clones"] = {patcher.load_device: patcher, other.load_device: other}
        return [other]

    conds = tuple(cond + host.cond(seed=3 + number) for number, cond in enumerate(prompts(host)))
    plain = render(host, host.model(), conds=conds, steps=4)
    monkeypatch.setattr(comfy.sampler_helpers, "prepare_model_patcher_multigpu_clones", clones)
    monkeypatch.setattr(comfy.model_management, "set_torch_device", lambda device: None)
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=2)
    with watching(host, pack) as watch:
        watch.before = lambda call: threads.add(threading.get_ident())
        ours = render(host, model, conds=conds, steps=4)
    assert len(threads) == 2
    assert {len(call.chunks) for call in watch.calls} == {2}
    assert cosine(ours, plain) > 0.9995
    # Two blocks, two threads, four steps; groupings in two of the steps, one for each of the four prompts.
    assert "16 of 32 attention calls" in host.texts[-1][0]
    assert f"grouped {2 * 2 * 4} times, in steps 1, 3 of 4" in host.texts[-1][0]


def test_skip_layer_guidance(host, pack):
    """Blocks replaced in some passes: layers keep their identity by index, not by order."""
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=1)
    model.set_model_patch_replace(lambda args, extra: {"img": args["img"]}, "dit", "double_block", 0)
    _, watch = watched(host, pack, model, steps=2)
    assert {call.block for call in watch.accelerated()} == {("double", 1)}


def test_pack_state_is_not_on_the_class_or_module(host, pack):
    """A render leaves every module of the pack as it was: no counters, caches or tensors at module level."""

    def tensors():
        found = []
        for module in pack.modules():
            for name, value in vars(module).items():
                if isinstance(value, (dict, list, set)) and not name.startswith("__"):
                    found.append((module.__name__, name, len(value)))
        return found

    model = pack.patch(host.model(), grouping_window=1.0)
    render(host, model, steps=1)
    before = tensors()
    render(host, model, latent=host.latent(size=20), steps=2)
    assert tensors() == before


def test_wrapper_of_another_pack_around_the_run(host, pack):
    """Another OUTER_SAMPLE wrapper that swaps model_options, as EasyCache does, inside or outside of ours."""
    import comfy.model_patcher

    def swapping(executor, *args, **kwargs):
        guider = executor.class_obj
        original = guider.model_options
        guider.model_options = comfy.model_patcher.create_model_options_clone(original)
        try:
            return executor(*args, **kwargs)
        finally:
            guider.model_options = original

    expected = render(host, pack.patch(host.model()))
    with wrapped(pack.patch(host.model()), host.extension.WrappersMP.OUTER_SAMPLE, swapping) as model:
        assert torch.equal(render(host, model), expected)
