"""Our workflows as descriptions: the builder lets the real frontend make them and saves what it serializes.

A graph is columns of groups of nodes and the links between them. Model files and settings are those of ComfyUI's
official templates (comfyui-workflow-templates-json 0.1.50).
"""

from __future__ import annotations

HUB = "https://huggingface.co/{repository}/resolve/main/{path}"
WAN22 = "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"
WAN21 = "Comfy-Org/Wan_2.1_ComfyUI_repackaged"
HUNYUAN = "Comfy-Org/HunyuanVideo_1.5_repackaged"
MINIMAX = "Comfy-Org/MiniMax-H3"
# Wan's own default negative prompt; the model was trained to be used with it.
WAN_NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，"
    "静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)

ABOUT_NODE = """\
## VC Attention Patch

It goes **last in the model chain, directly before the sampler or guider**: after the loader, LoRAs, shift and any node
that chooses an attention. {where}

- Queue once. Under the node you then read what it did: mode, kernel, accelerated calls of all calls, and why a call
  was left alone.
- To compare, set `mode` to `off` (or bypass the node with Ctrl+B) and queue again with the same seed. The picture is
  close, not equal: another sample is not a worse sample.
- `auto` picks what your GPU has a kernel for. Where there is none the render stays as it was and the node says so.
- If it says 0 calls, another node behind it replaced the attention.
"""


def model_file(name: str, directory: str, repository: str, folder: str | None = None) -> dict:
    path = f"{folder or f'split_files/{directory}'}/{name}".removeprefix("./")
    return {"name": name, "directory": directory, "url": HUB.format(repository=repository, path=path)}


def node(name: str, type_: str, title: str | None = None, *, models=(), tall=None, color=None, **widgets) -> dict:
    described = {"name": name, "type": type_, "title": title, "widgets": widgets}
    described.update(models=list(models) or None, tall=tall, color=color)
    return {key: value for key, value in described.items() if value is not None}


def note(name: str, title: str, text: str, tall: int) -> dict:
    return node(name, "MarkdownNote", title, tall=tall, text=text)


def column(title: str | None, width: int, *nodes: dict, color: str | None = None) -> dict:
    return {"title": title, "width": width, "nodes": list(nodes), **({"color": color} if color else {})}


def patch(name: str = "patch", title: str | None = None) -> dict:
    return node(name, "VCAttentionPatch", title, color="green", mode="auto")


def unet(name: str, title: str, file: dict) -> dict:
    return node(name, "UNETLoader", title, models=[file], unet_name=file["name"], weight_dtype="default")


def vae(name: str, file: dict, title: str | None = None) -> dict:
    return node(name, "VAELoader", title, models=[file], vae_name=file["name"])


def lora(name: str, title: str, file: dict) -> dict:
    return node(name, "LoraLoaderModelOnly", title, models=[file], lora_name=file["name"], strength_model=1.0)


def prompt(name: str, title: str, text: str, tall=200) -> dict:
    return node(name, "CLIPTextEncode", title, tall=tall, text=text)


def models_note(files: list[dict]) -> str:
    lines = ["## Models", "", "Put each file into this folder below `ComfyUI/models/`:", ""]
    for directory in dict.fromkeys(file["directory"] for file in files):
        lines.append(f"**{directory}**\n")
        lines += [f"- [{file['name']}]({file['url']})" for file in files if file["directory"] == directory]
        lines.append("")
    return "\n".join(lines)


# Wan2.2 14B -----------------------------------------------------------------------------------------------------------


