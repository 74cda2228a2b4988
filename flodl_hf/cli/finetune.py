"""``flodl-hf finetune``: train a model from a checkpoint and a file of examples.

The options are generated from the table `flodl_hf.training.Options`, so that both always agree.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import typer

from flodl.errors import ConfigError, nearest
from flodl.verbosity import Verbosity, verbosity
from flodl_hf.checkpoints.keywords import PRECISION_SPELLINGS
from flodl_hf.checkpoints.weights.prefetch import prefetching
from flodl_hf.cli import STARTED
from flodl_hf.cli.command import StrictCommand, command_line
from flodl_hf.cli.options import HELP_ALL, JSON, TIMING, argument, complete_task, option, task_word, with_parameters
from flodl_hf.cli.shared import check_places, emit, emit_json, reporting, say, say_timing, tell, training_said
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.training.options import HINTS, SCHEDULES

if TYPE_CHECKING:
    from flodl_hf.training.result import FinetuneResult

ANY_PORT = "any"
SHOWN = ("task", "folder", "metrics", "steps", "best_step", "seconds", "recorded", "summed")
"""What ``--json`` prints of a finished run."""
GROUPS = {
    "task": "Task and data",
    "labels": "Task and data",
    "max_length": "Steps and batches",
    "epochs": "Steps and batches",
    "lr": "Learning",
    "precision": "Arithmetic and speed",
    "gradient_checkpointing": "Arithmetic and speed",
    "eval_every": "Evaluation",
    "concatenate": "Masked words and answers",
    "generator": "Masked words and answers",
    "vector_loss": "Vectors",
    "guide": "Vectors",
    "trackers": "Trackers and traces",
    "save_every": "Checkpoints",
    "devices": "Devices",
    "revision": "The Hub",
}
"""Groups of options in help, in their order there, each by the options that begin it in the table of options."""
SHOWN_IN_HELP = (
    *("model", "data", "train", "eval", "out", "overwrite", "recipe", "set", "dry_run", "dashboard", "help_all"),
    *("task", "columns", "epochs", "batch_size", "max_length", "lr", "lora", "precision", "seed", "metric"),
    *("early_stopping", "resume", "devices"),
)
"""What ``--help`` shows; ``--help-all`` shows all options."""
IN_PARTS = (
    *("columns", "schedule_options", "loss_options", "matryoshka", "class_weights", "labels", "freeze", "devices"),
)
"""Options that may be given several times, a bit each."""
LISTS = ("labels", "freeze", "trackers", "matryoshka")
TASK: dict[str, Any] = {
    "metavar": "|".join(head.short for head in HEADS[1:6]) + "|...",
    "parser": task_word,
    "autocompletion": complete_task,
}
SHORT = {"epochs": "-e", "batch_size": "-b", "devices": "--device"}


def _loading(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of loading the model; without the device if worker processes select it."""
    devices = values.get("devices")
    device = "auto" if devices is None else devices if isinstance(devices, str) and devices != "auto" else None
    return {"device": device, "mapped": values.get("shard") is not None}


def _run(values: dict[str, Any], arguments: Mapping[str, Any]) -> None:
    """Run the requested training; ``values`` as in recipes, ``arguments`` the command line."""
    from flodl.distributed.group import is_first_rank
    from flodl_hf.training.run import finetune

    name = values.pop("model")
    data = {"train": train_data(values.pop("train")), "eval": eval_data(values.pop("eval", None))}
    target, trial = values.pop("out", None), arguments["dry_run"] or arguments["find_lr"]
    overwrite = bool(values.pop("overwrite", False)) or arguments["overwrite"]
    if target is None and not trial:
        target = usual_folder(name, again=bool(values.get("resume")) or overwrite)
        if is_first_rank():
            say(f"the model will be written to {target}; --out DIR names another folder")
    monitor = None if trial else _monitor(arguments["dashboard"], arguments["dashboard_control"])
    if not is_first_rank():
        finetune(name, **data, out=target, overwrite=overwrite, monitor=monitor, **values)
        return
    training_said(values.get("devices"))
    if trial:
        _try(arguments, name, data, values)
        return
    imported = time.perf_counter() - STARTED
    if data["eval"] is None:
        say("no --eval was given: nothing will be measured, and the last model is kept")
    result = finetune(
        name,
        **data,
        out=target,
        overwrite=overwrite,
        progress=None if verbosity() == Verbosity.QUIET else True,
        monitor=monitor,
        **values,
    )
    record = getattr(monitor, "folder", None)
    if record is not None:
        say("look at this run again: " + command_line("flodl-hf", "runs", "serve", record))
    if result.recorded is not None:
        say(f"steps: {result.recorded}")
    if result.summed is not None:
        say(f"gradients: summed by {result.summed}")
    _report(name, result, arguments["json_output"])
    if arguments["timing"]:
        say_timing({"import": imported, **result.timing})


