"""Vectors learned by writing texts again: loss and gradients beside sentence-transformers', noise, cuts, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetune_tables import sentences
from torch import Tensor
from torch.nn import functional as F

from flodl.data import Where
from flodl.data.rng import Rng
from flodl.errors import ConfigError
from flodl_hf import load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import head_named
from flodl_hf.training import finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options
from flodl_hf.training.start import set_dropout
from flodl_hf.training.vectors.tsdae import _kept, attach_decoder

TEXTS = sentences()
ALONE = [{"text": text} for text in TEXTS[:24]]
PAIRS = [{"damaged": " ".join(text.split()[::2]), "text": text} for text in TEXTS[:24]]
ONE: dict[str, Any] = {
    "task": "embedding", "vector_loss": "denoising", "max_steps": 2, "epochs": 9, "batch_size": 8, "lr": 1e-3,
    "report": False,
}  # fmt: skip
EXACT: dict[str, Any] = {
    **ONE, "max_steps": 3, "dropout": 0.0, "optimizer": "sgd", "lr": 0.1, "schedule": "constant", "max_grad_norm": 0.0,
}  # fmt: skip


def first_batch(base: Path, rows: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return a planned job and its first batch."""
    job: Any = plan_job(base, rows, None, make_options({**EXACT, **options}))
    indices = job.batches.plan(0)[0]
    set_dropout(job.model, 0.0)
    return job, job.collate(job.rows.__getitems__(indices), Where(0, 0, 0, tuple(indices.tolist())))


def test_words_are_deleted_anew_in_each_epoch_and_one_stays(base: Path) -> None:
    words = np.array([-1, 0, 0, 1, 2, 3, 3, -1])
    kept = [_kept(words, Rng(1, "deletion", epoch), 0.6) for epoch in range(400)]
    assert all(mask[0] and mask[-1] and mask[1:-1].any() for mask in kept)
    assert all(mask[1] == mask[2] and mask[5] == mask[6] for mask in kept)
    # one of four words stays in any case: (0.4 x 4 + 0.6^4) / 4 of them stay
    assert np.mean([mask[[1, 3, 4, 5]].mean() for mask in kept]) == pytest.approx(0.4324, abs=0.04)
    assert _kept(words, Rng(1), 0.0).all()
    assert _kept(np.array([-1, -1]), Rng(1), 0.9).all()
    job, _ = first_batch(base, ALONE)
    rows, seen = [job.rows.get(i) for i in range(8)], []
    for epoch, number in ((0, 0), (0, 5), (1, 0)):
        batch = job.collate(rows, Where(0, epoch, number, tuple(range(8))))
        seen.append(batch["input_ids"].tolist())
        assert batch["target_ids"].tolist() == job.collate(rows, Where(0, 0, 0, tuple(range(8))))["target_ids"].tolist()
    assert seen[0] == seen[1] != seen[2]


def plain(job: Any, rows: list[dict[str, str]]) -> Tensor:
    """Return the loss of pairs by a decoder that is written out text by text."""
    model, beside = job.model, job.model.beside
    encoder, total, count = model.graph.get_submodule("encoder"), torch.zeros(()), 0
    word = encoder.embeddings.word.weight
    for row in rows:
        states = model(torch.tensor([model.tokenizer(row["damaged"])["input_ids"]]))[0][0]
        vector = F.normalize(states.mean(0), dim=-1)
        ids = torch.tensor(model.tokenizer(row["text"])["input_ids"])
        hidden = word[ids[:-1]] + encoder.embeddings.position.weight[: len(ids) - 1]
        hidden = encoder.embeddings.norm(hidden + encoder.embeddings.token_type.weight[0])
        for layer, crossing in zip(encoder.layers.children(), beside.crossings, strict=True):
            parts = [getattr(layer.attention, n)(hidden) for n in ("query", "key", "value")]
            heads = [part.view(len(ids) - 1, layer.attention.num_heads, -1).transpose(0, 1) for part in parts]
            scores = heads[0] @ heads[1].transpose(1, 2) / heads[0].shape[-1] ** 0.5
            ahead = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
            mixed = (scores.masked_fill(ahead, -torch.inf).softmax(-1) @ heads[2]).transpose(0, 1).flatten(1)
            hidden = layer.attention_norm(layer.attention.output(mixed) + hidden)
            hidden = crossing.norm(crossing.output(crossing.value(vector)) + hidden)
            hidden = layer.feed_forward_norm(layer.feed_forward(hidden) + hidden)
        found = beside.norm(F.gelu(beside.dense(hidden))) @ word.T + beside.bias
        total = total + F.cross_entropy(found, ids[1:], reduction="sum")
        count += len(ids) - 1
    return total / count


