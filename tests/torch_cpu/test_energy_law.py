"""The law of V-Smooth: the error of quantized values falls as the energy that block means leave (method, section 1).

``error(grouped) / error(sequence) = left(grouped) / left(sequence)``: predicted 0.696 and measured 0.707 in the paper.
Here on clustered values made for it, and on activations of a small network trained in the test: a two-layer
transformer that fills in masked bytes of Python's own source files, the only real data that every machine has.
"""

import argparse
import ast
import inspect
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from vc_attention import group_values
from vc_attention.attend.exact import exact_attention
from vc_attention.attend.reference import attend8
from vc_attention.formats import decode_e4m3, nvfp4_scale, quantize_nvfp4
from vc_attention.group.blocks import demean, permute_tokens, removed_energy
from vc_attention.quantize.reference import quantize8
from vc_attention.testing import clustered_qkv, relative_l2

TRAINING_STEPS = 80
TOKENS = 1536


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.near = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.seen = None

    def forward(self, x):
        x = x + self.near(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        self.seen = q, k, v
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class MaskedBytes(nn.Module):
    """Bytes in, bytes out; byte 0 stands for a hidden one."""

    def __init__(self, width: int = 128, heads: int = 2):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.layers = nn.ModuleList([Layer(width, heads), Layer(width, heads)])

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def network_activations():
    """[(q, k, v)] of both trained layers, on text the training did not see; the training's loss before and after."""
    sources = [Path(inspect.getsourcefile(module)).read_bytes() for module in (argparse, inspect, ast)]
    text = torch.tensor(list(b"".join(sources)), dtype=torch.long)
    held_out, text = text[-TOKENS:], text[:-TOKENS]
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MaskedBytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(TRAINING_STEPS):
        starts = torch.randint(0, len(text) - 192, (8,), generator=generator)
        batch = torch.stack([text[start : start + 192] for start in starts])
        hidden = torch.rand(batch.shape, generator=generator) < 0.15
        loss = nn.functional.cross_entropy(model(batch.masked_fill(hidden, 0))[hidden], batch[hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        model(held_out[None])
    return [layer.seen for layer in model.layers], sum(losses[:5]) / 5, sum(losses[-5:]) / 5


def value_error(v: torch.Tensor, order: torch.Tensor | None, number_format: str) -> torch.Tensor:
    """[B, H]: summed squared error of the values after block means, quantization and restoring."""
    values = permute_tokens(v, order)
    blocks = demean(values)
    if number_format == "e4m3":
        scale = blocks.residual.abs().amax(2, keepdim=True) / 448
        stored = decode_e4m3((blocks.residual / scale).to(torch.float8_e4m3fn).view(torch.uint8)) * scale
    else:
        along_tokens = blocks.residual.transpose(2, 3)
        stored = quantize_nvfp4(along_tokens, nvfp4_scale(along_tokens, (3,))).dequantize().transpose(2, 3)
    return (stored - blocks.residual).double().square().sum((2, 3))


def ratios(v, order, number_format):
    """Measured ratio of error energies, and the predicted one, per head."""
    errors = value_error(v, order, number_format) / value_error(v, None, number_format)
    left = (1 - removed_energy(v, order)) / (1 - removed_energy(v))
    return errors.flatten().tolist(), left.double().flatten().tolist()


@pytest.mark.parametrize("seed", range(3))
def test_law_on_clustered_values(seed):
    v = clustered_qkv((8, 16, 16), heads=8, head_dim=64, seed=seed)[2]
    order = group_values(v).permutation
    energy = v.double().square().sum((2, 3))
    left = [((1 - removed_energy(v, one).double()) * energy).sum().item() for one in (order, None)]
    errors = [value_error(v, one, "e4m3").sum().item() for one in (order, None)]
    assert left[0] / left[1] < 0.9  # grouping has something to say here: measured 0.84, 0.81, 0.87
    # Measured 3 to 6.5 % above the law over 8 heads, up to 14 % in one: in sequence order most of the energy sits in a
    # few tokens at the top of their channel's scale, where an E4M3 number's relative error is smallest.
    assert errors[0] / errors[1] == pytest.approx(left[0] / left[1], rel=0.08)


@pytest.mark.parametrize("seed", range(3))
def test_nvfp4_gains_too_but_less_than_the_law(seed):
    # Scales per 16 tokens follow the values by themselves. Measured 0.978, 0.966, 0.973; the law says 0.81 to 0.87.
    v = clustered_qkv((8, 16, 16), heads=8, head_dim=64, seed=seed)[2]
    order = group_values(v).permutation
    assert value_error(v, order, "nvfp4").sum() < 0.99 * value_error(v, None, "nvfp4").sum()


def test_the_network_has_learned(network_activations):
    _, before, after = network_activations
    assert after < 0.75 * before  # it is not a random projection


@pytest.mark.parametrize(("number_format", "within"), [("e4m3", 0.05), ("nvfp4", 0.12)])  # measured 3 %, 8 %
@pytest.mark.parametrize("layer", [0, 1])
def test_law_on_real_network_activations(network_activations, number_format, within, layer):
    v = network_activations[0][layer][2]
    errors, left = ratios(v, group_values(v, clusters=24).permutation, number_format)
    for error, predicted in zip(errors, left, strict=True):
        assert predicted < 0.8  # 0.67 to 0.74: the paper's Wan2.2 heads have 0.696
        assert error == pytest.approx(predicted, rel=within)


@pytest.mark.parametrize("layer", [0, 1])
def test_error_of_the_output_falls_too(network_activations, layer):
    # Only the values are low-bit here, the weights are exact.
    q, k, v = (x.double() for x in network_activations[0][layer])
    order = group_values(v.float(), clusters=24).permutation
    index = order.long()[..., None].expand_as(v)
    exact = exact_attention(q, k, v)

    def output_error(permutation):
        operands = quantize8(q.float(), k.float(), v.float(), permutation, "int8", True)
        means = operands.means.double().repeat_interleave(128, 2)[:, :, : v.shape[2]]
        stored = decode_e4m3(operands.residual).double() * operands.residual_scale + means
        keys = k if permutation is None else k.gather(2, index)
        return relative_l2(exact_attention(q, keys, stored), exact)

    assert output_error(order) < output_error(None)


@pytest.mark.parametrize("layer", [0, 1])
def test_whole_8_bit_attention_on_real_activations(network_activations, layer):
    q, k, v = network_activations[0][layer]
    operands = quantize8(q, k, v, group_values(v, clusters=24).permutation, "int8", True)
    output = attend8(operands, 1 / math.sqrt(q.shape[-1]), "expcast")
    assert relative_l2(output, exact_attention(q, k, v)) < 0.02  # measured 0.0084 and 0.0083
