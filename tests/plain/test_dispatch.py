"""Which implementation serves a call: rows of support, the automatic choice, a named choice, and their reasons."""

import ast
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import vc_attention
from vc_attention import dispatch
from vc_attention.arch import EIGHT_BIT, FAMILIES, FOUR_BIT, MODES
from vc_attention.attend.settings import PROBABILITIES, QK_FORMATS
from vc_attention.dispatch import AUTO, IMPLEMENTATIONS, Call, Implementation, choose, implementation_names
from vc_attention.errors import InvalidArgument, UnsupportedCall

PACKAGE = Path(vc_attention.__file__).parent
CALL = Call("sm_90", EIGHT_BIT, "bfloat16", 128)
KNOWN_FAMILIES = {row.family for row in FAMILIES}


def row(name, **changes) -> Implementation:
    base = Implementation(name, ("sm_90",), (EIGHT_BIT,), ("bfloat16",), (1, 128), True, ".nowhere:run", "made up")
    return replace(base, **changes)


@pytest.fixture
def rows(monkeypatch):
    """Put made-up rows in place of the real ones."""

    def put(*made):
        monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", made)

    return put


# The real rows


@pytest.mark.parametrize("real", IMPLEMENTATIONS, ids=lambda real: real.name)
def test_row_is_well_formed(real):
    assert real.name != AUTO
    assert set(real.modes) <= set(MODES)
    assert real.modes
    assert set(real.dtypes) <= {"bfloat16", "float16", "float32"}
    assert real.families is None or set(real.families) <= KNOWN_FAMILIES
    assert all(choice in (*QK_FORMATS[mode], *PROBABILITIES[mode]) for mode, choice in real.lacks)
    assert real.status
    with pytest.raises(FrozenInstanceError):
        real.name = "other"


