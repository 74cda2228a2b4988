"""``flodl-hf new``: a project for fine-tuning, with a recipe, example data, a test, and a page with the next steps.

Everything runs unchanged, offline in the test and with the named model otherwise. Existing files are never replaced.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from flodl.errors import nearest
from flodl_hf.cli.command import command_line
from flodl_hf.cli.options import JSON, argument, option, with_parameters
from flodl_hf.cli.shared import emit_json, reporting, say, tell
from flodl_hf.errors import ExportError
from flodl_hf.families.schema.tasks import TASKS, find_task

_TASK = "The task: seqcls, ner, qa, mlm, choice, embedding or rank."


@reporting
@with_parameters((
    argument("folder", Path, "DIR", "A new or empty folder."),
    option("task", str, _TASK, "--task", "-t", default="seqcls"),
    option("model", str, "The start: a folder or a Hub name (default DistilBERT).", "--model", "-m"), JSON,
))  # fmt: skip
def command(folder: Path, task: str, model: str | None, json_output: bool) -> None:
    """Write a project for fine-tuning: a recipe, example data, a test, and a page with the next steps."""
    written = new_project(folder, task=task, model=model)
    if json_output:
        emit_json({"folder": str(folder), "files": [str(path.relative_to(folder)) for path in written]})
        return
    for path in written:
        tell(str(path))
    say(f"next: {command_line('cd', folder)}; flodl-hf finetune --recipe recipe.yaml --dry-run")


@dataclass(frozen=True)
class Data:
    """Example data of a task; the files are in ``project_files/data``.

    Attributes:
        task: the task in the recipe.
        suffix: the suffix of the files.
        columns: a description of their columns.
        use: a command that uses the trained model.
    """

    task: str
    suffix: str
    columns: str
    use: str


_PREDICT = "predict tuned --in texts.jsonl --out answers.jsonl"
_WORDS = "a word and its tag a line, an empty line between sentences"
_SQUAD = "`question`, `context` and `answers` as SQuAD has them"
_CHOICES = "`prompt`, `choices` and, as `label`, the right one's number from 0"
_PAIRS = "`anchor` and `positive`, texts that belong together"
_ENCODE = "encode tuned --in texts.jsonl --out vectors.npy"
_LISTS = "`query`, `positive` and a list of `negatives`"
_RANK = 'predict tuned --query "Ada in Bern" "Ada lives in Bern." "Bob lives in Kyiv."'
DATA = {
    "sequence_classification": Data("seqcls", ".csv", "`text` and `label`", _PREDICT),
    "token_classification": Data("ner", ".conll", _WORDS, _PREDICT),
    "question_answering": Data("qa", ".jsonl", _SQUAD, _PREDICT),
    "masked_lm": Data("mlm", ".txt", "a text a line", _PREDICT),
    "multiple_choice": Data("choice", ".jsonl", _CHOICES, "inspect tuned"),
    "embedding": Data("embedding", ".jsonl", _PAIRS, _ENCODE),
    "rank": Data("rank", ".jsonl", _LISTS, _RANK),
}
"""The example data of each task."""


FILES = {
    "recipe.yaml": "recipe.yaml", "recipe.ci.yaml": "recipe.ci.yaml", "README.md": "README.md",
    "test_recipe.py": "test_recipe.py.txt", ".gitignore": "gitignore",
}  # fmt: skip
"""Files of a project, with the names of their templates."""


def _template(source: str, about: Mapping[str, str]) -> str:
    text = (files("flodl_hf.cli") / "project_files" / source).read_text("utf-8")
    for name, value in about.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def new_project(folder: str | os.PathLike[str], *, task: str = "seqcls", model: str | None = None) -> list[Path]:
    """Write a project into a new or empty folder.

    Args:
        folder: the folder; its name is the name of the project.
        task: any name of a task with example data, such as ``seqcls``, ``ner``, ``qa``, ``mlm``, ``choice``,
            ``embedding`` or ``rank``.
        model: the start, a folder or a Hub name; None for DistilBERT.

    Returns:
        The written files.

    Raises:
        ExportError: the task is unknown, or the folder is not empty.
    """
    place = Path(folder)
    found = find_task(task)
    if found is None or found.training not in DATA:
        words = [word for each in TASKS if each.training in DATA for word in each.words]
        raise ExportError(f"new: no task {task!r}{nearest(task, words)}; expected one of {', '.join(words)}", task=task)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ExportError(
            f"{place}: found a folder with files, expected a new or empty one. Name another one, or empty it.",
            path=str(place),
        )
    data = DATA[found.training]
    model = model or "distilbert/distilbert-base-uncased"
    about = {
        "name": place.resolve().name, "model": model, "quoted_model": json.dumps(model), "task": data.task,
        "columns": data.columns, "suffix": data.suffix, "use": data.use,
    }  # fmt: skip
    written = {name: _template(source, about) for name, source in FILES.items()}
    for part in ("train", "held_out"):
        written[f"data/{part}{data.suffix}"] = _template(f"data/{data.task}.{part}{data.suffix}", {})
    beside = place.parent / f".{place.name}.{os.getpid()}.new"
    beside.mkdir(parents=True)
    try:
        for name, text in written.items():
            (beside / name).parent.mkdir(exist_ok=True)
            (beside / name).write_text(text, "utf-8")
        if place.exists():
            place.rmdir()
        os.replace(beside, place)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return [place / name for name in written]
