"""The demo: one clip with exact attention, once more with VC-Attention, and what changed.

make demo
.venv/bin/python demo/run.py --mode 4-bit --output demo/output/4-bit
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import model
import torch
from render import Clip, noise_levels, sample, start_noise
from report import quality_line, write_comparison
from tqdm import tqdm

OUTPUT = Path(__file__).parent / "output"


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    clip = Clip(
        frames=options.frames,
        height=options.height,
        width=options.width,
        steps=options.steps,
        seed=options.seed,
    )
    result = compare(clip, options)
    vc = result["vc_attention"]
    print(quality_line(result))
    print(vc["summary"])
    if vc["implementation"] == "reference":
        print("The reference implementation shows VC-Attention's numerics; its time says nothing about a GPU.")
    print(f"Written: {options.output / 'strip.png'}, clip.webp, result.json")
    return 0 if vc["served"] else 1


def compare(clip: Clip, options: argparse.Namespace) -> dict:
    """Render twice and write the comparison; returns what result.json holds."""
    from vc_attention.integrations.diffusers import apply

    device, dtype = _device(options.device, options.dtype)
    implementation = _implementation(options, device, dtype)
    transformer = model.build_transformer().to(device)
    model.set_precision(transformer, dtype)
    texts = model.files.prompt_embeddings(options.prompt)
    prompt, negative = (text.to(device=device, dtype=dtype) for text in texts)
    noise = start_noise(clip).to(device)

    bits = f"{torch.finfo(dtype).bits}-bit"
    exact, exact_s = _timed(f"{bits} attention", transformer, noise, prompt, negative, clip)
    with apply(
        transformer,
        mode=options.mode,
        window=options.window,
        interval=options.interval,
        clusters=options.clusters,
        implementation=implementation,
        min_tokens=1,
    ) as handle:
        with handle.render(noise_levels(clip.steps, clip.shift)):
            low_bit, low_bit_s = _timed("VC-Attention", transformer, noise, prompt, negative, clip)
        report = handle.report()

    facts = {
        "clip": {"prompt": options.prompt, **clip.__dict__, "tokens": clip.tokens, **model.attention_sizes()},
        "exact_attention": {"dtype": str(dtype).removeprefix("torch."), "seconds": round(exact_s, 2)},
        "vc_attention": {
            "seconds": round(low_bit_s, 2),
            "mode": report.mode,
            "implementation": report.implementation,
            "grouping_window": options.window,
            "refresh_interval": options.interval,
            "layers": report.layers,
            "calls": report.calls,
            "served": report.served,
            "declined": report.declined,
            "groupings": report.groupings,
            "summary": str(report),
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    return write_comparison(
        options.output,
        exact,
        low_bit,
        f"{bits} attention",
        f"VC-Attention, {report.mode or 'nothing served'}",
        facts,
    )


def _timed(label: str, transformer, noise, prompt, negative, clip: Clip) -> tuple[torch.Tensor, float]:
    with tqdm(total=clip.steps, desc=f"{label:18}", unit="step", file=sys.stdout) as bar:
        start = time.perf_counter()
        latents = sample(transformer, noise, prompt, negative, clip, each_step=bar.update)
        latents = latents.cpu()  # waits for the device
        return latents, time.perf_counter() - start


def _device(name: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if name.startswith("cuda") else "float32"
    return torch.device(name), getattr(torch, dtype)


def _implementation(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> str:
    """What was asked for; else "auto" where a GPU kernel would serve the clip, or the portable reference."""
    import vc_attention

    if options.implementation:
        return options.implementation
    sizes = model.attention_sizes()
    probe = torch.empty(1, sizes["heads"], 128, sizes["head_dim"], device=device, dtype=dtype)
    return "auto" if vc_attention.support(probe, probe, probe, mode=options.mode) else "reference"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    clip = Clip()
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--mode", choices=("auto", "8-bit", "4-bit", "8-bit precise"), default="auto")
    parser.add_argument("--steps", type=int, default=clip.steps)
    parser.add_argument("--window", type=float, default=0.25, help="share of the steps in which values are grouped")
    parser.add_argument("--interval", type=int, default=4, help="steps for which a grouping is held")
    parser.add_argument("--clusters", type=int, default=None, help="clusters per head; by length if not given")
    parser.add_argument("--seed", type=int, default=clip.seed, help="of the noise")
    parser.add_argument("--prompt", choices=model.files.prompt_texts(), default=model.PROMPT, metavar="TEXT")
    parser.add_argument("--frames", type=int, default=clip.frames, help="latent frames")
    parser.add_argument("--height", type=int, default=clip.height, help="latent rows, even: a quarter of the pixels")
    parser.add_argument("--width", type=int, default=clip.width, help="latent columns, even")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--implementation", default=None, help="a GPU kernel if there is one, else the reference")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the picture and the JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
