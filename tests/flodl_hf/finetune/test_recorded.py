"""Steps of every task can be recorded: nothing in them asks the device, and what fills batches up counts for nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import TABLES, finetune_with, sentences
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flodl.data import Batch, Where
from flodl.train import Warned
from flodl.train.step import route
from flodl.train.step.capture import flatten
from flodl_hf import load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families.schema.tasks import TASKS
from flodl_hf.heads.auto import head_named
from flodl_hf.nn.layout import Padded, largest_of_texts
from flodl_hf.training import batching, finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options
from flodl_hf.training.start import set_dropout

TEXTS = sentences()
Rows = list[dict[str, Any]]
PAIRS = [{"anchor": TEXTS[i], "positive": TEXTS[24 + i]} for i in range(24)]
TRIPLETS = [{**row, "negative": TEXTS[48 + i]} for i, row in enumerate(PAIRS)]
LINES = [{"text": text} for text in TEXTS[:24]]
NEIGHBOURS = [{"sentence_a": a, "sentence_b": b} for a, b in pairwise(TEXTS[:25])]
NUMBERS = [{"text": row["text"], "label": i / 7} for i, row in enumerate(LINES)]
SEVERAL = [{"text": row["text"], "label": ["a"] if i % 3 else ["a", "b"]} for i, row in enumerate(LINES)]
CHOICES = [
    {"question": TEXTS[i], "choices": [TEXTS[30 + i], TEXTS[60 + i], TEXTS[40 + i]][: 2 + i % 2], "label": i % 2}
    for i in range(24)
]
GRADED = [{"query": TEXTS[i // 4], "passage": TEXTS[40 + i], "label": (i % 4) / 3} for i in range(24)]
LISTED = [{"query": TEXTS[i], "positive": TEXTS[40 + i], "negatives": [TEXTS[60 + i]]} for i in range(24)]
CLASSES = [{"premise": a, "hypothesis": b, "label": "xyz"[i % 3]} for i, (a, b) in enumerate(zip(TEXTS, TEXTS[9:], strict=False))][:24]  # fmt: skip
LATE = {"projection": {"size": 8, "query_length": 16, "document_length": 40, "query_marker": "the ", "document_marker": "a "}}  # fmt: skip
AS_LONG = {"projection": {**LATE["projection"], "expanded": False, "punctuation": True}}

# name of the cell: task, rows, options
CELLS: dict[str, tuple[str, Rows, dict[str, Any]]] = {
    "sequence_classification": ("sequence_classification", TABLES["sequence_classification"](24), {}),
    "several labels": ("sequence_classification", SEVERAL, {"problem_type": "multi_label_classification"}),
    "numbers": ("sequence_classification", NUMBERS, {"problem_type": "regression"}),
    "weighted labels": (
        "sequence_classification",
        TABLES["sequence_classification"](24),
        {"class_weights": "balanced", "label_smoothing": 0.1},
    ),
    "noise": ("sequence_classification", TABLES["sequence_classification"](24), {"neftune": 5.0}),
    "token_classification": ("token_classification", TABLES["token_classification"](24), {}),
    "question_answering": ("question_answering", TABLES["question_answering"](24), {}),
    "masked_lm": ("masked_lm", LINES, {}),
    "multiple_choice": ("multiple_choice", CHOICES, {}),
    "next_sentence": ("next_sentence", NEIGHBOURS, {}),
    "pretraining": ("pretraining", NEIGHBOURS, {}),
    "replaced_tokens": ("replaced_tokens", LINES, {}),
    "generator": ("replaced_tokens", LINES, {"generator": "a folder"}),
    "embedding": ("embedding", TRIPLETS, {}),
    "largest values": ("embedding", PAIRS, {"pooling": "max"}),
    "sizes": ("embedding", PAIRS, {"matryoshka": [16, 8]}),
    "pair classes": ("embedding", CLASSES, {}),
    "denoising": ("embedding", LINES, {"vector_loss": "denoising"}),
    "damaged": ("embedding", PAIRS, {"vector_loss": "denoising"}),
    "rank": ("rank", GRADED, {}),
    "ranked lists": ("rank", LISTED, {}),
    "sparse": ("sparse", TRIPLETS, {}),
    "sparse thresholds": ("sparse", PAIRS, {"loss_options": {"document_regularizer_threshold": 3}}),
    "multivector": ("multivector", TRIPLETS, LATE),
    "queries as long as they are": ("multivector", PAIRS, AS_LONG),
}
FIXED: dict[str, Any] = {
    "epochs": 9, "batch_size": 8, "lr": 0.1, "max_length": 40, "report": False, "optimizer": "sgd", "dropout": 0.0,
    "schedule": "constant", "max_grad_norm": 0.0, "group_by_length": False,
}  # fmt: skip
ASKS = (
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount"),
    *("lift_fresh", "unique_consecutive"),
)
"""Operations for which a host waits for its device, or whose result has a shape that only the device knows."""


class Asked(TorchDispatchMode):
    """Notes the operations for which a host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        counted = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
        chosen = name.startswith("index") and any(
            isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8)
            for one in (args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ())
        )
        if name in ASKS or counted or chosen:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def starts(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of an untrained encoder that has a task's head."""
    made: dict[str, Path] = {}
    tokenizer: Any = load(base).tokenizer
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "max_position_embeddings": 128, "type_vocab_size": 2, "initializer_range": 0.2,
    }  # fmt: skip

    def start(task: str) -> Path:
        head = {"replaced_tokens": task, "generator": "masked_lm"}.get(task, "pretraining")
        key = task if task.startswith("neighbours") else head
        if key not in made:
            torch.manual_seed(3)
            family, further = ("bert", {}) if head == "pretraining" else ("electra", {"embedding_size": 16})
            if task in ("neighbours", "neighbours, values too"):
                head = "sequence_classification"
                family, further = "roformer", {"embedding_size": 16, "rotary_value": task != "neighbours"}
            config = ModelConfig.for_model(family, vocab_size=tokenizer.vocab_size, **sizes, **further)
            model: Any = head_named(head).model.from_config(config)
            model.tokenizer = tokenizer
            made[key] = model.save_pretrained(tmp_path_factory.mktemp("starts") / head)
        return made[key]

    return start


