"""Single attention calls inside a running evaluation: what is declined untouched, and the form of what is served."""

import math

import pytest
import torch
import torch.nn.functional as F

from .renders import Recorder, cosine, probed, render, with_override
from .watch import watching

HEADS, DIM = 2, 128


def qkv(tokens=150, batch=2, keys=None, heads=HEADS, kv_heads=None, dim=DIM, dtype=torch.float32, split=False, seed=0):
    """q, k, v as (B, L, heads*D), or with ``split`` as (B, heads, L, D)."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length, count in ((tokens, heads), (keys or tokens, kv_heads or heads), (keys or tokens, kv_heads or heads)):
        t = torch.randn(batch, length, count, dim, generator=generator).to(dtype)
        made.append(t.transpose(1, 2).contiguous() if split else t.flatten(2))
    return made


class Call:
    """One probe call: its output, whether a kernel served it, and what the attention before ours was given."""

    def __init__(self, host, pack, args, kwargs, previous=None, **widgets):
        self.host, self.output = host, None
        self.previous = Recorder() if previous is None else previous

        def probe(attention, options):
            if self.output is None:
                self.foreign_before = len(self.previous.calls)
                self.output = attention(*args, **kwargs, transformer_options=options)
                self.passed = self.previous.calls[self.foreign_before :]

        model = pack.patch(probed(host, with_override(host.model(), self.previous), probe), **widgets)
        with watching(host, pack) as watch:
            render(host, model, steps=1)
        # The probe calls attention itself, not through a model's call site: its kernel call is a stray one.
        self.kernel = [call for call in watch.stray if call.function == "attention"]
        self.groups = [call for call in watch.stray if call.function == "group_values"]

    @property
    def accelerated(self) -> bool:
        return bool(self.kernel)


def reference(host, args, kwargs):
    """The host's own pytorch attention, outside any patch."""
    return host.attention.attention_pytorch(*args, **kwargs)


def before(host, args, kwargs):
    """What the user had: the backend that this host's flags chose, outside any patch."""
    return host.attention.optimized_attention(*args, **kwargs)


def assert_declined_untouched(call, args, kwargs):
    """Once to the previous override, with the raw backend, the very same objects and every keyword."""
    assert not call.accelerated
    assert call.groups == []
    ((func, passed_args, passed_kwargs),) = call.passed
    assert callable(func)
    assert all(a is b for a, b in zip(passed_args, args, strict=True))
    assert passed_kwargs.pop("_inside_attn_wrapper") is True
    assert "sigmas" in passed_kwargs.pop("transformer_options")
    assert passed_kwargs.keys() == kwargs.keys()
    assert all(passed_kwargs[name] is kwargs[name] for name in kwargs)


def masks():
    yield "additive", torch.zeros(1, 1, 1, 150).index_fill(3, torch.arange(140, 150), -math.inf)
    yield "bool", torch.ones(1, 1, 150, 150, dtype=torch.bool).tril()
    yield "two dimensions", torch.ones(150, 150, dtype=torch.bool).tril()
    yield "one row per sample", torch.ones(2, 1, 1, 150, dtype=torch.bool).index_fill(3, torch.tensor([149]), False)


@pytest.mark.parametrize(("name", "mask"), list(masks()), ids=lambda value: value if isinstance(value, str) else "")
def test_masked_calls_go_on_untouched(host, pack, name, mask):
    """B017: a masked call must never take an unmasked kernel."""
    args, kwargs = qkv(), {"heads": HEADS, "mask": mask}
    call = Call(host, pack, args, kwargs)
    assert_declined_untouched(call, args, kwargs)
    assert torch.equal(call.output, before(host, args, kwargs))


def test_mask_as_fifth_positional_argument(host, pack):
    """LTX and Lumina pass it there."""
    args = [*qkv(), HEADS, torch.ones(150, 150, dtype=torch.bool).tril()]
    call = Call(host, pack, args, {})
    assert_declined_untouched(call, args, {})
    assert torch.equal(call.output, before(host, args, {}))


