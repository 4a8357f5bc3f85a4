"""The double's node interface: what a V3 node file imports from ``comfy_api.latest`` and nothing more.

Strict where ComfyUI is strict: an unknown keyword of an input or of the schema raises.
"""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

COMMON = {"display_name", "optional", "tooltip", "lazy", "extra_dict", "raw_link", "advanced"}
WIDGET = COMMON | {"default", "socketless", "force_input"}


def _input_class(io_type: str, allowed: set[str]):
    class Input:
        def __init__(self, id: str, *positional, **given):
            if positional:  # Combo takes its options there; the double wants it spelt out
                given["options"], *rest = positional
                if rest:
                    raise TypeError(f"{io_type}.Input {id!r}: spell keywords out")
            unknown = set(given) - allowed
            if unknown:
                raise TypeError(f"{io_type}.Input {id!r} got unexpected keywords {sorted(unknown)}")
            self.id = id
            self.io_type = io_type
            self.optional = bool(given.pop("optional", False))
            self.default = given.pop("default", None)
            self.options = given.pop("options", None)
            self.extra_dict = given.pop("extra_dict", None) or {}
            self.min, self.max = given.pop("min", None), given.pop("max", None)
            for name, value in given.items():
                setattr(self, name, value)
            self.tooltip = given.get("tooltip")
            self.advanced = given.get("advanced")
            self.is_widget = "default" in allowed

    return Input


def _output_class(io_type: str):
    class Output:
        def __init__(self, id=None, display_name=None, tooltip=None, is_output_list=False):
            self.id, self.display_name, self.tooltip = id, display_name or id, tooltip
            self.io_type, self.is_output_list = io_type, is_output_list

    return Output


def _io_type(name: str, io_type: str, allowed: set[str], value_type: type = object):
    return type(
        name, (), {"Type": value_type, "Input": _input_class(io_type, allowed), "Output": _output_class(io_type)}
    )


class Hidden(str, Enum):
    unique_id = "UNIQUE_ID"
    prompt = "PROMPT"
    extra_pnginfo = "EXTRA_PNGINFO"
    dynprompt = "DYNPROMPT"


class HiddenHolder:
    def __init__(self, values: dict):
        for name in Hidden:
            setattr(self, name.name, values.get(name))

    def __getattr__(self, name):  # as in ComfyUI: what was not asked for is None
        return None


@dataclass
class Schema:
    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    hidden: list = field(default_factory=list)
    description: str = ""
    search_aliases: list = field(default_factory=list)
    is_input_list: bool = False
    is_output_node: bool = False
    is_deprecated: bool = False
    is_experimental: bool = False
    is_dev_only: bool = False
    is_api_node: bool = False
    not_idempotent: bool = False
    enable_expand: bool = False
    accept_all_inputs: bool = False
    essentials_category: str | None = None
    has_intermediate_output: bool = False

    def check(self):
        ids = [item.id for item in self.inputs]
        if len(set(ids)) != len(ids):
            raise ValueError(f"input ids must be unique, got {ids}")


class NodeOutput:
    def __init__(self, *args: Any, ui=None, expand=None, block_execution=None):
        self.args, self.ui, self.expand, self.block_execution = args, ui, expand, block_execution

    @property
    def result(self):
        return self.args or None

    def __getitem__(self, index):
        return self.args[index]


class ComfyNode:
    hidden: HiddenHolder | None = None
    RELATIVE_PYTHON_MODULE = None
    SCHEMA = None

    @classmethod
    def define_schema(cls) -> Schema:
        raise NotImplementedError

    @classmethod
    def execute(cls, **kwargs):
        raise NotImplementedError

    @classmethod
    def GET_SCHEMA(cls) -> Schema:
        cls.SCHEMA = cls.define_schema()
        cls.SCHEMA.check()
        return cls.SCHEMA


class _Locked(type):
    """The class a node runs in refuses attributes: a node keeps no state on itself."""

    def __setattr__(cls, name, value):
        raise AttributeError(f"cannot set {name!r} on the class of a running node")