def cell_of(cell: str, start: Callable[[str], Path]) -> tuple[str, Rows, dict[str, Any]]:
    """Return a cell's task, rows and options, with the folder of its generator if it has one."""
    task, rows, options = CELLS[cell]
    return task, rows, {**options, **({"generator": str(start("generator"))} if "generator" in options else {})}


def planned(cell: str, start: Callable[[str], Path], layout: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a planned job: "padded", or "bucketed" or in a few "widths" as on CUDA."""
    task, rows, options = cell_of(cell, start)
    monkeypatch.setattr(batching, "_layout", lambda options: layout if layout == "bucketed" else "padded")
    monkeypatch.setattr(batching, "_on_cuda", lambda options: layout != "padded")
    job = plan_job(start(task), rows, None, make_options({**FIXED, "task": task, **options}))
    set_dropout(job.model, 0.0)
    return job


def batch_of(job: Any, which: list[int]) -> Batch:
    return Batch(job.collate(job.rows.__getitems__(which), Where(1, 0, 0, tuple(which))), len(which))


def gradients(job: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    job.model.zero_grad()
    mean = job.objective(job.model, batch).as_mean()
    mean.backward()
    return mean.detach(), {n: p.grad.clone() for n, p in job.model.named_parameters() if p.grad is not None}


def test_the_table_holds_every_task() -> None:
    assert {task for task, _, _ in CELLS.values()} == {task.training for task in TASKS}


@pytest.mark.parametrize("layout", ["bucketed", "widths"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_step_that_is_filled_up_asks_nothing_and_learns_what_padded_rows_do(
    cell: str, layout: str, starts: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    padded = planned(cell, starts, "padded", monkeypatch)
    job = planned(cell, starts, layout, monkeypatch)
    assert job.collate.settled
    assert not padded.collate.settled
    which = [3, 0, 9, 7, 12]
    batch = batch_of(job, which)
    loss, grads = gradients(padded, batch_of(padded, which))
    # on a device a mask is kept without asking whether anything is masked
    monkeypatch.setattr(Padded, "of", lambda mask: Padded(mask != 0))
    with Asked() as asked:
        found, filled = gradients(job, batch)
    if layout == "widths" and cell in (
        "replaced_tokens",
        "generator",
    ):  # padded scores on a device are told by `Tensor.is_cuda`
        assert set(asked.found) <= {"index", "index_put"}
    else:
        assert asked.found == []
    assert float(found) == pytest.approx(float(loss), rel=2e-5)
    assert grads.keys() == filled.keys()
    most = max(float(grad.abs().max()) for grad in grads.values())
    for name, grad in grads.items():
        assert float((grad - filled[name]).abs().max()) < 2e-5 * max(1.0, most), name
    assert not [name for name, part in batch.items() if isinstance(part, list)]


@pytest.mark.parametrize("layout", ["bucketed", "widths"])
@pytest.mark.parametrize(
    "cell", ["sparse", "multivector", "queries as long as they are", "denoising", "damaged", "generator"]
)
def test_batches_of_an_epoch_come_in_few_shapes_and_recordings_serve_all_of_one(
    cell: str, layout: str, starts: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = planned(cell, starts, layout, monkeypatch)
    by_shape: dict[Any, list[Batch]] = {}
    for epoch in range(6):
        for number, rows in enumerate(job.batches.plan(epoch)):
            where = Where(1, epoch, number, tuple(rows.tolist()))
            batch = Batch(job.collate(job.rows.__getitems__(rows), where), len(rows))
            by_shape.setdefault(flatten(batch, [], False), []).append(batch)
    assert len(by_shape) <= 6
    monkeypatch.setattr(Padded, "of", lambda mask: Padded(mask != 0))
    first, second = next(batches for batches in by_shape.values() if len(batches) > 1)[:2]
    for name, part in second.items():
        if isinstance(part, Tensor):
            first[name].copy_(part)
    (a, learned), (b, others) = gradients(job, first), gradients(job, second)
    assert torch.equal(a, b)
    assert all(torch.equal(grad, others[name]) for name, grad in learned.items())


class Repeats:
    """Stands in for capturing where there is no CUDA: a replay runs the step again, on the inputs kept for it."""

    def watch(self, run: Callable[[], Any]) -> tuple[Any, None]:
        return run(), None

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        return run


@pytest.mark.parametrize("cell", ["pair classes", "sparse", "multivector", "denoising"])
def test_replayed_steps_are_ordinary_ones_and_a_run_says_how_many_there_were(
    cell: str, starts: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, rows, given = cell_of(cell, starts)
    monkeypatch.setattr(batching, "_layout", lambda options: "bucketed")
    monkeypatch.setattr(Padded, "of", lambda mask: Padded(mask != 0))
    monkeypatch.setattr(route, "make_capturer", lambda device, settings: Repeats())
    options: Any = {**FIXED, "max_steps": 15, "task": task, "lr": 0.01, **given}
    replayed, plain = (finetune_with(starts(task), train=rows, capture=capture, **options) for capture in (True, False))
    assert replayed.losses == plain.losses
    learned, others = replayed.model.graph.state_dict(), plain.model.graph.state_dict()
    assert all(torch.equal(tensor, others[name]) for name, tensor in learned.items())
    told = replayed.recorded
    assert told is not None
    assert told.steps == 15
    assert told.share > 0.6
    assert replayed.to_dict()["recorded"]["replayed"] == told.replayed
    assert "capture=False" in str(plain.recorded)


def test_a_run_says_why_its_steps_are_not_recorded(
    starts: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "_on_cuda", lambda options: True)
    monkeypatch.setattr(route, "make_capturer", lambda device, settings: Repeats())
    told: list[Any] = []
    options: Any = {**FIXED, "max_steps": 2, "layout": "packed", "on_event": told.append}
    pairs = finetune(starts("embedding"), train=PAIRS, cache_tokens=64, **options)
    own = finetune(starts("rank"), train=TABLES["sequence_classification"](16), loss=mean_loss, **options)
    messages = [event.message for event in told if isinstance(event, Warned)]
    for result, reason in ((pairs, "texts go through the model in parts"), (own, "a loss of your own")):
        assert reason in str(result.recorded)
        assert sum("one operation at a time" in message and reason in message for message in messages) == 1


def mean_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(scores, labels)


def test_gradients_of_the_largest_values_are_shared_by_equal_ones() -> None:
    draw = torch.Generator().manual_seed(1)
    values = torch.randint(-3, 3, (11, 9000), generator=draw).to(torch.bfloat16).requires_grad_()
    offsets = torch.tensor([0, 4, 9, 9, 11], dtype=torch.int32)
    found = largest_of_texts(values, offsets)
    given = torch.randn(found.shape, generator=draw).to(torch.bfloat16)
    found.backward(given)
    plain = values.detach().clone().requires_grad_()
    parts = [part.amax(0) if len(part) else torch.zeros(9000) for part in plain.split([4, 5, 0, 2])]
    torch.stack([part.to(torch.bfloat16) for part in parts]).backward(given)
    assert torch.equal(found, torch.stack([part.to(torch.bfloat16) for part in parts]))
    assert values.grad is not None
    assert plain.grad is not None
    assert torch.allclose(values.grad, plain.grad, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("cell", CELLS)
def test_on_a_gpu_recorded_steps_are_ordinary_ones(cell: str, starts: Callable[[str], Path]) -> None:
    task, rows, given = cell_of(cell, starts)
    options: Any = {**FIXED, "max_steps": 24, "precision": "bf16", "task": task, "lr": 0.01, **given}
    found = []
    for capture in (True, False):
        told: list[str] = []

        def note(event: Any, told: list[str] = told) -> None:
            if isinstance(event, Warned):
                told.append(event.message)

        result = finetune_with(starts(task), train=rows, on_event=note, capture=capture, **options)
        found.append((result.losses, {k: v.clone() for k, v in result.model.graph.state_dict().items()}, told))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    apart = [float((tensor - found[1][1][name]).abs().max()) for name, tensor in found[0][1].items()]
    # sums of a text's losses are added in any order where its tokens are found one by one
    assert max(apart) == 0 or ("nois" in cell or ("damaged" in cell and max(apart) < 1e-5))
    assert not [message for message in found[0][2] if "one operation at a time" in message]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("way", ["neighbours", "neighbours, values too"])
def test_on_a_gpu_neighbours_turn_in_recorded_steps(way: str, starts: Callable[[str], Path]) -> None:
    rows = CELLS["sequence_classification"][1]
    options: Any = {**FIXED, "max_steps": 24, "precision": "bf16", "lr": 0.01}
    told: list[str] = []

    def note(event: Any) -> None:
        if isinstance(event, Warned):
            told.append(event.message)

    recorded, launched, plain = (
        finetune_with(starts(way), train=rows, on_event=note, capture=capture, fused=fused, **options)
        for capture, fused in ((True, True), (False, True), (False, False))
    )
    assert recorded.losses == pytest.approx(launched.losses, rel=1e-6)
    theirs = launched.model.graph.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in recorded.model.graph.state_dict().items())
    assert launched.losses == pytest.approx(plain.losses, rel=5e-2)
    assert not [message for message in told if "one operation at a time" in message or "torch's own" in message]
    (group,) = recorded.model.explain("cuda", "bf16", training=True).groups
    assert group.table == "cuda-training"
