"""Optional methods of modules that graphs call.

They are looked up on the *class*, so that a parameter or child called ``step`` or ``reset`` is not mistaken for a
method:

    reset()                       clear kept values (before a loop's first iteration and in reset_state)
    detach_state()                detach kept values
    step(x, emit, **references)   one loop iteration that publishes traces
    structural_hash()             a hash of the module's structure
    check_keywords(keywords)      faults in the keyword arguments of `using`
    flodl_name                    prefix of its node ids
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def offered(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return the bound method ``name`` if the class of the module defines it, else None."""
    return getattr(module, name) if callable(getattr(type(module), name, None)) else None


def call_inside(module: nn.Module, name: str) -> None:
    """Call the method ``name`` of the nearest modules below that define it."""
    for child in module.children():
        method = offered(child, name)
        if method is not None:
            method()
        else:
            call_inside(child, name)