def test_mask_that_hides_nothing_is_still_right(host, pack):
    args, kwargs = qkv(), {"heads": HEADS, "mask": torch.ones(1, 1, 150, 150, dtype=torch.bool)}
    call = Call(host, pack, args, kwargs)  # served or declined: both are right
    assert cosine(call.output, reference(host, args, kwargs)) > 0.999


def test_calls_marked_for_full_precision_stay_exact(host, pack):
    """B054: Wan's image cross-attention, audio models and SAM say so themselves."""
    args, kwargs = qkv(), {"heads": HEADS, "low_precision_attention": False}
    assert_declined_untouched(Call(host, pack, args, kwargs), args, kwargs)
    served = Call(host, pack, args, {"heads": HEADS, "low_precision_attention": True})
    assert served.accelerated


def test_calls_with_a_precision_of_their_own_stay_exact(host, pack):
    """Models of the Stable Diffusion family ask for float32 inside the product."""
    args, kwargs = qkv(), {"heads": HEADS, "attn_precision": torch.float32}
    assert_declined_untouched(Call(host, pack, args, kwargs), args, kwargs)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize("split", [False, True])
def test_grouped_query_heads(host, pack, heads, kv_heads, split):
    """B061: fewer key than query heads."""
    args = [*qkv(heads=heads, kv_heads=kv_heads, dim=32, split=split), heads]
    kwargs = {"enable_gqa": True, "skip_reshape": split}
    call = Call(host, pack, args, kwargs)
    assert_declined_untouched(call, args, kwargs)
    assert torch.equal(call.output, before(host, args, kwargs))


def test_heads_expanded_by_stride_zero(host, pack):
    """Pre-expanded keys and values are an ordinary call with stride 0."""
    q, _, _ = qkv(heads=4, dim=64, split=True)
    _, k, v = qkv(heads=4, kv_heads=1, dim=64, split=True)
    args = [q, k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1), 4]
    call = Call(host, pack, args, {"skip_reshape": True})
    assert call.accelerated
    assert cosine(call.output, reference(host, args, {"skip_reshape": True})) > 0.999


@pytest.mark.parametrize("scale", [0.02, 0.25])
def test_scale_is_honoured(host, pack, scale):
    """Never the default one, neither in the product nor where its error is judged."""
    args, kwargs = qkv(), {"heads": HEADS, "scale": scale}
    call = Call(host, pack, args, kwargs)
    expected, default = reference(host, args, kwargs), reference(host, args, {"heads": HEADS})
    assert cosine(call.output, expected) > 0.999
    assert cosine(call.output, expected) > cosine(call.output, default)
    assert call.accelerated
    assert call.passed == [], "its error is measured with this scale too"


def test_unknown_keyword_passes_through(host, pack):
    """B029: the next ComfyUI will add one. A declined call hands it on, an accelerated one survives it."""
    marker = object()
    args, kwargs = qkv(keys=40), {"heads": HEADS, "foo": marker}
    assert_declined_untouched(Call(host, pack, args, kwargs), args, kwargs)
    args = qkv()
    call = Call(host, pack, args, {"heads": HEADS, "foo": 1})
    assert cosine(call.output, reference(host, args, {"heads": HEADS})) > 0.999


