"""What ComfyUI gets from the pack: its nodes, and the two addresses of its page script."""

from __future__ import annotations

import logging

from comfy_api.latest import ComfyExtension, io

from .compare_node import VCAttentionCompare
from .demo_nodes import DEMO_NODES
from .patch import VCAttentionPatch
from .report_node import VCAttentionReport
from .routes import add_routes

NODES = (VCAttentionPatch, VCAttentionReport, VCAttentionCompare, *DEMO_NODES)

log = logging.getLogger("VC Attention")


class VCAttentionExtension(ComfyExtension):
    async def on_load(self) -> None:
        try:
            add_routes()
        except Exception:
            log.warning("the status will not come back after a page reload", exc_info=True)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return list(NODES)


def build_extension() -> VCAttentionExtension:
    """Builds the nodes' schemas once here, so that an incompatible ComfyUI shows up when the pack loads."""
    for node in NODES:
        node.define_schema()
    return VCAttentionExtension()