def _values(arguments: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged values of a recipe and the command line; the latter wins.

    Args:
        arguments: the command line.
        options: its options of the training.

    Raises:
        ConfigError: neither names a model and data, or an environment's file has no recipe to override.
    """
    values: dict[str, Any] = {}
    recipe, env = arguments["recipe"], arguments["env"]
    if recipe is not None:
        from flodl_hf.training.recipe import load_recipe

        values = load_recipe(recipe, env).values
    elif env is not None:
        raise ConfigError(
            "--env: found no --recipe; expected the recipe that the environment's file overrides",
            problems=["env"],
        )
    named = {name: arguments[name] for name in ("model", "train", "eval", "out")}
    named["train"] = named["train"] or arguments["data"]
    values |= {name: value for name, value in {**named, **options}.items() if value is not None}
    absent = [name for name in ("model", "train") if values.get(name) is None]
    if absent:
        nouns = [{"train": "training data"}.get(name, name) for name in absent]
        meant = [f"; the recipe has {name!r}{hint}" for name in values if (hint := nearest(name, absent))]
        raise ConfigError(
            f"finetune: found no {' and no '.join(nouns)}{''.join(meant)}; give MODEL and --train, or a --recipe that "
            "names them",
            problems=absent,
        )
    return values


def _report(model: str, result: FinetuneResult, json_output: bool) -> None:
    """Print the results of a run, and the next steps."""
    from flodl_hf.checkpoints.folders import ADAPTER_CONFIG

    if json_output:
        found = result.to_dict()
        emit_json({name: found[name] for name in SHOWN})
        return
    for figure, value in result.metrics.items():
        tell(f"{figure:<20} {value:.4f}")
    tell(f"written to {result.folder} (step {result.best_step} of {result.steps}, {result.seconds:.0f} s)")
    assert result.folder is not None
    if result.generator is not None:
        say(f"the generator is in {result.folder / 'generator'}")
    if (result.folder / ADAPTER_CONFIG).is_file():
        merge = command_line("flodl-hf", "merge", model, result.folder, "--out", "DIR")
        say(f"the adapter and its head alone; for a whole model: {merge}")
    else:
        say("check it: " + command_line("flodl-hf", "verify-export", result.folder, "--no-source"))


def usual_folder(model: str | Path, again: bool = False) -> Path:
    """Return the default output folder of a run: in the current folder, with the model's name.

    An existing model, or checkpoints of an interrupted run, stay unchanged: a number is appended, from 2 on.

    Args:
        model: the model to train.
        again: return the newest existing folder, to resume or replace it.
    """
    name = str(model).partition("@")[0] if not Path(model).exists() else str(Path(model).resolve())
    usual = f"{Path(name).name or 'model'}-finetuned"
    free: Path = Path(usual)
    taken: Path | None = None
    for number in count(2):
        if not _is_taken(free):
            break
        taken, free = free, Path(f"{usual}-{number}")
    return taken if again and taken is not None else free


def _is_taken(folder: Path) -> bool:
    """Return whether a run has written to a folder, or to its checkpoint folder."""
    kept = (folder, Path(f"{folder}.checkpoints"))
    return any(os.path.lexists(place) and not (place.is_dir() and not any(place.iterdir())) for place in kept)


def _try(arguments: Mapping[str, Any], model: str, data: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Do a dry run or search a learning rate, and print the result."""
    from flodl_hf.training import dry_run, find_lr

    if arguments["dry_run"]:
        found: Any = dry_run(model, **data, **values)
        text = str(found)
    else:
        found = find_lr(model, **data, **values)
        rates = f"{found.rates[0]:.1e} to {found.rates[-1]:.1e}"
        best = "the loss did not fall" if found.suggestion is None else f"try --lr {found.suggestion:.1e}"
        text = f"{len(found.rates)} steps at rates of {rates}, lowest loss {min(found.smoothed):.4f}: {best}"
    emit(found.to_dict(), text, arguments["json_output"])


def _monitor(dashboard: str | None, control: bool) -> Any:
    """Return the monitor for ``--dashboard``, with its page open; None on other ranks, or without the option.

    Raises:
        ConfigError: control without a page.
        TrainError: the port is taken.
    """
    if dashboard is None:
        if control:
            raise ConfigError("--dashboard-control: there is no --dashboard that it could be of", problems=["control"])
        return None
    from flodl.distributed.group import is_first_rank
    from flodl.monitor import Monitor

    if not is_first_rank():
        return True  # each rank tells of its work, the first one shows it
    monitor = Monitor(quiet=True)
    url = monitor.serve(None if dashboard == ANY_PORT else int(dashboard), control=control)
    say(f"watch this run at {url}")
    return monitor


class Command(StrictCommand):
    """The command; ``--dashboard`` takes an optional port."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, with a default port; options without a flag raise an error."""
        filled: list[str] = []
        for place, word in enumerate(args):
            name = word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
            if word.startswith("--") and name in HINTS and not HINTS[name][1].metadata["cli"]:
                raise typer.BadParameter(f"{word}: this option has no flag; use --set {name}=...", ctx=ctx)
            filled.append(word)
            if word == "--dashboard" and not "".join(args[place + 1 : place + 2]).isdecimal():
                filled.append(ANY_PORT)
        return super().parse_args(ctx, filled)


def train_data(text: Any) -> Any:
    """Return the value of ``--train``: a file, or named files."""
    return text if not isinstance(text, str) or Path(text).exists() or "=" not in text else dict(_pairs("train", text))


def eval_data(text: Any) -> Any:
    """Return the value of ``--eval``: a file, a share or number of training rows, or named files."""
    if not isinstance(text, str) or Path(text).exists():
        return text
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return dict(_pairs("eval", text)) if "=" in text else text


# ---- the options of the command, from the table of options ------------------------------------------------


def parse(name: str, text: Any) -> Any:
    """Return the value of an option that was written as text: ``a=1,b=2`` for maps, ``a,b`` for lists.

    Maps and lists may also be given bit by bit, one option for each.

    Raises:
        ConfigError: the text is no map, or gives one name two values.
    """
    if isinstance(text, (list, tuple)):
        text = ",".join(text) or None
    if name in LISTS and text:
        parts = [text] if isinstance(text, str) else list(text)
        return [word.strip() for part in parts for word in part.split(",") if word.strip()] or None
    if not isinstance(text, str):
        return text
    if name == "prompts" and text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            raise ConfigError(f"--prompts: found {text!r}, expected JSON", problems=[name]) from None
    is_map = name in ("columns", "schedule_options", "loss_options")
    if is_map or (name in ("vector_loss", "prompts") and "=" in text):
        return dict(_pairs(name, text))
    if name == "class_weights":
        if "=" in text:
            return {key: float(value) for key, value in _pairs(name, text)}
        return text if text == "balanced" else [float(part) for part in text.split(",")]
    if name == "devices":
        if text.isdecimal():
            return int(text)
        return text.split(",") if "," in text else text
    return text


def _pairs(name: str, text: str) -> list[tuple[str, str]]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(key and equals and value for key, equals, value in pairs):
        raise ConfigError(
            f"--{name.replace('_', '-')}: found {text!r}; expected name=value,name=value", problems=[name]
        )
    found = [(key.strip(), value if name == "prompts" else value.strip()) for key, _, value in pairs]
    twice = sorted({key for key, value in found for other, another in found if key == other and value != another})
    if twice:
        raise ConfigError(
            f"--{name.replace('_', '-')}: found several values for {', '.join(twice)} in {text!r}; expected one each",
            problems=twice,
        )
    return found


def _set_values(texts: Sequence[str]) -> dict[str, Any]:
    """Return the options that ``--set NAME=VALUE`` sets; values are YAML."""
    import yaml

    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            if not name or not equals:
                raise ValueError
            read = {name.replace("-", "_"): yaml.safe_load(value)}
        except (yaml.YAMLError, ValueError):
            raise ConfigError(f"--set: found {text!r}, expected name=value with YAML", problems=["set"]) from None
        if twice := [name for name, value in read.items() if _differ(found.get(name), value)]:
            raise ConfigError(f"--set: found several values for {twice[0]}; expected one", problems=twice)
        found |= read
    return found


def _differ(before: Any, value: Any) -> bool:
    """Return whether an option has another value than before; a list of changes may extend ``--resume``."""
    if before is None or (before is True and isinstance(value, list)):
        return False
    pair = [PRECISION_SPELLINGS.get(str(one), str(one)) for one in (before, value)]
    with suppress(ValueError):
        return float(pair[0]) != float(pair[1])  # YAML reads 1e-4 as text
    return pair[0] != pair[1]


def option_parameters(names: Container[str]) -> list[inspect.Parameter]:
    """Return a parameter of a command for each of these rows of the table of options."""
    group = ""
    groups: dict[str, list[inspect.Parameter]] = {name: [] for name in GROUPS.values()}
    for name, (hint, row) in HINTS.items():
        group = GROUPS.get(name, group)
        if name not in names:
            continue
        flag = "--" + name.replace("_", "-")
        kind, shown = _kind(hint, name, row.metadata.get("among")), _default(row.default)
        kind = list[str] if name in IN_PARTS else kind
        flags = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag, *([SHORT[name]] if name in SHORT else [])]
        text = row.metadata["help"] + (f" (default {shown})" if shown else "")
        bounds: dict[str, Any] = {word: row.metadata.get(key) for word, key in (("min", "least"), ("max", "most"))}
        more = TASK if name == "task" else bounds if kind in (int, float) else {}
        groups[group].append(option(name, kind, text, *flags, panel=group, show_default=False, **more))
    return [*chain(*groups.values())]


