"""The public call: what it refuses and how it says so, named implementations, support(), wrong groupings."""

import math

import pytest
import torch
import vc_attention
from vc_attention import Grouping, InvalidArgument, UnsupportedCall, attention, group_values, support
from vc_attention.attend.settings import resolve
from vc_attention.dispatch import implementation_names
from vc_attention.errors import InvalidArgument as ErrorsInvalidArgument
from vc_attention.testing import random_qkv

SHAPE = (2, 3, 50, 16)


def tensors(**changes):
    return {**dict(zip("qkv", random_qkv(SHAPE), strict=True)), **changes}


def refused(exception=InvalidArgument, **arguments) -> str:
    arguments = {**tensors(), "implementation": "reference", **arguments}
    with pytest.raises(exception) as raised:
        attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    return str(raised.value)


# Messages name the argument, what was expected and what came


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"q": torch.zeros(3, 50, 16)}, ("q ", "[B, H, S, D]", "(3, 50, 16)")),
        ({"k": torch.zeros(2, 3, 50, 16, 1)}, ("k ", "[B, H, S, D]", "(2, 3, 50, 16, 1)")),
        ({"v": torch.zeros(2, 50, 16), "layout": "BSHD"}, ("v ", "[B, S, H, D]", "(2, 50, 16)")),
        ({"q": torch.zeros(2, 3, 0, 16)}, ("q ", "empty", "(2, 3, 0, 16)")),
        ({"k": torch.zeros(2, 3, 0, 16), "v": torch.zeros(2, 3, 0, 16)}, ("k ", "empty", "(2, 3, 0, 16)")),
        ({"q": None}, ("q ", "torch.Tensor", "NoneType")),
        ({"v": [[1.0]]}, ("v ", "torch.Tensor", "list")),
        ({"k": torch.zeros(2, 1, 50, 16)}, ("k ", "[2, 3, *, 16]", "(2, 1, 50, 16)")),  # fewer key heads
        ({"k": torch.zeros(1, 3, 50, 16)}, ("k ", "[2, 3, *, 16]", "(1, 3, 50, 16)")),
        ({"k": torch.zeros(2, 3, 50, 8)}, ("k ", "[2, 3, *, 16]", "(2, 3, 50, 8)")),
        ({"v": torch.zeros(2, 3, 49, 16)}, ("v ", "[2, 3, 50, 16]", "(2, 3, 49, 16)")),
        ({"v": torch.zeros(2, 3, 50, 32)}, ("v ", "[2, 3, 50, 16]", "(2, 3, 50, 32)")),  # B067
        ({"k": torch.zeros(2, 4, 3, 16), "layout": "BSHD"}, ("k ", "[B, S, H, D] = [2, *, 50, 16]", "(2, 4, 3, 16)")),
        ({"v": torch.zeros(SHAPE, dtype=torch.bfloat16)}, ("v ", "float32", "bfloat16")),
        ({"q": torch.zeros(SHAPE, dtype=torch.float64)}, ("q ", "bfloat16, float16, float32", "float64")),
        ({"k": torch.zeros(SHAPE, dtype=torch.int8)}, ("k ", "bfloat16, float16, float32", "int8")),
        ({"v": torch.zeros(SHAPE, device="meta")}, ("v ", "cpu", "meta")),
        ({"mode": "16-bit"}, ("mode ", "'auto', '8-bit', '4-bit'", "'16-bit'")),
        ({"mode": None}, ("mode ", "'8-bit'", "None")),
        ({"layout": "SBHD"}, ("layout ", "'BHSD', 'BSHD'", "'SBHD'")),
        (
            {"implementation": "triton9"},
            ("implementation ", "'auto', 'cuda', 'triton8', 'triton4', 'reference'", "'triton9'"),
        ),
        ({"qk_format": "int4"}, ("qk_format ", "'int8', 'e4m3'", "'int4'")),
        ({"mode": "8-bit", "qk_format": "nvfp4"}, ("qk_format ", "'int8', 'e4m3'", "'nvfp4'")),
        ({"mode": "4-bit", "qk_format": "e4m3"}, ("qk_format ", "'nvfp4'", "'e4m3'")),
        ({"probabilities": "exp"}, ("probabilities ", "'expcast', 'exp2'", "'exp'")),
        ({"mode": "4-bit", "probabilities": "expcast"}, ("probabilities ", "'exp2'", "'expcast'")),
        ({"scale": math.nan}, ("scale ", "finite number or None", "nan")),
        ({"scale": math.inf}, ("scale ", "finite number or None", "inf")),
        ({"scale": "0.1"}, ("scale ", "finite number or None", "'0.1'")),
        ({"grouping": "yes"}, ("grouping ", "Grouping", "str")),
        ({"grouping": torch.zeros(2, 3, 50)}, ("grouping ", "Grouping", "Tensor")),
        ({"demean": "no"}, ("demean ", "'no'")),
        ({"own_block": 2}, ("own_block ", "True, False", "2")),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected_and_what_came(arguments, words):
    message = refused(**arguments)
    for word in words:
        assert word in message


