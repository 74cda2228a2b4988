"""``flodl-hf schema``: the options of a command as a JSON schema, for editors and other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from flodl.errors import ConfigError, nearest
from flodl_hf.cli.options import argument, with_parameters
from flodl_hf.cli.shared import emit_json, reporting

# A bool is an int, and a str a sequence, so the order matters.
TYPES = (
    (type(None), "null"), (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (Path, "string"),
    (Mapping, "object"), (Sequence, "array"),
)  # fmt: skip


@reporting
@with_parameters((argument("name", str, "COMMAND", "A command of flodl-hf.", "finetune"),))  # fmt: skip
def command(name: str) -> None:
    """Print the JSON schema of a command's options; for finetune the schema of a recipe.

    Editors with a YAML language server complete and check a recipe with it: write `flodl-hf schema > schema.json`, and
    `# yaml-language-server: $schema=schema.json` in the first line of the recipe.
    """
    emit_json(schema_of(name))


def parameters_of(name: str) -> list[Any]:
    """Return the options of a command, as click describes them.

    Raises:
        ConfigError: there is no such command, or it is a group of commands.
    """
    from flodl_hf.cli.app import NAMES, app_of

    if name not in NAMES:
        raise ConfigError(
            f"schema: found no command {name!r}{nearest(name, NAMES)}; expected one of {', '.join(NAMES)}",
            problems=[name],
        )
    group: Any = typer.main.get_command(app_of(name))
    found = group.commands[name]
    if hasattr(found, "commands"):
        raise ConfigError(f"schema: {name} is a group of commands, which has no options", problems=[name])
    return [option for option in found.params if option.param_type_name == "option"]


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a command's options, or of the recipes of ``finetune``."""
    options = {option.name: option for option in parameters_of(name)}
    function = import_module(f"flodl_hf.cli.{name.replace('-', '_')}").command
    properties = recipe_keys() if name == "finetune" else {}
    for key, hint in get_type_hints(function).items() if not properties else ():
        if (option := options.get(key)) is not None:
            properties[key_of(option)] = _kind(hint) | _about(option.help, option.default)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"flodl-hf {name}",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def key_of(option: Any) -> str:
    """Return the key of an option in YAML files: its first name, with underscores."""
    return option.opts[0].lstrip("-").replace("-", "_")


def recipe_keys() -> dict[str, Any]:
    """Return the schema of each key of a recipe of ``finetune``."""
    from flodl_hf.training.options import HINTS

    about = {option.name: option.help for option in parameters_of("finetune")}
    keys: dict[str, Any] = {
        "inherit-from": {"type": ["string", "array"]} | _about("The recipes that this one changes.", None),
        "model": _kind(str) | _about("A local folder or a Hub name.", None),
        "train": {"type": ["string", "object"]} | _about(about["train"], None),
        "eval": {"type": ["string", "object", "number"]} | _about(about["eval"], None),
        "out": _kind(str) | _about(about["out"], None),
        "overwrite": _kind(bool) | _about(about["overwrite"], False),
    }
    for name, (hint, row) in HINTS.items():
        among = row.metadata.get("among")
        keys[name] = ({"enum": [*among, None]} if among else _kind(hint)) | _about(row.metadata["help"], row.default)
    return keys


def _about(text: str | None, default: Any) -> dict[str, Any]:
    shown = {"default": default} if isinstance(default, (bool, int, float, str)) else {}
    return ({"description": text} if text else {}) | shown


def _kind(hint: Any) -> dict[str, Any]:
    """Return the schema of an annotation; nothing for a type that JSON does not have."""
    members = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
    origins = [get_origin(one) or one for one in members]
    if choices := [word for one in members if get_origin(one) is Literal for word in get_args(one)]:
        return {"enum": [*choices, None] if type(None) in members else choices}
    types = [next((word for kind, word in TYPES if _is(one, kind)), None) for one in origins]
    if None in types:
        return {}
    return {"type": types[0] if len(types) == 1 else list(dict.fromkeys(types))}


def _is(kind: Any, other: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, other)
