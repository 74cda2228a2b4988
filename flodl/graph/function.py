"""Functions as modules, which a graph can name, draw, hash and copy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class Function(nn.Module):
    """Calls a function; `FlowBuilder` creates one for each callable that is not an ``nn.Module``.

    Args:
        function: called with the stream, for `merge` with all streams, and with the keyword arguments of `using`. A
            graph can be pickled only if its functions can: an importable function can, a lambda cannot.

    Attributes:
        flodl_name: the name of the function, prefix of the node id.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        plain = function
        while isinstance(plain, partial):
            plain = plain.func
        self.flodl_name = getattr(plain, "__name__", type(plain).__name__).strip("<>")

    def forward(self, *values: Any, **named: Any) -> Any:
        """Return ``function(*values, **named)``."""
        return self.function(*values, **named)

    def structure(self) -> str:
        """Return the identity of the function for structural hashes."""
        return _identity(self.function)

    def extra_repr(self) -> str:
        """Return the name of the function."""
        return self.flodl_name


def _identity(function: Any) -> str:
    if isinstance(function, partial):
        named = ", ".join(f"{name}={value!r}" for name, value in sorted(function.keywords.items()))
        return f"partial({_identity(function.func)}, {function.args!r}, {named})"
    named = function if hasattr(function, "__qualname__") else type(function)
    name = f"{named.__module__}.{named.__qualname__}"
    code = getattr(function, "__code__", None)
    if code is None or "<" not in name:
        return name
    # Lambdas and local functions share their names, so their bytecode identifies them.
    constants = [value for value in code.co_consts if isinstance(value, (bool, int, float, str, tuple, type(None)))]
    parts = repr((code.co_code, constants, code.co_names)).encode()
    return f"{name} {hashlib.sha256(parts).hexdigest()}"
