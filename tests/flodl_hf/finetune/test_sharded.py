"""`finetune(shard="fsdp")`: the training of one device, and folders that read back, of whole models and adapters."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import labelled, lines

from flodl.distributed import sharded
from flodl.errors import TrainError
from flodl.train import StepDone, Trainer, sgd
from flodl_hf import load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import head_named
from flodl_hf.models.adapters import IA3, Lora, Prompt
from flodl_hf.training import demo, finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options
from flodl_hf.training.result import FinetuneResult
from flodl_hf.training.start import cast_stored, set_dropout, take
from flodl_hf.training.training import fingerprint_of, make_builder

ROWS = labelled(28)
OPTIONS: dict[str, Any] = {
    "epochs": 1, "batch_size": 8, "lr": 5e-3, "max_length": 24, "metric": "eval_loss", "dropout": 0.0, "seed": 3,
    "report": False, "max_grad_norm": 0.5, "micro_batch_size": 3,
}  # fmt: skip


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.graph.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, 2])
def test_two_ranks_with_shards_train_as_one_and_write_the_same_folder(
    lora: int | None, base: Path, tmp_path: Path
) -> None:
    own = {} if lora is None else {"lora": lora}
    alone = finetune(base, train=ROWS[:20], eval=ROWS[20:], devices="cpu", **own, **OPTIONS)
    out = tmp_path / "out"
    shared = finetune(
        base, train=ROWS[:20], eval=ROWS[20:], devices=["cpu", "cpu"], shard="fsdp", out=out, **own, **OPTIONS
    )
    one, other = weights(alone.model), weights(shared.model)
    assert one.keys() == other.keys()
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-4
    assert shared.metrics["eval_loss"] == pytest.approx(alone.metrics["eval_loss"], rel=1e-4)
    texts = [row["text"] for row in ROWS]
    assert load(out).predict(texts) == shared.model.predict(texts)
    assert not any(hasattr(parameter, "full_tensor") for parameter in shared.model.parameters())


@pytest.mark.slow
@pytest.mark.transformers
def test_what_shards_wrote_is_what_transformers_reads(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    parted = tmp_path / "parted"
    load(base, head="seqcls").save_pretrained(parted, max_shard_size=20_000)
    out = tmp_path / "out"
    given: dict[str, Any] = {**OPTIONS, "metric": None}
    trained = finetune(parted, train=ROWS[:20], devices=["cpu", "cpu"], shard="fsdp", out=out, **given)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    theirs = AutoModelForSequenceClassification.from_pretrained(out).state_dict()
    ours = load(out, mapped=False)
    assert trained.model.predict(["a text"]) == ours.predict(["a text"])
    names = ours.config.family.key_map(ours.config.encoder, ours.head).names(list(dict(ours.graph.named_parameters())))
    assert set(names.values()) == set(theirs)
    for name, parameter in ours.graph.named_parameters():
        assert torch.equal(parameter.detach(), theirs[names[name]]), name


@dataclass(frozen=True)
class InDouble:
    """Opens a discriminator with its generator, in float64.

    Args:
        start: folder of the discriminator.
        options: of the run.
    """

    start: Path
    options: dict[str, Any]

    def __call__(self, device: torch.device) -> Any:
        """Return the model."""
        model = self.job().model
        set_dropout(model, 0.0)
        return model.double()

    def job(self) -> Any:
        """Return the job, planned."""
        return plan_job(self.start, lines(24), None, make_options(self.options))


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "width"), [({}, 32), ({}, 48), ({"lora": 2}, 32), ({"adapter": Prompt(3)}, 48)])
def test_a_step_of_a_generator_in_shards_has_the_loss_and_gradients_of_one_device(
    adapter: dict[str, Any], width: int, tmp_path: Path
) -> None:
    tokenizer = demo.learn_vocabulary()
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    sizes |= {"vocab_size": tokenizer.vocab_size, "type_vocab_size": 2, "embedding_size": 16, "initializer_range": 0.2}
    for head, hidden, embedding in (("replaced_tokens", 32, 32), ("masked_lm", 16, width)):
        config = ModelConfig.for_model(
            "electra", **sizes | {"hidden_size": hidden, "intermediate_size": 2 * hidden, "embedding_size": embedding}
        )
        model: Any = head_named(head).model.from_config(config)
        model.tokenizer = tokenizer
        model.save_pretrained(tmp_path / head)
    given = {
        "task": "replaced",
        "generator": str(tmp_path / "masked_lm"),
        "batch_size": 24,
        "max_steps": 1,
        "max_length": 40,
    }
    start = InDouble(tmp_path / "replaced_tokens", given | adapter)
    job, found = start.job(), []
    before = {name: value.double() for name, value in job.model.state_dict().items()}
    assert bool(job.model._fixed_names()) is bool(adapter)
    for more in ({}, {"shard": "fsdp"}):
        losses: list[float] = []
        run = Trainer.builder(start, sgd(1.0), job.objective).dataset(
            job.rows, collate=job.collate, batches=job.batches
        )
        run.set(max_steps=1, max_grad_norm=None, micro_batch_size=5, progress=False, **more)
        run.subscribe(lambda event, losses=losses: losses.append(event.loss), StepDone)
        if more:
            run.devices(["cpu", "cpu"], start="fork")
        found.append((run.run().state_dict(), losses))
    (one, loss), (other, shared) = found
    assert shared == pytest.approx(loss, rel=1e-7)  # what is reported is summed in float32
    assert one.keys() == other.keys() == before.keys() - job.model._fixed_names()
    gradients = {name: before[name] - value for name, value in one.items()}  # at a rate of 1
    most = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert most > 0.1
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-13 * most


@pytest.fixture(scope="module", params=["base", "seqcls"])
def half(base: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder in bfloat16: an encoder alone, whose head is new, and one with a head that has other labels."""
    whole: Any = load(base, head="seqcls")
    model: Any = whole
    if request.param == "base":
        model = head_named("base").model.from_config(whole.config)
        model.tokenizer = whole.tokenizer
        model._mark_untrained(())
    return model.to(torch.bfloat16).save_pretrained(tmp_path_factory.mktemp("half") / "model")


