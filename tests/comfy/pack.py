"""The pack under test: a copy of the repository in a folder with a hyphen, as a user's clone has it, and its log."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

# PACK_SOURCE: test another checkout with these tests, for example a copy broken on purpose.
REPOSITORY = Path(os.environ.get("PACK_SOURCE") or Path(__file__).resolve().parents[2])
PARTS = (
    "__init__.py",
    "nodes",
    "kernels",
    "web",
    "locales",
    "workflows",
    "demo/weights",
    "pyproject.toml",
    "requirements.txt",
)
NODE_ID = "VCAttentionPatch"


def copy_pack(parent: Path, name: str = "vc-attention") -> Path:
    """Copy what ComfyUI would find in custom_nodes."""
    folder = parent / name
    folder.mkdir(parents=True)
    for part in PARTS:
        path = REPOSITORY / part
        if path.is_dir():
            shutil.copytree(path, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.exists():
            shutil.copy2(path, folder / part)
    return folder


def global_state(host) -> tuple:
    """What a pack must not replace in the process: attention functions, the launch flags, torch's own attention."""
    import torch

    attention = host.attention
    return (
        torch.nn.functional.scaled_dot_product_attention,
        attention.optimized_attention,
        attention.optimized_attention_masked,
        attention.attention_pytorch,
        attention.wrap_attn,
        *(site.optimized_attention for site in host.call_sites),
        sorted((key, repr(value)) for key, value in vars(sys.modules["comfy.cli_args"].args).items()),
    )


class Pack:
    """A loaded copy: its modules by identity, so that spies reach a function wherever the pack keeps a reference."""

    def __init__(self, host, folder: Path):
        self.host, self.folder = host, folder
        self.globals_before_loading = global_state(host)
        self.module, self.nodes = host.load_pack(folder)
        self.name = self.module.__name__

    def modules(self) -> list:
        return [m for name, m in list(sys.modules.items()) if name == self.name or name.startswith(self.name + ".")]

    @property
    def kernels(self):
        return sys.modules[self.name + ".kernels"]

    def owns(self, value) -> bool:
        """Whether ``value`` (a function or an object) is made by the pack's own code."""
        module = getattr(value, "__module__", None) or getattr(type(value), "__module__", "")
        return isinstance(module, str) and (module == self.name or module.startswith(self.name + "."))

    @contextmanager
    def replaced(self, **functions):
        """Put other functions in the place of public kernel functions, everywhere in the pack."""
        undo = []
        for name, replacement in functions.items():
            original = getattr(self.kernels, name)
            for module in self.modules():
                for key, value in list(vars(module).items()):
                    if value is original:
                        undo.append((module, key, original))
                        setattr(module, key, replacement)
        try:
            yield
        finally:
            for module, key, original in undo:
                setattr(module, key, original)

    def patch(self, model, unique_id="7", **widgets):
        """The node as the tests use it: the reference on every length, unless a widget says otherwise."""
        return self.host.run_node(NODE_ID, self.inputs(model, **widgets), unique_id)[0]

    def inputs(self, model, **widgets) -> dict:
        defaults = {
            "mode": "8-bit",
            "grouping_window": 0.25,
            "refresh_interval": 4,
            "start_percent": 0.0,
            "end_percent": 1.0,
            "skip_blocks": "",
            "clusters": 0,
            "implementation": "reference",
            "min_tokens": 0,
        }
        unknown = set(widgets) - set(defaults)
        if unknown:
            raise KeyError(f"the specification has no widgets {sorted(unknown)}")
        return {"model": model, **defaults, **widgets}

    @contextmanager
    def log(self):
        """Records that the pack's own code emits, at INFO and above, whatever logger and handlers it uses."""
        records, handle = [], logging.Logger.handle

        def catch(logger, record):
            if Path(record.pathname).is_relative_to(self.folder) and record.levelno >= logging.INFO:
                records.append(record)
            handle(logger, record)

        root, level = logging.getLogger(), logging.getLogger().level
        logging.Logger.handle = catch
        root.setLevel(logging.INFO)
        try:
            yield records
        finally:
            logging.Logger.handle = handle
            root.setLevel(level)
