"""Life and death of a run's state: normal end, interrupt, error, out of memory, failing kernel, ten renders."""

import contextlib
import gc
import weakref

import pytest
import torch

from .renders import cosine, probed, prompts, render, watched
from .watch import watching


def fresh(host, pack, **keywords):
    return render(host, pack.patch(host.model(), grouping_window=1.0, refresh_interval=2), **keywords)


def snapshot(model) -> str:
    """Everything a patcher carries, by identity where it is not plain data."""
    return repr((model.model_options, model.wrappers, model.callbacks, model.object_patches, model.attachments))


class Stopped(Exception):
    pass


def stop_at(host, watch, number, how):
    """Interrupt or raise at one attention call, in the middle of a step and of a block, or from within our kernel."""

    def in_kernel(kernel):
        if len(watch.calls) >= number:
            raise host.InterruptProcessingException()

    if how == "interrupt inside our kernel":
        watch.in_kernel = in_kernel
        return

    def before(call):
        if len(watch.calls) != number:
            return
        if how == "interrupt button":
            host.interrupt.set()
        elif how == "interrupt at the call":
            raise host.InterruptProcessingException()
        else:
            raise Stopped()

    watch.before = before


@pytest.mark.parametrize("how", ["interrupt button", "interrupt at the call", "interrupt inside our kernel", "error"])
@pytest.mark.parametrize("number", [1, 11])
def test_render_after_a_stopped_one_is_clean(host, pack, how, number):
    """B041: the same model again gives the bits of a fresh patch, and nothing of the run is left."""
    expected = fresh(host, pack, steps=4)
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=2)
    before, texts = snapshot(model), len(host.texts)
    for _ in range(2):
        with watching(host, pack) as watch:
            stop_at(host, watch, number, how)
            with pytest.raises((host.InterruptProcessingException, Stopped)) as caught:
                render(host, model, steps=4)
        assert isinstance(caught.value, Stopped) == (how == "error")
        del caught
        host.interrupt.set(False)
        assert snapshot(model) == before
    assert torch.equal(render(host, model, steps=4), expected)
    assert len(host.texts) <= texts + 3  # a stopped run may report, once each


def test_stopped_run_is_not_called_a_failure_of_the_node(host, pack):
    """A user who presses cancel must not read that 0 % was active."""
    model = pack.patch(host.model())
    with pack.log() as records, watching(host, pack) as watch:
        stop_at(host, watch, 9, "interrupt button")
        with pytest.raises(host.InterruptProcessingException):
            render(host, model, steps=4)
    assert [r for r in records if r.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize("where", ["attention", "group_values"])
@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.20 GiB"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=["cuda", "host", "driver"],
)
def test_out_of_memory_passes_through(host, pack, where, error):
    """ComfyUI unloads its models and tells the user: hiding it breaks both. The next render is clean."""
    expected = fresh(host, pack, steps=3)
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=2)
    before = snapshot(model)
    with watching(host, pack) as watch:
        seen = []

        def fail(kernel):
            if kernel.function == where:
                seen.append(1)
                if len(seen) == 2:
                    raise error

        watch.in_kernel = fail
        with pytest.raises(type(error)) as caught:
            render(host, model, steps=3)
    assert caught.value is error
    del caught
    assert snapshot(model) == before
    assert torch.equal(render(host, model, steps=3), expected)


def failing(error, function="attention", after=0):
    seen = []

    def fail(kernel):
        if kernel.function == function:
            seen.append(kernel)
            if len(seen) > after:
                raise error

    return fail, seen


