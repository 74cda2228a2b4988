"""Rows packed and filled up to shapes that come again learn what padded rows do, to rounding."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetune_tables import TABLES, finetune_with
from test_exactness import FIXED, apart, trained

from flodl.data import Batch, FixedBatches, RandomSampler, TokenBudgetBatches, Where
from flodl.train import Warned
from flodl_hf.nn.buckets import Bucket, fill
from flodl_hf.training import batching
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options
from flodl_hf.training.rows import Shapes, choose_shapes, choose_widths
from flodl_hf.training.training import make_builder

PLAIN: dict[str, Any] = {
    "schedule": "constant",
    "optimizer": "sgd",
    "lr": 0.05,
    "group_by_length": False,
    "max_steps": 4,
}
CASES = [
    ("sequence_classification", {}),
    ("sequence_classification", {"class_weights": "balanced", "label_smoothing": 0.1}),
    ("token_classification", {}),
    ("token_classification", {"class_weights": "balanced"}),
    ("question_answering", {}),
    ("masked_lm", {}),
]


@pytest.fixture
def bucketed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_layout", lambda options: "bucketed")


@pytest.mark.parametrize(("task", "options"), CASES)
def test_buckets_learn_what_padded_rows_do(
    task: str, options: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = TABLES[task](21)  # the last batch is smaller
    padded = trained(base, rows, layout="padded", **PLAIN, **options)
    monkeypatch.setattr(batching, "_layout", lambda options: "bucketed")
    assert apart(padded, trained(base, rows, **PLAIN, **options)) < 5e-6


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_numbers_and_several_labels_are_means_over_real_rows(
    problem: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    texts = [row["text"] for row in TABLES["sequence_classification"](21)]
    if problem == "regression":
        rows = [{"text": text, "label": float(rng.normal())} for text in texts]
    else:
        rows = [{"text": text, "label": [name for name in "abc" if rng.random() < 0.5]} for text in texts]
    padded = trained(base, rows, layout="padded", problem_type=problem, **PLAIN)
    monkeypatch.setattr(batching, "_layout", lambda options: "bucketed")
    assert apart(padded, trained(base, rows, problem_type=problem, **PLAIN)) < 5e-6


def test_few_shapes_and_little_filling(base: Path, bucketed: None) -> None:
    rows = TABLES["sequence_classification"](64)
    job = plan_job(base, rows * 8, None, make_options({**FIXED, "batch_size": 32}))
    shapes, filled, real = set(), 0, 0
    for epoch in range(3):
        for number, indices in enumerate(job.batches.plan(epoch)):
            where = Where(0, epoch, number, tuple(indices.tolist()))
            parts = job.collate([job.rows.get(int(i)) for i in indices], where)
            shapes.add(tuple((name, tuple(part.shape)) for name, part in parts.items() if torch.is_tensor(part)))
            assert not [part for part in parts.values() if isinstance(part, list)]
            filled += len(parts["input_ids"])
            real += int(job.rows.lengths[indices].sum())
            assert int(parts["real"].sum()) == len(indices)
            assert int(parts["cu_seqlens"].diff().max()) <= parts["longest"]
    assert len(shapes) <= 6
    assert filled < 1.2 * real


def lognormal(count: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.exp(np.random.default_rng(seed).normal(np.log(28), 0.75, count)), 3, 128).astype(np.int64)


def used(shapes: Shapes, lengths: np.ndarray, source: Any, epochs: range) -> tuple[Counter[Bucket], float]:
    """Return how often which shape comes, and the share of filling."""
    found: Counter[Bucket] = Counter()
    filled = real = 0
    for epoch in epochs:
        for rows in source.plan(epoch):
            bucket = shapes.bucket(lengths[rows])
            found[bucket] += 1
            filled += bucket.tokens
            real += int(lengths[rows].sum())
            fillers = len(fill(lengths[rows], bucket))
            assert max(fillers, len(rows) + 1) <= bucket.texts
    return found, filled / real - 1


@pytest.mark.parametrize("count", [48 * 32, 48 * 32 - 27, 400 * 32])
def test_batches_of_all_epochs_come_in_six_shapes_that_fit(count: int) -> None:
    lengths = lognormal(count)
    source = FixedBatches(RandomSampler(count, 1), 32)
    shapes = choose_shapes(lengths, source, 128)
    assert shapes == choose_shapes(lengths, source, 128)
    found, filling = used(shapes, lengths, source, range(20, 23))
    assert sum(n for _, n in found.most_common(6)) > 0.97 * found.total()
    assert filling < (0.08 if count > 9600 else 0.115)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_short_epochs_come_in_fewer_shapes_than_long_ones(size: int) -> None:
    lengths, many = lognormal(20 * size), lognormal(2000 * size)
    few = choose_shapes(lengths, FixedBatches(RandomSampler(len(lengths), 1), size), 128)
    assert 1 <= len(few.tokens) <= 4
    found, filling = used(few, lengths, FixedBatches(RandomSampler(len(lengths), 1), size), range(5))
    assert filling < 0.13
    steps = found.total()
    assert sum(min(2, count) for count in found.values()) < 0.1 * steps  # all others are replayed
    assert len(choose_shapes(many, FixedBatches(RandomSampler(len(many), 1), size), 128).tokens) > len(few.tokens)


def test_padded_batches_come_in_few_widths(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = lognormal(640)
    source = FixedBatches(RandomSampler(640, 1), 16)
    widths = choose_widths(lengths, lengths, source)
    own = [int(lengths[rows].max()) for epoch in range(4) for rows in source.plan(epoch)]
    assert len(set(own)) > 20
    assert len(widths) <= 6
    assert max(widths) == max(lengths)
    wide = [next(width for width in widths if width >= one) for one in own]
    assert sum(wide) < 1.15 * sum(own)
    assert len(choose_widths(lengths, lengths, source, micro_batch_size=4)) == 1  # a step of four would have many
    assert len(choose_widths(lengths, lengths, source, accumulate=2)) <= 2
    # on CUDA, for what is recorded: not where the width of a batch decides its loss
    rows = {task: TABLES[task](21) for task in ("sequence_classification", "question_answering")}
    for task, options, expected in (
        ("sequence_classification", {}, True),
        ("question_answering", {}, True),
        ("question_answering", {"compat": "transformers"}, False),
    ):
        for cuda in (True, False):
            monkeypatch.setattr(batching, "_on_cuda", lambda options, cuda=cuda: cuda)
            job = plan_job(base, rows[task], None, make_options({**FIXED, **options, "layout": "padded"}))
            assert bool(job.collate.widths) == (expected and cuda)


def test_batches_of_a_budget_of_tokens_come_in_a_size_or_two() -> None:
    lengths = lognormal(8000)
    source = TokenBudgetBatches(RandomSampler(8000, 1), lengths, 8192, layout="packed", seed=1)
    found, filling = used(choose_shapes(lengths, source, 128), lengths, source, range(3))
    assert len({bucket.tokens for bucket, n in found.items() if n > 3}) == 1
    assert len(found) <= 6
    assert filling < 0.02


def test_micro_batches_and_shares_of_ranks_have_shapes_of_their_size() -> None:
    lengths = lognormal(1024)
    source = FixedBatches(RandomSampler(1024, 1), 32)
    shapes = choose_shapes(lengths, source, 128, micro_batch_size=16)
    assert len(shapes.tokens) == 2  # a step has two of them, so four recordings serve all
    assert max(shapes.tokens) < 0.8 * max(choose_shapes(lengths, source, 128).tokens)
    assert choose_shapes(lengths, source, 128, accumulate=4).tokens[1:] == ()
    whole = choose_shapes(lengths, source, 128)
    assert whole.bucket(lengths[:4]).tokens < 1.3 * max(128, int(lengths[:4].sum()))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_shares_of_ranks_are_not_filled_up_to_whole_batches(ranks: int) -> None:
    lengths = lognormal(4096)
    source = FixedBatches(RandomSampler(4096, 1), 64)
    shapes = choose_shapes(lengths, source, 128, ranks=ranks)
    filled = real = 0
    for rows in source.plan(20):
        for part in np.array_split(rows, ranks):
            filled += shapes.bucket(lengths[part]).tokens
            real += int(lengths[part].sum())
    assert filled / real < 1.15


@pytest.mark.parametrize("layout", ["padded", "packed", "bucketed"])
def test_rows_taken_together_are_rows_taken_one_by_one(layout: Any, base: Path) -> None:
    for task in TABLES:
        job = plan_job(base, TABLES[task](11), None, make_options({**FIXED, "dropout": 0.0}))
        which = [7, 2, 2, 9]
        collate = replace(job.collate, layout=layout)
        where = Where(0, 0, 0, tuple(which))
        one = collate([job.rows.get(i) for i in which], where)
        together = collate(job.rows.__getitems__(which), where)
        assert list(one) == list(together)
        for name, part in one.items():
            same = torch.equal(part, together[name]) if torch.is_tensor(part) else part == together[name]
            assert same, (task, name)


def test_a_recorded_step_serves_batches_of_other_rows(base: Path, bucketed: None) -> None:
    """What a loss is computed from are tensors: the same shapes with other rows in them give the other rows' loss."""
    rows = TABLES["sequence_classification"](24)
    job = plan_job(base, rows, None, make_options({**FIXED, "dropout": 0.0}))
    job.model.eval()
    with ExitStack() as stack:
        assert make_builder(job, print, stack).trainer().plan.train_step.reads_num_rows is False

    def batch(indices: list[int]) -> Batch:
        where = Where(0, 0, 0, tuple(indices))
        return Batch(job.collate([job.rows.get(i) for i in indices], where), len(indices))

    a, b = batch([0, 1, 2]), batch([3, 4])
    assert {n: p.shape for n, p in a.items() if torch.is_tensor(p)} == {
        n: p.shape for n, p in b.items() if torch.is_tensor(p)
    }
    kept = Batch({n: p.clone() if torch.is_tensor(p) else p for n, p in a.items()}, a.num_rows)
    for name, part in b.items():
        if torch.is_tensor(part):
            kept[name].copy_(part)
    first, second = job.objective(job.model, kept), job.objective(job.model, b)
    assert torch.equal(first.sum, second.sum)
    assert float(first.count) == float(second.count) == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("task", TABLES)
