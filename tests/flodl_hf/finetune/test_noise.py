"""Noise on embeddings: as much as the paper says, the same in every cut, gone in evaluation."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import TABLES
from torch import Tensor

from flodl.data import Batch, Where
from flodl.errors import ConfigError, TrainError
from flodl.train.schedule import Constant
from flodl.train.step import route
from flodl_hf.training import batching, finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options
from flodl_hf.training.step import SEEDS, noisy, row_seeds, uniform_noise
from flodl_hf.training.training import make_builder, train_job

torch.set_num_threads(1)
FIXED: dict[str, Any] = {
    "neftune": 5.0, "dropout": 0.0, "batch_size": 8, "max_steps": 3, "lr": 0.05, "optimizer": "sgd", "max_length": 32,
    "stride": 8, "group_by_length": False,
}  # fmt: skip
CUTS: list[dict[str, Any]] = [
    {"micro_batch_size": 3},
    {"batch_size": 4, "accumulate": 2},
    {"layout": "packed"},
    {"layout": "packed", "micro_batch_size": 5},
]


def job_of(base: Path, rows: Any, **options: Any) -> Any:
    return plan_job(base, rows, None, make_options({**FIXED, **options}))


def weights(base: Path, rows: Any, **options: Any) -> dict[str, Tensor]:
    with ExitStack() as stack:
        model = train_job(job_of(base, rows, **options), lambda event: None, stack)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=1e-4, atol=2e-6) for name in a)


@pytest.mark.parametrize("task", TABLES)
def test_a_step_with_noise_is_the_same_however_it_is_cut(
    task: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = TABLES[task](21)
    whole = weights(base, rows)
    assert not close(whole, weights(base, rows, neftune=None))
    for cut in CUTS:
        assert close(whole, weights(base, rows, **cut)), cut
    monkeypatch.setattr(batching, "_layout", lambda options: "bucketed")  # as on CUDA
    for cut in ({}, {"micro_batch_size": 5}):
        assert close(whole, weights(base, rows, **cut)), cut


@pytest.mark.slow
def test_a_step_with_noise_is_the_same_on_two_devices(base: Path) -> None:
    rows = TABLES["token_classification"](21)
    assert close(weights(base, rows), weights(base, rows, devices=["cpu", "cpu"], policy="sync"))


def test_a_resumed_run_has_the_same_noise(base: Path, tmp_path: Path) -> None:
    rows = TABLES["sequence_classification"](21)
    given: dict[str, Any] = {"epochs": 2, "schedule": Constant(0.05), "resume": True, "keep_checkpoints": True}

    def go_on(most: int, neftune: float) -> Any:
        with ExitStack() as stack:
            planned = job_of(base, rows, max_steps=most, neftune=neftune, **given)
            folder = tmp_path / "run.checkpoints"  # as beside the result
            return make_builder(planned, lambda event: None, stack, folder).run().state_dict()

    straight = weights(base, rows, max_steps=4, **given)
    go_on(2, 5.0)
    with pytest.raises(TrainError, match=r"neftune: was 5\.0, is 6\.0"):
        go_on(4, 6.0)
    trained = go_on(4, 5.0)
    assert all(torch.equal(straight[name], tensor) for name, tensor in trained.items())


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_noise_is_uniform_within_the_bound_of_the_paper(layout: str, base: Path) -> None:
    planned = job_of(base, TABLES["sequence_classification"](64), layout=layout)
    batch = Batch(planned.collate([planned.rows.get(i) for i in range(64)], Where(0, 0, 0, tuple(range(64)))), 64)
    seen: list[Tensor] = []
    word = planned.model.graph.get_submodule("encoder.embeddings.word")
    model = planned.model.train()
    with noisy(model, 5.0, batch):
        handle = word.register_forward_hook(lambda module, given, states: seen.append(states.detach()))
        planned.objective.of(torch.zeros(64, 2), batch)
        word(batch["input_ids"])
    handle.remove()
    noise = seen[0] - word.weight[batch["input_ids"]].detach()
    width = noise.shape[-1]
    lengths = torch.as_tensor(planned.rows.lengths)
    if layout == "padded":
        kept = batch["attention_mask"].bool()
        bound = (5.0 / (lengths * width).sqrt())[:, None].expand(kept.shape)[kept]
        scaled = noise[kept] / bound[:, None]
    else:
        scaled = noise / (5.0 / (lengths * width).sqrt()).repeat_interleave(lengths)[:, None]
    assert scaled.abs().max() <= 1.0001
    assert abs(float(scaled.mean())) < 0.01
    assert float(scaled.var()) == pytest.approx(1 / 3, rel=0.02)
    assert float((scaled[:-1] * scaled[1:]).mean().abs()) < 0.01  # neighbours do not know of each other


def test_each_row_epoch_and_seed_has_noise_of_its_own() -> None:
    wheres = [Where(0, 0, 0, (3, 4)), Where(0, 1, 0, (3, 4)), Where(1, 0, 0, (3, 4)), Where(0, 0, 7, (4, 3))]
    found = [row_seeds(where, where.indices).tolist() for where in wheres]
    assert len({seed for line in found[:3] for seed in line}) == 6
    assert found[3] == found[0][::-1]
    lengths, places = torch.full((2,), 9), torch.tensor([0, 1])
    one, two = (uniform_noise(torch.full((2,), seed), lengths, places, 16) for seed in (1, 2))
    assert not torch.equal(one, two)
    assert not torch.equal(one[0], one[1])


def test_evaluation_and_prediction_have_no_noise(base: Path) -> None:
    rows = TABLES["sequence_classification"](40)
    planned = plan_job(base, rows[:24], rows[24:], make_options(FIXED))
    assert planned.evaluation is not None
    usual = plan_job(base, rows[:24], rows[24:], make_options({**FIXED, "neftune": None})).evaluation
    assert planned.evaluation(planned.model.eval()) == usual(planned.model)  # type: ignore[misc]
    assert SEEDS not in planned.evaluation.sets[""].collate([planned.rows.get(0)], Where(0, 0, 0, (0,)))


def test_what_cannot_be_together_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="compile=False"):
        finetune(base, train=TABLES["masked_lm"](8), neftune=5, compile=True)


class Replays:
    """Stands for CUDA graphs: what is captured is computed again from the captured graph's own tensors."""

    def __init__(self) -> None:
        self.replayed = 0

    def watch(self, run: Any) -> tuple[Any, None]:
        return run(), None

    def capture(self, run: Any) -> Any:
        def replay() -> Any:
            self.replayed += 1
            return run()

        return replay

    def beside(self, ranks: Any) -> tuple[Any, str]:
        return self, "nothing is launched beside here"


def test_captured_steps_have_the_noise_of_their_own_rows(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_layout", lambda options: "bucketed")
    given: dict[str, Any] = {"max_steps": 8, "epochs": 4, "optimizer": "adamw", "lr": 1e-3, "ema": 0.9}
    rows = TABLES["sequence_classification"](24)
    capturer = Replays()
    plain = weights(base, rows, **given)
    monkeypatch.setattr(route, "make_capturer", lambda device, settings: capturer)
    assert close(weights(base, rows, **given), plain)
    assert capturer.replayed >= 4