def wan22(kind: str) -> dict:
    """Two experts, the patch on both; 20 steps, or 4 with the LoRAs, behind one switch."""
    image_to_video = kind == "i2v"
    lora_version = "v1" if image_to_video else "v1.1"
    experts = ("high", "low")
    unets = {
        e: model_file(f"wan2.2_{kind}_{e}_noise_14B_fp8_scaled.safetensors", "diffusion_models", WAN22) for e in experts
    }
    loras = {
        e: model_file(f"wan2.2_{kind}_lightx2v_4steps_lora_{lora_version}_{e}_noise.safetensors", "loras", WAN22)
        for e in experts
    }
    text_encoder = model_file("umt5_xxl_fp8_e4m3fn_scaled.safetensors", "text_encoders", WAN21)
    vae_file = model_file("wan_2.1_vae.safetensors", "vae", WAN22)
    files = [*unets.values(), *loras.values(), text_encoder, vae_file]

    name = "image to video" if image_to_video else "text to video"
    about = (
        f"## Wan2.2 14B {name} with VC Attention\n\n"
        "1. Fetch the model files of the note below.\n"
        + ("2. Choose a start image and write what should happen.\n" if image_to_video else "2. Write a prompt.\n")
        + "3. Queue. *4 steps with LoRA* switches between the full render (20 steps, guidance 3.5) and the fast one "
        "(4 steps, guidance 1).\n\n"
        "640 x 640 and 81 frames are 5 seconds at 16 frames a second: 33,600 tokens per call of attention. Larger and "
        "longer clips gain more, because attention grows with the square of the tokens.\n\n"
        "With 4 steps there are few calls to accelerate and most of the time is elsewhere: expect less than with 20."
    )
    where = (
        "Wan2.2 renders with two experts, so there is **one on each**. Tokens are regrouped at the start of the "
        "schedule only, which is the high-noise expert: on the low-noise one 0 refreshes is right."
    )
    if image_to_video:
        size_type, title = "WanImageToVideo", None
        start = [node("image", "LoadImage", "Start image", image="example.png", tall=360)]
    else:
        size_type, title = "EmptyHunyuanLatentVideo", "Size and length"
        start = []
    size = node("latent", size_type, title, width=640, height=640, length=81, batch_size=1)
    positive = (
        "The camera slowly circles as the wind rises; cloth and hair move, the light changes from cloud to sun."
        if image_to_video
        else "A red fox walks along a mountain stream at sunrise, mist over the water, golden light through pine "
        "branches, the camera follows at its height, shallow depth of field."
    )

    def settings(suffix, title, steps, split, cfg):
        return [
            node(f"steps_{suffix}", "PrimitiveInt", f"Steps ({title})", value=steps),
            node(f"split_{suffix}", "PrimitiveInt", f"High-noise steps ({title})", value=split),
            node(f"cfg_{suffix}", "PrimitiveFloat", f"CFG ({title})", value=cfg),
        ]

    def switch(name, title):
        return node(name, "ComfySwitchNode", title, switch=False)

    def expert(e, title, color, **sampler):
        return column(
            title,
            320,
            node(f"shift_{e}", "ModelSamplingSD3", None, shift=5.0),
            patch(f"patch_{e}", f"VC Attention Patch ({e} noise)"),
            node(
                f"sampler_{e}",
                "KSamplerAdvanced",
                None,
                noise_seed=sampler.pop("seed"),
                control_after_generate="fixed",
                steps=20,
                cfg=3.5,
                sampler_name="euler",
                scheduler="simple",
                **sampler,
            ),
            color=color,
        )

    columns = [
        [
            column(
                None,
                480,
                note("about", "About this workflow", about, 250),
                note("about_models", "Models", models_note(files), 400),
                note("about_node", "VC Attention Patch", ABOUT_NODE.format(where=where), 380),
            )
        ],
        [
            column(
                "1 Models",
                380,
                unet("unet_high", "High-noise expert", unets["high"]),
                unet("unet_low", "Low-noise expert", unets["low"]),
                node(
                    "clip",
                    "CLIPLoader",
                    "Text encoder",
                    models=[text_encoder],
                    clip_name=text_encoder["name"],
                    type="wan",
                    device="default",
                ),
                vae("vae", vae_file),
            )
        ],
        [
            column(
                "2 Prompt" + (", start image" if image_to_video else "") + " and size",
                420,
                *start,
                prompt("positive", "Prompt", positive),
                prompt("negative", "Negative prompt", WAN_NEGATIVE),
                size,
            )
        ],
        [
            column("20 steps", 420, *settings("full", "20 steps", 20, 10, 3.5)),
            column(
                "4 steps with LoRA",
                420,
                lora("lora_high", "LoRA, high noise", loras["high"]),
                lora("lora_low", "LoRA, low noise", loras["low"]),
                *settings("fast", "LoRA", 4, 2, 1.0),
            ),
        ],
        [
            column(
                "3 Switch",
                280,
                node("fast", "PrimitiveBoolean", "4 steps with LoRA", value=False, color="yellow"),
                switch("switch_high", "High-noise model"),
                switch("switch_low", "Low-noise model"),
                switch("switch_steps", "Steps"),
                switch("switch_split", "High-noise steps"),
                switch("switch_cfg", "CFG"),
            )
        ],
        [
            expert(
                "high",
                "4 High noise",
                "#3f789e",
                seed=20260731,
                add_noise="enable",
                start_at_step=0,
                end_at_step=10,
                return_with_leftover_noise="enable",
            )
        ],
        [
            expert(
                "low",
                "5 Low noise",
                "#3f789e",
                seed=0,
                add_noise="disable",
                start_at_step=10,
                end_at_step=20,
                return_with_leftover_noise="disable",
            )
        ],
        [
            column(
                "6 Video",
                420,
                node("decode", "VAEDecode"),
                node("video", "CreateVideo", fps=16.0),
                node("save", "SaveVideo", filename_prefix=f"video/Wan2.2_{kind}_VC", tall=420),
            )
        ],
    ]
    links = [
        ("clip", "CLIP", "positive", "clip"),
        ("clip", "CLIP", "negative", "clip"),
        ("unet_high", "MODEL", "lora_high", "model"),
        ("unet_low", "MODEL", "lora_low", "model"),
    ]
    for target, plain, fast in (
        ("switch_high", ("unet_high", "MODEL"), ("lora_high", "MODEL")),
        ("switch_low", ("unet_low", "MODEL"), ("lora_low", "MODEL")),
        ("switch_steps", ("steps_full", "INT"), ("steps_fast", "INT")),
        ("switch_split", ("split_full", "INT"), ("split_fast", "INT")),
        ("switch_cfg", ("cfg_full", "FLOAT"), ("cfg_fast", "FLOAT")),
    ):
        links += [(*plain, target, "on_false"), (*fast, target, "on_true"), ("fast", "BOOLEAN", target, "switch")]
    if image_to_video:
        links += [
            ("image", "IMAGE", "latent", "start_image"),
            ("vae", "VAE", "latent", "vae"),
            ("positive", "CONDITIONING", "latent", "positive"),
            ("negative", "CONDITIONING", "latent", "negative"),
        ]
        conditions = [("latent", "positive"), ("latent", "negative")]
        latent = ("latent", "latent")
    else:
        conditions = [("positive", "CONDITIONING"), ("negative", "CONDITIONING")]
        latent = ("latent", "LATENT")
    for e in experts:
        links += [
            (f"switch_{e}", "output", f"shift_{e}", "model"),
            (f"shift_{e}", "MODEL", f"patch_{e}", "model"),
            (f"patch_{e}", "MODEL", f"sampler_{e}", "model"),
            (*conditions[0], f"sampler_{e}", "positive"),
            (*conditions[1], f"sampler_{e}", "negative"),
            ("switch_steps", "output", f"sampler_{e}", "steps"),
            ("switch_cfg", "output", f"sampler_{e}", "cfg"),
        ]
    links += [
        (*latent, "sampler_high", "latent_image"),
        ("switch_split", "output", "sampler_high", "end_at_step"),
        ("sampler_high", "LATENT", "sampler_low", "latent_image"),
        ("switch_split", "output", "sampler_low", "start_at_step"),
        ("switch_steps", "output", "sampler_low", "end_at_step"),
        ("sampler_low", "LATENT", "decode", "samples"),
        ("vae", "VAE", "decode", "vae"),
        ("decode", "IMAGE", "video", "images"),
        ("video", "VIDEO", "save", "video"),
    ]
    return {
        "name": f"Wan2.2 14B {name}",
        "facts": "two experts, 20 steps or 4 with LoRA",
        "columns": columns,
        "links": links,
    }