def test_on_a_gpu_every_task_is_recorded_and_gives_the_bits_of_ordinary_steps(task: str, base: Path) -> None:
    options: dict[str, Any] = {**FIXED, "max_steps": 24, "precision": "bf16"}
    found = []
    for capture in (True, False):
        told: list[str] = []

        def note(event: Any, told: list[str] = told) -> None:
            if isinstance(event, Warned):
                told.append(event.message)

        result = finetune_with(base, train=TABLES[task](48), on_event=note, capture=capture, **options)
        found.append((result.losses, {k: v.clone() for k, v in result.model.graph.state_dict().items()}, told))
    assert found[0][0] == found[1][0]
    assert apart(found[0][1], found[1][1]) == 0
    assert found[0][2] == []


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("task", TABLES)
def test_on_a_gpu_fused_layers_train_as_plain_ones(task: str, precision: str, base: Path) -> None:
    options: dict[str, Any] = {**FIXED, "max_steps": 12, "precision": precision, "dropout": 0.0}
    fused, plain = (finetune_with(base, train=TABLES[task](48), fused=fused, **options) for fused in (True, False))
    assert fused.losses == pytest.approx(plain.losses, rel=2e-2, abs=2e-2)
    # Not the same kernels: losses may round to the same numbers, weights do not.
    assert apart(*({k: v.clone() for k, v in r.model.graph.state_dict().items()} for r in (fused, plain))) > 0
