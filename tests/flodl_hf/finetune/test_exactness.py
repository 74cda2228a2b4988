"""The numbers of a run: equal to a plain loop to the bit, and the same however the work is cut."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import TABLES, labelled, sentences, tagged
from torch import Tensor
from torch.nn import functional as F

from flodl.data import Batch, Where
from flodl_hf import load
from flodl_hf.training import finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options
from flodl_hf.training.run import train_job
from flodl_hf.training.start import checkpoint_layers, restore_layers
from flodl_hf.training.step import Objective

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "finetune_parity.py"
FIXED: dict[str, Any] = {"max_steps": 10, "epochs": 9, "batch_size": 8, "lr": 1e-3, "max_length": 32, "stride": 8}


def benchmark() -> Any:
    if not BENCHMARK.is_file():
        pytest.skip("the benchmarks are not here")
    spec = importlib.util.spec_from_file_location("finetune_parity", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["finetune_parity"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("sequence_classification", {"warmup": 3, "weight_decay": 0.01}),
        ("sequence_classification", {"schedule": "cosine", "group_by_length": False, "attention": "eager"}),
        ("token_classification", {"warmup": 0.2}),
        ("question_answering", {"max_grad_norm": 0.1, "compat": "transformers"}),
        ("masked_lm", {"whole_words": True}),
    ],
)
def test_ten_steps_equal_a_plain_transformers_loop_to_the_bit(
    task: str, options: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = benchmark()
    found = module.compare(base, TABLES[task](32), 10, {**FIXED, **options})
    assert len(found.ours) == 10
    assert found.ours == found.theirs
    assert found.different_weights == []
    assert found.ours[0] != found.ours[-1]


@pytest.mark.transformers
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    ("problem_type", "label"),
    [
        ("regression", lambda i: [i / 4, -i / 8, 1.0]),
        ("regression", lambda i: i / 4),
        ("multi_label_classification", lambda i: [i / 8, 1 - i / 8]),
    ],
)
def test_the_loss_of_numbers_is_that_of_transformers(
    problem_type: str, label: Any, layout: str, base: Path, tmp_path: Path
) -> None:
    library = pytest.importorskip("transformers")
    rows = [{"text": text, "label": label(i)} for i, text in enumerate(sentences()[:8])]
    options = {**FIXED, "max_steps": 1, "dropout": 0.0, "lr": 0.0, "layout": layout, "problem_type": problem_type}
    result = finetune(base, train=rows, eval=rows, out=tmp_path / "out", report=False, **options)
    theirs = library.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert theirs.config.problem_type == problem_type
    given = load(tmp_path / "out").tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    inputs = {name: torch.as_tensor(given[name]) for name in ("input_ids", "attention_mask", "token_type_ids")}
    labels = torch.tensor([row["label"] for row in rows], dtype=torch.float32)
    with torch.no_grad():
        loss = theirs(**inputs, labels=labels).loss.item()
    assert result.losses[0] == pytest.approx(loss, rel=1e-6)
    assert result.metrics["eval_loss"] == pytest.approx(loss, rel=1e-6)
    for found, scores in zip(
        load(tmp_path / "out").predict([row["text"] for row in rows]), theirs(**inputs).logits, strict=True
    ):
        expected = scores.sigmoid() if problem_type != "regression" else scores
        by_label = {one.label: one.score for one in found}
        assert [
            by_label[f"LABEL_{k}" if problem_type == "regression" else str(k)] for k in range(len(scores))
        ] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-6)


def trained(base: Any, rows: Any, **options: Any) -> dict[str, Tensor]:
    chosen = {**FIXED, "max_steps": 4, "dropout": 0.0, **options}
    return {k: v.clone() for k, v in finetune(base, train=rows, **chosen).model.graph.state_dict().items()}


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("task", TABLES)
@pytest.mark.parametrize("cut", [{"micro_batch_size": 3}, {"batch_size": 4, "accumulate": 2, "group_by_length": False}])
def test_a_step_is_the_same_however_it_is_cut(task: str, cut: dict[str, Any], base: Path) -> None:
    rows = TABLES[task](21)
    plain = {
        "batch_size": 8,
        "group_by_length": False,
        "schedule": "constant",
        "optimizer": "sgd",
        "lr": 0.05,
    }
    whole, parts = trained(base, rows, **plain), trained(base, rows, **{**plain, **cut})
    names = ["O", "B-LONG"] if task == "token_classification" else None
    assert apart(whole, dict(load(base, head=task, labels=names).graph.state_dict())) > 1e-4
    assert apart(whole, parts) < 2e-6


@pytest.mark.parametrize("task", TABLES)
def test_packed_rows_learn_what_padded_ones_do(task: str, base: Path) -> None:
    rows = TABLES[task](24)
    plain = {"schedule": "constant", "optimizer": "sgd", "lr": 0.05}
    padded, packed = trained(base, rows, **plain), trained(base, rows, layout="packed", **plain)
    assert apart(padded, packed) < 5e-6
    job = plan_job(base, rows, rows, make_options({**FIXED, "layout": "packed"}))
    again = plan_job(base, rows, rows, make_options(FIXED))
    job.model.eval()
    assert job.evaluation is not None
    assert again.evaluation is not None
    a, b = job.evaluation(job.model), again.evaluation(job.model)
    assert a.keys() == b.keys()
    assert all(a[name] == pytest.approx(b[name], rel=1e-4) for name in a)


def test_checkpointing_layers_changes_memory_and_no_bit(base: Path) -> None:
    rows = labelled(24)
    assert apart(trained(base, rows), trained(base, rows, gradient_checkpointing=True)) == 0.0
    model = load(base, head="sequence_classification")
    checkpoint_layers(model)
    assert "forward" in vars(model.graph.get_submodule("encoder.layers.0"))
    restore_layers(model)
    assert "forward" not in vars(model.graph.get_submodule("encoder.layers.0"))


def test_the_same_recipe_gives_the_same_bits_and_another_seed_does_not(base: Path) -> None:
    rows = labelled(24)
    a, b, c = (trained(base, rows, dropout=0.1, seed=seed) for seed in (1, 1, 2))
    assert apart(a, b) == 0.0
    assert apart(a, c) > 0.0


def test_token_budgets_bound_every_batch(base: Path) -> None:
    job = plan_job(base, labelled(60), None, make_options({"tokens_per_batch": 64}))
    plan = job.batches.plan(0)
    assert sorted(int(i) for batch in plan for i in batch) == list(range(60))
    assert all(len(batch) * job.rows.lengths[batch].max() <= 64 for batch in plan)
    assert job.steps == sum(len(job.batches.plan(epoch)) for epoch in range(3))


def test_what_is_frozen_keeps_its_bits_and_learns_again_later(base: Path) -> None:
    before = load(base, head="sequence_classification").graph.state_dict()
    model = load(base, head="sequence_classification")
    after = finetune(model, train=labelled(24), freeze=["embeddings", "layers.0-0"], **FIXED).model.graph
    moved = {name for name, tensor in after.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved
    assert not [name for name in moved if name.startswith(("encoder.embeddings", "encoder.layers.0"))]
    assert {name for name, p in after.named_parameters() if p.requires_grad} == set(dict(after.named_parameters()))


def test_dropout_is_what_was_asked_during_training_and_the_models_own_afterwards(base: Path) -> None:
    model = load(base, head="sequence_classification")

    def dropouts() -> list[float]:
        return [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]

    own, during = dropouts(), []
    finetune(model, train=labelled(16), dropout=0.25, on_event=lambda event: during.append(dropouts()), **FIXED)
    assert set(own) != {0.25}
    assert during
    assert all(set(seen) == {0.25} for seen in during)
    assert dropouts() == own


def test_lower_layers_learn_at_falling_rates(base: Path) -> None:
    job = plan_job(base, labelled(16), None, make_options({**FIXED, "layerwise_decay": 0.5, "max_steps": 1}))
    rates: dict[str, float] = {}
    names = {id(p): name for name, p in job.model.graph.named_parameters()}
    step = torch.optim.AdamW.step

    def watching(self: Any, *args: Any, **named: Any) -> Any:
        rates.update({names[id(p)]: group["lr"] for group in self.param_groups for p in group["params"]})
        return step(self, *args, **named)

    torch.optim.AdamW.step = watching  # type: ignore[method-assign]
    try:
        with ExitStack() as stack:
            train_job(job, lambda event: None, stack)
    finally:
        torch.optim.AdamW.step = step  # type: ignore[method-assign]
    assert rates["head.classifier.weight"] == pytest.approx(1e-3)
    assert rates["encoder.layers.1.attention.query.weight"] == pytest.approx(0.5e-3)
    assert rates["encoder.layers.0.attention.query.weight"] == pytest.approx(0.25e-3)
    assert rates["encoder.embeddings.word.weight"] == pytest.approx(0.125e-3)


def batch_of(job: Any, count: int) -> Batch:
    parts = job.collate([job.rows.get(i) for i in range(count)], Where(0, 0, 0, tuple(range(count))))
    return Batch(parts, count)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, (1.0, 3.0)])
@pytest.mark.parametrize("task", ["sequence_classification", "token_classification"])
def test_weighted_and_smoothed_losses_add_up_over_parts_of_a_batch(
    task: str, weights: tuple[float, ...] | None, smoothing: float, base: Path
) -> None:
    job = plan_job(base, TABLES[task](12), None, make_options({}))
    objective = Objective(job.task.kind, weights, smoothing)
    batch = batch_of(job, 12)
    scores = torch.randn(*batch["labels"].shape, 2, dtype=torch.float64)
    whole = objective.of(scores, batch)
    parts = [objective.of(scores[k : k + 5], Batch({"labels": batch["labels"][k : k + 5]}, 5)) for k in (0, 5, 10)]
    total, count = sum(float(p.as_sum()) for p in parts), sum(float(p.count) for p in parts)
    assert total / count == pytest.approx(float(whole.as_mean()), rel=1e-12)
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    flat, labels = scores.view(-1, 2), batch["labels"].view(-1)
    by_hand = F.cross_entropy(flat, labels, weight=weight, label_smoothing=smoothing)
    assert float(whole.as_mean()) == pytest.approx(float(by_hand), rel=1e-12)


def test_balanced_weights_make_every_label_count_alike(base: Path) -> None:
    rows = tagged(32)
    job = plan_job(base, rows, None, make_options({"class_weights": "balanced"}))
    counts = job.task.label_counts(job.rows)
    assert counts is not None
    assert sum(counts) == sum(len(row["words"]) for row in rows)
    weights = job.objective.weights
    assert weights is not None
    shares = [w * n for w, n in zip(weights, counts, strict=True)]
    assert shares == pytest.approx([sum(counts) / 2] * 2)


class Stopped(BaseException):
    """What ends a run from outside in these tests."""


@pytest.mark.parametrize("at", [2, 7, 12])
def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(at: int, base: Path, tmp_path: Path) -> None:
    rows = labelled(40)
    options: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 8,
        "lr": 1e-3,
        "eval_every": 2,
        "eval": rows[:10],
        "keep_best": False,
    }
    whole = finetune(base, train=rows, **options)

    def stop(event: Any) -> None:
        if type(event).__name__ == "StepDone" and event.step == at:
            raise Stopped

    with pytest.raises(Stopped):
        finetune(base, train=rows, out=tmp_path / "out", save_every=1, on_event=stop, **options)
    rest = finetune(base, train=rows, out=tmp_path / "out", save_every=1, resume=True, **options)
    assert rest.steps == whole.steps == 15
    assert rest.losses == whole.losses
    assert rest.history == whole.history
    assert rest.seconds > 0
    assert apart(dict(whole.model.graph.state_dict()), dict(rest.model.graph.state_dict())) == 0.0


@pytest.mark.slow
def test_two_ranks_take_the_same_steps_as_one(base: Path) -> None:
    rows = labelled(36)
    one = trained(base, rows, optimizer="sgd", lr=0.05)
    two = finetune(
        base,
        train=rows,
        **{**FIXED, "max_steps": 4, "dropout": 0.0, "optimizer": "sgd", "lr": 0.05, "devices": ["cpu", "cpu"]},
    )
    assert apart(one, dict(two.model.graph.state_dict())) < 2e-6
