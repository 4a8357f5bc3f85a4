"""benchmarks/peers.py with packages of paper: which are picked up, how each is called, what is said of the others."""

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
OPTIONAL = ("fa3_bf16", "fa4_bf16", "sageattention", "comfy_kitchen_int8")


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import peers

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return peers


@pytest.fixture
def packages(monkeypatch):
    """Four packages, each with the function of the real one: its name, its layout, what it returns."""

    def bshd(q, k, v):
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    def in_place(q, k, v):
        k -= k.mean(2, keepdim=True)
        return scaled_dot_product_attention(q, k, v)

    functions = {
        "flash_attn_interface": ("flash_attn_func", bshd),
        "flash_attn": ("unused", None),
        "flash_attn.cute": ("flash_attn_func", lambda q, k, v: (bshd(q, k, v), "log-sum-exp")),
        "sageattention": ("sageattn", in_place),
        "comfy_kitchen": ("int8_attention", scaled_dot_product_attention),
    }
    made = {}
    for name, (function_name, function) in functions.items():
        made[name] = ModuleType(name)
        setattr(made[name], function_name, function)
        monkeypatch.setitem(sys.modules, name, made[name])
    return made


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 3, 40, 16, generator=generator) for _ in range(3)]


def test_every_package_is_called_as_its_users_call_it(peers, packages):
    q, k, v = inputs()
    kept = [x.clone() for x in (q, k, v)]
    found = peers.found(q, k, v)
    assert [name for name in found if name in OPTIONAL] == list(OPTIONAL)
    for name in OPTIONAL:
        torch.testing.assert_close(found[name](), scaled_dot_product_attention(q, k, v))
    assert all(torch.equal(x, old) for x, old in zip((q, k, v), kept, strict=True))


def test_what_is_missing_broken_or_refuses_is_named_and_left_out(peers, packages, monkeypatch, capsys):
    def refuses(q, k, v):
        raise ValueError("head_dim 16 is too small\nand more")

    packages["comfy_kitchen"].int8_attention = refuses
    del packages["sageattention"].sageattn
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # as if not installed
    found = peers.found(*inputs())
    assert [name for name in found if name in OPTIONAL] == ["fa4_bf16"]
    said = capsys.readouterr().out
    assert "skipped comfy_kitchen_int8: ValueError: head_dim 16 is too small\n" in said
    assert "skipped sageattention: AttributeError: " in said
    assert "skipped fa3_bf16: ModuleNotFoundError: " in said


def test_versions_come_from_the_installer_or_from_the_package(peers, packages, monkeypatch):
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"sageattention": ["sage-attention"]})
    monkeypatch.setattr(metadata, "version", {"sage-attention": "2.2.0"}.__getitem__)
    packages["flash_attn"].__version__ = "4.0.1"
    assert peers.versions() == {"fa4_bf16": "4.0.1", "sageattention": "2.2.0"}