def _kind(hint: Any, name: str, among: tuple[str, ...] | None) -> Any:
    """Return the type of an option's text; maps, lists and choices of several types are texts first."""
    among = tuple(SCHEDULES) if name == "schedule" else among
    if among:
        return Literal[among]
    kinds = [k for k in (get_args(hint) or (hint,)) if k in (bool, int, float, str)]
    if bool in kinds:
        return bool
    if hint == Sequence[str]:
        return list[str]
    return kinds[0] if len(kinds) == 1 and "Sequence" not in str(hint) and "Mapping" not in str(hint) else str


def _default(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return json.dumps(value) if isinstance(value, (int, float)) else str(value)


_TABLE = [name for name, (_, row) in HINTS.items() if row.metadata["cli"]]
PARAMETERS = [
    argument("model", str | None, "MODEL", "A local folder or a Hub name.", None),
    argument("data", str | None, "TRAIN", "Training data; the same as --train.", None),
    option("train", str, "Training data: CSV, TSV, JSON lines, Parquet, CoNLL, SQuAD JSON or text; for vectors "
           "also several as name=file,name=file.", "-t"),
    option("eval", str, "Held-out data, evaluated after each epoch: a file, several as name=file,name=file, or a "
           "share of the training rows (0.2)."),
    option("out", Path, "Folder to write; by default MODEL-finetuned here, by the last part of the name, with -2, "
           "-3 and so on where that is taken.", "-o"),
    option("overwrite", bool, "Replace a model in that folder.", default=False),
    option("recipe", Path, "YAML file with options; those on the command line win.", "-r"),
    option("env", str, "Override the recipe with RECIPE.ENV.yaml."),
    option("set", list[str], "Set any option of the reference, with the value as YAML: --set beta1=0.8 --set "
           "'adapter={type: ia3}'.", metavar="NAME=VALUE"),
    option("dry_run", bool, "Read and check all, try the heaviest batch and three steps on a copy, report the "
           "resources needed, and write nothing.", default=False),
    option("find_lr", bool, "Train a copy at rising rates, report where the loss fell fastest, and write nothing.",
           default=False),
    TIMING,
    option("dashboard", str, "Show the run on a page of this machine, at this port or the first free one from 6060 "
           "on.", metavar="[PORT]"),
    option("dashboard_control", bool, "Let that page make the run evaluate, save or stop, authorised by the token "
           "in its address.", default=False),
    *option_parameters(_TABLE),
    JSON,
    HELP_ALL,
]  # fmt: skip
Command.rare = frozenset(row.name for row in PARAMETERS if row.name not in SHOWN_IN_HELP)


@reporting
@with_parameters(PARAMETERS)
def command(**arguments: Any) -> None:
    """Train a model on your data and write it as a Hugging Face folder.

    The task follows from the columns of the data (a text and a label, words and tags, a question with context and
    answers, a prompt with choices, plain text), and labels are read off the data. The folder has a model card, the
    recipe that reproduces it, and every figure.
    """
    given, further = {name: parse(name, arguments.pop(name)) for name in _TABLE}, _set_values(arguments["set"] or ())
    if twice := [name for name, value in further.items() if _differ(given.get(name), value)]:
        raise ConfigError(
            f"--set: found {', '.join(twice)} also as an option with another value; expected each once", problems=twice
        )
    given |= further
    if arguments["data"] is not None and arguments["train"] is not None:
        raise ConfigError(
            f"train: found {arguments['data']!r} after MODEL and {arguments['train']!r}; expected one of them",
            problems=["train"],
        )
    values = _values(arguments, given)
    data = {"train": train_data(values["train"]), "eval": eval_data(values.get("eval"))}
    check_places("training", {**values, **data})
    with prefetching(values["model"], _loading(values)):
        _run(values, arguments)
