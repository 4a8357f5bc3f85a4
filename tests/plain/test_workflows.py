"""The files of ``workflows/`` agree with themselves: a link stands in its table, at its source and at its target."""

import json
from pathlib import Path

import pytest

WORKFLOWS = sorted((Path(__file__).parents[2] / "workflows").glob("*.json"))


def ends_at_the_nodes(nodes: list[dict]) -> tuple[list[tuple], list[tuple]]:
    """(link, node, slot) of every output's and of every input's links."""
    sources = [
        (link, node["id"], slot)
        for node in nodes
        for slot, output in enumerate(node["outputs"])
        for link in output["links"] or ()
    ]
    targets = [
        (entry["link"], node["id"], slot)
        for node in nodes
        for slot, entry in enumerate(node["inputs"])
        if entry["link"] is not None
    ]
    return sorted(sources), sorted(targets)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_link_is_known_at_both_ends(path):
    workflow = json.loads(path.read_text(encoding="utf-8"))
    nodes, links = workflow["nodes"], workflow["links"]
    assert links
    sources, targets = ends_at_the_nodes(nodes)
    assert sources == sorted((link, source, slot) for link, source, slot, *_ in links)
    assert targets == sorted((link, target, slot) for link, _, _, target, slot, _ in links)
    assert len({node["id"] for node in nodes}) == len(nodes)
    assert len({link for link, *_ in links}) == len(links)
    assert workflow["last_node_id"] == max(node["id"] for node in nodes)
    assert workflow["last_link_id"] == max(link for link, *_ in links)
