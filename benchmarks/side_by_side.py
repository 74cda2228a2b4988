"""Answers of this package beside those of transformers' pipelines, on one checkpoint and one data file.

The task is the checkpoint's; the data are read by their columns:

* text classification: ``text`` and ``label``, such as SST-2 as TSV;
* token classification: ``words`` and ``tags``, such as WNUT-17 as CoNLL; the texts are the words joined by spaces;
* question answering: SQuAD JSON, such as XQuAD. Transformers 5 has no pipeline for it any more; what stands
  for it is transformers' own model, decoded as the pipeline of version 4.57 did.

Printed are the share of texts with equal answers, the largest difference of their scores, how many answers
of each side are the data's, and the texts on which the two differ, with both answers.

    python -m benchmarks.side_by_side CHECKPOINT DATA [--limit N] [--show N] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from flodl_hf import load
from flodl_hf.models import EncoderModel
from flodl_hf.tokenization.alignment import join_words
from flodl_hf.tokenization.readers import load_rows

QUESTION_WINDOW = {"max_tokens": 384, "stride": 128}


@dataclass
class Case:
    """One text with the answers of both sides and of the data.

    Answers are lists of keys, such as ``("LOC", 4, 9)``; scores stand beside them.
    """

    input: str
    ours: list[Any]
    theirs: list[Any]
    gold: list[Any] | None
    our_scores: list[float] = field(default_factory=list, repr=False)
    their_scores: list[float] = field(default_factory=list, repr=False)

    @property
    def agrees(self) -> bool:
        return self.ours == self.theirs

    @property
    def difference(self) -> float:
        return max((abs(a - b) for a, b in zip(self.our_scores, self.their_scores, strict=True)), default=0.0)


def pipeline(task: str, folder: str, model: EncoderModel) -> Callable[..., Any]:
    """Return a pipeline of transformers, its warnings held back, that cuts texts where the model ends."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = transformers.pipeline(task, model=folder, device="cpu")  # type: ignore[call-overload]
    if model.max_tokens is not None:
        made.tokenizer.model_max_length = min(made.tokenizer.model_max_length, model.max_tokens)

    def ask(*inputs: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return made(*inputs, **options)

    return ask


def classes(model: EncoderModel, folder: str, rows: Sequence[dict[str, Any]]) -> list[Case]:
    """Compare the best label of each text."""
    texts = [str(row["text"]) for row in rows]
    ours = model.predict(texts, top_k=1)  # type: ignore[operator]
    theirs = pipeline("text-classification", folder, model)(texts, top_k=1, truncation=True)
    return [
        Case(
            text,
            [mine[0].label],
            [other[0]["label"]],
            _gold_label(model, row.get("label")),
            [mine[0].score],
            [float(other[0]["score"])],
        )
        for text, row, mine, other in zip(texts, rows, ours, theirs, strict=True)
    ]


def _gold_label(model: EncoderModel, label: Any) -> list[str] | None:
    if label is None:
        return None
    text = str(label)
    # Data name labels by number where the checkpoint names them by word.
    return [model.config.labels[int(text)]] if text.isdigit() and int(text) < model.num_labels else [text]


def entities(model: EncoderModel, folder: str, rows: Sequence[dict[str, Any]]) -> list[Case]:
    """Compare the entities of each text, by label and place."""
    joined = [join_words(row["words"]) for row in rows]
    texts = [text for text, _ in joined]
    ours = model.predict(texts)  # type: ignore[operator]
    theirs = pipeline("token-classification", folder, model)(texts, aggregation_strategy="first")
    return [
        Case(
            text,
            [(e.label, e.start, e.end) for e in mine],
            [(e["entity_group"], e["start"], e["end"]) for e in other],
            _gold_entities(row["tags"], extents) if "tags" in row else None,
            [e.score for e in mine],
            [float(e["score"]) for e in other],
        )
        for text, (_, extents), row, mine, other in zip(texts, joined, rows, ours, theirs, strict=True)
    ]


def _gold_entities(tags: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    open_label = None
    for tag, (start, end) in zip(tags, spans, strict=True):
        begins, _, label = tag.partition("-")
        if begins == "I" and label == open_label:
            found[-1] = (label, found[-1][1], end)
        elif label:
            found.append((label, start, end))
        open_label = label or None
    return found


def answers(model: EncoderModel, folder: str, rows: Sequence[dict[str, Any]]) -> list[Case]:
    """Compare the best answer to each question, by its words and place."""
    import transformers

    from flodl_hf.inference.transformers_results import question_answering
    from flodl_hf.parity.reference import load_reference

    assert model.tokenizer is not None
    transformers.utils.logging.disable_progress_bar()
    theirs = load_reference(folder, model.config.source["architectures"][0])
    width = min(QUESTION_WINDOW["max_tokens"], model.max_tokens or QUESTION_WINDOW["max_tokens"])
    stride = min(QUESTION_WINDOW["stride"], width // 2)
    cases = []
    found = model.answer_batch([(row["question"], row["context"]) for row in rows])  # type: ignore[operator]
    for row, mine in zip(rows, found, strict=True):
        windows = model.tokenizer.encode_rows(
            [row["question"]], [row["context"]], max_tokens=width, stride=stride, snap=False
        )[0]
        scores = [theirs(_inputs(model, window)) for window in windows]
        other = question_answering(
            [torch.stack([s["start_logits"][0], s["end_logits"][0]], -1) for s in scores], windows, row["context"],
            cls_id=model.tokenizer.cls_token_id,
        )  # fmt: skip
        other = other[0] if isinstance(other, list) else other
        stated = row.get("answers") or {}
        cases.append(
            Case(
                f"{row['question']} | {row['context']}",
                [mine[0].text],
                [other["answer"]],
                list(stated.get("text", [])) or None,
                [mine[0].score],
                [float(other["score"])],
            )
        )
    return cases


def _inputs(model: EncoderModel, row: Any) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": torch.tensor([list(row.ids)])}
    if model.config.uses_token_types:
        inputs["token_type_ids"] = torch.tensor([list(row.type_ids)])
    return inputs


TASKS = {"sequence_classification": classes, "token_classification": entities, "question_answering": answers}


def compare(checkpoint: str | Path, data: str | Path, limit: int | None = None) -> dict[str, Any]:
    """Return everything that is printed, as JSON types.

    Args:
        checkpoint: folder of a model with one of the three tasks.
        data: a file of rows.
        limit: most rows.
    """
    import transformers

    folder = str(checkpoint)
    model = load(folder)
    if model.head not in TASKS:
        raise SystemExit(f"{folder} is a {model.head} model; expected one of {', '.join(TASKS)}")
    rows = load_rows(data, "squad" if model.head == "question_answering" else None)[:limit]
    cases = TASKS[model.head](model, folder, rows)
    told = [case for case in cases if case.gold is not None]
    return {
        "task": model.head,
        "texts": len(cases),
        "equal answers": sum(case.agrees for case in cases) / max(1, len(cases)),
        "largest score difference": max((case.difference for case in cases if case.agrees), default=0.0),
        "ours as the data": _score(model.head, [(case.ours, case.gold or []) for case in told]),
        "theirs as the data": _score(model.head, [(case.theirs, case.gold or []) for case in told]),
        "only ours right": sum(_right(c.ours, c, model.head) and not _right(c.theirs, c, model.head) for c in told),
        "only theirs right": sum(_right(c.theirs, c, model.head) and not _right(c.ours, c, model.head) for c in told),
        "differing": [asdict(case) for case in cases if not case.agrees],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _right(answer: list[Any], case: Case, task: str) -> bool:
    gold = case.gold or []
    return bool(answer) and answer[0] in gold if task == "question_answering" else answer == gold


def _score(task: str, pairs: Sequence[tuple[list[Any], list[Any]]]) -> float | None:
    """Return the share of right answers; for entities the F1 of exact label and place."""
    if not pairs:
        return None
    if task != "token_classification":
        return sum(bool(found) and found[0] in gold for found, gold in pairs) / len(pairs)
    hits = sum(len(set(found) & set(gold)) for found, gold in pairs)
    total = sum(len(found) + len(gold) for found, gold in pairs)
    return 2 * hits / total if total else 1.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("checkpoint", help="folder of a model")
    parser.add_argument("data", help="file of rows")
    parser.add_argument("--limit", type=int, help="most rows")
    parser.add_argument("--show", type=int, default=10, help="most differing texts to print")
    parser.add_argument("--json", action="store_true", help="print one JSON document, with every differing text")
    given = parser.parse_args(arguments)
    result = compare(given.checkpoint, given.data, given.limit)
    if given.json:
        json.dump(result, sys.stdout, ensure_ascii=False, indent=2)
        print()
        return
    for name, value in result.items():
        if name == "differing":
            continue
        print(f"{name:<26}{value:.4g}" if isinstance(value, float) else f"{name:<26}{value}")
    for case in result["differing"][: given.show]:
        text = case["input"] if len(case["input"]) < 200 else case["input"][:200] + " ..."
        print(f"\n{text}\n  ours    {case['ours']}\n  theirs  {case['theirs']}\n  data    {case['gold']}")


if __name__ == "__main__":
    main()
