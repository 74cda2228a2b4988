"""The library's messages in the words of the command line: ``text_column="review"`` as ``--text-column review``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from typer.models import OptionInfo

_VALUE = r"""(?:'[^']*'|"[^"]*"|\{[^{}]*\}|\[[^\[\]]*\]|\.\.\.|[\w+-]+(?:\.[\w+-]+)*)"""
_QUOTED = r"""(?<![\w=])(?:'[^']*'|"[^"]*")"""


def command_line(*words: Any) -> str:
    """Return words as a line that can be pasted into a shell, paths with spaces included."""
    return shlex.join(str(word) for word in words)


def option_names(command: Callable[..., Any]) -> dict[str, tuple[str, str | None]]:
    """Return the options of a command by parameter name: the option, and its negation for a switch.

    Args:
        command: a function whose parameters are annotated with ``typer.Option``.
    """
    named: dict[str, tuple[str, str | None]] = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            if isinstance(option, OptionInfo):
                flag = f"--{name.replace('_', '-')}"
                # typer takes the first word for a default until it reads the annotation.
                declared = (option.default, *(option.param_decls or ()))
                words = next((word for word in declared if isinstance(word, str) and word.startswith("--")), flag)
                yes, _, no = words.partition("/")
                named[name] = yes, no or None
                named.setdefault(yes[2:].replace("-", "_"), named[name])
    if "set" in named:
        from flodl_hf.training.options import HINTS

        named |= {name: (f"--set {name}=", None) for name in HINTS if name not in named}
    return named


def in_options(text: str, options: Mapping[str, tuple[str, str | None]]) -> str:
    """Return ``text`` with Python keywords replaced by options; quoted text stays unchanged.

    Args:
        text: a message of the library.
        options: what `option_names` returns.
    """
    if not options:
        return text
    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))

    def replaced(match: re.Match[str]) -> str:
        if match["name"] is None:
            return match[0]
        (yes, no), value = options[match["name"]], match["value"]
        if yes.endswith("="):
            return yes + (value.lower() if value in ("True", "False") else _plain(value) if value else "...")
        if value in ("True", "False"):
            return yes if value == "True" else no or match[0]
        return yes if value is None else f"{yes} {_plain(value)}"

    # Where a message gives both spellings already, one is enough.
    text = re.sub(rf"{_QUOTED}|(?<![\w.=/-])(?P<name>{names})=(?P<value>{_VALUE})?", replaced, text)
    return re.sub(r"(--[\w-]+) \((\1(?: \S+)?)\)", r"\2", text)


def begun_with_options(text: str, options: Mapping[str, tuple[str, str | None]]) -> str:
    """Return ``text`` with the names in lines ``name: fault`` replaced by options."""
    lines = [line.partition(": ") for line in text.split("\n")]
    named = [(head.strip(), head, colon + rest) for head, colon, rest in lines]
    return "\n".join(
        (head.replace(name, options[name][0].rstrip("=")) if rest and name in options else head) + rest
        for name, head, rest in named
    )


def _plain(value: str) -> str:
    """Return a Python value as a shell takes it: without quotes, maps as ``a=1,b=2``, lists as ``a,b``."""
    if value[0] not in "{[":
        return shlex.quote(_bare(value))
    parts = [part.partition(":") for part in value[1:-1].split(",")]
    return shlex.quote(
        ",".join("=".join(_bare(side) for side in (name, worth) if side.strip()) for name, _, worth in parts)
    )


def _bare(value: str) -> str:
    return value.strip().strip("'\"")