def run_v3(cls, unique_id: str, inputs: dict) -> tuple:
    """Run a node as the executor does: on a locked clone of its class that carries the hidden values."""
    values = {Hidden.unique_id: unique_id, Hidden.prompt: {}} if cls.GET_SCHEMA().hidden else {}
    allowed = set(cls.SCHEMA.hidden)
    hidden = HiddenHolder({name: value for name, value in values.items() if name in allowed})
    clone = _Locked(cls.__name__, (cls,), {"hidden": hidden, "__module__": cls.__module__})
    output = cls.execute.__func__(clone, **inputs)
    if asyncio.iscoroutine(output):
        output = asyncio.run(output)
    return output.args if isinstance(output, NodeOutput) else output


def validate_v3(cls, inputs: dict) -> tuple[dict, list[str]]:
    """What is checked before a prompt runs: the inputs the node will see, and one line per refused input."""
    seen, errors = {}, []
    for item in cls.GET_SCHEMA().inputs:
        if item.id not in inputs:
            if not item.optional:
                errors.append(f"required_input_missing: {item.id}")
            continue
        value = inputs[item.id]
        if not item.is_widget:
            seen[item.id] = value
            continue
        try:
            value = {"INT": int, "FLOAT": float, "STRING": str, "BOOLEAN": bool}.get(item.io_type, lambda v: v)(value)
        except (TypeError, ValueError) as error:
            errors.append(f"invalid_input_type: {item.id}, {value!r}: {error}")
            continue
        if item.min is not None and value < item.min:
            errors.append(f"value_smaller_than_min: {item.id}")
        if item.max is not None and value > item.max:
            errors.append(f"value_bigger_than_max: {item.id}")
        if item.io_type == "COMBO" and value not in item.options:
            errors.append(f"value_not_in_list: {item.id}: {value!r} not in {item.options}")
        seen[item.id] = value
    return seen, errors + _own_validation(cls, seen)


def _own_validation(cls, seen: dict) -> list[str]:
    """The node's validate_inputs gets the inputs it names, as far as the prompt holds them."""
    if "validate_inputs" not in vars(cls):
        return []
    wanted = inspect.getfullargspec(cls.validate_inputs)
    given = {name: value for name, value in seen.items() if wanted.varkw or name in wanted.args}
    answer = cls.validate_inputs(**given)
    return [] if answer is True else [f"custom_validation_failed: {', '.join(given)} - {answer}"]


class ComfyExtension:
    async def on_load(self) -> None:
        pass

    async def get_node_list(self) -> list:
        raise NotImplementedError


def make_io() -> SimpleNamespace:
    number = WIDGET | {"min", "max", "step", "control_after_generate", "display_mode"}
    return SimpleNamespace(
        Model=_io_type("Model", "MODEL", COMMON),
        Latent=_io_type("Latent", "LATENT", COMMON),
        Image=_io_type("Image", "IMAGE", COMMON),
        Conditioning=_io_type("Conditioning", "CONDITIONING", COMMON),
        Int=_io_type("Int", "INT", number, int),
        Float=_io_type("Float", "FLOAT", (number | {"round", "gradient_stops"}) - {"control_after_generate"}, float),
        String=_io_type("String", "STRING", WIDGET | {"multiline", "placeholder", "dynamic_prompts"}, str),
        Boolean=_io_type("Boolean", "BOOLEAN", WIDGET | {"label_on", "label_off"}, bool),
        Combo=_io_type("Combo", "COMBO", (WIDGET - {"force_input"}) | {"options", "control_after_generate"}, str),
        NumberDisplay=SimpleNamespace(number="number", slider="slider", gradient_slider="gradientslider"),
        Hidden=Hidden,
        Schema=Schema,
        NodeOutput=NodeOutput,
        ComfyNode=ComfyNode,
    )


class PreviewImage:
    """ComfyUI writes the batch below its temp folder; the double keeps its shape."""

    def __init__(self, image, animated: bool = False, cls=None, **kwargs):
        self.shape = tuple(image.shape)

    def as_dict(self):
        return {"images": [self.shape]}


class PreviewText:
    def __init__(self, value: str, **kwargs):
        self.value = value

    def as_dict(self):
        return {"text": (self.value,)}
