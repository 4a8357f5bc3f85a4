"""VC Attention, a ComfyUI node pack.

ComfyUI loads this folder as a package and finds ``comfy_entrypoint``. A test runner that imports the file bare
(``__package__`` is empty then) gets nothing: the relative import could not work.
"""

if __package__:
    from .nodes import comfy_entrypoint

    WEB_DIRECTORY = "./web"
    __all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
