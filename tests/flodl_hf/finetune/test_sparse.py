"""Sparse vectors trained: losses beside sentence-transformers', the penalty's schedule, folders read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetune_tables import sentences
from torch import Tensor

from flodl.errors import ConfigError
from flodl_hf import load
from flodl_hf.errors import PredictError
from flodl_hf.jobs import encode_file
from flodl_hf.training import finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.losses import make_loss
from flodl_hf.training.options import make_options
from flodl_hf.training.vectors.sparse import SPARSE_LOSSES, SpladeLoss

TEXTS = sentences()
ONE: dict[str, Any] = {"task": "sparse", "max_steps": 2, "epochs": 9, "batch_size": 8, "lr": 1e-3, "report": False}
ROWS = [{"anchor": TEXTS[i], "positive": TEXTS[24 + i], "negative": TEXTS[48 + i]} for i in range(24)]
LABELS = {
    "SparseMarginMSELoss": (3, torch.tensor([0.5, 1.0, -0.2, 0.1])),
    "SparseDistillKLDivLoss": (3, torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 1.0], [0.5, 0.1]])),
    "SparseCoSENTLoss": (2, torch.tensor([0.1, 0.9, 0.4, 0.4])),
    "SparseAnglELoss": (2, torch.tensor([0.1, 0.9, 0.4, 0.4])),
    "SparseCosineSimilarityLoss": (2, torch.tensor([0.1, 0.9, 0.4, 0.4])),
    "SparseTripletLoss": (3, None),
    "SparseMultipleNegativesRankingLoss": (3, None),
}


def vectors_of(texts: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(4, 30, generator=draw).relu().requires_grad_() for _ in range(texts)]


@pytest.mark.parametrize("name", LABELS)
@pytest.mark.filterwarnings("ignore")
def test_losses_are_those_of_sentence_transformers(name: str) -> None:
    theirs = pytest.importorskip("sentence_transformers.sparse_encoder.losses")
    texts, labels = LABELS[name]
    weights = {
        "document_regularizer_weight": 0.3,
        "query_regularizer_weight": 0.5,
        "document_regularizer_threshold": 14,
    }
    ours = SpladeLoss(make_loss(name, None, SPARSE_LOSSES), **weights)

    class Model(torch.nn.Module):
        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"sentence_embedding": features["vectors"]}

    model = Model()
    wanted_of = theirs.SpladeLoss(model, getattr(theirs, name)(model), **weights)
    mine, other = vectors_of(texts), vectors_of(texts)
    found = ours(mine, labels)
    wanted: Any = sum(wanted_of([{"vectors": vector} for vector in other], labels).values())
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    for a, b in zip(torch.autograd.grad(found, mine), torch.autograd.grad(wanted, other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_penalty_rises_over_a_third_of_the_steps(base: Path) -> None:
    loss = SpladeLoss(None)
    assert [loss.strength(step, 12) for step in range(6)] == [0, 1 / 16, 1 / 4, 9 / 16, 1, 1]
    assert SpladeLoss(None, scheduler_type="linear").strength(1, 12) == 0.25
    assert SpladeLoss(None, warmup_ratio=0.0).strength(0, 12) == 1
    job = plan_job(base, ROWS, None, make_options({**ONE, "epochs": 4, "max_steps": None}))
    from flodl.data import Where

    rows = [job.rows.get(i) for i in range(4)]
    shares = [
        float(job.collate(rows, Where(0, epoch, number, (0,)))["strength"])
        for epoch, number in ((0, 0), (0, 2), (1, 1))
    ]
    assert shares == [0, 0.25, 1]  # of 12 steps, three an epoch


def test_sparse_vectors_are_trained_judged_and_read_again(base: Path, tmp_path: Path) -> None:
    given = {**ONE, "max_steps": 3, "loss_options": {"query_regularizer_weight": 0.1, "scale": 0.5}}
    result = finetune(base, train=ROWS, eval=ROWS[:6], out=tmp_path / "out", **given)
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert {"ndcg@10", "words_first", "words_others"} <= result.metrics.keys()
    model: Any = result.model
    loaded: Any = load(tmp_path / "out")
    found, again = model.embed_sparse(TEXTS[:3]), loaded.embed_sparse(TEXTS[:3])
    assert torch.equal(found.to_tensor().to_dense(), again.to_tensor().to_dense())
    with pytest.raises(PredictError, match="embed_sparse"):
        loaded.fill_mask(TEXTS[:3])
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:3]))
    with pytest.raises(PredictError) as refused:
        encode_file(tmp_path / "out", tmp_path / "texts.txt", tmp_path / "v.npy")
    assert refused.value.details["head"] == "base"
    assert not (tmp_path / "v.npy").exists()
    kinds = [module["type"].rpartition(".")[2] for module in json.loads((tmp_path / "out/modules.json").read_text())]
    assert kinds == ["MLMTransformer", "SpladePooling"]
    assert "sparse-encoder" in (tmp_path / "out/README.md").read_text()
    more: Any = finetune(tmp_path / "out", train=ROWS, **ONE).model  # goes on with the folder's own head and files
    assert more.sentence_recipe.files == loaded.sentence_recipe.files


@pytest.mark.filterwarnings("ignore")
def test_sentence_transformers_loads_the_folder_with_equal_vectors(base: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    model: Any = finetune(base, train=ROWS, out=tmp_path / "out", **ONE).model
    theirs = library.SparseEncoder(str(tmp_path / "out"), device="cpu").encode(TEXTS[:6], convert_to_tensor=True)
    ours = model.embed_sparse(TEXTS[:6]).to_tensor()
    torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"layout": "packed"}, {"cache_tokens": 40}], ids=str)
def test_a_step_is_the_same_however_its_batch_goes_through_the_model(base: Path, options: dict[str, Any]) -> None:
    exact = {**ONE, "dropout": 0.0, "optimizer": "sgd", "lr": 0.05, "loss_options": {"warmup_ratio": 0.0}}
    whole, other = (finetune(base, train=ROWS, **exact, **more).model for more in ({}, options))
    for a, b in zip(whole.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"matryoshka": [8]}, "matryoshka"),
        ({"loss_options": {"query_regularizer_weight": -1}}, "0 or more"),
        ({"loss_options": {"warmup_ratio": "soon"}}, "warmup_ratio"),
        ({"vector_loss": "GISTEmbed"}, "SparseMultipleNegativesRankingLoss"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], said: str, base: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        finetune(base, train=ROWS, **ONE, **options)
