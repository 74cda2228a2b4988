"""What a small table teaches with nothing said: rows in a batch compared, and `finetune` beside transformers' Trainer.

Each seed draws its own rows from the training file, the same for everything that is compared, and decides the new head,
the order and dropout. The last model is judged, by one judge on the processor, on the held-out file. Every run is a
line of ``--json``; runs that stand there already are not made again. Data are folders as for `finetune_quality`.

    python benchmarks/finetune_defaults.py --model DIR --data DIR --json FILE --task sst2 --rows 320 --runs 4 8 16 32
    python benchmarks/finetune_defaults.py --model DIR --data DIR --json FILE --task wnut17 --runs default trainer

``default`` says no batch size, ``trainer`` is transformers' Trainer with its own defaults and its own tokenizer, rows
prepared as its example scripts do; a number is a batch size. Needs accelerate for ``trainer``.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from finetune_quality import TASKS, Judged

from flodl_hf import AutoModel
from flodl_hf.tokenization.readers import load_rows
from flodl_hf.training import finetune
from flodl_hf.training.job import Job, plan_job
from flodl_hf.training.options import make_options

NUMBERS = "sst2-number"
"""The labels of sst2 as numbers, -0.5 and 1.5, to be met by regression."""
SHORT = "xquad-short"
"""The questions of xquad, each with the sentence of its answer alone, for small machines."""


def tables(
    task: str, data: Path, rows: int | None, seed: int, most_words: int | None = None
) -> tuple[list[Any], list[Any]]:
    """Return so many training rows, drawn by the seed, and all held-out ones, each without rows of too many words."""
    told = TASKS[task.partition("-")[0]]
    train, dev = (list(load_rows(data / told[part])) for part in ("train", "dev"))
    if task == SHORT:
        train, dev = ([_shortened(row) for row in part] for part in (train, dev))
    if most_words is not None:
        train, dev = ([row for row in part if _count_words(row) <= most_words] for part in (train, dev))
    drawn = random.Random(seed).sample(train, min(rows or len(train), len(train)))
    if task == NUMBERS:
        drawn, dev = ([{**row, "label": 2.0 * int(row["label"]) - 0.5} for row in part] for part in (drawn, dev))
    return drawn, dev


def _count_words(row: dict[str, Any]) -> int:
    if "words" in row:
        return len(row["words"])
    return sum(len(row.get(part, "").split()) for part in ("text", "question", "context"))


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    """Return a question with the sentence of its first answer for context."""
    context, text, start = row["context"], row["answers"]["text"][0], row["answers"]["answer_start"][0]
    ends = [0, *(k + 2 for k in range(len(context) - 1) if context[k : k + 2] == ". "), len(context)]
    first = max(i for i, k in enumerate(ends) if k <= start)
    last = min(i for i, k in enumerate(ends) if k >= start + len(text))
    return {
        "question": row["question"], "context": context[ends[first] : ends[last]],
        "answers": {"text": [text], "answer_start": [start - ends[first]]},
    }  # fmt: skip


def ours(model: str, train: Any, seed: int, size: int | None, more: dict[str, Any], device: str) -> Any:
    """Return the model that ``finetune`` trains, and its batch size and steps."""
    options: dict[str, Any] = {**more} if size is None else {"batch_size": size, **more}
    result = finetune(model, train=train, seed=seed, devices=device, progress=False, **options)
    return result.model.cpu().eval(), result.recipe["batch_size"], result.steps


def theirs(job: Job, model: str, train: Sequence[Any], seed: int, device: str) -> Any:
    """Return the model that transformers' Trainer trains with its defaults, and its batch size and steps."""
    import transformers

    head = job.task.head
    classes = {
        "sequence_classification": transformers.AutoModelForSequenceClassification,
        "token_classification": transformers.AutoModelForTokenClassification,
        "question_answering": transformers.AutoModelForQuestionAnswering,
    }
    transformers.set_seed(seed)
    names = job.task.labels
    given: dict[str, Any] = {} if names is None else {"num_labels": len(names)}
    if job.task.kind == "regression":
        given["problem_type"] = "regression"
    network = classes[head].from_pretrained(model, **given)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    collator: Any = transformers.DataCollatorWithPadding(tokenizer)
    if head == "token_classification":
        collator = transformers.DataCollatorForTokenClassification(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder, seed=seed, report_to=[], use_cpu=device == "cpu", save_strategy="no", logging_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=network, args=options, train_dataset=PREPARED[head](tokenizer, train, job), data_collator=collator
        )
        trainer.train()
    return Judged(network, "cpu"), options.per_device_train_batch_size, trainer.state.global_step


def _texts(tokenizer: Any, rows: Sequence[Any], job: Job) -> list[dict[str, Any]]:
    names = job.task.labels or ()
    number = float if job.task.kind == "regression" else lambda label: names.index(str(label))
    return [{**tokenizer(row["text"], truncation=True), "labels": number(row["label"])} for row in rows]


