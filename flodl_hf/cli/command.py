"""The class of all commands: conflicting values of one option raise an error, and --help-all shows all options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand

from flodl_hf.checkpoints.keywords import DTYPE_SPELLINGS, PRECISION_SPELLINGS

SPELLINGS = {"--precision": PRECISION_SPELLINGS, "--dtype": DTYPE_SPELLINGS}
"""Further values of options."""
DATA = ("train", "eval", "data", "source", "corpus", "vectors")
"""Options of data. A repeated one raises an error; of other options, the last value applies."""


class StrictCommand(TyperCommand):
    """A command that takes each option under one name.

    Attributes:
        rare: names of parameters that ``--help`` leaves out and ``--help-all`` shows.
    """

    rare: ClassVar[frozenset[str]] = frozenset()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options in their groups; no name is cut, however narrow the terminal is."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            named = getattr(parameter, "rich_help_panel", None)
            group = named or ("Options" if parameter.param_type_name == "option" else "Arguments")
            if (record := parameter.get_help_record(ctx)) is not None:
                names, text = record
                # The description of an option with many choices lists them.
                names = names if len(names) < formatter.width - 2 else re.sub("<.*>", "<word>", names)
                groups.setdefault(group, []).append((names, text))
        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments.

        Raises:
            typer.BadParameter: one option is given under two names with different values, or data is given twice.
        """
        options: list[Any] = self.params
        for option in options:
            option.hidden = (option.hidden or option.name in self.rare) and "--help-all" not in args
        args = ["--help"] if "--help-all" in args else spelled(args)
        for option in options:
            names = names_given(option, args)
            if len({name for name, _ in names}) > 1 and len({value for _, value in names}) > 1:
                given = " and ".join(f"{name} {value}" for name, value in names)
                what = f" ({text.partition('. ')[0].rstrip('.')})" if (text := getattr(option, "help", None)) else ""
                raise typer.BadParameter(f"{given} are aliases{what}; pass only one", ctx=ctx, param=option)
            files = list(dict.fromkeys(value for _, value in names)) if option.name in DATA else []
            if len(files) > 1:
                raise typer.BadParameter(f"found {' and '.join(files)}; expected one value", ctx=ctx, param=option)
        return super().parse_args(ctx, args)


def spelled(args: Sequence[str]) -> list[str]:
    """Return the arguments with the usual spelling of each value in `SPELLINGS`; words after ``--`` are texts."""
    found: list[str] = []
    end = args.index("--") if "--" in args else len(args)
    for word in args[:end]:
        name, equals, value = word.partition("=")
        if equals and name in SPELLINGS:
            word = f"{name}={SPELLINGS[name].get(value, value)}"
        elif found and found[-1] in SPELLINGS:
            word = SPELLINGS[found[-1]].get(word, word)
        found.append(word)
    return [*found, *args[end:]]


def names_given(option: Any, args: Sequence[str]) -> list[tuple[str, str]]:
    """Return under which of its names an option with a value is given, and with which values."""
    found: list[tuple[str, str]] = []
    if getattr(option, "is_flag", True) or getattr(option, "count", False):
        return found
    words = list(args[: args.index("--")] if "--" in args else args)
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        short = (word[:2], word[2:], word[2:])  # -tFILE
        name, equals, value = word.partition("=") if word.startswith("--") else short
        if name in option.opts:
            found.append((name, value if equals else after))
    return found
