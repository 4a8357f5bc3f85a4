"""Tiny checkpoints with random weights that ComfyUI's own loader detects. Needs a booted ComfyUI."""

from __future__ import annotations

from pathlib import Path

import torch


def _fill(model) -> dict:
    state = {}
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            state[name] = torch.zeros_like(value)
        elif value.ndim >= 2:
            state[name] = torch.randn(value.shape) / max(1, value.shape[1:].numel()) ** 0.5
        elif name.endswith("weight") or "scale" in name:
            state[name] = torch.ones(value.shape)
        else:
            state[name] = torch.randn(value.shape) * 0.02
    return state


def _save(path: Path, state: dict, keep: tuple[str, ...] = ()):
    from safetensors.torch import save_file

    def cast(name, value):
        keep_it = not value.is_floating_point() or any(part in name for part in keep)
        return (value if keep_it else value.to(torch.bfloat16)).contiguous()

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: cast(name, value) for name, value in state.items()}, str(path))


def _settings():
    import comfy.ops

    return {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init}


def wan():
    """Wan 2.1/2.2 T2V 14B's class: 2 blocks, 2 heads of 128."""
    import comfy.ldm.wan.model as wan

    model = wan.WanModel(
        model_type="t2v", dim=256, ffn_dim=512, num_heads=2, num_layers=2, text_dim=4096, **_settings()
    )
    return _fill(model), ()


def wan_i2v():
    """Wan2.2 I2V 14B: the text-to-video class, with the start image and its mask as 20 more channels."""
    import comfy.ldm.wan.model as wan

    model = wan.WanModel(
        model_type="t2v", in_dim=36, dim=256, ffn_dim=512, num_heads=2, num_layers=2, text_dim=4096, **_settings()
    )
    return _fill(model), ()


def vace():
    """Wan VACE: block i and its VACE block report the same index with equal shapes."""
    import comfy.ldm.wan.model as wan

    sizes = {"dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 4, "vace_layers": 2, "vace_in_dim": 96}
    return _fill(wan.VaceWanModel(**sizes, **_settings())), ()


def _hunyuan(**changes):
    import comfy.ldm.hunyuan_video.model as hunyuan

    sizes = {
        "hidden_size": 256,
        "num_heads": 2,
        "mlp_ratio": 4.0,
        "axes_dim": [16, 56, 56],
        "theta": 256,
        "qkv_bias": True,
        "meanflow": False,
        "byt5": False,
    }
    return _fill(hunyuan.HunyuanVideo(**{**sizes, **changes}, **_settings())), ()


def hv15():
    """HunyuanVideo 1.5: 2 double blocks, text first in the joint sequence."""
    return _hunyuan(
        in_channels=65,
        out_channels=32,
        vec_in_dim=None,
        context_in_dim=3584,
        depth=2,
        depth_single_blocks=0,
        patch_size=[1, 1, 1],
        guidance_embed=False,
        use_cond_type_embedding=True,
        vision_in_dim=1152,
        meanflow_sum=True,
    )


def joint():
    """HunyuanVideo 1.0: 2 double and 2 single blocks."""
    return _hunyuan(
        in_channels=16,
        out_channels=16,
        vec_in_dim=768,
        context_in_dim=4096,
        depth=2,
        depth_single_blocks=2,
        patch_size=[1, 2, 2],
        guidance_embed=True,
        use_cond_type_embedding=False,
        vision_in_dim=None,
        meanflow_sum=False,
    )


def h3():
    """MiniMax-H3: packed qkv, no block index in 0.33, text, audio and video in one sequence."""
    import comfy.ldm.minimax.model as minimax

    model = minimax.MiniMaxH3Model(
        hidden_size=256,
        num_layers=2,
        token_refiner_num_layers=2,
        num_attention_heads=2,
        ffn_hidden_size=512,
        text_dim=5120,
        time_embed_hidden_size=256,
        time_embed_dim=128,
        **_settings(),
    )
    state = _fill(model)
    state["rope.inv_freq"] = 1.0 / (10000 ** (torch.arange(16) / 16))
    keep = ("video_patch_proj", "audio_patch_proj", "time_embedder", "video_out", "audio_out", "rope.")
    return state, keep


KINDS = {"wan": wan, "wan_i2v": wan_i2v, "joint": joint, "hv15": hv15, "h3": h3, "vace": vace}


def build(kind: str, folder: Path) -> str:
    """Write one checkpoint if it is not there; its file name."""
    name = f"tiny_{kind}.safetensors"
    if not (folder / name).exists():
        torch.manual_seed(0)
        state, keep = KINDS[kind]()
        _save(folder / name, state, keep)
    return name
