"""Translations: English is what the nodes say, every other language translates all of it and nothing else."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCALES = ROOT / "locales"
FILES = ("main.json", "nodeDefs.json", "settings.json")
OTHERS = sorted(folder.name for folder in LOCALES.iterdir() if folder.name != "en")
# What the frontend that ComfyUI 0.33 pins lets a user choose; a folder of another name is never shown.
OFFERED = {"en", "zh", "zh-TW", "ru", "ja", "ko", "fr", "es", "ar", "tr", "pt-BR", "fa", "he"}


def read(language: str, name: str) -> dict:
    return json.loads((LOCALES / language / name).read_text(encoding="utf-8"))


def texts(tree: dict, path=()) -> dict[tuple, str]:
    found = {}
    for key, value in tree.items():
        found |= texts(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
    return found


def said_by(schema) -> dict:
    """A node's strings in the form of nodeDefs.json."""
    said = {"display_name": schema.display_name, "description": schema.description, "inputs": {}, "outputs": {}}
    for item in schema.inputs:
        said["inputs"][item.id] = {"name": item.id, **({"tooltip": item.tooltip} if item.tooltip else {})}
    for index, item in enumerate(schema.outputs):
        if item.display_name:
            tip = {"tooltip": item.tooltip} if item.tooltip else {}
            said["outputs"][str(index)] = {"name": item.display_name, **tip}
    return said if said["outputs"] else {key: value for key, value in said.items() if key != "outputs"}


def test_english_is_what_the_nodes_say(pack):
    schemas = [node.GET_SCHEMA() for node in pack.nodes.values()]
    assert read("en", "nodeDefs.json") == {schema.node_id: said_by(schema) for schema in schemas}


def test_there_is_another_language_and_the_frontend_offers_it():
    assert OTHERS
    assert set(OTHERS) <= OFFERED


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("name", FILES)
def test_every_text_is_translated(language, name):
    english, other = texts(read("en", name)), texts(read(language, name))
    assert other.keys() == english.keys()
    for key, text in other.items():
        assert text.strip(), key
        assert sorted(re.findall(r"\{\w+\}", text)) == sorted(re.findall(r"\{\w+\}", english[key])), key


def test_script_and_english_locale_say_the_same():
    script = (ROOT / "web" / "js" / "vc_attention.js").read_text(encoding="utf-8")
    (block,) = re.findall(r"const ENGLISH = \{(.*?)\};", script, re.DOTALL)
    assert dict(re.findall(r'(\w+): "(.*?)",', block)) == read("en", "main.json")["vcAttention"]
    (levels,) = re.findall(r"const LEVELS = \{(.*?)\};", script)
    options = read("en", "settings.json")["VCAttention_LogLevel"]["options"]
    assert re.findall(r'\w+: "(.*?)"', levels) == list(options)


def test_script_knows_the_server_s_log_levels(pack):
    script = (ROOT / "web" / "js" / "vc_attention.js").read_text(encoding="utf-8")
    (levels,) = re.findall(r"const LEVELS = \{(.*?)\};", script)
    routes = next(m for m in pack.modules() if m.__name__.endswith(".nodes.routes"))
    assert re.findall(r"(\w+): ", levels) == list(routes.LEVELS)


def test_every_node_has_a_help_page(pack):
    for node_id in pack.nodes:
        page = (pack.folder / "web" / "docs" / f"{node_id}.md").read_text(encoding="utf-8")
        assert page.startswith("# "), node_id
        for item in pack.nodes[node_id].GET_SCHEMA().inputs:
            assert item.id in page, (node_id, item.id)


def test_every_node_is_found_under_other_names(pack):
    for node in pack.nodes.values():
        aliases = node.GET_SCHEMA().search_aliases
        assert len(aliases) >= 3
        assert len(set(aliases)) == len(aliases)


def test_readme_lists_every_setting_with_its_default(pack):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| setting \| default \|.*\n\|[- |]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    listed = {}
    for names, defaults, _ in (re.split(r" \| ", row.strip("| "), maxsplit=2) for row in table.splitlines()):
        listed |= dict(zip(re.findall(r"`(\w+)`", names), defaults.split(", "), strict=True))
    inputs = [item for item in pack.nodes["VCAttentionPatch"].GET_SCHEMA().inputs if item.id != "model"]
    said = {item.id: f"{item.default:g}" if isinstance(item.default, (int, float)) else item.default for item in inputs}
    assert listed == {**said, "skip_blocks": "none"}
    assert said["skip_blocks"] == ""
    assert list(listed) == [item.id for item in inputs]
