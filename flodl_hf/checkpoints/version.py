"""Which version of this package runs, without anything else of it."""

from __future__ import annotations


def own_version() -> str:
    """Return this package's version, or that it runs from a checkout."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flodl-hf")
    except PackageNotFoundError:
        return "not installed"