@pytest.mark.parametrize("function", ["attention", "group_values"])
def test_failing_kernel_falls_back_and_is_said_once(host, pack, function):
    """B012: neither a traceback in a render nor one line per call. The picture is the unpatched one."""
    plain = render(host, host.model(), steps=6)
    model = pack.patch(host.model(), grouping_window=1.0)
    with pack.log() as records, watching(host, pack) as watch:
        watch.in_kernel, seen = failing(RuntimeError("illegal instruction in the kernel"), function)
        ours = render(host, model, steps=6)
    assert torch.equal(ours, plain)
    assert seen, "the kernel was tried"
    assert len(records) <= 3
    said = [r for r in records if "illegal instruction" in r.getMessage() or r.exc_info]
    assert 1 <= len(said) <= 2  # where it happened, and perhaps in the summary
    text = host.texts[-1][0]
    assert "illegal instruction" in text
    assert str(2 * 6) in text, "every call that fell back is counted"


def test_a_long_message_of_a_fault_stays_in_the_log(host, pack):
    """CUDA's advice, Triton's whole listing: one line on the row and in the report, all of it in the traceback."""
    message = "CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA\n" + 5000 * "x"
    with pack.log() as records, watching(host, pack) as watch:
        watch.in_kernel, _ = failing(RuntimeError(message))
        render(host, pack.patch(host.model()), steps=2)
    assert "failed: RuntimeError: CUDA error: an illegal memory access;" in records[-1].getMessage()
    assert "\n" not in records[-1].getMessage()
    assert len(records[-1].getMessage()) < 600
    assert message in str(records[0].exc_info[1])


def test_kernel_that_fails_in_mid_render(host, pack):
    """The calls before it stay ours, the later ones are exact: a whole picture, no NaN."""
    plain = render(host, host.model(), steps=6)
    with pack.log() as records, watching(host, pack) as watch:
        watch.in_kernel, _ = failing(ValueError("no such tile"), after=4)
        ours = render(host, pack.patch(host.model()), steps=6)
    assert torch.isfinite(ours).all()
    assert cosine(ours, plain) > 0.9995
    assert len(watch.accelerated()) == 4
    assert len(records) <= 3


def test_failure_of_one_render_does_not_switch_off_the_next(host, pack):
    expected = fresh(host, pack, steps=3)
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=2)
    with watching(host, pack) as watch:
        watch.in_kernel, _ = failing(RuntimeError("once"))
        render(host, model, steps=3)
    assert torch.equal(render(host, model, steps=3), expected)


@pytest.mark.parametrize("form", [float, lambda sigma: sigma[:0]], ids=["a number", "no rows"])
def test_noise_level_in_an_unknown_form_does_not_stop_the_render(host, pack, form):
    """What another node or a later host puts in the place of the tensor: the render of before, and why."""

    def another_form(executor, x, t, *args, **kwargs):
        options = next(value for value in (*args, *kwargs.values()) if isinstance(value, dict) and "sigmas" in value)
        options["sigmas"] = form(options["sigmas"])
        return executor(x, t, *args, **kwargs)

    base, kind = host.model(), host.extension.WrappersMP.APPLY_MODEL
    base.model_options["transformer_options"].setdefault("wrappers", {}).setdefault(kind, {})["other"] = [another_form]
    plain = render(host, base, steps=3)
    with pack.log() as records:
        ours = render(host, pack.patch(base), steps=3)
    assert torch.equal(ours, plain)
    assert len([record for record in records if record.exc_info]) == 1, "one traceback, not one an evaluation"
    assert "ACTIVE ON 0 %" in host.texts[-1][0]
    assert "failed: " in host.texts[-1][0]


def test_noise_levels_in_an_unknown_form_do_not_stop_the_render(host, pack, monkeypatch):
    """The same for the levels of a whole run, here made unreadable where we read them."""
    sampling = next(module for module in pack.modules() if module.__name__.endswith(".nodes.sampling"))
    plain = render(host, host.model(), steps=2)

    def unreadable(guider, sigmas):
        raise TypeError("no levels")

    monkeypatch.setattr(sampling, "schedule_of", unreadable)
    assert torch.equal(render(host, pack.patch(host.model()), steps=2), plain)
    assert "failed: TypeError: no levels" in host.texts[-1][0]


