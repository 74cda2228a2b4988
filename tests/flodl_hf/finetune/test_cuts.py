"""Every task: its steps and figures do not depend on layout, micro-batches, accumulation or number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import TABLES
from numpy.typing import NDArray

from flodl.distributed import Ranks, launch
from flodl.train import StepDone
from flodl_hf.training import batching
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options
from flodl_hf.training.training import make_builder

ROWS = 21
WHOLE: dict[str, Any] = {
    "batch_size": 8,
    "max_steps": 3,
    "schedule": "constant",
    "optimizer": "sgd",
    "lr": 0.05,
    "dropout": 0.0,
    "max_length": 24,
    "stride": 8,
    "group_by_length": False,
}
CUTS: dict[str, dict[str, Any]] = {
    "micro-batches": {"micro_batch_size": 3},
    "single rows": {"micro_batch_size": 1},
    "accumulated": {"batch_size": 4, "accumulate": 2},
}
LAYOUTS = ("padded", "packed", "bucketed")
RANKS: tuple[Any, ...] = (None, (3.0, 1.0))


def numbers(count: int) -> list[dict[str, Any]]:
    return [{**row, "label": 0.1 * len(row["text"])} for row in TABLES["sequence_classification"](count)]


def several(count: int) -> list[dict[str, Any]]:
    rows = TABLES["sequence_classification"](count)
    return [
        {**row, "label": [name for k, name in enumerate("abc") if (i + k) % 3 or i % 4]} for i, row in enumerate(rows)
    ]


def labels_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return the two labels of a table, the one of its first row first."""
    seen = [tag for row in rows for tag in row.get("tags", [row.get("label")])]
    return list(dict.fromkeys(seen))


def pairs(count: int) -> list[dict[str, Any]]:
    texts = [row["text"] for row in TABLES["masked_lm"](count + 1)]
    return [{"sentence_a": a, "sentence_b": b} for a, b in pairwise(texts)]


def choices(count: int) -> list[dict[str, Any]]:
    texts = [row["text"] for row in TABLES["masked_lm"](3 * count)]
    return [
        {"question": texts[i].split()[0], "choices": texts[count + 2 * i :][: 2 + i % 2], "label": i % 2}
        for i in range(count)
    ]


def graded(count: int) -> list[dict[str, Any]]:
    return [
        {"query": a["sentence_a"][:9], "passage": a["sentence_b"], "label": i % 2} for i, a in enumerate(pairs(count))
    ]


def candidates(count: int) -> list[dict[str, Any]]:
    texts = [row["text"] for row in TABLES["masked_lm"](90)]
    return [
        {"query": texts[i], "docs": texts[30 + i :][: 2 + i % 3], "labels": [i % 2, 1, 0, 2][: 2 + i % 3]}
        for i in range(count)
    ]


def embedded(**column: Callable[[int], Any]) -> Callable[[int], list[dict[str, Any]]]:
    return lambda count: [
        {"sentence1": row["sentence_a"], "sentence2": row["sentence_b"], **{k: of(i) for k, of in column.items()}}
        for i, row in enumerate(pairs(count))
    ]


def scores(i: int) -> float:
    return (i % 6) / 5


VARIANTS: dict[str, tuple[Callable[[int], list[dict[str, Any]]], dict[str, Any]]] = {
    **{name: (table, {}) for name, table in TABLES.items()},
    "whole words": (TABLES["masked_lm"], {"whole_words": True}),
    "numbers": (numbers, {}),
    "windows": (TABLES["sequence_classification"], {"long_texts": "windows", "max_length": 8, "stride": 2}),
    "several labels": (several, {"problem_type": "multi_label_classification"}),
    **{
        f"{name}, {how}": (TABLES[name], options)
        for name in ("sequence_classification", "token_classification")
        for how, options in {
            "weighted": {"class_weights": [3.0, 0.25]},
            "a weight of 0": {"class_weights": [0.0, 2.0]},
            "smoothed and a weight of 0": {"class_weights": [0.0, 1.0], "label_smoothing": 0.1},
        }.items()
    },
    "choices": (choices, {"task": "choice", "start": "bert"}),
    "next sentence": (pairs, {"task": "nsp", "lr": 0.5}),
    "pretraining": (pairs, {"task": "pretrain"}),
    "pretraining, whole words": (pairs, {"task": "pretrain", "whole_words": True, "mask_probability": 0.4}),
    "replaced": (TABLES["masked_lm"], {"task": "replaced", "start": "electra"}),
    "rank": (graded, {"task": "rank"}),
    "rank, numbers": (graded, {"task": "rank", "vector_loss": "MSELoss"}),
    "rank, lists": (candidates, {"task": "rank", "vector_loss": "ListNetLoss", "lr": 1.0}),
    "rank, lambda": (candidates, {"task": "rank", "vector_loss": "LambdaLoss", "lr": 1.0}),
    "embedding, in batch": (embedded(), {"task": "embedding", "lr": 0.02}),
    "embedding, order": (embedded(score=scores), {"task": "embedding", "lr": 0.02}),
    "embedding, alone": (embedded(score=scores), {"task": "embedding", "vector_loss": "CosineSimilarityLoss"}),
    "embedding, classes": (embedded(label=lambda i: "abc"[i % 3]), {"task": "embedding"}),
    "embedding, rebuilt": (TABLES["masked_lm"], {"task": "embedding", "vector_loss": "DenoisingAutoEncoderLoss"}),
    "multivector": (embedded(), {"task": "multivector", "lr": 0.02}),
}
VECTORS: dict[str, dict[str, dict[str, Any]]] = {
    # A batch of vectors is split by tokens. Losses that compare the examples of a batch are those of that batch.
    "embedding, in batch": {"parts": {"cache_tokens": 40}},
    "embedding, order": {"parts": {"cache_tokens": 40}},
    "embedding, alone": {"parts": {"cache_tokens": 40}, "accumulated": CUTS["accumulated"]},
    "embedding, classes": {"accumulated": CUTS["accumulated"]},
    "embedding, rebuilt": {"accumulated": CUTS["accumulated"]},
    "multivector": {"parts": {"cache_tokens": 40}},
}
IN_BATCH = ("embedding, in batch", "embedding, order", "multivector")