def test_query_in_fp32_with_value_in_bf16_is_named():
    q, k, v = random_qkv(SHAPE)
    assert "v must have q's dtype float32, got bfloat16" in refused(q=q, k=k, v=v.bfloat16())
    assert "k must have q's dtype bfloat16, got float32" in refused(q=q.bfloat16(), k=k, v=v)


@pytest.mark.parametrize("unknown", ["mask", "attn_mask", "is_causal", "enable_gqa"])
def test_what_the_call_cannot_do_is_not_silently_taken(unknown):
    with pytest.raises(TypeError, match=unknown):
        attention(**tensors(), implementation="reference", **{unknown: None})


def test_settings_are_keywords_only():
    with pytest.raises(TypeError):
        attention(*random_qkv(SHAPE), "8-bit")


def test_errors_are_the_exported_classes():
    assert ErrorsInvalidArgument is InvalidArgument
    with pytest.raises(ValueError, match="mode"):
        attention(**tensors(), mode="x")


# Groupings


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 3, 49, 16), ("[2, 3, 50]", "[2, 3, 49]")),
        ((1, 3, 50, 16), ("[2, 3, 50]", "[1, 3, 50]")),
        ((2, 2, 50, 16), ("[2, 3, 50]", "[2, 2, 50]")),
    ],
)
def test_a_grouping_of_other_tokens_is_named(shape, words):
    message = refused(grouping=group_values(torch.zeros(shape)))
    for word in ("grouping", *words):
        assert word in message


def test_a_grouping_is_for_keys_not_queries():
    q, k, v = random_qkv(SHAPE)
    grouping = group_values(v[:, :, :20])
    output = attention(q, k[:, :, :20], v[:, :, :20], implementation="reference", grouping=grouping)
    assert output.shape == q.shape
    assert "grouping" in refused(q=q[:, :, :20], grouping=grouping)


def test_a_grouping_on_another_device_is_named():
    grouping = group_values(random_qkv(SHAPE)[2])
    elsewhere = Grouping(grouping.permutation.to("meta"), grouping.centroids.to("meta"))
    message = refused(grouping=elsewhere)
    assert "grouping" in message
    assert "meta" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_permutation_that_holds_no_positions_is_named(dtype):
    grouping = group_values(random_qkv(SHAPE)[2])
    message = refused(grouping=Grouping(grouping.permutation.to(dtype), grouping.centroids))
    assert "grouping" in message


def test_a_grouping_of_another_copy_of_the_package_is_taken():
    class Lookalike:
        permutation = group_values(random_qkv(SHAPE)[2]).permutation

    attention(**tensors(), implementation="reference", grouping=Lookalike())


# Choice of implementation


def test_auto_declines_on_the_cpu_with_a_sentence():
    with pytest.raises(UnsupportedCall) as raised:
        attention(**tensors())
    assert list(raised.value.reasons) == ["auto"]
    assert "CPU" in raised.value.reasons["auto"]


def test_auto_declines_before_it_looks_at_values():
    with pytest.raises(UnsupportedCall) as raised:
        attention(**tensors(v=torch.full(SHAPE, math.nan)))
    assert list(raised.value.reasons) == ["auto"]


@pytest.mark.parametrize("name", [name for name in implementation_names() if name != "auto"])
def test_a_named_implementation_serves_or_refuses_under_its_own_name(name):
    arguments = dict(zip("qkv", (torch.zeros(1, 1, 4, 300) for _ in range(3)), strict=True))
    with pytest.raises(UnsupportedCall) as raised:
        attention(**arguments, implementation=name)
    assert list(raised.value.reasons) == [name]
    assert raised.value.reasons[name]


def test_the_head_dim_limit_is_stated():
    wide = {name: torch.zeros(1, 1, 4, 257) for name in "qkv"}
    assert "257" in refused(UnsupportedCall, **wide)
    assert "256" in refused(UnsupportedCall, **wide)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_input_is_an_unsupported_call_with_its_name(argument, bad):
    changed = random_qkv(SHAPE)[0]
    changed[0, 0, 0, 0] = bad
    assert refused(UnsupportedCall, **{argument: changed}) == f"reference: {argument} holds NaN or infinity"


# Modes