def planned(start: Path, **more: Any) -> Any:
    """A job whose ranks have not been started."""
    return plan_job(start, ROWS[:20], None, make_options({**OPTIONS, "metric": None, **more}))


@pytest.mark.parametrize("more", [{}, {"lora": 2}, {"new_head": True}])
def test_what_is_to_be_cut_is_opened_as_it_is_stored(more: dict[str, Any], half: Path) -> None:
    whole = planned(half, devices="cpu", **more).model
    cut = planned(half, devices=["cpu", "cpu"], shard="fsdp", **more).model
    assert (whole.dtype, whole.dtype_in_shards) == (torch.float32, None)
    assert (cut.dtype, cut.dtype_in_shards) == (torch.bfloat16, torch.float32)
    # What is drawn is drawn in float32, and the numbers are those of one device.
    one, other = weights(whole), weights(cut)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name].float()) for name, value in one.items())
    cast_stored(cut)
    assert cut.dtype_in_shards is None
    assert {value.dtype for value in weights(cut).values()} == {torch.float32}
    assert all(torch.equal(value, one[name]) for name, value in weights(cut).items())


def test_a_start_has_one_identity_in_shards_or_not(half: Path) -> None:
    whole, cut = planned(half, devices="cpu"), planned(half, devices=["cpu", "cpu"], shard="fsdp")
    assert fingerprint_of(whole)["model"] == fingerprint_of(cut)["model"]


def test_trained_weights_replace_stored_ones(half: Path) -> None:
    cut = planned(half, devices=["cpu", "cpu"], shard="fsdp").model
    state = {name: torch.full(value.shape, 0.3) for name, value in cut.state_dict().items()}
    take(cut, state)
    assert {value.dtype for value in weights(cut).values()} == {torch.float32}
    assert all(torch.equal(value, state[name]) for name, value in cut.state_dict().items())
    assert not cut.untrained


def test_files_of_float32_are_opened_in_float32_whatever_their_configuration_says(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    load(base).save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(told))
    (folder / "checksums.json").unlink(missing_ok=True)
    model = planned(folder, devices=["cpu", "cpu"], shard="fsdp").model
    assert (model.dtype, model.dtype_in_shards) == (torch.float32, None)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"lora": 2}])