# HunyuanVideo 1.5 -----------------------------------------------------------------------------------------------------


def hunyuan15() -> dict:
    unet_file = model_file("hunyuanvideo1.5_720p_t2v_fp16.safetensors", "diffusion_models", HUNYUAN)
    encoders = [
        model_file(name, "text_encoders", HUNYUAN)
        for name in ("qwen_2.5_vl_7b_fp8_scaled.safetensors", "byt5_small_glyphxl_fp16.safetensors")
    ]
    vae_file = model_file("hunyuanvideo15_vae_fp16.safetensors", "vae", HUNYUAN)
    about = (
        "## HunyuanVideo 1.5 text to video, 720p, with VC Attention\n\n"
        "1. Fetch the model files of the note below.\n2. Write a prompt.\n3. Queue.\n\n"
        "1280 x 720 and 121 frames are 5 seconds at 24 frames a second: 111,600 video tokens per call of attention. At "
        "that length attention is most of the render.\n\n"
        "20 steps with shift 7 are ComfyUI's own settings. Tencent's are 50 steps with shift 9 at 720p and shift 5 at "
        "480p, guidance 6. Out of memory: load the model with `weight_dtype` fp8_e4m3fn, or use VAE Decode (Tiled)."
    )
    where = (
        "Here it sits between ModelSamplingSD3 and CFGGuider; BasicScheduler needs no patch. Prompt and video share "
        "one sequence in this model; that needs no setting."
    )
    columns = [
        [
            column(
                None,
                480,
                note("about", "About this workflow", about, 270),
                note("about_models", "Models", models_note([unet_file, *encoders, vae_file]), 300),
                note("about_node", "VC Attention Patch", ABOUT_NODE.format(where=where), 360),
            )
        ],
        [
            column(
                "1 Models",
                400,
                unet("unet", "Video model", unet_file),
                node(
                    "clip",
                    "DualCLIPLoader",
                    "Text encoders",
                    models=encoders,
                    clip_name1=encoders[0]["name"],
                    clip_name2=encoders[1]["name"],
                    type="hunyuan_video_15",
                    device="default",
                ),
                vae("vae", vae_file),
            )
        ],
        [
            column(
                "2 Prompt and size",
                420,
                prompt(
                    "positive",
                    "Prompt",
                    "A paper boat drifts down a rain-filled street at night, neon signs mirrored in the water, drops "
                    "falling around it, the camera glides beside it just above the surface, slow and steady.",
                ),
                prompt("negative", "Negative prompt", "", 120),
                node(
                    "latent",
                    "EmptyHunyuanVideo15Latent",
                    "Size and length",
                    width=1280,
                    height=720,
                    length=121,
                    batch_size=1,
                ),
            )
        ],
        [
            column(
                "3 Model, patch, guider",
                320,
                node("shift", "ModelSamplingSD3", None, shift=7.0),
                patch(),
                node("guider", "CFGGuider", None, cfg=6.0),
                color="#3f789e",
            )
        ],
        [
            column(
                "4 Sampling",
                320,
                node("noise", "RandomNoise", None, noise_seed=20260731, control_after_generate="fixed"),
                node("algorithm", "KSamplerSelect", None, sampler_name="euler"),
                node("schedule", "BasicScheduler", None, scheduler="simple", steps=20, denoise=1.0),
                node("sampler", "SamplerCustomAdvanced"),
            )
        ],
        [
            column(
                "5 Video",
                420,
                node("decode", "VAEDecode"),
                node("video", "CreateVideo", fps=24.0),
                node("save", "SaveVideo", filename_prefix="video/HunyuanVideo1.5_VC", tall=420),
            )
        ],
    ]
    links = [
        ("clip", "CLIP", "positive", "clip"),
        ("clip", "CLIP", "negative", "clip"),
        ("unet", "MODEL", "shift", "model"),
        ("shift", "MODEL", "patch", "model"),
        ("shift", "MODEL", "schedule", "model"),
        ("patch", "MODEL", "guider", "model"),
        ("positive", "CONDITIONING", "guider", "positive"),
        ("negative", "CONDITIONING", "guider", "negative"),
        ("noise", "NOISE", "sampler", "noise"),
        ("guider", "GUIDER", "sampler", "guider"),
        ("algorithm", "SAMPLER", "sampler", "sampler"),
        ("schedule", "SIGMAS", "sampler", "sigmas"),
        ("latent", "LATENT", "sampler", "latent_image"),
        ("sampler", "output", "decode", "samples"),
        ("vae", "VAE", "decode", "vae"),
        ("decode", "IMAGE", "video", "images"),
        ("video", "VIDEO", "save", "video"),
    ]
    return {
        "name": "HunyuanVideo 1.5 text to video",
        "facts": "720p, 121 frames, 20 steps",
        "columns": columns,
        "links": links,
    }