def planned(starts: dict[str, Path], variant: str, layout: str, **more: Any) -> Any:
    table, options = VARIANTS[variant]
    rows = table(ROWS)
    chosen = {**WHOLE, **options, **more}
    start = starts[chosen.pop("start", "base")]
    if "class_weights" in chosen:
        chosen["labels"] = labels_of(rows)
    before = batching._layout
    batching._layout = lambda options: layout  # type: ignore[assignment]
    try:
        return plan_job(start, rows, rows[:11], make_options(chosen))
    finally:
        batching._layout = before


def steps_of(job: Any, ranks: Ranks | None = None, shares: Any = None) -> tuple[list[float], NDArray[Any]]:
    """Return the losses of all steps, and the weights after the last."""
    losses: list[float] = []

    def note(event: Any) -> None:
        if isinstance(event, StepDone):
            losses.append(event.loss)

    with ExitStack() as stack:
        builder = make_builder(job, note, stack)
        builder.eval_fn(None)
        if shares is not None:
            builder.shares(shares)
        if ranks is None:
            model: Any = builder.run().model
        else:
            model = builder.trainer(ranks).fit().model
    return losses, torch.cat([p.detach().flatten() for p in model.graph.parameters()]).numpy()


def same(found: tuple[list[float], NDArray[Any]], whole: tuple[list[float], NDArray[Any]]) -> None:
    assert len(found[0]) == len(whole[0]) == 3
    assert found[0] == pytest.approx(whole[0], rel=2e-5)
    assert abs(found[1] - whole[1]).max() < 5e-6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_steps_however_rows_are_cut(variant: str, layout: str, starts: dict[str, Path]) -> None:
    whole = steps_of(planned(starts, variant, "padded"))
    assert len(set(whole[0])) == 3
    same(steps_of(planned(starts, variant, layout)), whole)
    for cut in VECTORS.get(variant, CUTS).values():
        same(steps_of(planned(starts, variant, layout, **cut)), whole)


def on_ranks(ranks: Ranks, starts: dict[str, Path], variant: str) -> list[Any]:
    os.environ["WORLD_SIZE"] = "2"  # the options of a run on two ranks, in a process of its own
    return [steps_of(planned(starts, variant, layout), ranks, shares) for layout in LAYOUTS for shares in RANKS]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_steps_on_two_ranks(variant: str, starts: dict[str, Path]) -> None:
    torch.set_num_threads(1)
    whole = steps_of(planned(starts, variant, "padded"))
    first, second = launch(on_ranks, (starts, variant), ranks=2, start="fork").wait()
    assert len(first) == len(LAYOUTS) * len(RANKS)
    for a, b in zip(first, second, strict=True):
        same(a, whole)
        assert (a[1] == b[1]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_figures_for_any_evaluation_batch(variant: str, layout: str, starts: dict[str, Path]) -> None:
    found = []
    for size in (64, 1, 4):
        job = planned(starts, variant, layout, eval_batch_size=size)
        found.append(job.evaluation(job.model.eval()))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, value in found[0].items():
            if name == "eval_loss" and variant in IN_BATCH:
                continue
            # scores of an untrained model hardly differ, so their correlation is one of rounding too
            bound = 1e-4 if name in ("pearson", "spearman") else 0.0
            assert other[name] == pytest.approx(value, rel=2e-5, abs=bound, nan_ok=True), name