def test_a_start_in_half_precision_trains_in_shards_as_on_one_device(
    more: dict[str, Any], half: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"train": ROWS[:20], "eval": ROWS[20:], **OPTIONS, **more}
    alone = finetune(half, devices="cpu", **given)
    shared = finetune(half, devices=["cpu", "cpu"], shard="fsdp", out=tmp_path / "out", **given)
    # The folder was written without the base in float32.
    assert vars(shared)["_model"].dtype_in_shards == (torch.float32 if more else None)
    one, other = weights(alone.model), weights(shared.model)
    assert one.keys() == other.keys()
    assert {value.dtype for value in other.values()} == {torch.float32}
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-3
    assert shared.metrics["eval_loss"] == pytest.approx(alone.metrics["eval_loss"], rel=1e-3)


def test_a_base_is_cast_when_somebody_asks_for_the_model(half: Path) -> None:
    cut = planned(half, devices=["cpu", "cpu"], shard="fsdp", lora=2).model
    fixed = cut._fixed_names()
    before = {name: value.clone() for name, value in cut.state_dict().items()}
    take(cut, {name: torch.full(value.shape, 0.3) for name, value in before.items() if name not in fixed})
    stored = {name: value for name, value in cut.state_dict().items() if name in fixed}
    assert {value.dtype for value in stored.values() if value.is_floating_point()} == {torch.bfloat16}
    elsewhere = FinetuneResult(None, None, "seqcls", {}, [], [], 1, 1, 0.0, {})
    assert not elsewhere.holds_model
    with pytest.raises(TrainError, match="rank 0"):
        _ = elsewhere.model
    result = FinetuneResult(cut, None, "seqcls", {}, [], [], 1, 1, 0.0, {})
    assert repr(result)
    assert result.to_dict()
    assert cut.dtype_in_shards is torch.float32
    asked = result.model
    assert asked is cut
    assert asked.dtype_in_shards is None
    for name, value in asked.state_dict().items():
        expected = before[name].float() if name in fixed else torch.full(value.shape, 0.3)
        assert torch.equal(value, expected if value.is_floating_point() else before[name]), name


ADAPTERS: list[dict[str, Any]] = [{"lora": 2}, {"adapter": Lora(2, dora=True)}, {"adapter": IA3()}]


@pytest.mark.parametrize("more", [{"lora": 2}, {}])
def test_matrices_that_do_not_learn_may_stay_in_half_precision(more: dict[str, Any], half: Path) -> None:
    model = planned(half, devices=["cpu", "cpu"], shard="fsdp", **more).model
    names = {id(parameter): name for name, parameter in model.graph.named_parameters()}
    kept = {names[id(parameter)] for parameter in sharded._fixed_matrices(model, torch.bfloat16)}
    matrices = {name for name in names.values() if name.endswith(("dense.weight", "query.weight", "value.weight"))}
    assert kept & matrices == ({name for name in matrices if not name.startswith("head.")} if more else set())
    assert not any("embeddings" in name or "norm" in name or "lora" in name or name.endswith("bias") for name in kept)
    assert not sharded._fixed_matrices(model, None)


@pytest.mark.slow
@pytest.mark.parametrize("more", ADAPTERS)
def test_a_base_kept_in_half_precision_trains_to_the_bit_as_one_in_float32(
    more: dict[str, Any], half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for kept in (True, False):
        if not kept:
            monkeypatch.setattr(sharded, "_fixed_matrices", lambda model, dtype: set())
        job = planned(half, devices=["cpu", "cpu"], shard="fsdp", precision="bf16", **more)
        losses: list[float] = []
        with ExitStack() as stack:
            builder = make_builder(job, lambda event: None, stack).devices(["cpu", "cpu"], start="fork")
            builder.set(progress=False).subscribe(lambda event, losses=losses: losses.append(event.loss), StepDone)
            found.append((builder.run().state_dict(), losses))
    (one, loss), (other, expected) = found
    assert loss == expected
    assert len(loss) == 3
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