# MiniMax-H3 -----------------------------------------------------------------------------------------------------------


def minimax_h3() -> dict:
    unet_file = model_file(
        "minimax_h3_fl2va_pruned_int8_convrot.safetensors", "diffusion_models", MINIMAX, "diffusion_models"
    )
    encoder = model_file("qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", "text_encoders", MINIMAX, "text_encoders")
    video_vae = model_file("minimax_h3_video_vae_fp16.safetensors", "vae", MINIMAX, "vae")
    audio_vae = model_file("minimax_h3_audio_vae_fp32.safetensors", "vae", MINIMAX, "vae")
    turbo = model_file(
        "minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16.safetensors", "loras", "lightx2v/Minimax-h3-Turbo", "."
    )
    files = [unet_file, encoder, video_vae, audio_vae, turbo]
    about = (
        "## MiniMax-H3 text to video with sound and VC Attention\n\n"
        "1. Fetch the model files of the note below.\n"
        "2. Write shots, camera, speech and sound into one prompt.\n"
        "3. Queue. *Turbo LoRA* switches between 20 steps and 6.\n\n"
        "864 x 480 and 124 frames are 5 seconds at 24 frames a second. The model takes 17 k + 5 frames; other lengths "
        "are rounded up. Its own size is 1344 x 768. There is no guidance and no negative prompt."
    )
    where = (
        "Here it sits between the switch and BasicGuider. Prompt, sound and video share one sequence in this model; "
        "that needs no setting."
    )
    text = (
        "A lighthouse on a cliff in a storm, cinematic, cold blue dusk with one warm beam of light. Waves break on "
        "the rocks, spray drifts through the beam, the camera rises slowly from sea to lamp. Sound: wind, surf, "
        "a distant foghorn, no music."
    )
    columns = [
        [
            column(
                None,
                480,
                note("about", "About this workflow", about, 250),
                note("about_models", "Models", models_note(files), 360),
                note("about_node", "VC Attention Patch", ABOUT_NODE.format(where=where), 360),
            )
        ],
        [
            column(
                "1 Models",
                440,
                unet("unet", "Video model", unet_file),
                lora("lora", "Turbo LoRA", turbo),
                node(
                    "clip",
                    "CLIPLoader",
                    "Text encoder",
                    models=[encoder],
                    clip_name=encoder["name"],
                    type="minimax",
                    device="default",
                ),
                vae("video_vae", video_vae, "Video VAE"),
                vae("audio_vae", audio_vae, "Audio VAE"),
            )
        ],
        [
            column(
                "2 Prompt and size",
                440,
                node(
                    "condition",
                    "MiniMaxH3ImageToVideo",
                    "Prompt and size",
                    tall=520,
                    prompt=text,
                    width=864,
                    height=480,
                    length=124,
                ),
            )
        ],
        [
            column(
                "3 Switch",
                300,
                node("turbo", "PrimitiveBoolean", "Turbo LoRA", value=False, color="yellow"),
                node("steps_full", "PrimitiveInt", "Steps", value=20),
                node("steps_fast", "PrimitiveInt", "Steps (turbo)", value=6),
                node("switch_model", "ComfySwitchNode", "Model", switch=False),
                node("switch_steps", "ComfySwitchNode", "Steps", switch=False),
            )
        ],
        [
            column(
                "4 Patch and guider",
                320,
                patch(),
                node("guider", "BasicGuider"),
                color="#3f789e",
            )
        ],
        [
            column(
                "5 Sampling",
                320,
                node("noise", "RandomNoise", None, noise_seed=20260731, control_after_generate="fixed"),
                node("algorithm", "KSamplerSelect", None, sampler_name="res_multistep"),
                node("schedule", "BasicScheduler", None, scheduler="simple", steps=20, denoise=1.0),
                node("sampler", "SamplerCustomAdvanced"),
            )
        ],
        [
            column(
                "6 Video and sound",
                420,
                node("decode", "VAEDecode"),
                node("decode_audio", "VAEDecodeAudio"),
                node("video", "CreateVideo", fps=24.0),
                node("save", "SaveVideo", filename_prefix="video/MiniMax_H3_VC", tall=360),
            )
        ],
    ]
    links = [
        ("unet", "MODEL", "lora", "model"),
        ("unet", "MODEL", "switch_model", "on_false"),
        ("lora", "MODEL", "switch_model", "on_true"),
        ("turbo", "BOOLEAN", "switch_model", "switch"),
        ("steps_full", "INT", "switch_steps", "on_false"),
        ("steps_fast", "INT", "switch_steps", "on_true"),
        ("turbo", "BOOLEAN", "switch_steps", "switch"),
        ("clip", "CLIP", "condition", "clip"),
        ("video_vae", "VAE", "condition", "vae"),
        ("switch_model", "output", "patch", "model"),
        ("switch_model", "output", "schedule", "model"),
        ("switch_steps", "output", "schedule", "steps"),
        ("patch", "MODEL", "guider", "model"),
        ("condition", "positive", "guider", "conditioning"),
        ("noise", "NOISE", "sampler", "noise"),
        ("guider", "GUIDER", "sampler", "guider"),
        ("algorithm", "SAMPLER", "sampler", "sampler"),
        ("schedule", "SIGMAS", "sampler", "sigmas"),
        ("condition", "LATENT", "sampler", "latent_image"),
        ("sampler", "output", "decode", "samples"),
        ("sampler", "output", "decode_audio", "samples"),
        ("video_vae", "VAE", "decode", "vae"),
        ("audio_vae", "VAE", "decode_audio", "vae"),
        ("decode", "IMAGE", "video", "images"),
        ("decode_audio", "AUDIO", "video", "audio"),
        ("video", "VIDEO", "save", "video"),
    ]
    return {
        "name": "MiniMax-H3 text to video",
        "facts": "with sound, 20 steps or 6 with LoRA",
        "columns": columns,
        "links": links,
    }


