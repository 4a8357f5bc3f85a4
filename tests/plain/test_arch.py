"""Device -> family -> mode, with made-up devices and a made-up torch: no GPU and no torch are needed."""

import sys
from types import SimpleNamespace

import pytest
from vc_attention.arch import EIGHT_BIT, FAMILIES, FOUR_BIT, family, family_row, why_no_mode
from vc_attention.dispatch import AUTO, IMPLEMENTATIONS, Call, choose, why_no_kernel
from vc_attention.errors import UnsupportedCall

# Method, section 5. Capability, family, mode, ExpCast.
SERVED = [
    ((8, 9), "sm_89", EIGHT_BIT, False),
    ((9, 0), "sm_90", EIGHT_BIT, True),
    ((10, 0), "sm_100", EIGHT_BIT, True),
    ((10, 3), "sm_103", EIGHT_BIT, True),
    ((12, 0), "sm_120", FOUR_BIT, False),
    ((12, 1), "sm_121", FOUR_BIT, False),
]
NOT_SERVED = [
    ((6, 1), "sm_61"),
    ((7, 5), "sm_75"),
    ((8, 0), "sm_80"),
    ((8, 6), "sm_86"),
    ((11, 0), "sm_110"),
    ((12, 9), "sm_129"),
    ((13, 0), "sm_130"),
]
OTHER_DEVICES = [("cpu", "cpu"), ("mps", "mps"), ("xpu", "xpu"), ("meta", "meta"), ("privateuseone", "privateuseone")]


class FakeCuda:
    """``torch.cuda`` with cards of the given capabilities; remembers which device was asked."""

    def __init__(self, *capabilities):
        self.capabilities = capabilities
        self.asked = []

    def get_device_capability(self, device=None):
        self.asked.append(device)
        return self.capabilities[device.index or 0]


def fake_torch(monkeypatch, *capabilities, hip=None) -> FakeCuda:
    cuda = FakeCuda(*capabilities)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip)))
    return cuda


def device(kind="cuda", index=None):
    return SimpleNamespace(type=kind, index=index)


@pytest.mark.parametrize(("capability", "name", "mode", "expcast"), SERVED)
def test_family_and_mode_of_each_served_card(monkeypatch, capability, name, mode, expcast):
    fake_torch(monkeypatch, capability)
    assert family(device()) == name
    row = family_row(name)
    assert (row.mode, row.expcast) == (mode, expcast)


@pytest.mark.parametrize(("capability", "name"), NOT_SERVED)
def test_other_cards_have_a_family_and_no_mode(monkeypatch, capability, name):
    fake_torch(monkeypatch, capability)
    assert family(device()) == name
    assert family_row(name) is None


@pytest.mark.parametrize(("kind", "name"), OTHER_DEVICES)
def test_other_devices_are_named_by_their_type_without_torch(monkeypatch, kind, name):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    assert family(device(kind)) == name
    assert family_row(name) is None


@pytest.mark.parametrize("hip", ["6.2.41133", "7.0", ""])
def test_amd_is_told_from_nvidia_without_asking_for_a_capability(monkeypatch, hip):
    cuda = fake_torch(monkeypatch, (9, 0), hip=hip)  # gfx90a reports (9, 0): must not pass for an H100
    assert family(device()) == "hip"
    assert cuda.asked == []


def test_torch_without_the_hip_field_is_not_amd(monkeypatch):
    torch = SimpleNamespace(cuda=FakeCuda((9, 0)), version=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert family(device()) == "sm_90"


def test_the_tensors_own_device_is_asked(monkeypatch):
    cuda = fake_torch(monkeypatch, (8, 6), (9, 0), (12, 0))
    first, second, third = device(index=0), device(index=1), device(index=2)
    assert [family(one) for one in (second, third, first)] == ["sm_90", "sm_120", "sm_86"]
    assert cuda.asked == [second, third, first]


def test_the_answer_is_not_kept_between_devices(monkeypatch):
    fake_torch(monkeypatch, (9, 0))
    assert family(device()) == "sm_90"
    fake_torch(monkeypatch, (12, 0))
    assert family(device()) == "sm_120"


def test_the_table_is_the_methods_and_no_more():
    assert {(row.family, row.mode, row.expcast) for row in FAMILIES} == {(name, m, e) for _, name, m, e in SERVED}


# Sentences for a person

EVERY_FAMILY = [name for _, name, _, _ in SERVED] + [name for _, name in NOT_SERVED]
EVERY_FAMILY += [name for _, name in OTHER_DEVICES] + ["hip"]


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_auto_takes_a_familys_kernel_or_says_why_there_is_none(name):
    served = [row for row in IMPLEMENTATIONS if row.automatic and (row.families is None or name in row.families)]
    table = family_row(name)
    assert bool(served) == (table is not None)
    if served:
        for mode in {EIGHT_BIT, table.mode}:
            first = choose(Call(name, mode, "bfloat16", 128))
            assert first is next(row for row in served if mode in row.modes)
            assert first.name == ("cuda" if name == "sm_90" else {EIGHT_BIT: "triton8", FOUR_BIT: "triton4"}[mode])
        return
    with pytest.raises(UnsupportedCall) as raised:
        choose(Call(name, EIGHT_BIT, "bfloat16", 128))
    sentence = raised.value.reasons[AUTO]
    assert sentence == why_no_kernel(name)
    assert len(sentence) > 20
    assert "\n" not in sentence
    assert not sentence.endswith(".")  # sentences are joined by the caller


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sm_90", ("H100", "sm_90", "yet")),
        ("sm_121", ("DGX Spark", "sm_121", "yet")),
        ("sm_75", ("sm_75", "RTX 40", "H100", "B200", "RTX 50")),
        ("sm_130", ("sm_130", "H100")),
        ("cpu", ("CPU", "NVIDIA")),
        ("hip", ("AMD", "not supported")),
        ("mps", ("Apple", "not supported")),
        ("xpu", ("xpu", "not supported")),
    ],
)
def test_sentence_names_the_cause(name, words):
    sentence = why_no_kernel(name)
    for word in words:
        assert word in sentence


def test_a_new_card_is_not_called_too_old():
    assert "old" not in why_no_mode("sm_130")


def test_an_unknown_family_can_still_be_served_by_name():
    assert choose(Call("sm_130", EIGHT_BIT, "bfloat16", 128), "reference").name == "reference"