@pytest.mark.parametrize("real", IMPLEMENTATIONS, ids=lambda real: real.name)
def test_entry_points_at_a_function_of_this_package(real):
    module, _, function = real.entry.partition(":")
    path = PACKAGE.joinpath(*module.lstrip(".").split(".")).with_suffix(".py")
    assert module.startswith(".")
    tree = ast.parse(path.read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_names_are_unique_and_auto_comes_first():
    names = implementation_names()
    assert names[0] == AUTO
    assert len(set(names)) == len(names)
    assert "reference" in names


def test_auto_never_takes_the_reference():
    assert not next(real for real in IMPLEMENTATIONS if real.name == "reference").automatic


@pytest.mark.parametrize("name", [*sorted(KNOWN_FAMILIES), "sm_75", "sm_130", "hip", "mps", "cpu", "xpu"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_reference_serves_every_family_mode_and_dtype(name, mode, dtype):
    assert choose(Call(name, mode, dtype, 128), "reference").name == "reference"


@pytest.mark.parametrize("head_dim", [1, 64, 72, 80, 96, 112, 128, 160, 256])
def test_reference_serves_head_dims(head_dim):
    assert choose(replace(CALL, head_dim=head_dim), "reference").name == "reference"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (replace(CALL, dtype="float64"), ("float64", "bfloat16, float16, float32")),
        (replace(CALL, head_dim=257), ("head_dim", "256", "257")),
        (replace(CALL, mode="2-bit"), ("2-bit",)),
    ],
)
def test_reference_refuses_with_what_it_takes_and_what_came(call, words):
    with pytest.raises(UnsupportedCall) as raised:
        choose(call, "reference")
    assert list(raised.value.reasons) == ["reference"]
    for word in words:
        assert word in raised.value.reasons["reference"]


def test_a_mode_asked_on_the_wrong_card_names_the_right_ones():
    with pytest.raises(UnsupportedCall) as raised:
        choose(replace(CALL, mode=FOUR_BIT))
    sentence = "has no 4-bit mode, which is for RTX PRO 6000, RTX 50, DGX Spark"
    assert raised.value.reasons == {"cuda": sentence, "triton8": sentence}


def test_auto_on_a_hopper_card_takes_triton_only_where_cuda_cannot_run(monkeypatch):
    missing = {".guard:why_cuda_is_unavailable": "needs a compiler"}
    monkeypatch.setattr(dispatch, "_load", lambda place: lambda *_: missing.get(place))
    assert choose(CALL, device="a card").name == "triton8"
    missing.clear()
    assert choose(CALL, device="a card").name == "cuda"
    assert choose(replace(CALL, head_dim=64), device="a card").name == "triton8"


@pytest.mark.parametrize(
    "changes",
    [{"qk_format": "e4m3"}, {"heads": 65536}],
    ids=lambda changes: next(iter(changes)),
)
def test_auto_on_a_hopper_card_takes_triton_for_what_cuda_does_not_make(changes):
    assert choose(replace(CALL, qk_format="int8", probabilities="expcast", heads=65535)).name == "cuda"
    assert choose(replace(CALL, **changes)).name == "triton8"


@pytest.mark.parametrize("real", [real for real in IMPLEMENTATIONS if real.automatic], ids=lambda real: real.name)
def test_kernels_count_elements_in_32_bits(real):
    # cuda: rows are numbered so; Triton: bytes of rows of 128 inside a head are, too.
    fits = replace(CALL, family=real.families[0], mode=real.modes[0])
    most = 2**31 - 1 if real.name == "cuda" else 2**24 - 1
    assert real.refusal(replace(fits, tokens=most)) is None
    assert f"up to {most}, not {most + 1}" in real.refusal(replace(fits, tokens=most + 1))
    assert real.refusal(replace(fits, heads=2**15, tokens=2**16 - 1)) is None
    sentence = "serves B * H * S up to 2147483647, not 2147483648"
    assert real.refusal(replace(fits, heads=2**15, tokens=2**16)) == sentence


@pytest.mark.parametrize(
    ("limits", "changes", "sentence"),
    [
        ({"most_heads": 7}, {"heads": 8}, "serves B * H up to 7, not 8"),
        ({"most_tokens": 7}, {"tokens": 8}, "serves S up to 7, not 8"),
        ({"most_rows": 7}, {"heads": 2, "tokens": 4}, "serves B * H * S up to 7, not 8"),
        ({"lacks": ((EIGHT_BIT, "e4m3"),)}, {"qk_format": "e4m3"}, "makes no e4m3 in 8-bit mode"),
        ({"lacks": ((EIGHT_BIT, "expcast"),)}, {"probabilities": "expcast"}, "makes no expcast in 8-bit mode"),
    ],
)
def test_limits_of_a_row_are_said_with_what_came(limits, changes, sentence):
    assert row("small", **limits).refusal(CALL) is None  # neither sizes nor formats are asked for
    assert row("small", **limits).refusal(replace(CALL, **changes)) == sentence
    assert row("free").refusal(replace(CALL, **changes)) is None


@pytest.mark.parametrize(("head_dim", "served"), [(64, True), (128, True), (63, False), (96, False), (192, False)])
def test_head_dims_in_steps(head_dim, served):
    real = row("triton8", head_dims=(64, 128), head_dim_step=64)
    refusal = real.refusal(replace(CALL, head_dim=head_dim))
    assert refusal == (None if served else f"serves head_dim 64 and 128, not {head_dim}")


def test_what_was_seen_is_said_by_family_and_mode():
    seen = (("sm_90", "run on an H200"), ("4-bit", "emulated"))
    real = row("new", families=("sm_89", "sm_90"), status="compiled only", seen=seen)
    assert [real.status_on(name, "8-bit") for name in ("sm_89", "sm_90")] == ["compiled only", "run on an H200"]
    assert real.status_on("sm_89", "4-bit") == "emulated"


# The choice, on made-up rows


def test_auto_takes_the_first_automatic_row_that_serves(rows):
    rows(row("by_hand", automatic=False), row("small", head_dims=(1, 64)), row("first"), row("second"))
    assert choose(CALL).name == "first"


@pytest.mark.parametrize("name", ["first", "second", "by_hand"])
def test_a_name_gets_that_row_and_no_other(rows, name):
    rows(row("first"), row("second"), row("by_hand", automatic=False))
    assert choose(CALL, name).name == name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"families": ("sm_100", "sm_103")}, ("sm_100, sm_103", "sm_90")),
        ({"modes": (FOUR_BIT,)}, (EIGHT_BIT,)),
        ({"dtypes": ("float16",)}, ("float16", "bfloat16")),
        ({"head_dims": (1, 64)}, ("1 to 64", "128")),
        ({"head_dims": (64, 64)}, ("head_dim 64,", "128")),
    ],
)
def test_a_named_row_that_refuses_never_slides_to_another(rows, changes, words):
    rows(row("asked", **changes), row("would_serve"))
    assert choose(CALL).name == "would_serve"
    with pytest.raises(UnsupportedCall) as raised:
        choose(CALL, "asked")
    assert list(raised.value.reasons) == ["asked"]
    for word in words:
        assert word in raised.value.reasons["asked"]


