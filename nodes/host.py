"""What the pack asks of the ComfyUI around it. Every answer may be None: the nodes also run without a server."""

from __future__ import annotations

import logging
import sys

UNNAMED = "00000000-0000-0000-0000-000000000000"  # of a graph that was just cleared; a reload gives it another

log = logging.getLogger("VC Attention")


def server():
    """The running PromptServer."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def prompt_id() -> str | None:
    """The prompt that is being executed, asked from inside a node or a sampling run."""
    try:
        return sys.modules["comfy_execution.utils"].get_executing_context().prompt_id
    except (KeyError, AttributeError):
        return None


def workflow_id(prompt: str | None) -> str | None:
    """The id of the workflow a running prompt was queued from; None for a prompt sent as bare API text.

    Node ids repeat from workflow to workflow; with this the browser puts a status on the right one.
    """
    try:
        workflow = _extra_data(prompt)["extra_pnginfo"]["workflow"]["id"]
        return None if workflow == UNNAMED else workflow
    except Exception:
        log.debug("this prompt names no workflow", exc_info=True)
        return None


def client_id(prompt: str | None) -> str | None:
    """Who queued a running prompt: an open page, or a program; None where it did not say."""
    try:
        return _extra_data(prompt).get("client_id")
    except Exception:
        log.debug("this prompt names no client", exc_info=True)
        return None


def _extra_data(prompt: str | None) -> dict:
    """What was sent along with a running prompt."""
    running, _ = server().prompt_queue.get_current_queue_volatile()
    return next(item[3] for item in running if item[1] == prompt)


def stop_if_interrupted() -> None:
    """Lets a user's cancel through in a long computation outside a sampler."""
    check = getattr(sys.modules.get("comfy.model_management"), "throw_exception_if_processing_interrupted", None)
    if check is not None:
        check()


def send_text(text: str, node_id: str | None) -> None:
    """Text under a node in the browser."""
    _send("send_progress_text", node_id, text, node_id)


def send_event(event: str, data: dict, node_id: str | None) -> None:
    """A message about a node to every open page."""
    _send("send_sync", node_id, event, data)


def _send(method: str, node_id: str | None, *args) -> None:
    """A render is never lost to a message."""
    to = server()
    if to is None or node_id is None:
        return
    try:
        getattr(to, method)(*args)
    except Exception:
        log.debug("%s failed", method, exc_info=True)
