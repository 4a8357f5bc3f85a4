"""The demo through ComfyUI: the same model and clip, with and without the VC Attention Patch node.

    COMFYUI_PATH=~/ComfyUI make demo-comfy

This side needs the demo's environment. The renders happen in a second process under ComfyUI's Python, so that
nothing has to be installed into it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import model
from render import Clip
from report import quality_line, write_comparison
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = Path(__file__).parent / "output" / "comfy"


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    comfyui = options.comfyui.expanduser().resolve()
    if not (comfyui / "comfy" / "samplers.py").is_file():
        print(f"{comfyui} is not a ComfyUI folder; set COMFYUI_PATH to one", file=sys.stderr)
        return 2
    clip = Clip(steps=options.steps, seed=options.seed)
    with tempfile.TemporaryDirectory(prefix="vc-attention-demo-") as folder:
        job = _prepare(Path(folder), comfyui, clip, options)
        code = subprocess.run([options.python, Path(__file__).parent / "comfy_worker.py", job], check=False).returncode
        if code != 0:
            print(f"the render in ComfyUI failed (exit status {code}); see above", file=sys.stderr)
            return 1
        latents = load_file(Path(folder) / "latents.safetensors")
        facts = json.loads((Path(folder) / "facts.json").read_text(encoding="utf-8"))
    result = _compare(latents, facts, clip, options)
    print(quality_line(result))
    print(f"Written: {options.output / 'strip.png'}, clip.webp, result.json")
    return 1 if facts["idle"] else 0


def _prepare(folder: Path, comfyui: Path, clip: Clip, options: argparse.Namespace) -> Path:
    """Everything the worker reads, in one folder; returns its job file."""
    models = folder / "base" / "models" / "diffusion_models"
    models.mkdir(parents=True)
    (folder / "base" / "custom_nodes").mkdir()
    shutil.copy(model.files.MODEL, models)
    prompt, negative = model.files.prompt_embeddings(options.prompt)
    save_file({"prompt": prompt, "negative": negative}, folder / "texts.safetensors")
    job = {
        "comfyui": str(comfyui),
        "base": str(folder / "base"),
        "pack": str(ROOT),
        "checkpoint": model.files.MODEL.name,
        "texts": str(folder / "texts.safetensors"),
        "latents": str(folder / "latents.safetensors"),
        "facts": str(folder / "facts.json"),
        "latent_shape": clip.latent_shape,
        "steps": clip.steps,
        "shift": clip.shift,
        "guidance": clip.guidance,
        "seed": clip.seed,
        "widgets": _widgets(options),
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    return path


def _widgets(options: argparse.Namespace) -> dict:
    """The node's widgets."""
    return {
        "mode": options.mode,
        "grouping_window": options.window,
        "refresh_interval": options.interval,
        "implementation": options.implementation,
        "min_tokens": 1024,  # above the 8 text tokens, below the clip
    }


def _compare(latents: dict, facts: dict, clip: Clip, options: argparse.Namespace) -> dict:
    return write_comparison(
        options.output,
        latents["exact"],
        latents["low_bit"],
        f"ComfyUI {facts['comfyui']}, its own attention ({facts['dtype']})",
        f"with VC Attention Patch, {options.mode}",
        {
            "clip": {"prompt": options.prompt, **clip.__dict__, "tokens": clip.tokens, **model.attention_sizes()},
            "exact_attention": {"dtype": facts["dtype"], "seconds": facts["exact_s"]},
            "vc_attention": {"seconds": facts["low_bit_s"], **_widgets(options), "summary": facts["summary"]},
            "device": facts["device"],
            "comfyui": {"version": facts["comfyui"], "torch": facts["torch"]},
        },
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    clip = Clip()
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--comfyui", type=Path, default=Path(os.environ.get("COMFYUI_PATH", "ComfyUI")))
    parser.add_argument("--python", default=os.environ.get("COMFYUI_PYTHON", sys.executable), help="ComfyUI's Python")
    parser.add_argument("--mode", choices=("auto", "8-bit", "4-bit", "8-bit precise"), default="8-bit")
    parser.add_argument("--implementation", choices=("auto", "reference"), default="reference")
    parser.add_argument("--steps", type=int, default=clip.steps)
    parser.add_argument("--window", type=float, default=0.25, help="grouping_window of the node")
    parser.add_argument("--interval", type=int, default=4, help="refresh_interval of the node")
    parser.add_argument("--seed", type=int, default=clip.seed)
    parser.add_argument("--prompt", choices=model.files.prompt_texts(), default=model.PROMPT, metavar="TEXT")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the picture and the JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