def gradients(loss: Tensor, model: Any) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: part for name, part in zip(named, found, strict=True) if part is not None}


def test_loss_and_gradients_are_those_of_a_plain_decoder(base: Path) -> None:
    job, batch = first_batch(base, PAIRS)
    found = job.objective(job.model, batch)
    wanted = plain(job, [PAIRS[i] for i in job.batches.plan(0)[0]])
    torch.testing.assert_close(found.sum / found.count, wanted, rtol=1e-6, atol=1e-6)
    mine, other = gradients(found.sum / found.count, job.model), gradients(wanted, job.model)
    assert mine.keys() == other.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], other[name], rtol=1e-4, atol=1e-6)


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
def test_loss_and_gradients_are_those_of_sentence_transformers(base: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    losses: Any = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    modules: Any = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    start = _with_words_head(base, tmp_path / "start")
    job, batch = first_batch(start, PAIRS, pooling="cls", normalize=False)
    inside = modules.Transformer(str(start))
    theirs = library.SentenceTransformer(modules=[inside, modules.Pooling(64, pooling_mode="cls")], device="cpu").eval()
    loss_of = losses.DenoisingAutoEncoderLoss(theirs).eval()
    named = dict(loss_of.decoder.named_parameters())
    pairs = []
    for i, crossing in enumerate(job.model.beside.crossings):
        at = f"bert.encoder.layer.{i}.crossattention."
        for ours, other in (("value", "self.value"), ("output", "output.dense"), ("norm", "output.LayerNorm")):
            for kind in ("weight", "bias"):
                pairs.append((crossing.get_submodule(ours).get_parameter(kind), named[f"{at}{other}.{kind}"]))
    beside = job.model.beside
    pairs += [(beside.bias, named["cls.predictions.bias"]), (beside.norm.weight, named["cls.predictions.transform.LayerNorm.weight"]),
              (beside.dense.weight, named["cls.predictions.transform.dense.weight"])]  # fmt: skip
    for ours, other in pairs[:-3]:
        ours.data.copy_(other.data)
    for ours, other in pairs[-3:]:
        assert torch.equal(ours, other)  # the folder's own head
    rows = [PAIRS[i] for i in job.batches.plan(0)[0]]
    features = [theirs.preprocess([row[side] for row in rows]) for side in ("damaged", "text")]
    wanted = loss_of(features, None)
    found = job.objective(job.model.eval(), batch)
    torch.testing.assert_close(found.sum / found.count, wanted, rtol=1e-6, atol=1e-6)
    graph = job.model.graph
    pairs += [
        (graph.get_parameter("encoder.embeddings.word.weight"), named["bert.embeddings.word_embeddings.weight"]),
        (
            graph.get_parameter("encoder.embeddings.position.weight"),
            named["bert.embeddings.position_embeddings.weight"],
        ),
    ]
    for i in range(2):
        for ours, other in (
            ("attention.query", "attention.self.query"),
            ("attention.value", "attention.self.value"),
            ("feed_forward.up", "intermediate.dense"),
            ("feed_forward_norm", "output.LayerNorm"),
        ):
            pairs.append(
                (
                    graph.get_parameter(f"encoder.layers.{i}.{ours}.weight"),
                    named[f"bert.encoder.layer.{i}.{other}.weight"],
                )
            )
    mine = torch.autograd.grad(found.sum / found.count, [a for a, _ in pairs])
    other = torch.autograd.grad(wanted, [b for _, b in pairs])
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def _with_words_head(base: Path, folder: Path) -> Path:
    kind: Any = head_named("masked_lm").model
    torch.manual_seed(3)
    model = kind.from_pretrained(base)
    for parameter in model.graph.get_submodule("head").parameters():
        parameter.data.add_(0.01)
    return model.save_pretrained(folder)


def weights(base: Path, data: Any, **options: Any) -> dict[str, Tensor]:
    model = finetune(base, train=data, **{**EXACT, **options}).model
    return {name: value.detach().clone() for name, value in model.graph.named_parameters()}


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_a_step_is_the_same_packed_and_noise_is_that_of_the_seed(base: Path) -> None:
    whole = weights(base, ALONE)
    assert far(whole, weights(base, ALONE, layout="packed")) < 1e-5
    assert far(whole, weights(base, ALONE, loss_options={"del_ratio": 0.2})) > 1e-5


@pytest.mark.slow
def test_a_step_is_the_same_on_several_ranks(base: Path) -> None:
    assert far(weights(base, ALONE), weights(base, ALONE, devices=["cpu", "cpu"])) < 1e-5


def test_vectors_are_learned_judged_and_written_without_the_decoder(base: Path, tmp_path: Path) -> None:
    scored = [{"sentence1": TEXTS[i], "sentence2": TEXTS[8 + i], "score": i / 8} for i in range(8)]
    held_out = {"texts": ALONE[:8], "sts": scored}
    given: dict[str, Any] = {**ONE, "max_steps": 8, "lr": 3e-3, "report": True}
    result = finetune(base, train=ALONE, eval=held_out, out=tmp_path / "out", **given)
    assert {"texts/eval_loss", "sts/spearman"} <= result.metrics.keys()
    assert np.mean(result.losses[-2:]) < result.losses[0]
    assert result.model.beside is None
    loaded: Any = load(tmp_path / "out")
    model: Any = result.model
    assert torch.equal(loaded.embed(TEXTS[:4]), model.embed(TEXTS[:4]))
    adapted: Any = finetune(tmp_path / "out", train=PAIRS, out=tmp_path / "lora", lora=2, **ONE).model
    again: Any = load(tmp_path / "lora")
    assert torch.equal(again.embed(TEXTS[:4]), adapted.embed(TEXTS[:4]))


def test_a_run_that_was_ended_goes_on_to_the_same_bits(base: Path, tmp_path: Path) -> None:
    class Stopped(BaseException):
        pass

    def stop(event: Any) -> None:
        if type(event).__name__ == "StepDone" and event.step == 4:
            raise Stopped

    given: dict[str, Any] = {**ONE, "max_steps": None, "epochs": 2, "save_every": 1, "lr": 5e-3}
    whole = finetune(base, train=ALONE, out=tmp_path / "whole", **given)
    with pytest.raises(Stopped):
        finetune(base, train=ALONE, out=tmp_path / "out", on_event=stop, **given)
    rest = finetune(base, train=ALONE, out=tmp_path / "out", resume=True, **given)
    assert rest.losses == whole.losses
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_what_does_not_fit_is_refused(base: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"matryoshka": [8]}, "matryoshka"),
        ({"cache_tokens": 64}, "cache_tokens"),
        ({"loss_options": {"del_ratio": 1}}, "del_ratio is 1"),
    ]
    for options, said in cases:
        with pytest.raises(ConfigError, match=said):
            finetune(base, train=ALONE, **{**ONE, **options})
    with pytest.raises(ConfigError, match="takes texts, pairs"):
        finetune(base, train=[{"text": text, "label": i % 3} for i, text in enumerate(TEXTS[:9])], **ONE)


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
FAMILIES: dict[str, dict[str, int]] = {
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "roberta": {**SIZES, "type_vocab_size": 1},
    "data2vec-text": {**SIZES, "type_vocab_size": 1},
    "electra": {**SIZES, "type_vocab_size": 2, "embedding_size": 8},
    "mpnet": SIZES,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_decode_from_the_left_or_are_refused(family: str) -> None:
    config = ModelConfig.for_model(family, **FAMILIES[family], vocab_size=60, max_position_embeddings=40)
    kind: Any = head_named("base").model
    model = kind.from_config(config).eval()
    if family in ("electra", "mpnet"):
        with pytest.raises(ConfigError, match=f"layers of {family} cannot decode"):
            attach_decoder(model, 1)
        return
    attach_decoder(model, 1)
    model.eval()
    ids = torch.tensor([[2, 7, 8, 9], [2, 7, 8, 30]])
    batch = {"target_ids": ids, "target_mask": torch.ones(2, 4, dtype=torch.bool), "target_places": torch.tensor([1, 5]),
             "target_labels": torch.tensor([8, 8]), "target_texts": torch.tensor([0, 1])}  # fmt: skip
    found = model.beside(model, torch.ones(2, 16), batch)
    assert found[:, 1].tolist() == [1, 1]
    assert found[0, 0] == found[1, 0]  # what comes later is not seen
    assert model.beside(model, -torch.ones(2, 16), batch)[0, 0] != found[0, 0]
    with torch.no_grad():
        model.beside.bias[8] += 1
    assert (model.beside(model, torch.ones(2, 16), batch)[:, 0] < found[:, 0]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.filterwarnings("error")
def test_texts_are_written_again_on_a_gpu(base: Path, precision: str) -> None:
    given: dict[str, Any] = {**EXACT, "max_steps": 6, "lr": 0.05}
    plain = finetune(base, train=ALONE, devices="cpu", **given)
    fast = finetune(base, train=ALONE, eval=ALONE[:6], devices="cuda:0", precision=precision, **given)
    assert fast.losses == pytest.approx(plain.losses, rel=1e-3 if precision == "fp32" else 0.1)
