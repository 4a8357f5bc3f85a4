"""A small Wan transformer whose weights are drawn from a seed, not trained.

Plain random weights turn noise into other noise. These are random too, but laid out so that the model works the way
a trained one does and its pictures can be looked at. The 256 channels of a token are four rooms of 64:

    NOISE   the 2 x 2 patch of 16 latent channels, as it comes in
    FIELD   smooth fields: block 0 averages the noise of the SEED latents over neighbouring tokens
    IMAGE   what the finished clip should hold, built from the fields by the feed-forward layers
    LEVEL   a constant, large enough that layer norms act as an almost fixed scale

The head returns ``RATE * (NOISE - IMAGE)``, a velocity that carries the latents from noise to the image. Every
attention layer matters: block 0 attends by position, the later blocks attend to tokens that look alike.
"""

from __future__ import annotations

import math

import torch

HEADS = 2
HEAD_DIM = 128
WIDTH = HEADS * HEAD_DIM
LAYERS = 3
FFN_WIDTH = 512
TEXT_WIDTH = 64
TEXT_TOKENS = 16
LATENT_CHANNELS = 16
SEED_CHANNELS = 4
PATCH = (1, 2, 2)
PATCH_CELLS = math.prod(PATCH)
ROPE_THETA = 10000.0

NOISE = slice(0, 64)
FIELD = slice(64, 128)
IMAGE = slice(128, 192)
LEVEL = slice(192, 256)

RATE = 3.5  # the Euler factors 1 - RATE * step leave about 1 % of the noise for 8 to 30 steps
LEVEL_HEIGHT = 3.0
FIELDS = 12  # distinct smooth fields in FIELD
FIELD_GAIN = 9.0  # averaging shrinks noise about that much

WEIGHT_SEED = 20260731


def build_transformer(seed: int = WEIGHT_SEED, layers: int = LAYERS):
    """A ``diffusers.WanTransformer3DModel`` in float32 on the CPU, the same for the same seed."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=PATCH,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=256,
        ffn_dim=FFN_WIDTH,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    model.requires_grad_(False).eval()
    _fill(model, torch.Generator().manual_seed(seed))
    return model


def set_precision(model, dtype: torch.dtype) -> None:
    """Cast the weights as diffusers does when it loads a model: what it keeps in float32 stays."""
    for name, parameter in model.named_parameters():
        if not set(name.split(".")) & set(model._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)


def text_embedding(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand-ins for an encoded prompt and an empty prompt, each [1, TEXT_TOKENS, TEXT_WIDTH]."""
    random = torch.Generator().manual_seed(seed + 1)
    prompt = torch.randn(1, TEXT_TOKENS, TEXT_WIDTH, generator=random)
    return prompt, torch.zeros_like(prompt)


class _Draw:
    """Random matrices from one generator, scaled so that unit inputs give outputs of a wanted size."""

    def __init__(self, random: torch.Generator):
        self.random = random

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self.random) * (gain / math.sqrt(columns))

    def vector(self, size: int, spread: float) -> torch.Tensor:
        return torch.randn(size, generator=self.random) * spread


def _fill(model, random: torch.Generator):
    draw = _Draw(random)
    for parameter in model.parameters():
        parameter.zero_()
    _fill_ends(model, draw)
    for index, block in enumerate(model.blocks):
        block.norm2.weight.fill_(1.0)
        for attention in (block.attn1, block.attn2):
            attention.norm_q.weight.fill_(1.0)
            attention.norm_k.weight.fill_(1.0)
        block.scale_shift_table[:, (2, 5)] = 1.0  # the gates of self-attention and feed-forward
        if index == 0:
            _attend_by_position(block.attn1, draw)
        else:
            _attend_by_likeness(block.attn1, draw)
        _attend_to_text(block.attn2, draw)
        _fill_feed_forward(block.ffn, draw)


def _fill_ends(model, draw: _Draw):
    size = LATENT_CHANNELS * PATCH_CELLS
    model.patch_embedding.weight[NOISE] = torch.eye(size).view(size, LATENT_CHANNELS, *PATCH)
    model.patch_embedding.bias[LEVEL] = LEVEL_HEIGHT * (1.0 - 2.0 * (torch.arange(64) % 2))

    # proj_out rows are ordered (cell, channel), the patch embedding's columns (channel, cell).
    cell, channel = torch.meshgrid(torch.arange(PATCH_CELLS), torch.arange(LATENT_CHANNELS), indexing="ij")
    column = (channel * PATCH_CELLS + cell).flatten()
    rows = torch.arange(size)
    model.proj_out.weight[rows, NOISE.start + column] = RATE
    model.proj_out.weight[rows, IMAGE.start + channel.flatten()] = -RATE
    model.proj_out.weight.mul_(_norm_scale())

    embedder = model.condition_embedder
    embedder.text_embedder.linear_1.weight.copy_(draw.matrix(WIDTH, TEXT_WIDTH))
    embedder.text_embedder.linear_2.weight.copy_(draw.matrix(WIDTH, WIDTH, 1.5))
    embedder.time_embedder.linear_1.weight.copy_(draw.matrix(WIDTH, 256))
    embedder.time_embedder.linear_2.weight.copy_(draw.matrix(WIDTH, WIDTH, 0.02))
    embedder.time_proj.weight.copy_(draw.matrix(6 * WIDTH, WIDTH, 0.5))


def _norm_scale() -> float:
    """What a layer norm divides by, roughly: rooms NOISE, FIELD and IMAGE near 1 and LEVEL at its height."""
    return math.sqrt((3 * 1.0 + LEVEL_HEIGHT**2) / 4)


