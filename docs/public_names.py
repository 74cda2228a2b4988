"""Sphinx extension: ``.. public:: MODULE`` documents every name in the ``__all__`` of a module.

It reads ``__all__`` with ``getattr``, so that names that are imported on demand are included. A name that another
public module documents becomes a short entry with a link. Private base classes are not shown; their members are.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

from docutils.nodes import Node
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.docutils import SphinxDirective

from flodl_hf.cli.docs import Parsed, exported, options_of, public_modules, public_names


@cache
def public() -> tuple[tuple[str, Any], ...]:
    """Return the public names with their objects."""
    return tuple(public_names())


class Public(SphinxDirective):
    """Entries of a module's public names."""

    required_arguments = 1

    def run(self) -> list[Node]:
        """Return the entries."""
        module = self.arguments[0]
        lines = [f".. py:module:: {module}", ""]
        values = dict(public())
        for name in exported(module):
            value = values.get(f"{module}.{name}")
            if isinstance(value, Parsed):
                lines += [*self.parsed(value), ""]
            else:
                lines += [*entry(module, name, getattr(import_module(module), name)), ""]
        return self.parse_text_to_nodes("\n".join(lines))

    def parsed(self, value: Parsed, kind: str = "") -> Iterator[str]:
        """Yield the entry of a name that is read from the source."""
        yield from (f".. py:{kind or value.kind}:: {value.name}{value.signature}", "")
        text = str(GoogleDocstring(value.description, self.config, what=kind or value.kind))
        yield from (f"   {line}" for line in text.splitlines())
        for member in value.members:
            yield from ("", *(f"   {line}" for line in self.parsed(member, "method")))


def entry(module: str, name: str, value: Any) -> Iterator[str]:
    """Yield the directive of a name."""
    full = f"{module}.{name}"
    kind = "class" if inspect.isclass(value) else "function" if inspect.isroutine(value) else "data"
    main = next((known for known, other in public() if other is value), full)
    if kind == "data":
        yield from (f".. autodata:: {full}", "   :no-value:")
    elif main != full:
        yield from (f".. py:{kind}:: {name}", "", f"   The same as :py:obj:`{main}`.")
    else:
        yield f".. auto{kind}:: {full}"
        if kind == "class":
            yield "   :members:"
            if any(base is other for _, other in public() for base in value.__bases__):
                yield "   :show-inheritance:"
            if any(base.__name__.startswith("_") for base in value.__mro__):
                shown = [base.__name__ for base in value.__mro__[1:] if not base.__name__.startswith("_")]
                yield f"   :inherited-members: {', '.join(shown)}"


def without_private_bases(app: Sphinx, name: str, value: Any, options: Any, bases: list[type[Any]]) -> None:
    """Remove base classes that are not public from the line of bases."""
    known = [other for _, other in public() if inspect.isclass(other)]
    bases[:] = [base for base in bases if base in known]


def with_options(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Append the descriptions of the options of a dataclass."""
    for option in options_of(value):
        lines += ["", f"``{option['name']}{option['default']}``", f"    {option['summary']}"]


def short_signature(app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, returned: str) -> Any:
    """Return a short signature for a class of options, which the description lists."""
    return ("(**options)", None) if any(options_of(value)) else None


def missing_names(inventory: bytes) -> list[str]:
    """Return the public names that a built ``objects.inv`` lacks."""
    # Four lines of text, then compressed lines: name, domain:role, priority, address, title.
    lines = zlib.decompress(inventory.split(b"\n", 4)[4]).decode().splitlines()
    entries = {line.split(" ", 1)[0] for line in lines if " py:" in line}
    names = [f"{module}.{name}" for module in public_modules() for name in exported(module)]
    return [name for name in names if name not in entries]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive and the hooks."""
    app.add_directive("public", Public)
    app.connect("autodoc-process-bases", without_private_bases)
    app.connect("autodoc-process-docstring", with_options)
    app.connect("autodoc-process-signature", short_signature)
    return {"parallel_read_safe": True}
