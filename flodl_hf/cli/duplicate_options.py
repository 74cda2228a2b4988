"""Commands with option aliases: conflicting values raise an error instead of the last one winning."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import typer
from typer.core import TyperCommand

__all__ = ["OnceCommand", "names_given"]


class OnceCommand(TyperCommand):
    """A command that takes each option under one name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments.

        Raises:
            typer.BadParameter: one option is given under two names, with different values.
        """
        options: list[Any] = self.params
        for option in options:
            said = names_given(option, args)
            if len({name for name, _ in said}) > 1 and len({value for _, value in said}) > 1:
                given = " and ".join(f"{name} {value}" for name, value in said)
                what = f" ({text.partition('. ')[0].rstrip('.')})" if (text := getattr(option, "help", None)) else ""
                raise typer.BadParameter(f"{given} are one option{what}; give it once", ctx=ctx, param=option)
        return super().parse_args(ctx, args)


def names_given(option: Any, args: Sequence[str]) -> list[tuple[str, str]]:
    """Return under which of its names an option with a value is given, and with which values."""
    found: list[tuple[str, str]] = []
    if getattr(option, "is_flag", True) or getattr(option, "count", False) or len(option.opts) < 2:
        return found
    words = list(args[: args.index("--")] if "--" in args else args)
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if name in option.opts:
            found.append((name, value if equals else after))
    return found