def _rope_axes() -> list[tuple[int, int]]:
    """(first channel, channels) of the time, height and width parts of a head."""
    side = 2 * (HEAD_DIM // 6)
    time = HEAD_DIM - 2 * side
    return [(0, time), (time, side), (time + side, side)]


def _position_kernel(radius: tuple[float, float, float]) -> torch.Tensor:
    """Gains of one head's channels that make equal queries and keys a bump over (time, height, width) distance.

    Rotary embedding turns a pair of frequency f with amplitude g into ``2 g^2 cos(f * distance)``; the frequencies
    around ``1 / radius`` are used, with the gain that gives the bump the wanted curvature at distance 0.
    """
    gains = torch.zeros(HEAD_DIM)
    for (first, channels), wide in zip(_rope_axes(), radius, strict=True):
        frequency = ROPE_THETA ** (-torch.arange(0, channels, 2) / channels)
        used = (frequency * wide < 1.1) & (frequency * wide > 0.22)
        curvature = (frequency[used] ** 2).sum()
        logit = 1.0 / (wide**2 * curvature)
        pair_gain = torch.sqrt(logit * math.sqrt(HEAD_DIM) / 2)
        pairs = first + 2 * torch.nonzero(used).flatten()
        gains[pairs] = pair_gain
        gains[pairs + 1] = pair_gain
    return gains


def _attend_by_position(attention, draw: _Draw):
    attention.to_q.bias.fill_(1.0)
    attention.to_k.bias.fill_(1.0)
    kernels = torch.cat([_position_kernel((1.6, 1.3, 1.3)), _position_kernel((2.0, 2.6, 2.6))])
    attention.norm_q.weight.copy_(kernels)
    attention.norm_k.weight.copy_(kernels)

    # Values: the SEED latents, averaged over the cells of the patch; the same in both heads, then random company.
    seed_columns = torch.arange(SEED_CHANNELS * PATCH_CELLS)
    scale = _norm_scale()
    for head in range(HEADS):
        for channel in range(SEED_CHANNELS):
            row = head * HEAD_DIM + channel
            columns = seed_columns[channel * PATCH_CELLS : (channel + 1) * PATCH_CELLS]
            attention.to_v.weight[row, columns] = scale / PATCH_CELLS
        rest = slice(head * HEAD_DIM + SEED_CHANNELS, (head + 1) * HEAD_DIM)
        attention.to_v.weight[rest, : SEED_CHANNELS * PATCH_CELLS] = draw.matrix(
            HEAD_DIM - SEED_CHANNELS, SEED_CHANNELS * PATCH_CELLS, scale
        )

    out = attention.to_out[0].weight
    for channel in range(SEED_CHANNELS):
        out[IMAGE.start + channel, channel] = 1.12  # the seed fields keep their size: averaging costs them a little
        out[FIELD.start + channel, channel] = FIELD_GAIN
        out[FIELD.start + SEED_CHANNELS + channel, HEAD_DIM + channel] = 2 * FIELD_GAIN
    mixed = FIELD.start + 2 * SEED_CHANNELS
    out[mixed : mixed + 4, :SEED_CHANNELS] = draw.matrix(4, SEED_CHANNELS, FIELD_GAIN)


def _attend_by_likeness(attention, draw: _Draw):
    look = draw.matrix(WIDTH, 64, 2.5)
    attention.to_q.weight[:, FIELD] = look
    attention.to_k.weight[:, FIELD] = look
    near = torch.cat([_position_kernel((4.0, 5.0, 5.0)), _position_kernel((4.0, 9.0, 9.0))])
    attention.to_q.bias.copy_((near > 0).float() * 2.0)
    attention.to_k.bias.copy_((near > 0).float() * 2.0)
    attention.norm_q.weight.fill_(1.3)
    attention.norm_k.weight.fill_(1.3)
    attention.to_v.weight[:, FIELD] = draw.matrix(WIDTH, 64, 1.5)
    attention.to_v.weight[:, IMAGE] = draw.matrix(WIDTH, 64, 1.5)
    attention.to_out[0].weight[FIELD] = draw.matrix(64, WIDTH, 0.6)
    painted = slice(IMAGE.start + SEED_CHANNELS, IMAGE.start + LATENT_CHANNELS)
    attention.to_out[0].weight[painted] = draw.matrix(LATENT_CHANNELS - SEED_CHANNELS, WIDTH, 0.6)


def _attend_to_text(attention, draw: _Draw):
    attention.to_q.weight[:, FIELD] = draw.matrix(WIDTH, 64, 1.0)
    attention.to_k.weight.copy_(draw.matrix(WIDTH, WIDTH, 1.0))
    attention.to_v.weight.copy_(draw.matrix(WIDTH, WIDTH, 1.0))
    attention.to_out[0].weight[FIELD] = draw.matrix(64, WIDTH, 0.6)


def _fill_feed_forward(feed_forward, draw: _Draw):
    first, last = feed_forward.net[0].proj, feed_forward.net[2]
    first.weight[:, FIELD] = draw.matrix(FFN_WIDTH, 64, 3.2)
    first.bias.copy_(draw.vector(FFN_WIDTH, 0.7))
    painted = slice(IMAGE.start + SEED_CHANNELS, IMAGE.start + LATENT_CHANNELS)
    last.weight[painted] = draw.matrix(LATENT_CHANNELS - SEED_CHANNELS, FFN_WIDTH, 1.0)
    last.weight[FIELD] = draw.matrix(64, FFN_WIDTH, 0.6)
