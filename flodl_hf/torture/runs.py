"""Suite ``runs``: fine-tunes that are ended at some moment, gone on with, and compared with one left alone.

Forty kinds of runs, computed from what they may differ in: the task, the schedule, accumulation, when is saved and
judged, what is learned, how many ranks, and what ends them. Right is: every weight, the best step, its figures, all
losses, the history and the recipe are those of the run that nobody disturbed, to the bit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import torch

from flodl_hf.torture.case import Case, Fault, Grade, Kind, Verdict, dealt, right, silent
from flodl_hf.torture.checkpoints import checkpoint, write_files
from flodl_hf.torture.ctrl_c import CtrlC
from flodl_hf.torture.subjects import Subject
from flodl_hf.torture.vocabularies import WORDS

__all__ = ["KINDS", "NAME", "cases", "run", "together"]

NAME = "runs"
ROWS, HELD_OUT = 22, 6


# --- what runs differ in ----------------------------------------------------------------------------------------------


def _lines(random: Random) -> list[str]:
    return [" ".join(random.choice(WORDS) for _ in range(3 + number % 6)) for number in range(ROWS + HELD_OUT)]


def _classified(random: Random) -> list[dict[str, Any]]:
    return [{"text": line, "label": "yes" if "good" in line or random.random() < 0.3 else "no"}
            for line in _lines(random)]  # fmt: skip


def _tagged(random: Random) -> list[dict[str, Any]]:
    lines = [line.split() for line in _lines(random)]
    return [{"words": line, "tags": ["B-X" if len(word) > 3 else "O" for word in line]} for line in lines]


def _asked(random: Random) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_lines(random)):
        word = max(line.split(), key=len)
        answers = {"text": [word], "answer_start": [line.index(word)]}
        rows.append({"id": str(number), "question": "the film?", "context": line, "answers": answers})
    return rows


def _masked(random: Random) -> list[dict[str, Any]]:
    return [{"text": line} for line in _lines(random)]


TASKS: Mapping[str, tuple[str, Callable[[Random], list[dict[str, Any]]]]] = {
    "texts": ("bert", _classified), "tokens": ("roberta", _tagged), "answers": ("distilbert", _asked),
    "masks": ("bert", _masked),
}  # fmt: skip
SCHEDULES = ("linear", "cosine", "constant", "plateau", "inverse_sqrt")
EXTRAS: Mapping[str, Mapping[str, Any]] = {
    "plain": {}, "average": {"ema": 0.9}, "noise": {"neftune": 5.0}, "slower below": {"layerwise_decay": 0.8},
    "dropout": {"dropout": 0.3, "weight_decay": 0.1}, "sgd": {"optimizer": "sgd", "lr": 0.02},
    "lengths": {"group_by_length": True}, "frozen": {"freeze": ["embeddings"]},
}  # fmt: skip
ENDS = ("killed", "told to end", "interrupted", "failed", "killed in a save", "ended twice", "killed while judged")
OF_TEXTS = ("roberta",)


def _differences(number: int) -> dict[str, Any]:
    """Return what one kind of run is; neighbours differ in everything."""
    return {
        "task": list(TASKS)[number % 4], "schedule": SCHEDULES[number % 5], "accumulate": (1, 2, 3)[number % 3],
        "extra": list(EXTRAS)[number // 2 % 8], "save": (1, 3, None)[number // 4 % 3],
        "judge": (None, 2)[number // 3 % 2], "end": ENDS[number % 7], "ranks": 2 if number % 10 == 9 else 1,
    }  # fmt: skip


def _kind(number: int) -> Kind:
    same = _differences(number)
    name = f"{same['task']}, {same['schedule']}, {same['extra']}, {same['end']}" + ", two ranks" * (same["ranks"] - 1)

    def fault(random: Random, _number: int) -> Fault:
        return Fault({**same, "place": random.random(), "second": random.random()})

    return Kind(name, 1, fault, {"cpu_s": 200.0, "wall_s": 600.0, "memory_mb": 2_000})


KINDS = tuple(_kind(number) for number in range(40))

cases = partial(dealt, NAME, KINDS)


def together(case: Case) -> str:
    """Return what cases share that are best run by one process: the run that nobody disturbs."""
    return case.kind


# --- runs -------------------------------------------------------------------------------------------------------------


def _options(what: Mapping[str, Any]) -> dict[str, Any]:
    given = {
        "epochs": 2, "batch_size": 4, "lr": 5e-3, "max_length": 24, "schedule": what["schedule"], "seed": 5,
        "accumulate": what["accumulate"], "report": False, "save_every": what["save"], "eval_every": what["judge"],
        **EXTRAS[what["extra"]],
    }  # fmt: skip
    return {**given, "devices": 2, "backend": "cpu"} if what["ranks"] > 1 else given


def _finetuned(what: Mapping[str, Any], root: Path, out: Path, **more: Any) -> dict[str, Any]:
    """Run, or go on with a run, and return all that it came to."""
    from flodl_hf.finetuning import finetune

    family, table = TASKS[what["task"]]
    base = root / f"base-{family}"
    if not base.exists():
        write_files(base, checkpoint(family, "base", 1, "bytes" if family in OF_TEXTS else "wordpiece"))
    rows = table(Random(3))
    more["resume"] = Path(f"{out}.checkpoints").is_dir()
    found = finetune(
        base, train=rows[:ROWS], eval=rows[ROWS:], out=out, progress=False, **{**_options(what), **more}
    )  # fmt: skip
    facts = json.loads((out / "training.json").read_text("utf-8"))
    return {
        "weights": {name: t.clone() for name, t in found.model.graph.state_dict().items()},
        "best step": found.best_step, "steps": found.steps, "figures of the best": found.metrics,
        "losses": found.losses, "history": found.history, "changes": found.changes,
        "losses in training.json": facts["losses"], "history in training.json": facts["history"],
        "recipe": {name: value for name, value in found.recipe.items() if name not in ("resume", "out")},
        "recipe.yaml": (out / "recipe.yaml").read_bytes(), "stored weights": (out / "model.safetensors").read_bytes(),
    }  # fmt: skip


_left_alone: dict[str, tuple[dict[str, Any], int]] = {}


def _alone(what: Mapping[str, Any], root: Path) -> tuple[dict[str, Any], int]:
    """Return what an undisturbed run of the kind comes to, and how many lines of Python it has; done once."""
    key = json.dumps(
        {name: what[name] for name in ("task", "schedule", "accumulate", "extra", "save", "judge", "ranks")}
    )
    if key not in _left_alone:
        place = root / "alone"
        place.mkdir()
        try:
            counted = CtrlC()
            with counted if what["end"] == "interrupted" else nullcontext():
                found = _finetuned(what, root, place / "out")
        finally:
            shutil.rmtree(place)
        _left_alone[key] = found, counted.lines
    return _left_alone[key]


def _ended(what: Mapping[str, Any], root: Path, out: Path, place: float, whole: tuple[dict[str, Any], int]) -> None:
    """Run in a process of its own, and have it end somewhere."""
    process = os.fork()
    if process == 0:
        _end_there(what, root, out, place, whole)
    until = time.monotonic() + 240
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)


def _end_there(
    what: Mapping[str, Any], root: Path, out: Path, place: float, whole: tuple[dict[str, Any], int]
) -> NoReturn:
    try:
        os.setpgrp()
        found, lines = whole
        at, end = 1 + int(place * found["steps"]), what["end"]
        wanted = {"killed in a save": "Saved", "killed while judged": "EvalDone"}.get(end, "StepDone")

        def told(event: Any) -> None:
            if type(event).__name__ != wanted or event.step < at:
                return
            if end == "told to end":
                os.kill(os.getpid(), signal.SIGTERM)
            elif end == "failed":
                raise RuntimeError("as planned")
            else:
                os.killpg(0, signal.SIGKILL)

        if end == "interrupted":
            with CtrlC(1 + int(place * lines)):
                _finetuned(what, root, out)
        else:
            _finetuned(what, root, out, on_event=told)
    except BaseException:
        with suppress(BaseException):
            (root / "last-end.txt").write_text(traceback.format_exc())
    finally:
        os._exit(1)


def run(case: Case, folder: Path, subject: Subject) -> Verdict:
    """End a run once or twice, go on with it, and compare."""
    what, root = case.what, folder.parent / "runs"
    root.mkdir(exist_ok=True)
    started = time.process_time()
    whole = _alone(what, root)
    out = folder / "out"
    for place in (what["place"], what["second"])[: 2 if what["end"] == "ended twice" else 1]:
        _ended(what, root, out, place, whole)
        if out.exists():  # it had come to its end before
            shutil.rmtree(out)
    try:
        found = _finetuned(what, root, out)
    except BaseException as fault:
        return Verdict(Grade.PARTIAL, f"cannot be gone on with: {fault}", type(fault).__name__)
    other = [name for name in whole[0] if not _equal(found[name], whole[0][name])]
    verdict = silent(f"not as a run left alone: {', '.join(other)}") if other else right()
    return verdict.measured(time.process_time() - started, 0.0)


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict) and any(isinstance(value, torch.Tensor) for value in expected.values()):
        return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    return found == expected
