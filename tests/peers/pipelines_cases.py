"""Inputs and keywords of transformers' pipeline tests, on small models of several families."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from flodl_hf.parity.cell import Bench, Cell
from tests.peers.case import Case

__all__ = ["cases"]

FAMILIES = ("bert", "roberta", "distilbert", "modernbert")
WITHOUT_TYPES = ("distilbert", "modernbert")
LABELS = {
    "text": ["LABEL_0", "bad", "good", "fair", "odd"],
    "tokens": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"],
    "entailed": ["contradiction", "neutral", "entailment", "w", "z"],
}
TEXTS = ["The staff was friendly, and the food was great!", "I'd never go there again; it's awful.", "x", "été 東京 😀"]
LONG = " ".join(TEXTS[:2] * 30)
PAIR = {"text": TEXTS[0], "text_pair": TEXTS[1]}
STRATEGIES = ("none", "simple", "first", "average", "max")
CONTEXT = "The room was clean. We arrived at noon and the driver was waiting for us at the station. Great!"
ASKED = {"question": "When did we arrive?", "context": CONTEXT}
OFFSETS = [(0, 0), (0, 1), (2, 3), (4, 5), (0, 0)]
# What a tokenizer with another mask has in its place.
MASKED = ["The food was [MASK].", "[MASK] staff was [MASK]", "[MASK]"]
Call = tuple[tuple[Any, ...], dict[str, Any]]
# Task: head, labels, calls.
CALLS: dict[str, tuple[str, str | None, list[Call]]] = {
    "text-classification": ("sequence_classification", "text", [
        *(((given,), options) for given in (TEXTS[0], TEXTS, TEXTS[:1], PAIR, [PAIR, PAIR], [])
          for options in ({}, {"top_k": None}, {"top_k": 1}, {"top_k": 3}, {"function_to_apply": "none"},
                          {"function_to_apply": "sigmoid"}, {"function_to_apply": "softmax", "top_k": 2})),
        (([TEXTS[0], PAIR],), {"top_k": 2}),
        (([["a", "b"]],), {}), (([TEXTS[:2]],), {"top_k": 2}), ((TEXTS,), {"batch_size": 2}), ((5,), {}),
        ((LONG,), {"truncation": True, "max_length": 16}), ((LONG,), {"max_length": 16}), ((TEXTS,), {"padding": True}),
        ((TEXTS[0],), {"function_to_apply": "other"}),
        (("",), {}), (([PAIR, TEXTS[0]],), {}), (([{"text": TEXTS[0]}],), {}),
    ]),
    "token-classification": ("token_classification", "tokens", [
        *(((given,), {"aggregation_strategy": strategy}) for given in (TEXTS[0], TEXTS, TEXTS[:1]) for strategy in STRATEGIES),
        *(((TEXTS,), {"aggregation_strategy": strategy, "ignore_labels": ignored})
          for strategy in STRATEGIES for ignored in ([], ["PER"], ["O", "LOC"])),
        ((TEXTS[0],), {}), (("",), {}), ((TEXTS[0],), {"aggregation_strategy": "other"}), (([],), {}),
        ((TEXTS[0],), {"aggregation_strategy": "SIMPLE", "ignore_labels": None}), ((TEXTS[0],), {"aggregation_strategy": None}),
        *(((LONG,), {"stride": stride, "aggregation_strategy": strategy}) for stride in (5, 40) for strategy in ("none", "first")),
        ((TEXTS[0].split(),), {"is_split_into_words": True}),
        ((TEXTS[0].split(),), {"is_split_into_words": True, "aggregation_strategy": "simple"}),
        (([text.split() for text in TEXTS[:2]],), {"is_split_into_words": True, "aggregation_strategy": "max"}),
        ((TEXTS[:2],), {"batch_size": 2, "aggregation_strategy": "simple"}), ((TEXTS[0],), {"stride": 4}),
        *(((given,), {"offset_mapping": OFFSETS, "aggregation_strategy": strategy})
          for given in ("a b c", ["a b c"], ["a", "b"]) for strategy in ("none", "simple")),
    ]),
    "fill-mask": ("masked_lm", None, [
        *(((given,), options) for given in (*MASKED, MASKED, MASKED[:1])
          for options in ({}, {"top_k": 2}, {"top_k": 10000}, {"targets": ["food", "staff"]}, {"targets": "staff", "top_k": 1})),
        (("no mask here",), {}), ((MASKED[0],), {"targets": []}), ((MASKED[0],), {"targets": ["unheardof"]}),
        ((MASKED[0],), {"top_k": None}), ((MASKED[0],), {"targets": ["food", "food"]}), ((MASKED[0],), {"targets": ["##s", "food"]}),
        ((MASKED[0] + LONG,), {"tokenizer_kwargs": {"truncation": True, "max_length": 12}}), ((MASKED,), {"batch_size": 2}),
    ]),
    "zero-shot-classification": ("sequence_classification", "entailed", [
        *(((given,), {"candidate_labels": labels, **options}) for given in (TEXTS[0], TEXTS, TEXTS[:1])
          for labels in (["food", "staff", "price"], "food, staff", ["food"])
          for options in ({}, {"multi_label": True}, {"hypothesis_template": "It is {}."})),
        ((TEXTS[0], ["food", "staff"]), {}), ((TEXTS[0],), {"candidate_labels": []}), ((TEXTS[0],), {}),
        ((TEXTS[0],), {"candidate_labels": "food", "hypothesis_template": "no place"}), (("",), {"candidate_labels": "food"}),
        ((), {"sequences": TEXTS[0], "candidate_labels": ["food", "staff"]}), (([],), {"candidate_labels": "food"}),
        *(((given,), {"candidate_labels": ["food", "staff"], "hypothesis_template": template})
          for given, template in ((TEXTS[0], None), (TEXTS[0], "{0}!"), (TEXTS[0], "{:s} {0}"), (TEXTS[0], "{:>9}"),
                                  ([TEXTS[0], ""], "{}"), (TEXTS[0], "{a}"), (TEXTS[0], "{} {}"), (TEXTS[0], "{{}}"))),
    ]),
    # Larger batches of transformers return rows of padding too.
    "feature-extraction": ("base", None, [
        *(((given,), options) for given in (TEXTS[0], TEXTS, TEXTS[:1])
          for options in ({}, {"return_tensors": True}, {"batch_size": 1})),
        ((LONG,), {"truncation": True, "tokenize_kwargs": {"max_length": 12}}), (("",), {}),
        ((LONG,), {"tokenize_kwargs": {"truncation": True, "max_length": 12}}),
    ]),
    "question-answering": ("question_answering", None, [
        *(((given,), options) for given in (ASKED, [ASKED, ASKED], [ASKED])
          for options in ({}, {"top_k": 3}, {"max_answer_len": 3}, {"handle_impossible_answer": True}, {"top_k": 50},
                          {"align_to_words": False}, {"max_seq_len": 24, "doc_stride": 4}, {"max_question_len": 3},
                          {"max_seq_len": 60}, {"max_seq_len": 48, "doc_stride": 9})),
        ((), ASKED), ((), {"question": ["a", "b"], "context": CONTEXT}), ((), {"question": "a", "context": [CONTEXT, "b"]}),
        ((), {"question": ["a", "b"], "context": [CONTEXT, TEXTS[0]]}), ((), {**ASKED, "context": CONTEXT * 8}),
        ((), {"question": "", "context": CONTEXT}), ((), {"question": "a", "context": ""}), ((), {"question": "a"}),
        ((), {**ASKED, "top_k": 0}), ((), {**ASKED, "max_answer_len": 0}), ((), {"question": None, "context": "a"}),
        ((), {**ASKED, "context": CONTEXT * 8, "top_k": 4, "max_seq_len": 36, "doc_stride": 12, "max_answer_len": 5}),
    ]),
}  # fmt: skip


def cases(room: Path, *, quick: bool = False) -> Iterator[Case]:
    """Return every call on every family; both sides read the same folder."""
    from transformers.pipelines import get_supported_tasks

    # Version 5 has no pipeline for questions; with 4.57 installed its cases run too.
    tasks = CALLS.keys() & set(get_supported_tasks())
    for family in FAMILIES[:1] if quick else FAMILIES:
        for task in sorted(tasks):
            head, labels, calls = CALLS[task]
            folder = folder_of(room / f"{family}-{task}", Cell(family, head), labels)
            theirs, ours = both(task, folder)
            for number, (inputs, options) in enumerate(calls):
                if not quick or number % 4 == 0:
                    name = f"{task}, {family}: {str(inputs)[:60]} {str(options)[:90]}"
                    yield Case(name, partial(called, theirs, inputs, options), partial(called, ours, inputs, options))


def folder_of(folder: Path, cell: Cell, labels: str | None) -> Path:
    with Bench(cell) as bench:
        shutil.copytree(bench.folder, folder)
    if labels:
        config = json.loads((folder / "config.json").read_text())
        config["id2label"] = {str(i): label for i, label in enumerate(LABELS[labels])}
        config["label2id"] = {label: i for i, label in enumerate(LABELS[labels])}
        (folder / "config.json").write_text(json.dumps(config))
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    # As the published folders of a family whose models have no token types.
    names = {"model_input_names": ["input_ids", "attention_mask"]} if cell.family in WITHOUT_TYPES else {}
    (folder / "tokenizer_config.json").write_text(json.dumps({**stated, **names, "model_max_length": 40}))
    return folder


def both(task: str, folder: Path) -> tuple[Callable[..., Any], Callable[..., Any]]:
    import transformers

    import flodl_hf

    return transformers.pipeline(task, model=str(folder), device="cpu"), flodl_hf.pipeline(task, folder)


def called(pipe: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return pipe(*inputs, **copy.deepcopy(options))  # transformers changes dictionaries in them
