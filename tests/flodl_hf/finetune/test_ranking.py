"""Rankers: pairs and lists of candidates, the numbers of a plain loop, and what is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import sentences
from torch.nn import functional as F

from flodl.errors import ConfigError, DataError
from flodl_hf import load
from flodl_hf.training import finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.losses import make_loss
from flodl_hf.training.losses.lists import LIST_LOSSES
from flodl_hf.training.options import make_options

TEXTS = sentences()
ONE: dict[str, Any] = {"task": "rank", "max_steps": 3, "epochs": 9, "batch_size": 8, "lr": 1e-3, "report": False}


def graded(count: int = 24) -> list[dict[str, Any]]:
    return [{"query": TEXTS[i // 4], "passage": TEXTS[40 + i], "label": (i % 4) / 3} for i in range(count)]


def listed(count: int = 8) -> list[dict[str, Any]]:
    return [
        {"query": TEXTS[i], "positive": TEXTS[40 + i], "negatives": [TEXTS[60 + i], TEXTS[80 + i]]}
        for i in range(count)
    ]


@pytest.mark.parametrize("rows", [graded(), listed()], ids=["graded", "listed"])
def test_a_ranker_trains_is_judged_and_ranks_again_when_read(
    rows: list[dict[str, Any]], base: Path, tmp_path: Path
) -> None:
    result = finetune(base, train=rows, eval=rows, out=tmp_path / "out", **ONE)
    assert result.task == "rank"
    assert set(result.metrics) == {"eval_loss", "ap", "map", "mrr@10", "ndcg@10"}
    assert all(0 < value < 5 for value in result.metrics.values()), result.metrics
    again: Any = load(tmp_path / "out")
    assert again.num_labels == 1
    ours, theirs = (m.rerank(TEXTS[0], TEXTS[40:44]) for m in (result.model, again))
    assert ours == theirs
    # One score, by every method; transformers applies the sigmoid to one label without a problem type.
    scores = {document.index: document.score for document in theirs}
    predicted = again.predict([(TEXTS[0], text) for text in TEXTS[40:44]])
    assert [labels[0].score for labels in predicted] == pytest.approx([scores[i] for i in range(4)], abs=1e-6)
    config = json.loads((tmp_path / "out/config.json").read_text("utf-8"))
    assert "problem_type" not in config
    assert config["sentence_transformers"] == {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
    assert "text-ranking" in (tmp_path / "out/README.md").read_text()
    from flodl_hf.training.recipe import load_recipe

    given = {k: v for k, v in load_recipe(tmp_path / "out/recipe.yaml", None).values.items() if k != "train"}
    assert finetune(given.pop("model"), train=rows, **{**given, "eval": None}).losses == result.losses


@pytest.mark.parametrize("loss", ["MSELoss", None])
def test_an_adapter_of_a_ranker_keeps_the_activation_of_its_scores(
    loss: str | None, base: Path, tmp_path: Path
) -> None:
    result = finetune(base, train=graded(), out=tmp_path / "out", lora=4, vector_loss=loss, **ONE)
    ours: Any = result.model
    again: Any = load(tmp_path / "out")
    assert again.rerank(TEXTS[0], TEXTS[40:44]) == ours.rerank(TEXTS[0], TEXTS[40:44])
    logits = again.rerank(TEXTS[0], TEXTS[40:44], function_to_apply="none")
    assert (again.rerank(TEXTS[0], TEXTS[40:44]) == logits) is (loss == "MSELoss")
    again.save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved").rerank(TEXTS[0], TEXTS[40:44]) == ours.rerank(TEXTS[0], TEXTS[40:44])  # type: ignore[attr-defined]


def test_steps_are_those_of_a_plain_loop(base: Path) -> None:
    exact: dict[str, Any] = {**ONE, "dropout": 0.0, "optimizer": "sgd", "lr": 0.1, "schedule": "constant",
                             "max_grad_norm": 0.0}  # fmt: skip
    rows = graded()
    job = plan_job(base, rows, None, make_options(exact))
    model: Any = job.factory.open()  # its head is drawn by the run's seed
    torch.manual_seed(42)
    model.load_state_dict(job.model.state_dict())
    trained = finetune(base, train=rows, **exact).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in list(job.batches.plan(0))[:3]:
        chosen = [rows[i] for i in batch.tolist()]
        given = model.tokenizer(
            [row["query"] for row in chosen], [row["passage"] for row in chosen], padding=True, return_tensors="pt"
        )
        inputs = {n: torch.as_tensor(given[n]) for n in ("input_ids", "attention_mask", "token_type_ids")}
        scores = model(**inputs).logits[:, 0]
        F.binary_cross_entropy_with_logits(scores, torch.tensor([row["label"] for row in chosen])).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, theirs in zip(trained.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6)


def test_figures_are_those_of_each_question(base: Path) -> None:
    job = plan_job(base, listed(), listed(3), make_options(ONE))
    evaluation: Any = job.evaluation
    scorer = evaluation.sets[""].scorer()
    for i, score in enumerate([3.0, 2.0, 1.0, 1.0, 2.0, 3.0, 2.0, 3.0, 1.0]):
        scorer.update(i, [torch.tensor([score])])
    figures = scorer.compute()
    assert figures["mrr@10"] == pytest.approx((1 + 1 / 3 + 1 / 2) / 3)
    assert figures["map"] == pytest.approx((1 + 1 / 3 + 1 / 2) / 3)


@pytest.mark.parametrize("options", [{}, {"vector_loss": "ListNetLoss"}])
def test_queries_with_one_passage_have_a_note_about_undefined_metrics(options: dict[str, Any], base: Path) -> None:
    single = [{"query": TEXTS[i], "passage": TEXTS[40 + i], "label": i % 2} for i in range(6)]
    several = [{**row, "query": TEXTS[0]} for row in single]
    given = make_options({**ONE, "task": "rank", **options})
    notes = [plan_job(base, several, rows, given).notes for rows in (single, several)]
    assert [sum("ndcg@10" in note for note in found) for found in notes] == [1, 0]


@pytest.mark.parametrize(
    ("rows", "options", "fault", "said"),
    [
        ([{"query": "a", "positive": "b"}] * 8, {}, DataError, "negatives"),
        ([{"query": "a", "passage": "b", "score": 4.5}] * 8, {}, DataError, "from 4.5 to 4.5"),
        (graded(), {"labels": ["x"]}, ConfigError, "labels"),
    ],
)
def test_what_does_not_say_how_well_passages_fit_is_refused(
    rows: list[dict[str, Any]], options: dict[str, Any], fault: type[Exception], said: str, base: Path
) -> None:
    with pytest.raises(fault, match=said):
        finetune(base, train=rows, **{**ONE, **options})


@pytest.mark.filterwarnings("ignore")
def test_sentence_transformers_ranks_alike(base: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    result: Any = finetune(base, train=listed(), out=tmp_path / "out", **ONE)
    pairs = [(TEXTS[0], text) for text in TEXTS[40:44]]
    theirs = library.CrossEncoder(str(tmp_path / "out"), device="cpu").predict(pairs)
    again: Any = load(tmp_path / "out")
    assert [labels[0].score for labels in again.predict(pairs)] == pytest.approx(theirs.tolist(), abs=1e-6)
    ours = {hit.index: hit.score for hit in result.model.rerank(TEXTS[0], TEXTS[40:44])}
    assert [ours[i] for i in range(4)] == pytest.approx(theirs.tolist(), abs=1e-6)


def lists() -> list[dict[str, Any]]:
    """Questions with two to five passages, graded 0 to 3."""
    sizes = (3, 2, 5, 4) * 3
    return [
        {"query": TEXTS[i], "docs": TEXTS[20 + 5 * i : 20 + 5 * i + n], "labels": [(k * 7 + i) % 4 for k in range(n)]}
        for i, n in enumerate(sizes)
    ]


EXACT: dict[str, Any] = {**ONE, "batch_size": 4, "dropout": 0.0, "optimizer": "sgd", "lr": 5.0, "max_grad_norm": 0.0,
                         "schedule": "constant"}  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "rows"),
    [
        ("Lambda", lists()),
        ("PListMLE", [{"query": r["query"], "passage": d, "label": float(k)} for r in lists() for d, k in zip(r["docs"], r["labels"], strict=True)]),
        ("MarginMSE", [{**row, "scores": [3.0, 1.0, 0.5]} for row in listed(12)]),
        ("MSE", lists()),
    ],
    ids=["lists", "one a row", "teacher", "each by itself"],
)  # fmt: skip
def test_lists_are_learned_and_judged(loss: str, rows: list[dict[str, Any]], base: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {**ONE, "batch_size": 4, "vector_loss": loss}
    result = finetune(base, train=rows, eval=rows, out=tmp_path / "out", **given)
    assert {"ap", "map", "mrr@10", "ndcg@10"} <= result.metrics.keys()
    assert all(value == value for value in result.metrics.values())
    assert result.recipe["vector_loss"] == loss
    model: Any = result.model
    again: Any = load(tmp_path / "out")
    ranked = again.rerank(TEXTS[0], TEXTS[20:24])
    assert ranked == model.rerank(TEXTS[0], TEXTS[20:24])
    logits = again.rerank(TEXTS[0], TEXTS[20:24], function_to_apply="none")
    assert [one.score for one in ranked] == pytest.approx(
        [one.score if loss == "MSE" else torch.tensor(one.score).sigmoid().item() for one in logits], abs=1e-6
    )


@pytest.mark.parametrize("loss", ["Lambda", "ListNet"])
def test_steps_of_lists_are_those_of_a_plain_loop_however_they_are_cut(base: Path, loss: str) -> None:
    data = lists()
    job = plan_job(base, data, None, make_options({**EXACT, "vector_loss": loss}))
    model: Any = job.model
    start = {name: value.detach().clone() for name, value in model.graph.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.9)
    of = make_loss(loss, None, LIST_LOSSES)
    for batch in list(job.batches.plan(0))[:3]:
        scores, labels = torch.zeros(4, 5), torch.zeros(4, 5)
        present = torch.zeros(4, 5, dtype=torch.bool)
        for place, i in enumerate(batch.tolist()):
            row, n = data[i], len(data[i]["docs"])
            given = model.tokenizer([row["query"]] * n, row["docs"], padding=True, return_tensors="pt")
            names = ("input_ids", "token_type_ids", "attention_mask")
            inputs = {name: torch.as_tensor(given[name]) for name in names if name in given.keys()}  # noqa: SIM118
            scores[place, :n] = model(**inputs).logits[:, 0]
            labels[place, :n], present[place, :n] = torch.tensor(row["labels"]), True
        total, count = of(scores, labels, present)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = {name: value.detach().clone() for name, value in model.graph.named_parameters()}
    moved = max((plain[name] - start[name]).abs().max() for name in plain)
    assert moved > 1e-3
    cuts: list[dict[str, Any]] = [{}, {"micro_batch_size": 1}, {"layout": "packed"}]
    for more in cuts:
        found: Any = finetune(base, train=data, vector_loss=loss, **EXACT, **more).model
        for name, value in found.graph.named_parameters():
            assert (value - plain[name]).abs().max() < 5e-3 * moved, (name, more)


@pytest.mark.slow
def test_ranks_share_lists(base: Path) -> None:
    shared: list[dict[str, Any]] = [{}, {"devices": ["cpu", "cpu"]}]
    models: list[Any] = [finetune(base, train=lists(), vector_loss="Lambda", **EXACT, **more).model for more in shared]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([{**lists()[0], "labels": [1.0]}], {"vector_loss": "Lambda"}, "row 0: 3 documents, 1 labels"),
        (lists(), {}, "from 0 to 3"),
        (lists(), {"vector_loss": "Lamda"}, "LambdaLoss"),
        (lists(), {"vector_loss": "ListNet", "neftune": 5.0}, "neftune"),
        (lists(), {"vector_loss": "ListNet", "loss_options": {"k": 3}}, "no setting"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lists_that_do_not_fit_are_refused(
    rows: list[dict[str, Any]], options: dict[str, Any], said: str, base: Path
) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        finetune(base, train=rows, **ONE, **options)
