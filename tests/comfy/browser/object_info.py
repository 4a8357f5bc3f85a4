"""What the server's /object_info says about a node, held against the prompt that the frontend makes."""

from __future__ import annotations

ANY = ("*", "COMFY_MATCHTYPE_V3")
NUMBERS = {"INT": (int,), "FLOAT": (int, float)}


def specifications(node: dict) -> dict[str, list]:
    return {name: spec for part in ("required", "optional") for name, spec in node["input"].get(part, {}).items()}


def complaints(prompt: dict, object_info: dict) -> list[str]:
    """Every node, link and widget that the server would not take; empty when all fit."""
    found = []
    for key, node in prompt.items():
        where = f"{node['class_type']} {key}"
        info = object_info.get(node["class_type"])
        if info is None:
            found.append(f"{where}: the server has no such node")
            continue
        known = specifications(info)
        found += [
            f"{where}: {name} is missing" for name in info["input"].get("required", {}) if name not in node["inputs"]
        ]
        for name, value in node["inputs"].items():
            if name not in known:
                if name.partition(".")[0] not in known:
                    found.append(f"{where}: it has no input {name}")
            elif isinstance(value, list):
                found += _link(f"{where}.{name}", value, known[name], prompt, object_info)
            else:
                found += _value(f"{where}.{name}", value, known[name])
    return found


def _link(where, link, spec, prompt, object_info) -> list[str]:
    source, slot = link
    if source not in prompt:
        return [f"{where}: comes from the missing node {source}"]
    given = object_info[prompt[source]["class_type"]]["output"][slot]
    wanted = spec[0] if isinstance(spec[0], str) else "COMBO"
    if given in ANY or wanted in ANY or given in wanted.split(","):
        return []
    return [f"{where}: takes {wanted}, gets {given}"]


def _value(where, value, spec) -> list[str]:
    kind, options = spec[0], spec[1] if len(spec) > 1 else {}
    if isinstance(kind, list) or kind == "COMBO":
        choices = kind if isinstance(kind, list) else options["options"]
        return [] if value in choices else [f"{where}: {value!r} is not offered"]
    if kind == "COMFY_DYNAMICCOMBO_V3":
        return [] if value in [o["key"] for o in options["options"]] else [f"{where}: {value!r} is not offered"]
    if kind in NUMBERS:
        if not isinstance(value, NUMBERS[kind]) or isinstance(value, bool):
            return [f"{where}: {value!r} is no {kind}"]
        low, high = options.get("min", value), options.get("max", value)
        return [] if low <= value <= high else [f"{where}: {value!r} is not in {low} to {high}"]
    if kind == "BOOLEAN":
        return [] if isinstance(value, bool) else [f"{where}: {value!r} is no switch"]
    if kind == "STRING":
        return [] if isinstance(value, str) else [f"{where}: {value!r} is no text"]
    return [f"{where}: {kind} cannot be typed in, got {value!r}"]