# The demo model -----------------------------------------------------------------------------------------------------


def tiny() -> dict:
    """Renders on any machine without a download: every file lies in the pack."""
    about = (
        "## A tiny video model with VC Attention\n\n"
        "Queue it: nothing has to be fetched. The model (7 million weights, 14 MB) lies in this pack and was trained "
        "by the project on clips that a program draws and on photographs. It knows fifteen prompts; choose one.\n\n"
        "It renders the clip of `make demo`: 8 frames of 128 x 128 are 2,048 tokens per call of attention. On a CPU "
        "that takes a minute or two, most of it in the reference implementation."
    )
    where = (
        "`implementation` is `reference` here: the same numbers in plain PyTorch, on any machine, slowly. On a "
        "supported NVIDIA GPU set it to `auto`."
    )
    columns = [
        [
            column(
                None,
                480,
                note("about", "About this workflow", about, 250),
                note("about_node", "VC Attention Patch", ABOUT_NODE.format(where=where), 360),
            )
        ],
        [
            column(
                "1 Model, prompt and size",
                400,
                node("model", "VCAttentionDemoModel"),
                node("prompt", "VCAttentionDemoPrompt", prompt="balloons rise into a cloudy sky"),
                node("latent", "VCAttentionDemoLatent", width=128, height=128, frames=8, batch_size=1),
            )
        ],
        [
            column(
                "2 Patch and sampling",
                340,
                node("shift", "ModelSamplingSD3", None, shift=3.0),
                node(
                    "patch",
                    "VCAttentionPatch",
                    color="green",
                    mode="8-bit",
                    implementation="reference",
                    min_tokens=1024,
                ),
                node(
                    "sampler",
                    "KSampler",
                    None,
                    seed=10,
                    control_after_generate="fixed",
                    steps=16,
                    cfg=2.0,
                    sampler_name="euler",
                    scheduler="simple",
                    denoise=1.0,
                ),
                color="#3f789e",
            )
        ],
        [
            column(
                "3 Video",
                420,
                node("decode", "VCAttentionDemoDecode"),
                node("video", "CreateVideo", fps=16.0),
                node("save", "SaveVideo", filename_prefix="video/tiny_VC", tall=420),
            )
        ],
    ]
    links = [
        ("model", "model", "shift", "model"),
        ("shift", "MODEL", "patch", "model"),
        ("patch", "MODEL", "sampler", "model"),
        ("prompt", "positive", "sampler", "positive"),
        ("prompt", "negative", "sampler", "negative"),
        ("latent", "latent", "sampler", "latent_image"),
        ("sampler", "LATENT", "decode", "latent"),
        ("decode", "frames", "video", "images"),
        ("video", "VIDEO", "save", "video"),
    ]
    return {
        "name": "Tiny model, no download",
        "facts": "128 x 128, 8 frames, any machine",
        "columns": columns,
        "links": links,
    }


GRAPHS = {
    "wan2_2_14B_t2v": lambda: wan22("t2v"),
    "wan2_2_14B_i2v": lambda: wan22("i2v"),
    "hunyuan_video_1_5_720p_t2v": hunyuan15,
    "minimax_h3_t2v": minimax_h3,
    "tiny": tiny,
}


def files(graph: dict) -> list[dict]:
    """Every model file of a graph."""
    nodes = [n for stack in graph["columns"] for group in stack for n in group["nodes"]]
    return [file for n in nodes for file in n.get("models", [])]
