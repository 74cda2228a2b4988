"""Vectors that are evaluated on data of another form than the training data: loss, metric, and errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from finetune_tables import sentences
from torch import Tensor

from flodl.errors import ConfigError, DataError
from flodl_hf.training import finetune
from flodl_hf.training.losses.ranking import MultipleNegativesRankingLoss

TEXTS = sentences()
MADE: dict[str, Any] = {
    "pairs": lambda i: {"anchor": TEXTS[i], "positive": TEXTS[24 + i]},
    "scored": lambda i: {"sentence1": TEXTS[i], "sentence2": TEXTS[24 + i], "score": (i % 6) / 5},
    "binary": lambda i: {"sentence1": TEXTS[i], "sentence2": TEXTS[24 + i], "label": i % 2},
    "classes": lambda i: {"text": TEXTS[i], "label": f"class {i % 3}"},
    "texts": lambda i: {"text": TEXTS[i]},
    "teacher_scores": lambda i: {
        "query": TEXTS[i],
        "positive": TEXTS[24 + i],
        "negative": [TEXTS[48 + i]],
        "scores": [2.0, i % 2],
    },
}
ROWS: dict[str, list[dict[str, Any]]] = {form: [made(i) for i in range(16)] for form, made in MADE.items()}


class OfPairs:
    forms, in_batch, by_guide = ("pairs",), True, False

    def __call__(self, vectors: list[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        return (vectors[0] - vectors[1]).square().mean()


def of_first(vectors: list[Tensor], labels: Tensor | None) -> Tensor:
    return vectors[0].square().mean()


def metric_of(base: Path, task: str, train: Any, held_out: Any, **options: Any) -> tuple[str | None, set[str]]:
    """Return the metric that selects the best model, and the metrics of a run."""
    given: dict[str, Any] = {"max_steps": 1, "batch_size": 8, "report": False, **options}
    result = finetune(base, train=train, eval=held_out, task=task, out="out", overwrite=True, **given)
    assert result.folder is not None
    return json.loads((result.folder / "training.json").read_text("utf-8"))["metric"], set(result.metrics)


@pytest.mark.parametrize(
    ("task", "form", "metric"),
    [
        ("embedding", "scored", "spearman"),
        ("embedding", "binary", "ap"),
        ("embedding", "classes", "neighbour_accuracy"),
        ("embedding", "texts", "-eval_loss"),
        ("embedding", "teacher_scores", "triplet_accuracy"),
        ("sparse", "scored", "spearman"),
        ("multivector", "teacher_scores", "triplet_accuracy"),
    ],
)
def test_the_first_metric_of_the_evaluation_data_selects_the_model(
    task: str, form: str, metric: str, base: Path
) -> None:
    found, names = metric_of(base, task, ROWS["pairs"], ROWS[form])
    assert found == metric
    assert metric.lstrip("-") in names


def test_several_tables_take_the_metric_of_the_first_evaluation_set(base: Path) -> None:
    tables = {"pairs": ROWS["pairs"], "sts": ROWS["scored"]}
    assert metric_of(base, "embedding", tables, ROWS["scored"])[0] == "spearman"
    assert metric_of(base, "embedding", tables, {"a": ROWS["binary"], "b": ROWS["pairs"]})[0] == "a/spearman"


@pytest.mark.parametrize("loss", [OfPairs(), MultipleNegativesRankingLoss()], ids=lambda loss: type(loss).__name__)
def test_sparse_vectors_have_the_default_loss_for_other_data(loss: Any, base: Path) -> None:
    for form in ("scored", "teacher_scores"):
        names = metric_of(base, "sparse", ROWS["pairs"], ROWS[form], vector_loss=loss)[1]
        assert "eval_loss" in names


@pytest.mark.parametrize(
    ("task", "form", "options"),
    [
        ("sparse", "classes", {}),
        ("sparse", "classes", {"vector_loss": OfPairs()}),
        *(("multivector", form, {}) for form in ("scored", "binary", "texts", "classes")),
        *(("multivector", form, {"vector_loss": OfPairs()}) for form in ("scored", "texts", "classes")),
        ("multivector", "classes", {"loss": of_first}),
    ],
    ids=str,
)
def test_evaluation_data_without_a_loss_is_refused(task: str, form: str, options: dict[str, Any], base: Path) -> None:
    with pytest.raises(DataError) as caught:
        metric_of(base, task, ROWS["pairs"], ROWS[form], metric="-eval_loss", **options)
    assert caught.value.details["form"] == form
    assert caught.value.message.startswith("eval: found")


def test_data_with_different_numbers_of_negatives_are_evaluated_on_pairs(base: Path) -> None:
    several = [{**row, "negatives": TEXTS[60 + 2 * i : 61 + 2 * i + i % 2]} for i, row in enumerate(ROWS["pairs"])]
    result = finetune(base, train=several, eval=ROWS["scored"], task="embedding", max_steps=1, batch_size=8)
    assert math.isfinite(result.metrics["eval_loss"])


def test_a_function_takes_other_data_of_token_vectors(base: Path) -> None:
    assert metric_of(base, "multivector", ROWS["pairs"], ROWS["scored"], loss=of_first) == ("-eval_loss", {"eval_loss"})


def test_losses_of_whole_texts_are_refused_for_token_vectors(base: Path) -> None:
    with pytest.raises(ConfigError, match="MultiVectorMultipleNegativesRankingLoss"):
        metric_of(base, "multivector", ROWS["pairs"], None, vector_loss=MultipleNegativesRankingLoss())
