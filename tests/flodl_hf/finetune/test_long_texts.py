"""Texts that are longer than a row: how many are cut is said, or they are read in windows and judged as predict does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetune_tables import labelled, sentences

from flodl.errors import ConfigError, DataError
from flodl_hf import load
from flodl_hf.training import evaluate, finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options

TEXTS = sentences()
SHORT: dict[str, Any] = {"max_length": 16, "batch_size": 4}


def long_rows(count: int = 24, pair: bool = False) -> list[dict[str, Any]]:
    rows = []
    for i, row in enumerate(labelled(count)):
        text = " ".join([row["text"], *TEXTS[i + 1 : i + 1 + (i % 4)]])
        rows.append({**row, "text": text} if not pair else {**row, "text": row["text"].split()[0], "text_pair": text})
    return rows


@pytest.mark.parametrize("pair", [False, True])
def test_how_many_texts_are_cut_is_said(pair: bool, base: Path, tmp_path: Path) -> None:
    rows = long_rows(24, pair)
    tokenizer = load(base).tokenizer
    assert tokenizer is not None
    seconds = [row["text_pair"] for row in rows] if pair else None
    long = [len(group[0].ids) > 16 for group in tokenizer.encode_rows([row["text"] for row in rows], seconds)]
    assert 0 < sum(long) < 24
    job = plan_job(base, rows[:20], rows[20:], make_options(SHORT))
    assert job.notes == [
        f"{sum(long[:20])} of 20 texts of train and {sum(long[20:])} of 4 texts of eval are longer than 16 tokens and are "
        "truncated; long_texts='windows' reads them whole"
    ]
    said: list[str] = []
    finetune(
        base, train=rows[:20], eval=rows[20:], out=tmp_path / "out", max_steps=1,
        on_event=lambda e: said.append(getattr(e, "message", "")), **SHORT,
    )  # fmt: skip
    assert job.notes[0] in said
    assert json.loads((tmp_path / "out" / "training.json").read_text())["notes"] == job.notes


@pytest.mark.parametrize("options", [{"max_length": 64}, {**SHORT, "long_texts": "windows"}], ids=str)
def test_nothing_is_said_where_nothing_is_cut(options: dict[str, Any], base: Path) -> None:
    assert plan_job(base, long_rows(), None, make_options(options)).notes == []


def test_a_max_length_beyond_the_model_is_a_warning_alone(base: Path) -> None:
    [note] = plan_job(base, long_rows(), None, make_options({"max_length": 128})).notes
    assert note.startswith("max_length: found 128")


@pytest.mark.parametrize("kind", ["single", "several", "number"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_windows_are_judged_as_predict_answers(
    kind: str, layout: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = long_rows()
    options: dict[str, Any] = {**SHORT, "long_texts": "windows", "layout": layout, "new_head": True}
    if kind == "several":
        rows = [{**row, "label": [row["label"], "c"][: 1 + i % 2]} for i, row in enumerate(rows)]
        options["problem_type"] = "multi_label_classification"
    elif kind == "number":
        rows = [{**row, "label": 0.1 * i + 0.05} for i, row in enumerate(rows)]
    job = plan_job(base, rows, rows, make_options(options))
    evaluation = job.evaluation
    assert evaluation is not None
    prepared = evaluation.sets[""].prepared
    assert len(job.rows) == len(prepared.rows) > len(rows)
    assert job.rows.lengths.max() <= 16
    # each window has the label of its text
    of_texts = [job.task.targets.encode(row["label"]) for row in rows]
    assert np.allclose(job.rows.values["labels"], np.asarray(of_texts)[job.rows.owners])
    seen: dict[int, torch.Tensor] = {}
    scorer = prepared.scorer()
    job.model.eval()
    with torch.no_grad():
        for example in range(len(rows)):
            windows = np.flatnonzero(prepared.rows.owners == example)
            scores = [
                job.model._run_graph(torch.as_tensor(prepared.rows.get(int(w))["input_ids"])[None], None, None, None)[
                    0
                ][0]
                for w in windows
            ]
            seen[example] = torch.tensor(scorer.update(example, scores)[0])
    monkeypatch.setattr(type(job.model), "_most_tokens", lambda self, stated: 16)
    answers = job.model.predict([row["text"] for row in rows], untrained=True)
    for example, answer in enumerate(answers):
        if kind == "number":
            expected = torch.tensor([answer[0].score])
            found = seen[example]
        else:
            found = torch.softmax(seen[example], -1) if kind == "single" else torch.sigmoid(seen[example])
            by_name = {item.label: item.score for item in answer}
            expected = torch.tensor([by_name[name] for name in job.task.labels or ()])
        assert torch.allclose(found, expected, atol=1e-5), example


def test_windows_are_trained_and_the_best_judged(base: Path) -> None:
    rows = long_rows()
    result = finetune(
        base, train=rows, eval=rows[:9], long_texts="windows", stride=4, eval_batch_size=2, epochs=1, lr=1e-3, **SHORT
    )
    again = plan_job(base, rows, rows[:9], make_options({**SHORT, "long_texts": "windows", "stride": 4}))
    assert again.evaluation is not None
    figures = again.evaluation(result.model.eval())
    assert figures == pytest.approx(result.metrics, rel=1e-5)


def test_long_texts_can_be_refused(base: Path) -> None:
    rows = long_rows()
    assert not plan_job(base, rows, rows, make_options({"max_length": 64, "long_texts": "error"})).notes
    with pytest.raises(DataError, match=r"train and .* of eval longer than 16 tokens"):
        plan_job(base, rows, rows, make_options({**SHORT, "long_texts": "error"}))
    trained = finetune(base, train=rows, max_steps=1, **SHORT)
    with pytest.raises(DataError, match="long_texts='error'"):
        evaluate(trained.model, rows, long_texts="error", max_length=16)
    words = [{"words": ["the", "cat"], "tags": ["O", "B-X"]}] * 8
    with pytest.raises(ConfigError, match="only classifiers"):
        plan_job(base, words, None, make_options({"long_texts": "error"}))
