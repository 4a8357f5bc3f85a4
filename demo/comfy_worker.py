"""Renders a job inside a real ComfyUI, twice: as it is, and with the VC Attention Patch node.

Runs under ComfyUI's Python, started by run_comfy.py; imports nothing of the demo, because ComfyUI's own names
must win. Nothing is written below ComfyUI's folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

NODE_ID = "VCAttentionPatch"
LOGGERS = ("VC Attention", "vc_attention")  # of nodes/ and of kernels/


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    boot(Path(job["comfyui"]), Path(job["base"]))

    import torch
    from safetensors.torch import load_file, save_file

    node = load_node(job["pack"])
    texts = load_file(job["texts"])
    log = KeptLog()
    with torch.inference_mode():
        model = load_model(job["checkpoint"], job["shift"])
        print("ComfyUI's attention", flush=True)
        exact, exact_s = timed(render, model, texts, job)
        print("VC Attention Patch", flush=True)
        patched = node.execute(model=model, **job["widgets"]).result[0]
        with log:
            low_bit, low_bit_s = timed(render, patched, texts, job)
    save_file({"exact": exact, "low_bit": low_bit}, job["latents"])
    facts = {
        "exact_s": exact_s,
        "low_bit_s": low_bit_s,
        "summary": log.text,
        "idle": log.warned or not log.text,
        "comfyui": comfyui_version(),
        "torch": torch.__version__,
        "dtype": str(model.model.get_dtype_inference()).removeprefix("torch."),
        "device": str(model.load_device),
    }
    Path(job["facts"]).write_text(json.dumps(facts), encoding="utf-8")


def boot(comfyui: Path, base: Path) -> None:
    """Make ComfyUI importable with ``base`` as its own directory."""
    sys.dont_write_bytecode = True
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or os.getcwd()).resolve() != here]
    sys.path.insert(0, str(comfyui))
    sys.argv = sys.argv[:1]
    os.chdir(base)

    import comfy.options
    import torch

    comfy.options.enable_args_parsing(False)
    from comfy.cli_args import args

    args.base_directory = str(base)
    args.cpu = not torch.cuda.is_available()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)

    import server

    # No server runs here; nodes that would talk to the browser find someone who listens to nothing.
    server.PromptServer.instance = SimpleNamespace(
        send_progress_text=lambda *args, **kwargs: None,
        send_sync=lambda *args, **kwargs: None,
        client_id=None,
        last_node_id=None,
    )


def load_node(pack: str):
    """The node's class, loaded as ComfyUI loads a folder of custom_nodes."""
    import nodes

    if not asyncio.run(nodes.load_custom_node(pack)):
        raise SystemExit(f"ComfyUI could not load {pack}: see the messages above")
    return nodes.NODE_CLASS_MAPPINGS[NODE_ID]


def load_model(checkpoint: str, shift: float):
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    import nodes

    model = nodes.UNETLoader().load_unet(checkpoint, "default")[0]
    return ModelSamplingSD3().patch(model, shift)[0]


def render(model, texts: dict, job: dict):
    """Through the KSampler node, from an empty latent; returned as the model sees latents."""
    import torch

    import nodes

    latents = nodes.KSampler().sample(
        model,
        job["seed"],
        job["steps"],
        job["guidance"],
        "euler",
        "simple",
        [[texts["prompt"], {}]],
        [[texts["negative"], {}]],
        {"samples": torch.zeros(job["latent_shape"])},
        1.0,
    )[0]["samples"]
    return model.model.latent_format.process_in(latents).float().cpu().contiguous()


def timed(function, *arguments):
    start = time.perf_counter()
    result = function(*arguments)
    return result, round(time.perf_counter() - start, 2)


def comfyui_version() -> str | None:
    try:
        from comfyui_version import __version__
    except ImportError:
        return None
    return __version__


class KeptLog(logging.Handler):
    """What the pack says about a render, kept while this is entered."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.text = ""
        self.warned = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
        self.warned = record.levelno >= logging.WARNING

    def __enter__(self) -> KeptLog:
        logging.getLogger("VC Attention").addHandler(self)
        return self

    def __exit__(self, *_exception) -> None:
        logging.getLogger("VC Attention").removeHandler(self)


if __name__ == "__main__":
    main()
