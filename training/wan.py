"""Wan's text-to-video transformer in plain torch, with Wan's own parameter names.

The same function as ``diffusers.WanTransformer3DModel`` and ComfyUI's ``WanModel`` on the same weights (a test holds
it), small enough to read, and with a door for another self-attention: ``attend(layer, q, k, v)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH = (1, 2, 2)
ROPE_THETA = 10000.0
EPSILON = 1e-6

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class WanSizes:
    """The demo model's sizes; ``heads * 128`` channels a token."""

    heads: int = 2
    head_dim: int = 128
    layers: int = 6
    ffn: int = 1024
    channels: int = 16
    text: int = 64
    frequencies: int = 256

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim


class Attention(nn.Module):
    """Projections and norms of one attention layer; ``norm_q`` and ``norm_k`` run across all heads."""

    def __init__(self, dim: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q = nn.RMSNorm(dim, eps=EPSILON)
        self.norm_k = nn.RMSNorm(dim, eps=EPSILON)

    def heads(self, x: Tensor) -> Tensor:
        """[B, S, H * D] as [B, H, S, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SelfAttention(Attention):
    def forward(self, x: Tensor, rotation: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        value = self.v(x)
        query = rotate(self.heads(self.norm_q(self.q(x))), rotation).to(value.dtype)
        key = rotate(self.heads(self.norm_k(self.k(x))), rotation).to(value.dtype)
        return self.o(attend(query, key, self.heads(value)).transpose(1, 2).flatten(2))


class CrossAttention(Attention):
    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        value = self.v(text)
        query = self.heads(self.norm_q(self.q(x))).to(value.dtype)
        key = self.heads(self.norm_k(self.k(text))).to(value.dtype)
        mixed = F.scaled_dot_product_attention(query, key, self.heads(value))
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, sizes: WanSizes):
        super().__init__()
        dim = sizes.dim
        self.norm1 = nn.LayerNorm(dim, eps=EPSILON, elementwise_affine=False)
        self.self_attn = SelfAttention(dim, sizes.head_dim)
        self.norm3 = nn.LayerNorm(dim, eps=EPSILON)
        self.cross_attn = CrossAttention(dim, sizes.head_dim)
        self.norm2 = nn.LayerNorm(dim, eps=EPSILON, elementwise_affine=False)
        self.ffn = nn.Sequential(nn.Linear(dim, sizes.ffn), nn.GELU("tanh"), nn.Linear(sizes.ffn, dim))
        self.modulation = nn.Parameter(torch.zeros(1, 6, dim))

    def forward(self, x: Tensor, time: Tensor, text: Tensor, rotation: Tensor, attend) -> Tensor:
        """x [B, S, dim], time [B, 6, dim], text [B, T, dim]; the residual stream keeps x's dtype."""
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (self.modulation + time).chunk(6, dim=1)
        y = self.self_attn((self.norm1(x) * (1 + scale) + shift).to(x.dtype), rotation, attend)
        x = (x + y * gate).to(x.dtype)
        x = (x + self.cross_attn(self.norm3(x), text)).to(x.dtype)
        y = self.ffn((self.norm2(x) * (1 + ffn_scale) + ffn_shift).to(x.dtype))
        return (x + y * ffn_gate).to(x.dtype)


class Head(nn.Module):
    def __init__(self, sizes: WanSizes):
        super().__init__()
        self.norm = nn.LayerNorm(sizes.dim, eps=EPSILON, elementwise_affine=False)
        self.head = nn.Linear(sizes.dim, sizes.channels * math.prod(PATCH))
        self.modulation = nn.Parameter(torch.zeros(1, 2, sizes.dim))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = (self.modulation + time[:, None]).chunk(2, dim=1)
        return self.head((self.norm(x) * (1 + scale) + shift).to(x.dtype))


class WanModel(nn.Module):
    """Velocity ``noise - clip`` of flow matching for noisy latents at one noise level a clip."""

    def __init__(self, sizes: WanSizes | None = None):
        super().__init__()
        self.sizes = sizes = sizes or WanSizes()
        dim = sizes.dim
        self.patch_embedding = nn.Conv3d(sizes.channels, dim, PATCH, PATCH)
        self.text_embedding = nn.Sequential(nn.Linear(sizes.text, dim), nn.GELU("tanh"), nn.Linear(dim, dim))
        self.time_embedding = nn.Sequential(nn.Linear(sizes.frequencies, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.head = Head(sizes)

    def forward(self, latents: Tensor, timestep: Tensor, text: Tensor, attend: Attend | None = None) -> Tensor:
        """Latents [B, 16, F, h, w] with even h and w, timestep [B] from 0 to 1000, text [B, T, 64] -> like latents.

        ``attend(layer, q, k, v)`` computes self-attention of [B, H, S, D] in the place of torch's.
        """
        grid = tuple(size // step for size, step in zip(latents.shape[2:], PATCH, strict=True))
        x = self.patch_embedding(latents.to(self.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)
        x = x.contiguous()
        time = self.time_embedding(wave(timestep, self.sizes.frequencies).to(x.dtype))
        steps = self.time_projection(time).unflatten(1, (6, -1))
        text = self.text_embedding(text.to(x.dtype))
        rotation = rotations(grid, self.sizes.head_dim, latents.device)
        for layer, block in enumerate(self.blocks):
            call = torch_attention if attend is None else _of_layer(attend, layer)
            x = block(x, steps, text, rotation, call)
        return unpatch(self.head(x, time), grid, self.sizes.channels)


def torch_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """16-bit (or wider) attention as torch computes it."""
    return F.scaled_dot_product_attention(query, key, value)


def _of_layer(attend: Attend, layer: int):
    return lambda query, key, value: attend(layer, query, key, value)


def wave(timestep: Tensor, channels: int) -> Tensor:
    """Cosines, then sines, of each timestep: [B, channels], float32."""
    place = torch.arange(channels // 2, device=timestep.device, dtype=torch.float32)
    angle = timestep.float()[:, None] * torch.exp(place * (-math.log(10000.0) / (channels // 2)))
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def rotations(grid: tuple[int, int, int], head_dim: int, device: torch.device) -> Tensor:
    """Cosine and sine of each token's rotary angles: float32 [2, S, D / 2]."""
    side = 2 * (head_dim // 6)
    angles = []
    for axis, channels in enumerate((head_dim - 2 * side, side, side)):
        frequency = ROPE_THETA ** (-torch.arange(0, channels, 2, device=device, dtype=torch.float32) / channels)
        shape = [1, 1, 1, -1]
        shape[axis] = grid[axis]
        angle = torch.arange(grid[axis], device=device, dtype=torch.float32)[:, None] * frequency
        angles.append(angle.view(*shape).expand(*grid, -1))
    angle = torch.cat(angles, dim=-1).flatten(0, 2)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns neighbouring channel pairs of [B, H, S, D] by the tokens' angles."""
    cosine, sine = rotation
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)


def unpatch(x: Tensor, grid: tuple[int, int, int], channels: int) -> Tensor:
    """Tokens [B, S, 4 * channels] as latents [B, channels, F, h, w]."""
    cells = x.unflatten(1, grid).unflatten(-1, (*PATCH, channels))
    return torch.einsum("bfhwpqrc->bcfphqwr", cells).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def initialize(model: WanModel, seed: int) -> None:
    """Weights to start training from: every block open (gates 1), its outputs small, the head silent."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv3d)):
                fan_in = module.weight[0].numel()
                module.weight.normal_(0.0, fan_in**-0.5, generator=random)
                module.bias.zero_()
        for block in model.blocks:
            block.modulation[:, (2, 5)] = 1.0
            for last in (block.self_attn.o, block.cross_attn.o, block.ffn[2]):
                last.weight.mul_((3 * len(model.blocks)) ** -0.5)
        model.time_projection[1].weight.mul_(0.1)
        model.head.head.weight.zero_()
