"""What a module may offer beyond `forward`, and how a graph finds it.

All of it is optional and looked up on the *class*, so a parameter or child that happens to be called
``step`` or ``reset`` is never mistaken for a method:

    reset()                       begin anew (called before a loop's first iteration and by reset_state)
    detach_state()                cut the history of kept tensors
    step(x, emit, **references)   one loop iteration that publishes traces
    trace()                       one tensor to keep after each loop iteration
    as_graph()                    the graph inside a wrapper
    structural_hash()             a hash of the module's own structure
    check_keywords(keywords)      complaints about the keyword arguments that `using` would pass
    flodl_name                    prefix of its node ids
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["call_inside", "offered"]


def offered(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return the bound method ``name`` if the module's class defines it, else None."""
    return getattr(module, name) if callable(getattr(type(module), name, None)) else None


def call_inside(module: nn.Module, name: str) -> None:
    """Call the method ``name`` on the nearest modules below that have it, whatever holds them."""
    for child in module.children():
        method = offered(child, name)
        if method is not None:
            method()
        else:
            call_inside(child, name)