@pytest.mark.parametrize(
    ("family", "mode", "qk_format", "probabilities"),
    [
        ("sm_90", "8-bit", "int8", "expcast"),
        ("sm_100", "8-bit", "e4m3", "expcast"),
        ("sm_103", "8-bit", "e4m3", "expcast"),
        ("sm_89", "8-bit", "int8", "exp2"),
        ("sm_120", "4-bit", "nvfp4", "exp2"),
        ("sm_121", "4-bit", "nvfp4", "exp2"),
        ("cpu", "8-bit", "int8", "expcast"),
        ("sm_75", "8-bit", "int8", "expcast"),
    ],
)
def test_auto_settings_follow_the_hardware_table(family, mode, qk_format, probabilities):
    settings = resolve("auto", "auto", "auto", True, family)
    assert (settings.mode, settings.qk_format, settings.probabilities) == (mode, qk_format, probabilities)


@pytest.mark.parametrize("family", ["sm_90", "sm_100", "sm_120", "cpu"])
def test_expcast_does_not_exist_in_4_bit_on_any_family(family):
    assert resolve("4-bit", "auto", "auto", True, family).probabilities == "exp2"
    with pytest.raises(InvalidArgument, match="probabilities"):
        resolve("4-bit", "auto", "expcast", True, family)


def test_auto_on_the_cpu_is_the_8_bit_mode():
    auto = attention(**tensors(), implementation="reference")
    assert torch.equal(auto, attention(**tensors(), implementation="reference", mode="8-bit"))
    assert torch.equal(
        auto, attention(**tensors(), implementation="reference", qk_format="int8", probabilities="expcast")
    )
    for other in ({"mode": "4-bit"}, {"qk_format": "e4m3"}, {"probabilities": "exp2"}, {"demean": False}):
        assert not torch.equal(auto, attention(**tensors(), implementation="reference", **other))


# support()


def test_support_names_what_would_serve():
    answer = support(**tensors(), implementation="reference")
    assert answer
    assert (answer.implementation, answer.mode, answer.reasons, answer.why) == ("reference", "8-bit", {}, "")
    assert support(**tensors(), implementation="reference", mode="4-bit").mode == "4-bit"


def test_support_says_why_not():
    answer = support(**tensors())
    assert not answer
    assert answer.implementation is None
    assert answer.why == answer.reasons["auto"]
    assert "CPU" in answer.why


STRANGE = {
    "no tensor": None,
    "a list": [1.0],
    "a number": 1.0,
    "three dimensions": torch.zeros(3, 50, 16),
    "no dimension": torch.zeros(()),
    "empty": torch.zeros(2, 3, 0, 16),
    "integers": torch.zeros(SHAPE, dtype=torch.int64),
    "float64": torch.zeros(SHAPE, dtype=torch.float64),
    "complex": torch.zeros(SHAPE, dtype=torch.complex64),
    "e4m3": torch.zeros(SHAPE).to(torch.float8_e4m3fn),
    "another device": torch.zeros(SHAPE, device="meta"),
    "other heads": torch.zeros(2, 1, 50, 16),
    "other head dim": torch.zeros(2, 3, 50, 8),
    "wide": torch.zeros(2, 3, 50, 300),
    "sparse": torch.zeros(SHAPE).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.zeros(3, 5, 16), torch.zeros(4, 5, 16)], layout=torch.jagged)
    if hasattr(torch, "jagged")
    else None,
}


@pytest.mark.parametrize("kind", list(STRANGE))
@pytest.mark.parametrize("position", ["q", "k", "v", "all"])
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_support_never_raises_for_tensors_and_agrees_with_the_call(kind, position, implementation):
    arguments = tensors()
    for name in "qkv" if position == "all" else position:
        arguments[name] = STRANGE[kind]
    answer = support(**arguments, implementation=implementation)
    assert bool(answer) is (answer.why == "")
    if kind == "another device" and position == "all":
        return  # meta tensors are answered by the operator's fake
    if not answer:
        with pytest.raises((InvalidArgument, UnsupportedCall)):
            attention(**arguments, implementation=implementation)
    else:
        attention(**arguments, implementation=implementation)


def test_support_of_ungrouped_heads_says_what_was_expected():
    assert "[2, 3, *, 16]" in support(**tensors(k=torch.zeros(2, 1, 50, 16))).why


@pytest.mark.parametrize("wrong", [{"mode": "x"}, {"implementation": "x"}, {"layout": "x"}])
def test_support_raises_for_a_wrong_setting(wrong):
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        support(**tensors(), **wrong)


def test_support_looks_at_no_values():
    assert support(**tensors(v=torch.full(SHAPE, math.nan)), implementation="reference")


def test_support_reads_the_layout():
    short = {"q": torch.zeros(2, 50, 3, 16), "k": torch.zeros(2, 7, 3, 16), "v": torch.zeros(2, 7, 3, 16)}
    assert support(**short, layout="BSHD", implementation="reference")
    assert not support(**short, layout="BHSD", implementation="reference")


def test_public_names_are_reachable():
    for name in vc_attention.__all__:
        assert getattr(vc_attention, name) is not None
