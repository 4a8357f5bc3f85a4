"""The real ComfyUI behind the same interface as the double. One process holds one of the two.

Nothing is written below COMFYUI_PATH: ComfyUI's base directory is a scratch folder, byte code is not kept.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from . import checkpoints

TEXT_DIM = {"wan": 4096, "vace": 4096, "joint": 4096, "hv15": 3584, "h3": 5120}


def boot(path: Path, base: Path):
    """Make ComfyUI importable and import its core, on the CPU, with ``base`` as its own directory."""
    sys.dont_write_bytecode = True
    repository = Path(__file__).resolve().parents[2]
    # `python -m pytest` puts the repository on sys.path, where nodes/ would shadow ComfyUI's nodes.py.
    sys.path[:] = [p for p in sys.path if Path(p or os.getcwd()).resolve() != repository]
    sys.path.insert(0, str(path))
    os.chdir(base)
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        import comfy.options

        comfy.options.enable_args_parsing(False)
        from comfy.cli_args import args

        args.cpu = True
        args.base_directory = str(base)
        for name in ("comfy.samplers", "comfy.sd", "nodes", "server"):
            importlib.import_module(name)
    finally:
        sys.argv = arguments


class Real:
    name = "real"
    is_real = True
    kinds = ("wan", "joint", "hv15", "vace", "h3")
    blocks = {"wan": 2, "joint": 4, "hv15": 2, "vace": 6, "h3": 2}
    refiner_calls = {"wan": 0, "joint": 2, "hv15": 2, "vace": 0, "h3": 0}
    InputRefused = ValueError

    def __init__(self, path: Path, base: Path):
        self.path, self.base = path, base
        (base / "models" / "diffusion_models").mkdir(parents=True, exist_ok=True)
        (base / "custom_nodes").mkdir(exist_ok=True)
        boot(path, base)
        import comfy.ldm.flux.math
        import comfy.ldm.hunyuan_video.model
        import comfy.ldm.minimax.model
        import comfy.ldm.modules.attention
        import comfy.ldm.wan.model
        import comfy.model_management
        import comfy.patcher_extension
        import comfy.utils
        import server

        comfy.utils.PROGRESS_BAR_ENABLED = False
        self.attention = comfy.ldm.modules.attention
        self.extension = comfy.patcher_extension
        self.interrupt = SimpleNamespace(set=comfy.model_management.interrupt_current_processing)
        self.InterruptProcessingException = comfy.model_management.InterruptProcessingException
        self.call_sites = [
            comfy.ldm.wan.model,
            comfy.ldm.flux.math,
            comfy.ldm.hunyuan_video.model,
            comfy.ldm.minimax.model,
        ]
        self.texts, self.events, self._models, self.nodes = [], [], {}, {}

        def send(text, node_id, sid=None):
            self.texts.append((text, node_id))

        def send_event(event, data, sid=None):
            self.events.append((event, data))

        # No server runs in this process: what it would send is kept. test_server.py has a real one.
        server.PromptServer.instance = SimpleNamespace(
            send_progress_text=send, send_sync=send_event, client_id=None, last_node_id=None
        )

    def installed(self):
        from contextlib import nullcontext

        return nullcontext(self)

    def in_prompt(self, prompt_id: str, node_id: str = "5"):
        """What is done inside belongs to this prompt, as if its executor did it."""
        from comfy_execution.utils import CurrentNodeContext

        return CurrentNodeContext(prompt_id, node_id)

    # the pack ---------------------------------------------------------------------------------------------------

    def load_pack(self, folder: Path):
        import nodes

        before = set(nodes.NODE_CLASS_MAPPINGS)
        if not asyncio.run(nodes.load_custom_node(str(folder))):
            raise ImportError(f"ComfyUI could not load {folder}: see its log")
        self.nodes = {
            name: node
            for name, node in nodes.NODE_CLASS_MAPPINGS.items()
            if name not in before or str(getattr(node, "__module__", "")).startswith(str(folder).replace(".", "_x_"))
        }
        return sys.modules[str(folder).replace(".", "_x_")], self.nodes

    def _prompt(self, node_id, inputs):
        linked = {**inputs, "model": ["1", 0]}
        return {
            "1": {"class_type": "UNETLoader", "inputs": {"unet_name": self.file("wan"), "weight_dtype": "default"}},
            "7": {"class_type": node_id, "inputs": linked},
        }

    def validate(self, node_id: str, inputs: dict) -> list[str]:
        """ComfyUI's own check of a prompt; its error lines."""
        import execution

        prompt = self._prompt(node_id, inputs)
        valid, errors, _ = asyncio.run(execution.validate_inputs("test", prompt, "7", {}))
        if not valid and not errors:
            raise AssertionError("refused without an error")
        return [f"{e['type']}: {e['details']} {e['extra_info'].get('input_name')}" for e in errors]

    def run_node(self, node_id: str, inputs: dict, unique_id="7") -> tuple:
        """Validate, drop what the schema does not know and run, as the executor does."""
        import execution

        prompt = self._prompt(node_id, inputs)
        valid, errors, _ = asyncio.run(execution.validate_inputs("test", prompt, "7", {}))
        if not valid:
            raise self.InputRefused("; ".join(f"{e['type']}: {e['details']}" for e in errors))
        checked = {**prompt["7"]["inputs"], "model": inputs["model"]}
        data, _, v3 = execution.get_input_data(checked, self.nodes[node_id], unique_id)
        result = asyncio.run(
            execution._async_map_node_over_list(
                "test", unique_id, self.nodes[node_id], data, "EXECUTE_NORMALIZED", v3_data=v3
            )
        )
        return result[0].result

    def execute(self, node_id: str, inputs: dict, unique_id="7") -> tuple:
        from comfy_api.internal import make_locked_method_func
        from comfy_api.latest import io

        cls = self.nodes[node_id]
        cls.VALIDATE_CLASS()
        clone = cls.PREPARE_CLASS_CLONE({"hidden_inputs": {io.Hidden.unique_id: unique_id}})
        return make_locked_method_func(cls, "EXECUTE_NORMALIZED", clone)(**inputs).result

    # models and sampling ----------------------------------------------------------------------------------------

    def file(self, kind: str) -> str:
        name = checkpoints.build(kind, self.base / "models" / "diffusion_models")
        import folder_paths

        folder_paths.filename_list_cache.clear()
        return name

    def model(self, kind="wan"):
        import nodes

        if kind not in self._models:
            with torch.inference_mode():
                self._models[kind] = nodes.UNETLoader().load_unet(self.file(kind), "default")[0]
        return self._models[kind].clone()

    def set_shift(self, model, shift):
        from comfy_extras.nodes_model_advanced import ModelSamplingSD3

        return ModelSamplingSD3().patch(model, shift)[0]

    def select_attention(self, model, function):
        model = model.clone()
        model.set_model_optimized_attention(function)
        return model

    def cond(self, kind="wan", length=32, seed=0, **extra):
        generator = torch.Generator().manual_seed(1000 + seed)
        text = torch.randn(1, length, TEXT_DIM[kind], generator=generator)
        if kind in ("joint", "hv15"):
            extra["pooled_output"] = torch.zeros(1, 768) if kind == "joint" else None
        return [[text, extra]]

    def latent(self, kind="wan", batch=1, frames=3, size=16):
        if kind == "hv15":
            return torch.zeros(batch, 32, frames, size // 2, size // 2)
        return torch.zeros(batch, 16, frames, size, size)

    def noise(self, latent, seed):
        import comfy.sample

        return comfy.sample.prepare_noise(latent, seed)

    def sigmas(self, model, steps, denoise=1.0):
        import comfy.samplers

        whole = comfy.samplers.calculate_sigmas(
            model.get_model_object("model_sampling"), "simple", int(steps / denoise)
        )
        return whole[-(steps + 1) :]

    def sampler(self, name="euler"):
        import comfy.samplers

        return comfy.samplers.sampler_object(name)

    def guider(self, model, positive, negative, cfg=3.0):
        import comfy.samplers

        guider = comfy.samplers.CFGGuider(model)
        guider.set_conds(positive, negative)
        guider.set_cfg(cfg)
        return guider

    def run_guider(self, guider, latent, sigmas, sampler="euler", seed=1, noise=None, callback=None):
        noise = self.noise(latent, seed) if noise is None else noise
        kept = None if callback is None else (lambda i, denoised, x, total: callback(i, denoised))
        with torch.inference_mode():
            return guider.sample(
                noise, latent, self.sampler(sampler), sigmas, callback=kept, disable_pbar=True, seed=seed
            )

    def ksampler(
        self,
        model,
        positive,
        negative,
        latent,
        *,
        steps=4,
        cfg=3.0,
        sampler="euler",
        seed=1,
        denoise=1.0,
        start=None,
        last=None,
        add_noise=True,
    ):
        """Through the nodes KSampler and KSamplerAdvanced themselves."""
        import nodes

        latent = {"samples": latent}
        with torch.inference_mode():
            if start is None and last is None and add_noise:
                node = nodes.KSampler()
                out = node.sample(model, seed, steps, cfg, sampler, "simple", positive, negative, latent, denoise)
            else:
                node = nodes.KSamplerAdvanced()
                out = node.sample(
                    model,
                    "enable" if add_noise else "disable",
                    seed,
                    steps,
                    cfg,
                    sampler,
                    "simple",
                    positive,
                    negative,
                    latent,
                    0 if start is None else start,
                    10000 if last is None else last,
                    "disable" if last is None else "enable",
                )
        return out[0]["samples"]
