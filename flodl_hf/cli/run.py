"""``flodl-hf run``: named commands and presets of a project, from ``flodl-hf.yaml``."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from flodl.errors import ConfigError, nearest
from flodl_hf.cli.options import JSON, argument, option, with_parameters
from flodl_hf.cli.schema import key_of, parameters_of, recipe_keys
from flodl_hf.cli.shared import emit_json, reporting, say, tell

FILE = "flodl-hf.yaml"
WORDS = {str: "text", list: "a list", dict: "a map"}
KINDS: dict[str, type] = {"run": str, "command": str, "arguments": list, "options": dict, "help": str}
"""Keys of an entry with the types of their values."""
# Everything after the name belongs to the named command.
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


@reporting
@with_parameters((
    argument("name", str | None, "NAME", "The command; without it all are listed.", None),
    argument("arguments", list[str] | None, "ARGUMENT", "Passed on; they override the preset.", None),
    option("env", str, "Override with flodl-hf.ENV.yaml."),
    option("show", bool, "Print the command and the origin of each value.", default=False), JSON,
))  # fmt: skip
def command(name: str | None, arguments: list[str] | None, env: str | None, show: bool, json_output: bool) -> None:
    """Run a command that the project's flodl-hf.yaml names.

    The file is searched in the current folder and its parents. An entry of `commands:` contains `run:`, a line for the
    shell, or `command:`, a command of flodl-hf, with `arguments:` and `options:`. Commands run in the folder of the
    file. Options before NAME belong to `run`.
    """
    from flodl_hf.training.recipe import load_recipe

    file = _project_file(Path.cwd())
    recipe = load_recipe(file, env)
    commands = recipe.values.get("commands")
    if not isinstance(commands, dict) or not commands:
        raise ConfigError(f"{file}: found no map commands:, expected one entry for each command", problems=["commands"])
    for key, entry in commands.items():
        _check(file, key, entry)
    if name is None:
        if json_output:
            emit_json(commands)
            return
        width = max(map(len, commands))
        for key, entry in commands.items():
            tell(f"{key:<{width}}  {entry.get('help') or entry.get('run') or 'flodl-hf ' + entry['command']}")
        return
    if name not in commands:
        raise ConfigError(
            f"run: found no command {name!r} in {file}{nearest(name, commands)}; expected one of {', '.join(commands)}",
            problems=[name],
        )
    entry, given = commands[name], [word for word in arguments or [] if word != "--"]
    words: list[str] = []
    if "run" in entry:
        line = " ".join([entry["run"], *map(shlex.quote, given)])
        origins = {"run": recipe.origins[f"commands.{name}.run"]}
    else:
        words, origins = preset_words(file, name, entry, given)
        origins = {key: str(recipe.origins.get(path, file)) if path else "command line" for key, path in origins}
        line = shlex.join(["flodl-hf", *words])
    if json_output or show:
        if json_output:
            emit_json({"command": line, "folder": str(file.parent), "origins": origins})
        else:
            tell(line)
            for key, origin in origins.items():
                tell(f"  {key}  # {origin}")
        return
    say(line)
    os.chdir(file.parent)
    if "run" in entry:
        # The user's own file, as a Makefile is; nothing of a checkpoint or recipe gets here.
        raise typer.Exit(subprocess.run(["sh", "-c", line]).returncode)
    from flodl_hf.cli.app import app_for

    app_for(words)(words)


def preset_words(
    file: Path, name: str, entry: Mapping[str, Any], user_words: Sequence[str]
) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Return the words of a preset with the user's, and each option with the path of its value in the file.

    Args:
        file: the project file, for messages.
        name: of the preset.
        entry: ``command``, ``arguments`` and ``options``.
        user_words: the user's words. Options among them replace those of the preset.

    Raises:
        ConfigError: the preset contains an option that the command does not have.
    """
    known = {key_of(option): option for option in parameters_of(entry["command"])}
    user = {word.partition("=")[0] for word in user_words if word.startswith("-")}
    words: list[str] = []
    origins: list[tuple[str, str | None]] = []
    for key, value in (entry.get("options") or {}).items():
        option = known.get(key.replace("-", "_"))
        if option is None and entry["command"] == "finetune" and key.replace("-", "_") in recipe_keys():
            words += ["--set", f"{key.replace('-', '_')}={json.dumps(value)}"]
            origins.append((key, f"commands.{name}.options.{key}"))
            continue
        if option is None:
            raise ConfigError(
                f"{file}: commands.{name}.options.{key}: found an option that flodl-hf {entry['command']} does not "
                f"have{nearest(key, known)}; see flodl-hf {entry['command']} --help",
                problems=[key],
            )
        if user & {*option.opts, *option.secondary_opts}:
            origins.append((option.opts[0], None))
            continue
        words += _as_words(option, value)
        origins.append((option.opts[0], f"commands.{name}.options.{key}"))
    return [entry["command"], *words, *map(str, entry.get("arguments") or []), *user_words], origins


def _as_words(option: Any, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [option.opts[0]] if value else list(option.secondary_opts[:1])
    if isinstance(value, dict):
        value = ",".join(f"{key}={worth}" for key, worth in value.items())
    values = value if isinstance(value, list) else [value]
    return [word for one in values for word in (option.opts[0], one if isinstance(one, str) else json.dumps(one))]


def _project_file(folder: Path) -> Path:
    for place in (folder, *folder.parents):
        if (place / FILE).is_file():
            return place / FILE
    raise ConfigError(
        f"run: found no {FILE} in {folder} or its parents. Write one with commands:, for example\n"
        "commands:\n  quick:\n    command: finetune\n    options: {recipe: recipe.yaml, max_steps: 2}",
        problems=[FILE],
    )


def _check(file: Path, name: str, entry: Any) -> None:
    """Raise ConfigError for an entry of another form, an unknown key, or a command that does not exist."""
    from flodl_hf.cli.app import NAMES

    where = f"{file}: commands.{name}"
    if not isinstance(entry, dict) or ("run" in entry) == ("command" in entry):
        raise ConfigError(f"{where}: expected a map with either run: or command:", problems=[name])
    for key, value in entry.items():
        if key not in KINDS:
            raise ConfigError(f"{where}.{key}: unknown key{nearest(str(key), KINDS)}", problems=[key])
        if not isinstance(value, KINDS[key]):
            raise ConfigError(f"{where}.{key}: found {value!r}, expected {WORDS[KINDS[key]]}", problems=[key])
    # A command that runs this file again would never end; groups have no options.
    known = [command for command in NAMES if command not in ("run", "config", "runs")]
    if "command" in entry and entry["command"] not in known:
        raise ConfigError(
            f"{where}.command: found {entry['command']!r}{nearest(entry['command'], known)}; expected one of "
            f"{', '.join(known)}",
            problems=["command"],
        )