@pytest.mark.parametrize(
    ("keyword", "value"),
    [("is_causal", True), ("dropout_p", 0.1), ("attn_mask", torch.zeros(150, 150)), ("softcap", 30.0)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keyword_that_would_change_the_result_is_left_to_who_knows_it(host, pack, keyword, value):
    args, kwargs = qkv(), {"heads": HEADS, keyword: value}
    assert_declined_untouched(Call(host, pack, args, kwargs), args, kwargs)
    unset = None if isinstance(value, torch.Tensor) else type(value)(0)
    assert Call(host, pack, args, {"heads": HEADS, keyword: unset}).accelerated


def test_calls_that_need_gradients_are_declined(host, pack):
    """Training a LoRA with the node in the model line: ours has no gradient."""
    (q, k, v), outputs = qkv(), []
    q.requires_grad_()

    def probe(attention, options):
        with torch.inference_mode(False), torch.enable_grad():
            outputs.append(attention(q, k, v, heads=HEADS, transformer_options=options))

    with watching(host, pack) as watch:
        render(host, pack.patch(probed(host, host.model(), probe)), steps=1)
    assert watch.stray == []
    outputs[0].sum().backward()
    assert q.grad.abs().sum() > 0


def test_tensors_on_different_devices_go_to_the_attention_before(host, pack):
    """B010: what an offload left behind. Whoever was before us may know what to do with it."""
    q, k, v = qkv()
    args, kwargs = [q, k.to("meta"), v], {"heads": HEADS}
    call = Call(host, pack, args, kwargs, previous=Recorder(lambda func, q, *args, **keywords: q))
    assert_declined_untouched(call, args, kwargs)
    assert "on different devices" in host.texts[-1][0]


def test_every_known_keyword_at_once(host, pack):
    args = qkv(split=True)
    kwargs = {
        "mask": None,
        "attn_precision": None,
        "skip_reshape": True,
        "skip_output_reshape": True,
        "scale": 0.1,
        "enable_gqa": False,
        "low_precision_attention": True,
        "foo": 1,
    }
    call = Call(host, pack, [*args, HEADS], kwargs)
    plain = {k: v for k, v in kwargs.items() if k != "foo"}
    assert cosine(call.output, reference(host, [*args, HEADS], plain)) > 0.999


@pytest.mark.parametrize("keys", [40, 149, 151, 512])
def test_cross_attention_is_declined(host, pack, keys):
    args, kwargs = qkv(keys=keys), {"heads": HEADS}
    assert_declined_untouched(Call(host, pack, args, kwargs), args, kwargs)


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("split_output", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_output_has_the_form_of_attention_pytorch(host, pack, positional, split, split_output, dtype):
    """Shape, dtype and strides: what follows in the model was written against them."""
    args = qkv(split=split, dtype=dtype)
    kwargs = {"skip_reshape": split, "skip_output_reshape": split_output}
    if positional:
        args = [*args, HEADS]
    else:
        kwargs["heads"] = HEADS
    call = Call(host, pack, args, kwargs)
    expected = reference(host, args, kwargs)
    assert call.accelerated
    assert call.output.shape == expected.shape
    assert call.output.dtype == expected.dtype == dtype
    assert call.output.stride() == expected.stride()
    assert cosine(call.output, expected) > 0.999


def packed_qkv(layout, tokens=150):
    """Views of one fused projection, as the models make them; values differ between q, k and v."""
    generator = torch.Generator().manual_seed(1)
    if layout == "token rows of q|k|v":  # MiniMax-H3: token stride 3*H*D
        fused = torch.randn(2, tokens, 3, HEADS, DIM, generator=generator)
        return [t.transpose(1, 2) for t in fused.unbind(2)], True
    if layout == "chunks of the last dimension":  # HunyuanVideo single blocks
        fused = torch.randn(2, tokens, 3 * HEADS * DIM, generator=generator)
        return list(fused.chunk(3, -1)), False
    if layout == "leading three":
        return list(torch.randn(3, 2, HEADS, tokens, DIM, generator=generator).unbind(0)), True
    if layout == "tokens last":  # transposed storage
        fused = torch.randn(3, 2, HEADS, DIM, tokens, generator=generator)
        return [t.transpose(-1, -2) for t in fused.unbind(0)], True
    if layout == "one sample expanded":  # stride 0 along the batch
        return [t[:1].expand(2, -1, -1, -1) for t in qkv(split=True)], True
    if layout == "every second token":
        return [t[:, :, ::2] for t in qkv(2 * tokens, split=True)], True
    raise KeyError(layout)


@pytest.mark.parametrize(
    "layout",
    [
        "token rows of q|k|v",
        "chunks of the last dimension",
        "leading three",
        "tokens last",
        "one sample expanded",
        "every second token",
    ],
)
def test_strided_inputs(host, pack, layout):
    """Views give the same bits as their contiguous copies and are not written to."""
    args, split = packed_qkv(layout)
    assert not all(t.is_contiguous() for t in args) or layout == "leading three"
    kwargs = {"heads": HEADS, "skip_reshape": split}
    copies, originals = [t.contiguous() for t in args], [t.clone() for t in args]
    views = Call(host, pack, args, kwargs)
    contiguous = Call(host, pack, copies, kwargs)
    assert views.accelerated
    assert contiguous.accelerated
    assert torch.equal(views.output, contiguous.output)
    assert cosine(views.output, reference(host, args, kwargs)) > 0.999
    assert all(torch.equal(a, b) for a, b in zip(args, originals, strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 63, 127, 128, 129, 257])
@pytest.mark.parametrize("mode", ["8-bit", "4-bit"])
def test_awkward_lengths(host, pack, tokens, mode):
    args, kwargs = qkv(tokens), {"heads": HEADS}
    call = Call(host, pack, args, kwargs, mode=mode, grouping_window=1.0)
    expected = reference(host, args, kwargs)
    assert call.accelerated
    assert torch.isfinite(call.output).all()
    assert cosine(call.output[:, -1:], expected[:, -1:]) > 0.98  # faults sit in the last rows
    assert cosine(call.output, expected) > (0.999 if mode == "8-bit" else 0.98)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 40, 72])
def test_head_dims(host, pack, dim):
    """B043: whatever the head size, the result is right; the reference decides what it serves."""
    args, kwargs = qkv(dim=dim), {"heads": HEADS}
    call = Call(host, pack, args, kwargs)
    assert cosine(call.output, reference(host, args, kwargs)) > 0.999


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16, torch.bfloat16),
    ],
    ids=["v bf16", "v fp16", "q fp16"],
)
def test_mixed_dtypes_go_to_the_attention_before(host, pack, dtypes):
    """B030: no cast of ours; what the user had decides, and here it casts."""

    def casting(func, q, k, v, *args, **kwargs):
        return func(q, k.to(q.dtype), v.to(q.dtype), *args, **kwargs)

    args = [t.to(dtype) for t, dtype in zip(qkv(), dtypes, strict=True)]
    kwargs = {"heads": HEADS}
    call = Call(host, pack, args, kwargs, previous=Recorder(casting))
    assert_declined_untouched(call, args, kwargs)
    assert call.output.dtype == dtypes[0]


