"""Write a project for fine-tuning: a recipe, example data, a test, and a page with the next steps.

Everything runs unchanged, offline in the test and with the named model otherwise. Existing files are never replaced.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from flodl.errors import nearest
from flodl_hf.errors import ExportError
from flodl_hf.families.schema.tasks import TASKS, find_task

TRAIN_ROWS, HELD_OUT_ROWS = 48, 16


@dataclass(frozen=True)
class Data:
    """Example data of a task.

    Attributes:
        suffix: the suffix of the files.
        columns: a description of their columns.
        write: returns the text of a file with ``count`` rows from ``first``.
        task: the task in the recipe.
        use: a command that uses the trained model.
    """

    suffix: str
    columns: str
    write: Callable[[int, int], str]
    task: str
    use: str = "predict tuned --in texts.jsonl --out answers.jsonl"


def _labels(first: int, count: int) -> str:
    from flodl_hf.training.demo import LABELS, sentences

    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["text", "label"])
    table.writerows((sentence, LABELS[label]) for sentence, label in sentences()[first : first + count])
    return text.getvalue()


_NAMES = ("Ada", "Bob", "Eve", "Ida", "Kim", "Lee", "Mia", "Tom", "Zoe")
_PLACES = ("Bern", "Kyiv", "London", "New York", "Oslo", "Paris", "Rome", "The Hague")


def _pairs(first: int, count: int) -> list[tuple[str, str]]:
    return [(_NAMES[n % len(_NAMES)], _PLACES[n * 3 % len(_PLACES)]) for n in range(first, first + count)]


def _entities(first: int, count: int) -> str:
    sentences = []
    for name, place in _pairs(first, count):
        parts = [(name, "PER"), ("lives", None), ("in", None), (place, "LOC"), (".", None)]
        lines = []
        for text, kind in parts:
            for at, word in enumerate(text.split()):
                lines.append(f"{word}\t" + ("O" if kind is None else ("I-" if at else "B-") + kind))
        sentences.append("\n".join(lines))
    return "\n\n".join(sentences) + "\n"


def _answers(first: int, count: int) -> str:
    lines = []
    for name, place in _pairs(first, count):
        context = f"{name} lives in {place}. The staff were kind."
        answers = {"text": [place], "answer_start": [context.index(place)]}
        lines.append(json.dumps({"question": f"Where does {name} live?", "context": context, "answers": answers}))
    return "\n".join(lines) + "\n"


def _rows(make: Callable[[str, str, str, str], dict[str, Any]]) -> Callable[[int, int], str]:
    """Return a writer of one row for each name and place; ``make`` also receives another name and place."""

    def write(first: int, count: int) -> str:
        rows = zip(_pairs(first, count), _pairs(first + 1, count), strict=True)
        return "".join(json.dumps(make(*own, *other)) + "\n" for own, other in rows)

    return write


def _vectors(name: str, place: str, _other: str, _elsewhere: str) -> dict[str, Any]:
    return {"anchor": f"Where is {name} of {place} at home?", "positive": f"{name} lives in {place}."}


def _lists(name: str, place: str, other: str, elsewhere: str) -> dict[str, Any]:
    wrong = [f"{other} lives in {elsewhere}.", f"{other} lives in {place}."]
    return {"query": f"{name} in {place}", "positive": f"{name} lives in {place}.", "negatives": wrong}


def _choices(name: str, place: str, _other: str, elsewhere: str) -> dict[str, Any]:
    choices = sorted([place, elsewhere])
    return {"prompt": f"{name} lives in {place}. Where is that?", "choices": choices, "label": choices.index(place)}


def _lines(first: int, count: int) -> str:
    from flodl_hf.training.demo import sentences

    return "".join(f"{sentence}\n" for sentence, _ in sentences()[first : first + count])


DATA = {
    "sequence_classification": Data(".csv", "`text` and `label`", _labels, "seqcls"),
    "token_classification": Data(
        ".conll", "a word and its tag a line, an empty line between sentences", _entities, "ner"
    ),
    "question_answering": Data(".jsonl", "`question`, `context` and `answers` as SQuAD has them", _answers, "qa"),
    "masked_lm": Data(".txt", "a text a line", _lines, "mlm"),
    "multiple_choice": Data(
        ".jsonl",
        "`prompt`, `choices` and, as `label`, the right one's number from 0",
        _rows(_choices),
        "choice",
        "inspect tuned",
    ),
    "embedding": Data(
        ".jsonl",
        "`anchor` and `positive`, texts that belong together",
        _rows(_vectors),
        "embedding",
        "encode tuned --in texts.jsonl --out vectors.npy",
    ),
    "rank": Data(
        ".jsonl",
        "`query`, `positive` and a list of `negatives`",
        _rows(_lists),
        "rank",
        'predict tuned --query "Ada in Bern" "Ada lives in Bern." "Bob lives in Kyiv."',
    ),
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
    written[f"data/train{data.suffix}"] = data.write(0, TRAIN_ROWS)
    written[f"data/held_out{data.suffix}"] = data.write(TRAIN_ROWS, HELD_OUT_ROWS)
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