def test_nothing_is_left_on_the_model(host, pack):
    base = host.model()
    model = pack.patch(base)
    before = snapshot(base), snapshot(model)
    guider = host.guider(model, *prompts(host))
    host.run_guider(guider, host.latent(), host.sigmas(model, 3))
    assert (snapshot(base), snapshot(model)) == before
    assert guider.model_options is model.model_options


@pytest.mark.parametrize("ending", ["normal", "interrupt"])
def test_other_wrappers_find_the_guider_as_they_left_it(host, pack, ending):
    """EasyCache and others wrap the run too: our key is not in the options they hold, during the run or after it."""
    base, seen = host.model(), []

    def outer(executor, *args, **kwargs):
        guider = executor.class_obj
        before = guider.model_options
        keys = set(before["transformer_options"])
        try:
            return executor(*args, **kwargs)
        finally:
            seen.append((guider.model_options is before, set(before["transformer_options"]) == keys))

    kind = host.extension.WrappersMP.OUTER_SAMPLE
    base.model_options["transformer_options"].setdefault("wrappers", {}).setdefault(kind, {})["other"] = [outer]
    with watching(host, pack) as watch:
        if ending == "interrupt":
            stop_at(host, watch, 3, "interrupt button")
        with contextlib.suppress(host.InterruptProcessingException):
            render(host, pack.patch(base), steps=2)
    assert seen == [(True, True)]


def reachable(value, seen=None) -> dict:
    """Objects below nested dicts and lists, by id."""
    seen = {} if seen is None else seen
    if isinstance(value, dict):
        for item in value.values():
            reachable(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            reachable(item, seen)
    else:
        seen[id(value)] = value
    return seen


@pytest.mark.parametrize("ending", ["normal", "interrupt", "error"])
def test_run_state_dies_with_the_run(host, pack, ending):
    """Whatever of ours travels in transformer_options during a run and was not on the model before: gone, and every
    grouping with it."""
    model = pack.patch(host.model(), grouping_window=1.0)
    lasting = reachable(model.model_options)
    state, groupings = {}, []

    def probe(attention, options):
        for key, value in reachable(options).items():
            if key not in lasting and pack.owns(value) and not callable(value):
                state[type(value).__name__] = weakref.ref(value)

    inspected = probed(host, model, probe)
    with watching(host, pack) as watch:
        watch.keep_results = True
        if ending != "normal":
            stop_at(host, watch, 11, "interrupt button" if ending == "interrupt" else "error")
        with contextlib.suppress(Stopped, host.InterruptProcessingException):
            render(host, inspected, steps=4)
        host.interrupt.set(False)
        for call in watch.calls:
            for group in call.groups:
                groupings += [weakref.ref(group.result), weakref.ref(group.result.permutation)]
                group.result = group.started_from = None
    watch.before = None
    assert state, "the run's state was not seen in transformer_options"
    assert groupings
    gc.collect()
    assert {name: ref() for name, ref in state.items() if ref() is not None} == {}
    assert [ref for ref in groupings if ref() is not None] == []


def test_a_kept_traceback_keeps_no_grouping(host, pack):
    """Whoever keeps the error of a stopped render keeps its frames, and with them the run's state."""
    model = pack.patch(host.model(), grouping_window=1.0)
    with watching(host, pack) as watch:
        watch.keep_results = True
        stop_at(host, watch, 11, "error")
        with pytest.raises(Stopped) as caught:
            render(host, model, steps=4)
    permutations = [weakref.ref(group.result.permutation) for call in watch.calls for group in call.groups]
    assert permutations
    watch.calls.clear()
    gc.collect()
    assert [ref for ref in permutations if ref() is not None] == []
    assert caught.value.__traceback__ is not None


def live_tensors() -> tuple[int, int]:
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return len(tensors), sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("sizes", [[(3, 16)], [(3, 16), (4, 12)]], ids=["one size", "two sizes"])
def test_memory_is_flat_over_ten_renders(host, pack, sizes):
    """B031, B040: the same prompt ten times, and ten times with two sizes in turn."""
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=1)
    conds = prompts(host)
    counts = {}
    for i in range(10):
        frames, size = sizes[i % len(sizes)]
        render(host, model, conds=conds, latent=host.latent(frames=frames, size=size), steps=2)
        if i in (3, 5, 9):  # walking ComfyUI's heap takes a second
            counts[i] = live_tensors()
    assert counts[3] == counts[5] == counts[9]


