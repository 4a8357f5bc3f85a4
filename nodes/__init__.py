"""ComfyUI's side of the pack. Importing it costs nothing; ComfyUI calls ``comfy_entrypoint`` for the nodes."""

import logging


async def comfy_entrypoint():
    """The pack's extension. ComfyUI shows an error from here as one line, so the traceback is logged first."""
    try:
        from .extension import build_extension

        return build_extension()
    except Exception:
        logging.getLogger("VC Attention").exception("VC Attention could not be loaded")
        raise
