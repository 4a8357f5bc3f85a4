"""VC-Attention: low-bit attention for video diffusion transformers, without retraining.

Public names load on first use; importing this package touches neither torch nor a GPU.
"""

from importlib import import_module

_HOME = {
    "attention": ".attend.api",
    "support": ".attend.api",
    "Support": ".attend.api",
    "sampled_error": ".attend.sampled",
    "group_values": ".group.api",
    "Grouping": ".group.api",
    "sampled_removed_energy": ".group.sampled",
    "InvalidArgument": ".errors",
    "UnsupportedCall": ".errors",
    "GroupingPolicy": ".schedule",
    "Schedule": ".schedule",
    "family": ".arch",
    "uses_grouping": ".arch",
    "implementation_names": ".dispatch",
}

__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str):
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return __all__