def test_a_dropped_model_is_freed(host, pack):
    """B031: our closures and wrappers keep no patcher and no weights."""
    model = pack.patch(host.model())
    render(host, model, steps=1)
    ref, texts = weakref.ref(model), list(host.texts)
    del model
    host.texts.clear()
    gc.collect()
    assert ref() is None
    assert texts


def test_cached_guider_over_two_renders(host, pack):
    """ComfyUI keeps a guider between prompts: the prompt uuids are the same, the state must not be."""
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=50)
    guider = host.guider(model, *prompts(host))
    latent, sigmas = host.latent(), host.sigmas(model, 3)

    def run(seed, one):
        with watching(host, pack) as watch:
            out = host.run_guider(one, latent, sigmas, seed=seed)
        return out, watch

    run(1, guider)
    second, watch = run(2, guider)
    expected, _ = run(
        2, host.guider(pack.patch(host.model(), grouping_window=1.0, refresh_interval=50), *prompts(host))
    )
    assert torch.equal(second, expected)
    assert watch.grouped_steps() == [0]
    assert not any(group.previous for call in watch.calls for group in call.groups)


def test_cached_guider_after_an_interrupt(host, pack):
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=50)
    guider = host.guider(model, *prompts(host))
    latent, sigmas = host.latent(), host.sigmas(model, 3)
    expected = host.run_guider(guider, latent, sigmas)
    with watching(host, pack) as watch:
        stop_at(host, watch, 7, "interrupt button")
        with pytest.raises(host.InterruptProcessingException):
            host.run_guider(guider, latent, sigmas)
    host.interrupt.set(False)
    assert torch.equal(host.run_guider(guider, latent, sigmas), expected)


def test_a_render_inside_a_render(host, pack):
    """A node that samples from within a sampler, on another model (a detailer): each run has its own state."""
    outer = pack.patch(host.model(), grouping_window=1.0, refresh_interval=2, unique_id="1")
    inner = pack.patch(host.model("joint"), grouping_window=1.0, refresh_interval=2, unique_id="2")
    expected, inner_expected = render(host, outer, steps=3), render(host, inner, "joint", steps=2)
    host.texts.clear()
    seen = []

    def callback(step, denoised):
        if step == 1:
            seen.append(render(host, inner, "joint", steps=2))

    guider = host.guider(outer, *prompts(host))
    out = host.run_guider(guider, host.latent(), host.sigmas(outer, 3), callback=callback)
    assert torch.equal(out, expected)
    assert torch.equal(seen[0], inner_expected)
    assert [node for _, node in host.texts] == ["2", "1"]


def test_two_clones_render_independently(host, pack):
    """Closures are shared by all clones: two clones of one patched model, one stopped in mid-render."""
    model = pack.patch(host.model(), grouping_window=1.0)
    left, right = model.clone(), model.clone()
    expected = render(host, model, steps=3)
    with watching(host, pack) as watch:
        stop_at(host, watch, 6, "error")
        with pytest.raises(Stopped):
            render(host, left, steps=3)
    assert torch.equal(render(host, right, steps=3), expected)
    assert torch.equal(render(host, left, steps=3), expected)


def test_unpatched_model_next_to_a_patched_one(host, pack):
    """B013, B021: the other model of the same graph never meets our kernels."""
    ours, other = pack.patch(host.model()), host.model("joint")
    _, watch = watched(host, pack, other, "joint", steps=2)
    assert watch.accelerated() == []
    render(host, ours, steps=1)
    _, watch = watched(host, pack, other, "joint", steps=2)
    assert watch.accelerated() == []