def _words(tokenizer: Any, rows: Sequence[Any], job: Job) -> list[dict[str, Any]]:
    """The first token of a word has its label, as in run_ner.py."""
    names, found = job.task.labels or (), []
    words, tags = job.task.columns.words, job.task.columns.tags  # type: ignore[attr-defined]
    for row in rows:
        one = tokenizer(row[words], truncation=True, is_split_into_words=True)
        owners = one.word_ids()
        first = [i is not None and (k == 0 or owners[k - 1] != i) for k, i in enumerate(owners)]
        labels = [names.index(row[tags][i]) if begins else -100 for i, begins in zip(owners, first, strict=True)]
        found.append({**one, "labels": labels})
    return found


def _spans(tokenizer: Any, rows: Sequence[Any], job: Job) -> list[dict[str, Any]]:
    """Windows of 384 tokens that share 128; where the answer is not whole, its first token, as in run_qa.py."""
    found = []
    for row in rows:
        given = tokenizer(
            row["question"].strip(), row["context"], truncation="only_second", max_length=384, stride=128,
            return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        answers = row["answers"]
        begin = answers["answer_start"][0]
        end = begin + len(answers["text"][0])
        for i, offsets in enumerate(given["offset_mapping"]):
            context = [k for k, part in enumerate(given.sequence_ids(i)) if part == 1]
            first, last = context[0], context[-1]
            span = (0, 0)
            if offsets[first][0] <= begin and offsets[last][1] >= end:
                span = (
                    max(k for k in context if offsets[k][0] <= begin),
                    min(k for k in context if offsets[k][1] >= end),
                )
            one = {name: given[name][i] for name in ("input_ids", "attention_mask", "token_type_ids")}
            found.append({**one, "start_positions": span[0], "end_positions": span[1]})
    return found


PREPARED = {"sequence_classification": _texts, "token_classification": _words, "question_answering": _spans}


def one_run(task: str, how: str, said: argparse.Namespace, rows: int | None, seed: int, model: str, more: Any) -> Any:
    """Return what one run came to."""
    train, dev = tables(task, said.data, rows, seed, said.most_words)
    job = plan_job(model, train, dev, make_options({"seed": seed, "devices": "cpu", "eval_batch_size": 32}))
    began = time.perf_counter()
    if how == "trainer":
        trained, size, steps = theirs(job, model, train, seed, said.device)
    else:
        trained, size, steps = ours(model, train, seed, None if how == "default" else int(how), more, said.device)
    seconds = time.perf_counter() - began
    assert job.evaluation is not None
    figures = job.evaluation(trained)
    return {
        "task": task, "rows": len(train), "judged": len(dev), "most_words": said.most_words, "run": how, "seed": seed,
        **({"options": more} if more else {}), "batch_size": size, "steps": steps, "figures": figures,
        "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the start")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True, help="lines of runs; those that are there stay")
    parser.add_argument("--task", required=True, choices=[*TASKS, NUMBERS, SHORT])
    parser.add_argument("--rows", type=int, nargs="+", help="rows to draw; by default all")
    parser.add_argument("--most-words", type=int, help="leave out longer rows, training and held-out, to save time")
    parser.add_argument("--runs", nargs="+", default=["default", "trainer"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of ours, as YAML")
    parser.add_argument("--device", default="cpu", help="where models are trained")
    parser.add_argument("--threads", type=int, default=1)
    said = parser.parse_args()
    import yaml

    torch.set_num_threads(said.threads)
    more = {name: yaml.safe_load(value) for name, _, value in (item.partition("=") for item in said.set)}
    figure = "pearson" if said.task == NUMBERS else TASKS[said.task.partition("-")[0]]["figure"]
    done = [json.loads(line) for line in said.json.read_text().splitlines()] if said.json.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        AutoModel.from_pretrained(said.model, dtype=torch.float32).save_pretrained(start)
        for rows in said.rows or [None]:
            for seed in said.seeds:
                for how in said.runs:
                    asked = (said.task, how, seed, more)
                    if any(
                        (r["task"], r["run"], r["seed"], r.get("options", {})) == asked and rows in (None, r["rows"])
                        for r in done
                    ):
                        continue
                    found = one_run(said.task, how, said, rows, seed, str(start), more)
                    done.append(found)
                    with said.json.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                    print(json.dumps(found), flush=True)
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for r in done:
        if r["task"] == said.task:
            groups.setdefault((r["rows"], r["run"], json.dumps(r.get("options", {}))), []).append(r)
    for (rows, how, options), found in sorted(groups.items(), key=str):
        values = [r["figures"][figure] for r in sorted(found, key=lambda r: r["seed"])]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        shown = " ".join(f"{value:.4f}" for value in values)
        size = "/".join(sorted({f"{r['batch_size']}" for r in found}))
        steps = "/".join(sorted({f"{r['steps']}" for r in found}))
        print(
            f"{said.task:12} {rows:>5} rows  {how:8} batch {size:>3} {steps:>5} steps  {figure} "
            f"mean {statistics.mean(values):.4f}  deviation {spread:.4f}  ({shown})  {options.strip('{}')}"
        )
    print(f"torch {torch.__version__}, python {platform.python_version()}, {said.device}, {said.threads} thread")


if __name__ == "__main__":
    main()
