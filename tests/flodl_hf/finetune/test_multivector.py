"""Vectors of tokens trained: losses and steps beside plain ones, folders read again, adapters, ranks, going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetune_tables import sentences
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from flodl.errors import ConfigError
from flodl_hf import load
from flodl_hf.training import finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.losses import make_loss
from flodl_hf.training.options import make_options
from flodl_hf.training.start import set_dropout
from flodl_hf.training.vectors.multivector_step import MULTIVECTOR_LOSSES

TEXTS = sentences()
SMALL = {"size": 8, "query_length": 16, "document_length": 40, "query_marker": "the ", "document_marker": "a "}
ONE: dict[str, Any] = {
    "task": "multivector", "max_steps": 2, "epochs": 9, "batch_size": 8, "lr": 1e-3, "report": False,
    "projection": {**SMALL, "punctuation": True},
}  # fmt: skip
EXACT: dict[str, Any] = {
    **ONE, "max_steps": 3, "dropout": 0.0, "optimizer": "sgd", "lr": 0.05, "schedule": "constant", "max_grad_norm": 0.0,
}  # fmt: skip
ROWS = [{"query": TEXTS[i], "positive": TEXTS[24 + i], "negative": TEXTS[48 + i]} for i in range(24)]
TAUGHT = [{**row, "scores": [2.0, i % 3]} for i, row in enumerate(ROWS)]
LABELS = {
    "MultiVectorMultipleNegativesRankingLoss": [None],
    "MultiVectorMarginMSELoss": [torch.tensor([0.5, 1.0, -0.2, 0.1]), torch.tensor([[2.0, 1], [0, 1], [3, 1], [1, 1]])],
    "MultiVectorDistillKLDivLoss": [torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 1.0], [0.5, 0.1]])],
}


def vectors_of(texts: int) -> list[Tensor]:
    """Return vectors of four examples, of several lengths, with zeros where there is none."""
    draw = torch.Generator().manual_seed(7)
    made = []
    for text in range(texts):
        part = F.normalize(torch.randn(4, 6 + text, 5, generator=draw), dim=-1)
        part[1, 3:] = 0
        part[2, 1] = 0
        made.append(part.requires_grad_())
    return made


def max_sim_of(query: Tensor, document: Tensor) -> Tensor:
    query, document = (text[(text != 0).any(-1)] for text in (query, document))
    return (query @ document.T).max(1).values.sum()


def plain(name: str, vectors: list[Tensor], labels: Tensor | None) -> Tensor:
    queries, *documents = vectors
    if labels is None:
        rows = [[max_sim_of(query, each[k]) for k in range(len(queries)) for each in documents] for query in queries]
        scores = torch.stack([torch.stack(row) for row in rows])
        return F.cross_entropy(scores, torch.arange(len(queries)) * len(documents))
    scores = torch.stack([torch.stack([max_sim_of(q, d[i]) for d in documents]) for i, q in enumerate(queries)])
    if "Margin" in name:
        goal = labels if labels.dim() == 1 else labels[:, 0] - labels[:, 1]
        return F.mse_loss(scores[:, 0] - scores[:, 1], goal)
    shares = labels.softmax(1)
    return (shares * (shares.log() - scores.log_softmax(1))).sum() / len(scores)


@pytest.mark.parametrize("name", LABELS)
def test_losses_are_those_of_plain_loops(name: str) -> None:
    for labels in LABELS[name]:
        mine, other = vectors_of(3), vectors_of(3)
        found, wanted = make_loss(name, None, MULTIVECTOR_LOSSES)(mine, labels), plain(name, other, labels)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        for a, b in zip(torch.autograd.grad(found, mine), torch.autograd.grad(wanted, other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_large_batches_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = make_loss("MultipleNegativesRanking", {"similarity": "meanmaxsim", "temperature": 0.1}, MULTIVECTOR_LOSSES)
    whole, parts = vectors_of(3), vectors_of(3)
    at_once = loss(whole, None)
    monkeypatch.setattr("flodl_hf.training.vectors.multivector_step.MAX_SCORES", 1)
    found = loss(parts, None)
    torch.testing.assert_close(found, at_once, rtol=1e-6, atol=0)
    for a, b in zip(torch.autograd.grad(found, parts), torch.autograd.grad(at_once, whole), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LABELS)
@pytest.mark.filterwarnings("ignore")
def test_losses_are_those_of_sentence_transformers(name: str) -> None:
    theirs = pytest.importorskip("sentence_transformers.multi_vector_encoder.losses")

    class Model(torch.nn.Module):
        def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
            vectors = features["vectors"]
            return {"token_embeddings": vectors, "attention_mask": (vectors != 0).any(-1)}

    settings: Any = {"temperature": 0.7, "teacher_temperature": 2.0} if "KL" in name else {}
    wanted_of: Any = getattr(theirs, name)(Model(), **settings)
    for labels in LABELS[name]:
        mine, other = vectors_of(3), vectors_of(3)
        found = make_loss(name, settings, MULTIVECTOR_LOSSES)(mine, labels)
        features = [{"vectors": v, "attention_mask": (v != 0).any(-1), "input_ids": v[..., 0]} for v in other]
        wanted = wanted_of(features, labels)
        assert torch.equal(found, wanted)
        for a, b in zip(torch.autograd.grad(found, mine), torch.autograd.grad(wanted, other), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def weights(base: Path, data: Any = ROWS, **options: Any) -> dict[str, Tensor]:
    model: Any = finetune(base, train=data, **{**EXACT, **options}).model
    found = {name: value.detach().clone() for name, value in model.graph.named_parameters()}
    return found | {"projection": model.sentence_recipe.late.projections[0].weight}


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def plain_steps(base: Path) -> dict[str, Tensor]:
    """Return the weights after the steps of a loop that knows nothing of ours but batches and the first weights."""
    job: Any = plan_job(base, ROWS, None, make_options(EXACT))
    model, weight = job.model, job.model.beside[0].weight.detach().clone().requires_grad_()
    tokenizer, to_id = model.tokenizer, model.tokenizer.convert_tokens_to_ids
    marks = {id_ for id_ in map(to_id, "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") if id_ != tokenizer.unk_token_id}
    set_dropout(model, 0.0)
    model.train()
    optimizer = torch.optim.SGD([*model.graph.parameters(), weight], lr=0.05, momentum=0.9)

    def vectors(text: str, *, query: bool) -> Tensor:
        ids = tokenizer(text)["input_ids"]
        ids = [*ids[:14], ids[-1]] if query and len(ids) > 15 else ids
        ids = [ids[0], to_id("the" if query else "a"), *ids[1:]]
        mask = torch.ones(1, 16 if query else len(ids))
        if query:
            mask[0, len(ids) :] = 0
            ids = ids + [tokenizer.mask_token_id] * (16 - len(ids))
        states = model(torch.tensor([ids]), attention_mask=mask)[0][0]
        kept = torch.tensor([query or id_ not in marks for id_ in ids])
        return F.normalize(states @ weight.T, dim=-1)[kept]

    for batch in [job.batches.plan(0)[k] for k in range(3)]:
        rows = [ROWS[i] for i in batch]
        queries = [vectors(row["query"], query=True) for row in rows]
        documents = [vectors(row[side], query=False) for row in rows for side in ("positive", "negative")]
        scores = torch.stack([torch.stack([max_sim_of(q, d) for d in documents]) for q in queries])
        loss = F.cross_entropy(scores, torch.arange(len(rows)) * 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = {name: value.detach() for name, value in model.graph.named_parameters()}
    return found | {"projection": weight.detach()}


def test_steps_are_those_of_a_plain_loop(base: Path) -> None:
    assert far(weights(base), plain_steps(base)) < 1e-5


@pytest.mark.parametrize(
    "options", [{"layout": "packed"}, {"cache_tokens": 40}, {"cache_tokens": 40, "layout": "packed"}], ids=str
)
def test_a_step_is_the_same_however_its_batch_goes_through_the_model(base: Path, options: dict[str, Any]) -> None:
    whole = weights(base)
    assert far(whole, weights(base, **options)) < 1e-5
    assert far(whole, weights(base, ROWS[::-1], **options)) > 1e-7


@pytest.mark.slow
def test_ranks_learn_from_the_whole_batch(base: Path) -> None:
    both = weights(base, devices=["cpu", "cpu"], projection={**SMALL, "expanded": False})
    assert far(weights(base, projection={**SMALL, "expanded": False}), both) < 1e-5


# --- folders ------------------------------------------------------------------------------------------


def same_vectors(model: Any, other: Any) -> None:
    for query in (True, False):
        for a, b in zip(
            model.embed_tokens(TEXTS[:4], query=query), other.embed_tokens(TEXTS[:4], query=query), strict=True
        ):
            assert torch.equal(a, b)


def folder_of(kind: str, base: Path, folder: Path) -> Path:
    """Return the base as a folder of one kind, with a projection to 8 features where it has one."""
    model: Any = load(base, head="base")
    files = {}
    if kind == "m3":
        torch.save({"weight": torch.randn(8, 64), "bias": torch.randn(8)}, folder.with_suffix(".pt"))
        files = {"colbert_linear.pt": folder.with_suffix(".pt").read_bytes(), "modules.json": json.dumps([
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ]).encode(), "1_Pooling/config.json": b'{"pooling_mode_cls_token": true}'}  # fmt: skip
    model.save_pretrained(folder, extra_files=files)
    (folder / "checksums.json").unlink()
    if kind == "colbert":
        config = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
        (folder / "config.json").write_text(json.dumps(config))
        found = load_file(folder / "model.safetensors")
        held = {name: value for name, value in found.items() if name.startswith("bert.")}
        held["linear.weight"] = torch.randn(8, 64)
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        said = {"query_token_id": "the", "doc_token_id": "a", "query_maxlen": 16, "attend_to_mask_tokens": True}
        (folder / "artifact.metadata").write_text(json.dumps(said))
    return folder


FILES = {
    "new": ["1_Dense/model.safetensors", "config_sentence_transformers.json", "modules.json"],
    "colbert": ["artifact.metadata"],
    "m3": ["colbert_linear.pt", "1_Pooling/config.json"],
}


@pytest.mark.parametrize("kind", FILES)
def test_folders_are_trained_and_read_again_with_equal_vectors(kind: str, base: Path, tmp_path: Path) -> None:
    start = base if kind == "new" else folder_of(kind, base, tmp_path / "start")
    given: dict[str, Any] = {**ONE, "max_steps": 3} if kind == "new" else {**ONE, "max_steps": 3, "projection": None}
    before: Any = None if kind == "new" else load(start).sentence_recipe.late.projections[0].weight  # type: ignore[attr-defined]
    events: list[Any] = []
    result = finetune(start, train=ROWS, eval=ROWS[:6], out=tmp_path / "out", on_event=events.append, **given)
    said = [event.message for event in events if "new projection of 64 to 8" in getattr(event, "message", "")]
    assert len(said) == (kind == "new")
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert {"ndcg@10", "triplet_accuracy"} <= result.metrics.keys()
    model: Any = result.model
    weight = model.sentence_recipe.late.projections[0].weight
    assert not weight.requires_grad
    assert model.beside is None
    assert before is None or not torch.equal(weight, before)
    same_vectors(model, load(tmp_path / "out"))
    assert all((tmp_path / "out" / name).is_file() for name in FILES[kind])
    assert (kind == "colbert") == ("linear.weight" in load_file(tmp_path / "out/model.safetensors"))
    given["projection"] = None
    again: Any = finetune(tmp_path / "out", train=TAUGHT, out=tmp_path / "more", **given).model
    same_vectors(again, load(tmp_path / "more"))
    assert not torch.equal(again.sentence_recipe.late.projections[0].weight, weight)


@pytest.mark.filterwarnings("ignore")
def test_sentence_transformers_loads_the_folder_with_equal_vectors(base: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    model: Any = finetune(base, train=ROWS, out=tmp_path / "out", **ONE).model
    theirs = library.MultiVectorEncoder(str(tmp_path / "out"), device="cpu")
    for name in ("query", "document"):
        found = getattr(theirs, f"encode_{name}")(TEXTS[:6])
        for a, b in zip(model.embed_tokens(TEXTS[:6], query=name == "query"), found, strict=True):
            torch.testing.assert_close(a, torch.as_tensor(b), rtol=1e-5, atol=1e-6)
    theirs.save(str(tmp_path / "native"))
    same_vectors(model, load(tmp_path / "native"))
    given: dict[str, Any] = {**ONE, "projection": None}
    more: Any = finetune(tmp_path / "native", train=ROWS, out=tmp_path / "more", **given).model
    same_vectors(more, load(tmp_path / "more"))
    again = library.MultiVectorEncoder(str(tmp_path / "more"), device="cpu").encode_document(TEXTS[:2])
    for a, b in zip(more.embed_tokens(TEXTS[:2]), again, strict=True):
        torch.testing.assert_close(a, torch.as_tensor(b), rtol=1e-5, atol=1e-6)


def test_an_adapter_keeps_the_projection(base: Path, tmp_path: Path) -> None:
    for kind in ("new", "colbert"):
        start = base if kind == "new" else folder_of(kind, base, tmp_path / "start")
        given: dict[str, Any] = ONE if kind == "new" else {**ONE, "projection": None}
        model: Any = finetune(start, train=ROWS, out=tmp_path / kind, lora=2, **given).model
        assert not (tmp_path / kind / "model.safetensors").exists()
        loaded: Any = load(tmp_path / kind)
        same_vectors(model, loaded)
        assert torch.equal(*(m.sentence_recipe.late.projections[0].weight for m in (model, loaded)))
        assert torch.equal(*(m.graph.get_parameter("encoder.embeddings.word.weight") for m in (model, load(start))))


def test_a_run_that_was_ended_goes_on_to_the_same_bits(base: Path, tmp_path: Path) -> None:
    class Stopped(BaseException):
        pass

    def stop(event: Any) -> None:
        if type(event).__name__ == "StepDone" and event.step == 3:
            raise Stopped

    given: dict[str, Any] = {**ONE, "max_steps": None, "epochs": 2, "save_every": 1, "lr": 5e-3}
    whole = finetune(base, train=TAUGHT, eval=TAUGHT[:6], vector_loss="DistillKLDiv", out=tmp_path / "whole", **given)
    more: Any = {"train": TAUGHT, "eval": TAUGHT[:6], "vector_loss": "DistillKLDiv", "out": tmp_path / "out", **given}
    with pytest.raises(Stopped):
        finetune(base, **more, on_event=stop)
    rest = finetune(base, **more, resume=True)
    assert rest.losses == whole.losses
    assert rest.history == whole.history
    for name in ("model.safetensors", "1_Dense/model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_the_command_trains_vectors_of_tokens(base: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flodl_hf.cli.app import app

    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    said = [str(base), "--train", str(data), "--out", str(tmp_path / "out"), "--task", "colbert", "--max-steps", "1"]
    said += [
        "--vector-loss",
        "CachedMultiVectorMultipleNegativesRanking",
        "--set",
        "projection={size: 4, query_marker: the}",
    ]
    ran = CliRunner().invoke(app, ["finetune", *said, "--json", "--no-report", "--batch-size", "8"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["task"] == "multivector"
    assert "cache_tokens: 32768" in (tmp_path / "out/recipe.yaml").read_text()
    loaded: Any = load(tmp_path / "out")
    assert loaded.embed_tokens("the train", query=True).shape == (32, 4)
    assert loaded.sentence_recipe.late.document_marker is None
    assert "ColBERT" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"matryoshka": [8]}, "matryoshka: multivector takes none"),
        ({"vector_loss": "CoSENT"}, "MultiVectorMarginMSELoss"),
        ({"loss_options": {"scale": 0}}, "scale is 0"),
        ({"loss_options": {"similarity": "cosine"}}, "maxsim"),
        (
            {"projection": {"size": 0, "sise": 3, "expanded": "perhaps"}},
            "(?s)did you mean 'size'.*yes or no.*size: found 0",
        ),
        ({"projection": {"query_marker": "[nowhere]"}}, r"no token '\[nowhere\]'"),
        ({"task": "embedding"}, "projection: embedding takes none"),
        ({"long_texts": "windows"}, "long_texts"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], said: str, base: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        finetune(base, train=ROWS, **{**ONE, **options})


def test_data_and_settings_that_a_start_cannot_have_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multivector has no loss of scored"):
        finetune(base, train=[{"a": text, "b": text, "score": 0.5} for text in TEXTS[:8]], **ONE)
    with pytest.raises(ConfigError, match="the model to start from has one"):
        finetune(folder_of("colbert", base, tmp_path / "start"), train=ROWS, **ONE)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.filterwarnings("error")
def test_vectors_of_tokens_train_on_a_gpu(base: Path, precision: str) -> None:
    given: dict[str, Any] = {**EXACT, "max_steps": 6}
    plain = finetune(base, train=ROWS, eval=ROWS[:6], devices="cpu", **given)
    fast = finetune(base, train=ROWS, eval=ROWS[:6], devices="cuda:0", precision=precision, **given)
    assert fast.losses == pytest.approx(plain.losses, rel=1e-3 if precision == "fp32" else 0.1)
    model: Any = fast.model
    assert len(model.embed_tokens(TEXTS[:2], query=True)) == 2
