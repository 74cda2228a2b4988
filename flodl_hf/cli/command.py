"""The class of all commands, which refuses conflicting values, and the messages of the library with its options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, ClassVar, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

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
