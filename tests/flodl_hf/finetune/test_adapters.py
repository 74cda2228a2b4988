"""Fine-tunes that train an adapter: the base keeps its bits, steps are exact, checkpoints small, folders peft's."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import TABLES, labelled, sentences
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from flodl.distributed import Ranks, launch
from flodl.errors import ConfigError
from flodl_hf import load
from flodl_hf.cli.app import app
from flodl_hf.models.adapters import IA3, Lora, Prefix, Prompt
from flodl_hf.training import dry_run, finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options
from flodl_hf.training.training import make_builder

ROWS = labelled(48)
BASIC: dict[str, Any] = {"epochs": 2, "batch_size": 8, "lr": 5e-3, "max_length": 24, "adapter": Lora(4, 8)}
WHOLE: dict[str, Any] = {
    "batch_size": 8, "max_steps": 3, "schedule": "constant", "optimizer": "sgd", "lr": 0.1, "dropout": 0.0,
    "max_length": 24, "stride": 8, "group_by_length": False, "adapter": Lora(4, 8),
}  # fmt: skip


def learned(model: Any) -> dict[str, Tensor]:
    fixed = model._fixed_names()
    return {name: t.clone() for name, t in model.state_dict().items() if name not in fixed}


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("task", TABLES)
def test_an_adapter_learns_beside_a_base_that_keeps_its_bits(task: str, base: Path, tmp_path: Path) -> None:
    rows = TABLES[task](40)
    result = finetune(
        base, train=rows, eval=rows[:8], out=tmp_path / "out", **{**BASIC, "adapter": Lora(4, 8, targets="all-linear")}
    )
    assert result.losses[-1] < result.losses[0]
    before = load(base, head=task, labels=result.model.config.labels or None if "token" in task else None)
    own = before.graph.state_dict()
    fixed = [name.removeprefix("network.") for name in result.model._fixed_names()]
    assert all(torch.equal(own[name], result.model.graph.get_parameter(name)) for name in fixed)
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "recipe.yaml"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    again = load(tmp_path / "out")
    assert again.head == task
    assert again.config.labels == result.model.config.labels
    assert apart(learned(again), learned(result.model)) == 0.0


@pytest.mark.parametrize("task", ["embedding", "sparse", "rank"])
def test_vectors_and_scores_of_a_saved_adapter_are_those_that_were_trained(
    task: str, base: Path, tmp_path: Path
) -> None:
    texts = sentences()
    rows = [{"anchor": a, "positive": b, "negative": c} for a, b, c in zip(texts, texts[16:], texts[32:], strict=False)]
    more: dict[str, Any] = {"pooling": "cls"} if task == "embedding" else {}
    given = {**BASIC, "task": task, "epochs": 1, "max_steps": 2, **more}
    model: Any = finetune(base, train=rows[:16], out=tmp_path / "out", **given).model
    again: Any = load(tmp_path / "out")
    assert again.active_adapter is not None
    assert apart(learned(again), learned(model)) == 0.0
    if task == "rank":
        assert again.rerank(texts[0], texts[8:12]) == model.rerank(texts[0], texts[8:12])
    elif task == "sparse":
        found, wanted = (m.embed_sparse(texts[:4]).to_tensor().to_dense() for m in (again, model))
        assert torch.equal(found, wanted)
    else:
        assert torch.equal(again.embed(texts[:4]), model.embed(texts[:4]))
        assert not torch.equal(again.embed(texts[:4]), load(base, head="base").embed(texts[:4]))


def test_only_the_adapter_and_the_head_are_in_the_optimiser_and_in_checkpoints(base: Path, tmp_path: Path) -> None:
    result = finetune(
        base,
        train=ROWS,
        out=tmp_path / "out",
        checkpoints=str(tmp_path / "saved"),
        keep_checkpoints=True,
        ema=0.9,
        **BASIC,
    )
    held = set(learned(result.model))
    assert held == {name for name, p in result.model.named_parameters() if p.requires_grad}
    files = {path.name: path for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    tensors = {name: load_file(path) for name, path in files.items() if name.endswith(".safetensors")}
    of_model = [set(found) for found in tensors.values() if any(name.startswith("network.") for name in found)]
    assert of_model
    for found in of_model:
        assert {name.split("::")[0] for name in found} <= held
    whole = sum(t.numel() for t in load(base, head="sequence_classification").state_dict().values())
    assert sum(t.numel() for found in tensors.values() for t in found.values()) < whole


def test_a_run_that_was_ended_goes_on_to_the_bit(base: Path, tmp_path: Path) -> None:
    class Stopped(BaseException):
        pass

    def stop(event: Any) -> None:
        if type(event).__name__ == "StepDone" and event.step == 5:
            raise Stopped

    chosen = {**BASIC, "adapter": Lora(4, 8, dropout=0.1, dora=True)}
    whole = finetune(base, train=ROWS, **chosen)
    with pytest.raises(Stopped):
        finetune(base, train=ROWS, out=tmp_path / "out", save_every=1, on_event=stop, **chosen)
    rest = finetune(base, train=ROWS, out=tmp_path / "out", save_every=1, resume=True, **chosen)
    assert rest.losses == whole.losses
    assert apart(learned(rest.model), learned(whole.model)) == 0.0


def on_ranks(ranks: Ranks, base: Path) -> Any:
    with ExitStack() as stack:
        job = plan_job(base, ROWS[:21], None, make_options(WHOLE))
        model: Any = make_builder(job, lambda event: None, stack).trainer(ranks).fit().model
        return {name: t.numpy() for name, t in learned(model).items()}


@pytest.mark.parametrize("kinds", [(), ("dora", "rslora")])
@pytest.mark.parametrize("cut", [{"micro_batch_size": 3}, {"batch_size": 4, "accumulate": 2}, {"layout": "packed"}])
def test_a_step_is_the_same_however_it_is_cut(kinds: Any, cut: dict[str, Any], base: Path) -> None:
    chosen = {**WHOLE, "adapter": Lora(4, 8, **dict.fromkeys(kinds, True))}
    whole = learned(finetune(base, train=ROWS[:21], **chosen).model)
    parts = learned(finetune(base, train=ROWS[:21], **{**chosen, **cut}).model)
    start = learned(plan_job(base, ROWS[:21], None, make_options(chosen)).model)
    assert apart(whole, start) > 1e-3
    assert apart(whole, parts) < 2e-6


def test_the_same_steps_on_two_ranks(base: Path) -> None:
    torch.set_num_threads(1)
    whole = learned(finetune(base, train=ROWS[:21], **WHOLE).model)
    for found in launch(on_ranks, (base,), ranks=2, start="fork").wait():
        assert apart(whole, {name: torch.from_numpy(value) for name, value in found.items()}) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [False, True])
def test_the_same_steps_on_two_processes_of_their_own(in_memory: bool, base: Path) -> None:
    whole = learned(finetune(base, train=ROWS[:21], **WHOLE).model)
    chosen = {**WHOLE, "devices": ["cpu", "cpu"], "policy": "sync"}
    torch.manual_seed(WHOLE.get("seed", 42))
    start: Any = load(base, head="sequence_classification") if in_memory else base
    shared = learned(finetune(start, train=ROWS[:21], **chosen).model)
    assert apart(whole, shared) < 2e-6


def test_a_model_in_memory_is_adapted_and_goes_on(base: Path) -> None:
    model = load(base, head="sequence_classification")
    first = finetune(
        model, train=ROWS, adapter=Lora(rank=2, targets=("query", "feed_forward.up")), epochs=1, batch_size=8
    )
    assert first.model is model
    assert model.active_adapter == "default"
    assert first.recipe["adapter"] == {"type": "lora", "rank": 2, "targets": ["query", "feed_forward.up"]}
    other = load(base, head="sequence_classification")
    dry_run(other, train=ROWS, lora=2, batch_size=8)
    assert not other.adapters
    before = learned(model)
    finetune(model, train=ROWS, epochs=1, batch_size=8)
    assert apart(before, learned(model)) > 0
    with pytest.raises(ConfigError, match="does not fit the data"):
        finetune(model, train=ROWS, lora=2)


def test_the_command_trains_an_adapter_and_predicts_with_it(base: Path, tmp_path: Path) -> None:
    table = tmp_path / "train.csv"
    table.write_text("text,label\n" + "".join(f"{row['text'].replace(',', ' ')},{row['label']}\n" for row in ROWS))
    words = [
        "finetune",
        str(base),
        "--train",
        str(table),
        "--out",
        str(tmp_path / "out"),
        "--epochs",
        "1",
    ]
    ran = CliRunner().invoke(
        app, [*words, "--set", "adapter={type: lora, rank: 4, targets: [query, key], rslora: true}"]
    )
    assert ran.exit_code == 0, ran.output
    assert "flodl-hf merge" in ran.output
    settings = load(tmp_path / "out").adapters["default"]
    assert (settings.rank, sorted(settings.targets), settings.rslora) == (4, ["key", "query"], True)
    ran = CliRunner().invoke(app, ["predict", str(tmp_path / "out"), "a good film"])
    assert ran.exit_code == 0, ran.output
    assert any(label in ran.output for label in ("complaint", "praise"))


ADAPTERS: dict[str, Any] = {
    "lora": Lora(rank=2), "dora": Lora(rank=2, dora=True, targets="all-linear"), "ia3": IA3(), "prompt": Prompt(3),
    "p-tuning": Prompt(3, encoder=8), "prefix": Prefix(3), "prefix encoder": Prefix(3, encoder=8),
}  # fmt: skip


@pytest.mark.parametrize("frozen", [["encoder"], ["embeddings", "layers.0-1", "head"]], ids=str)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_freeze_applies_to_the_base_and_every_part_of_the_adapter_learns(
    kind: str, frozen: list[str], base: Path
) -> None:
    before = learned(plan_job(base, ROWS[:16], None, make_options({"adapter": ADAPTERS[kind]})).model)
    chosen: dict[str, Any] = {"adapter": ADAPTERS[kind], "max_steps": 3, "batch_size": 8, "lr": 1e-2, "report": False}
    free = finetune(base, train=ROWS[:16], **chosen).model
    model = finetune(base, train=ROWS[:16], freeze=frozen, **chosen).model
    moved = {name for name, tensor in learned(model).items() if not torch.equal(tensor, before[name])}
    head = {name for name in before if name.startswith("network.head.")}
    assert moved == (set(before) - head if "head" in frozen else set(before))
    if "head" not in frozen:
        assert apart(learned(model), learned(free)) == 0.0
    assert model.freeze("encoder").num_parameters(only_trainable=True) > sum(before[name].numel() for name in head)


def test_freeze_that_leaves_nothing_to_train_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="freeze") as fault:
        plan_job(base, ROWS[:16], None, make_options({"freeze": ["encoder", "pooler", "head"]}))
    assert fault.value.problems == ["freeze"]