def test_auto_reports_every_automatic_row_it_asked(rows):
    rows(row("one", dtypes=("float16",)), row("two", head_dims=(1, 64)), row("by_hand", automatic=False))
    with pytest.raises(UnsupportedCall) as raised:
        choose(CALL)
    assert list(raised.value.reasons) == ["one", "two"]


def test_auto_says_one_sentence_on_the_device_where_no_row_is_for_it(rows):
    rows(row("other_card", families=("sm_120",)))
    with pytest.raises(UnsupportedCall) as raised:
        choose(CALL)
    assert list(raised.value.reasons) == [AUTO]
    assert "H100" in raised.value.reasons[AUTO]


def test_a_row_that_cannot_run_here_is_passed_over_with_its_sentence(rows, monkeypatch):
    sentences = {"no compiler": "needs a compiler", "fine": None}
    monkeypatch.setattr(dispatch, "_load", lambda place: lambda device, dtype: sentences[place])
    rows(row("first", readiness="no compiler"), row("second", readiness="fine"))
    assert choose(CALL, device="a card").name == "second"
    assert choose(CALL).name == "first"  # without a device only the row itself is asked
    with pytest.raises(UnsupportedCall) as raised:
        choose(CALL, "first", "a card")
    assert raised.value.reasons == {"first": "needs a compiler"}


def test_a_refused_row_is_not_asked_whether_it_can_run(rows, monkeypatch):
    monkeypatch.setattr(dispatch, "_load", lambda place: pytest.fail("asked"))
    rows(row("other", families=("sm_120",), readiness="never"))
    with pytest.raises(UnsupportedCall):
        choose(CALL, device="a card")


def test_a_row_for_every_family_serves_unknown_ones(rows):
    rows(row("anywhere", families=None))
    assert choose(replace(CALL, family="sm_999")).name == "anywhere"


def test_a_name_that_does_not_exist_is_refused_with_a_reason(rows):
    rows(row("first"))
    with pytest.raises((UnsupportedCall, InvalidArgument)) as raised:
        choose(CALL, "nonsense")
    assert "nonsense" in str(raised.value)


def test_load_imports_on_first_use_only(rows):
    made = row("broken", entry=".no_such_module:run")
    rows(made)
    assert choose(CALL) is made
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        made.load()


# The errors


def test_unsupported_call_holds_its_reasons():
    reasons = {"one": "is not here", "two": "has no 4-bit mode"}
    error = UnsupportedCall(reasons)
    reasons["three"] = "late"
    assert error.reasons == {"one": "is not here", "two": "has no 4-bit mode"}
    assert str(error) == "one: is not here; two: has no 4-bit mode"


def test_errors_can_be_caught_by_builtin_classes():
    # Two copies of the package have different classes; a caller of one copy may meet the other's.
    assert issubclass(UnsupportedCall, NotImplementedError)
    assert issubclass(InvalidArgument, ValueError)
