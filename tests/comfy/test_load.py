"""Loading: the folder, the schema, what the pack may not touch."""

import re

import pytest

from .pack import NODE_ID, global_state
from .watch import watching

WIDGETS = [
    ("mode", "COMBO", "auto"),
    ("grouping_window", "FLOAT", 0.25),
    ("refresh_interval", "INT", 4),
    ("start_percent", "FLOAT", 0.0),
    ("end_percent", "FLOAT", 1.0),
    ("skip_blocks", "STRING", ""),
    ("clusters", "INT", 0),
    ("implementation", "COMBO", "auto"),
    ("min_tokens", "INT", None),
]


def schema(pack):
    return pack.nodes[NODE_ID].GET_SCHEMA()


def test_the_pack_loads_from_a_folder_with_a_hyphen(pack):
    assert "-" in pack.folder.name
    assert "." not in pack.name
    assert NODE_ID in pack.nodes


def test_node_has_the_specified_name_and_widgets_in_order(pack):
    """Saved workflows keep widget values by position: the order is part of the contract."""
    found = schema(pack)
    assert (found.node_id, found.display_name) == (NODE_ID, "VC Attention Patch")
    assert found.inputs[0].id == "model"
    widgets = [(i.id, i.get_io_type() if hasattr(i, "get_io_type") else i.io_type, i.default) for i in found.inputs[1:]]
    for (name, kind, default), (want_name, want_kind, want_default) in zip(widgets, WIDGETS, strict=True):
        assert (name, kind) == (want_name, want_kind)
        if want_default is not None:
            assert default == want_default, name
    assert len(found.outputs) == 1


def test_drop_downs_offer_the_specified_choices(pack):
    options = {i.id: i.options for i in schema(pack).inputs if getattr(i, "options", None)}
    assert options["mode"] == ["auto", "8-bit", "4-bit", "off", "8-bit precise"]
    # A named GPU implementation may stand between the two; saved workflows hold the names.
    assert options["implementation"][0] == "auto"
    assert "reference" in options["implementation"]
    assert set(options) == {"mode", "implementation"}


def test_a_tooltip_explains_every_choice(pack):
    """A line of it begins with the choices it is about: ``cuda (H100, H200), triton8 (8-bit): ...``."""
    for widget in schema(pack).inputs[1:]:
        heads = [line.partition(":")[0] for line in widget.tooltip.splitlines()]
        explained = {name for head in heads for name in re.sub(r" \(.*?\)", "", head).split(", ")}
        assert set(getattr(widget, "options", None) or []) <= explained, widget.id


def test_every_widget_has_a_tooltip(pack):
    silent = [i.id for i in schema(pack).inputs[1:] if not (i.tooltip and len(i.tooltip) > 20)]
    assert silent == []


def test_node_asks_for_its_id(pack):
    """Without the hidden unique_id no text reaches the node."""
    assert "UNIQUE_ID" in [str(getattr(h, "value", h)) for h in schema(pack).hidden]


def test_loading_and_rendering_change_nothing_global(host, pack, conds):
    """B013, B023: nothing is replaced process-wide, not by import, not by a render, not by a failed render."""
    before = pack.globals_before_loading
    assert global_state(host) == before
    fresh = host.load_pack(pack.folder)
    host.load_pack(pack.folder)  # a second load of the same folder, as the manager's "reload" does
    assert fresh is not None
    assert global_state(host) == before
    patched = pack.patch(host.model())
    host.ksampler(patched, *conds, host.latent(), steps=1)
    assert global_state(host) == before
    with watching(host, pack) as watch:
        watch.before = lambda call: {}["a failed render"]
        with pytest.raises(KeyError, match="a failed render"):
            host.ksampler(patched, *conds, host.latent(), steps=1)
    assert global_state(host) == before


def test_loaded_pack_comes_from_the_copy(pack):
    """The tests would mean nothing if an installed or checked-out copy were imported instead."""
    files = [m.__file__ for m in pack.modules() if getattr(m, "__file__", None)]
    assert files
    assert all(str(pack.folder) in f for f in files)