def bad_values():
    plain = qkv()
    for name, index, value in (("q", 0, math.nan), ("k", 1, math.inf), ("v", 2, -math.inf), ("v", 2, math.nan)):
        args = [t.clone() for t in plain]
        args[index][0, 70, 3] = value
        yield f"{value} in {name}", args


@pytest.mark.parametrize(
    ("name", "args"), list(bad_values()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_non_finite_inputs_are_declined(host, pack, name, args):
    """One NaN poisons a scale of a whole block: the attention before ours spreads it as it always did."""
    kwargs = {"heads": HEADS}
    call = Call(host, pack, args, kwargs)
    expected = reference(host, args, kwargs)
    finite = torch.isfinite(expected)
    assert torch.isfinite(call.output[finite]).all(), "no NaN where exact attention has none"
    assert call.passed, "declined to the attention before"


def hard_values():
    def changed(change):
        args = qkv()
        change(*args)
        return args

    yield "all-zero k", changed(lambda q, k, v: k.zero_()), 0.999
    yield "all-zero q", changed(lambda q, k, v: q.zero_()), 0.999
    yield "all-zero v", changed(lambda q, k, v: v.zero_()), None
    yield "zero block of v", changed(lambda q, k, v: v[:, :128].zero_()), 0.99
    yield "zero block of k", changed(lambda q, k, v: k[:, :128].zero_()), 0.99
    yield "constant k", changed(lambda q, k, v: k.fill_(1.0)), 0.999
    yield "tiny values", changed(lambda q, k, v: v.mul_(1e-8)), 0.99
    yield "one channel of v 2000 times larger", changed(lambda q, k, v: v[..., 5].mul_(2000)), 0.99
    yield "one channel of k 2000 times larger", changed(lambda q, k, v: k[..., 5].mul_(2000)), 0.9
    yield "logits of thousands", changed(lambda q, k, v: q.mul_(300)), 0.9


@pytest.mark.parametrize(
    ("name", "args", "close"), list(hard_values()), ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("mode", ["8-bit", "4-bit"])
def test_hard_values_stay_finite(host, pack, name, args, close, mode):
    """B001, B063, B070: black output is the most reported fault. 4-bit gets a wider limit."""
    kwargs = {"heads": HEADS}
    call = Call(host, pack, args, kwargs, mode=mode)
    expected = reference(host, args, kwargs)
    assert torch.isfinite(call.output).all()
    if close is None:
        assert torch.equal(call.output, expected)
    else:
        assert cosine(call.output, expected) > (close if mode == "8-bit" else close - 0.1)


def test_same_layer_with_another_length(host, pack):
    """The same block and prompt at another length (a crop, a reference row): a held grouping must not be used."""
    lengths, outputs = [150, 200, 150, 90, 200], []

    def probe(attention, options):
        args = qkv(lengths[len(outputs)])
        output = attention(*args, heads=HEADS, transformer_options=options)
        outputs.append(cosine(output, reference(host, args, {"heads": HEADS})))

    model = pack.patch(probed(host, host.model(), probe), grouping_window=1.0, refresh_interval=50)
    with watching(host, pack) as watch:
        render(host, model, steps=len(lengths))
    assert len([call for call in watch.stray if call.function == "attention"]) == len(lengths)
    assert min(outputs) > 0.999


@pytest.mark.parametrize("names", [{"block_index": [3]}, {"block_type": ["double"]}], ids=str)
def test_blocks_named_in_a_way_not_known_here(host, pack, names):
    """Calls are counted by block: a name that cannot be counted by ends no render, of a served or a declined call."""
    args, mask, outputs = qkv(), torch.ones(150, 150, dtype=torch.bool).tril(), []

    def probe(attention, options):
        outputs.append([attention(*args, HEADS, m, transformer_options={**options, **names}) for m in (mask, None)])

    with watching(host, pack) as watch:
        render(host, pack.patch(probed(host, host.model(), probe)), steps=2)
    for masked, served in outputs:
        assert torch.equal(masked, before(host, args, {"heads": HEADS, "mask": mask}))
        assert cosine(served, reference(host, args, {"heads": HEADS})) > 0.999
    assert len([call for call in watch.stray if call.function == "attention"]) == len(outputs)
    assert "failed" not in host.texts[-1][0]


def test_declined_call_reaches_the_raw_backend_without_a_previous_override(host, pack):
    """Nobody before us: func itself gets the call, and wrap_attn is not entered again."""
    args, kwargs = qkv(keys=40), {"heads": HEADS}
    outputs = []

    def probe(attention, options):
        outputs.append(attention(*args, **kwargs, transformer_options=options))

    render(host, pack.patch(probed(host, host.model(), probe)), steps=1)
    assert torch.equal(outputs[0], before(host, args, kwargs))


def test_previous_override_that_calls_a_decorated_backend(host, pack):
    """Trap 19: it must find our marker still there, or it comes back to us for ever."""

    def decorated(func, *args, **kwargs):
        return host.attention.attention_pytorch(*args, **kwargs)

    args, kwargs = qkv(keys=40), {"heads": HEADS}
    call = Call(host, pack, args, kwargs, previous=Recorder(decorated))
    assert torch.equal(call.output, reference(host, args, kwargs))


def test_sdpa_replaced_by_another_pack_is_what_the_fallback_uses(host, pack, monkeypatch):
    """B023: our fallback neither recurses nor uses a different one."""
    original, used = F.scaled_dot_product_attention, []

    def foreign(*args, **kwargs):
        used.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", foreign)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", foreign)

    def decorated(func, *args, **kwargs):
        return host.attention.attention_pytorch(*args, **kwargs)

    call = Call(host, pack, qkv(keys=40), {"heads": HEADS}, previous=Recorder(decorated))
    assert not call.accelerated
    assert used


def test_call_without_a_run_is_left_alone(host, pack):
    """A module run outside sampling, with the patched model's options: no state, so the attention before."""
    recorder = Recorder()
    model = pack.patch(with_override(host.model(), recorder))
    args, kwargs = qkv(), {"heads": HEADS}
    options = dict(model.model_options["transformer_options"])
    with watching(host, pack) as watch:
        output = host.attention.optimized_attention(*args, **kwargs, transformer_options=options)
    assert watch.stray == []
    assert len(recorder.calls) == 1
    assert torch.equal(output, before(host, args, kwargs))
