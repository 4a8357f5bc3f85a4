"""Two small addresses on ComfyUI's server for the pack's page script."""

from __future__ import annotations

import logging

from .host import server
from .record import RECORD

LOGGERS = ("VC Attention", "vc_attention")  # of nodes/ and of kernels/, under whatever name they are imported
STATUS = "/vc_attention/status"
LOG_LEVEL = "/vc_attention/log_level"
LEVELS = {
    "default": logging.NOTSET,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}


def add_routes() -> None:
    """Add them where a server runs. A second copy of the pack in one process leaves them to the first."""
    routes = getattr(server(), "routes", None)
    if routes is None or any(getattr(route, "path", None) == STATUS for route in routes):
        return
    from aiohttp import web

    @routes.get(STATUS)
    async def last_statuses(request):
        return web.json_response({"statuses": RECORD.statuses()})

    @routes.post(LOG_LEVEL)
    async def log_level(request):
        try:
            level = (await request.json())["level"]
        except (ValueError, KeyError, TypeError):
            level = None
        if level not in LEVELS:
            return web.json_response({"error": f"level must be one of {', '.join(LEVELS)}, got {level!r}"}, status=400)
        for name in LOGGERS:
            logging.getLogger(name).setLevel(LEVELS[level])
        return web.json_response({"level": level})
