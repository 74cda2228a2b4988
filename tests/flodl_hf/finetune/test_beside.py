"""Vectors learned with a layer beside the model: classes of pairs, teachers of another size, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import sentences
from torch.nn import functional as F

from flodl.errors import ConfigError, DataError
from flodl_hf import load
from flodl_hf.training import finetune
from flodl_hf.training.losses import make_loss
from flodl_hf.training.vectors.auxiliary import AUXILIARY_LOSSES

TEXTS = sentences()
NAMES: tuple[str, ...] = ("entailment", "neutral", "contradiction")
ROWS = [{"premise": TEXTS[i], "hypothesis": TEXTS[i + 9], "label": NAMES[i % 3]} for i in range(24)]
RUN: dict[str, Any] = {
    "task": "embedding", "max_steps": 2, "epochs": 9, "batch_size": 8, "lr": 0.1, "dropout": 0.0, "optimizer": "sgd",
    "schedule": "constant", "max_grad_norm": 0.0, "report": False, "weight_decay": 0.0,
}  # fmt: skip


def test_names_of_classes_train_a_classifier_of_pairs_that_is_not_kept(base: Path, tmp_path: Path) -> None:
    found = finetune(base, train=ROWS, eval=ROWS[:9], out=tmp_path / "out", **RUN)
    assert {"accuracy", "eval_loss"} <= set(found.metrics)
    assert found.model.beside is None
    kept: Any = load(tmp_path / "out")
    learned: Any = found.model.to("cpu")
    assert torch.equal(kept.embed(TEXTS[:3]), learned.embed(TEXTS[:3]))
    numbers = {name: i for i, name in enumerate(sorted(NAMES))}
    same = [{**row, "label": numbers[row["label"]]} for row in ROWS]
    again = finetune(base, train=same, eval=same[:9], loss="softmax", **RUN)
    assert again.losses == found.losses
    assert again.metrics["accuracy"] == found.metrics["accuracy"]
    scored = [{"text1": row["premise"], "text2": row["hypothesis"], "score": i / 9} for i, row in enumerate(ROWS[:9])]
    assert "spearman" in finetune(base, train=ROWS, eval=scored, **RUN).metrics


def test_the_first_step_is_that_of_the_formula(base: Path) -> None:
    one = {**RUN, "max_steps": 1, "batch_size": len(ROWS)}
    start: Any = load(base, head="base")
    vectors = [F.normalize(start.embed([row[name] for row in ROWS]), dim=-1) for name in ("premise", "hypothesis")]
    torch.manual_seed(42)
    size = vectors[0].shape[1]
    layer = torch.nn.Linear(3 * size, 3)
    scores = layer(torch.cat([*vectors, (vectors[0] - vectors[1]).abs()], 1))
    labels = torch.tensor([sorted(NAMES).index(row["label"]) for row in ROWS])
    assert finetune(base, train=ROWS, **one).losses[0] == pytest.approx(
        F.cross_entropy(scores, labels).item(), abs=1e-5
    )
    rows = [
        {"text": text, "label": torch.randn(5, generator=torch.manual_seed(i)).tolist()}
        for i, text in enumerate(TEXTS[:24])
    ]
    torch.manual_seed(42)
    wide = torch.nn.Linear(size, 5)(F.normalize(start.embed([row["text"] for row in rows]), dim=-1))
    wanted = (1 - F.cosine_similarity(wide, torch.tensor([row["label"] for row in rows]))).mean()
    found = finetune(base, train=rows, loss="EmbedDistill", loss_options={"projection_dim": 5}, **one)
    assert found.losses[0] == pytest.approx(wanted.item(), abs=1e-5)


def test_what_does_not_fit_is_refused(base: Path) -> None:
    with pytest.raises(DataError, match="eval: found the classes"):
        finetune(base, train=ROWS, eval=[{**ROWS[0], "label": "maybe"}], **RUN)
    with pytest.raises(DataError, match="names of classes"):
        finetune(base, train=[{"anchor": text, "positive": text} for text in TEXTS[:9]], eval=ROWS, **RUN)
    sizes: Any = [8]
    with pytest.raises(ConfigError, match="matryoshka"):
        finetune(base, train=ROWS, matryoshka=sizes, **RUN)
    off = {f"concatenation_sent_{name}": False for name in ("rep", "difference", "multiplication")}
    with pytest.raises(ConfigError, match="concatenation_sent"):
        make_loss("Softmax", off, AUXILIARY_LOSSES)


@pytest.mark.parametrize("parts", [(True, True, False), (False, True, True)])
@pytest.mark.filterwarnings("ignore")
def test_classes_of_pairs_are_those_of_sentence_transformers(parts: tuple[bool, bool, bool]) -> None:
    theirs: Any = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

    class Model(torch.nn.Module):
        device = "cpu"

        def forward(self, features: Any) -> Any:
            return {"sentence_embedding": features["vectors"]}

    names = [f"concatenation_sent_{name}" for name in ("rep", "difference", "multiplication")]
    settings = dict(zip(names, parts, strict=True))
    torch.manual_seed(1)
    reference = theirs.SoftmaxLoss(Model(), 8, 3, **settings)
    ours = make_loss("Softmax", settings, AUXILIARY_LOSSES)
    layer = ours.layer(8, 3)
    layer.classifier.load_state_dict(reference.classifier.state_dict())
    mine = torch.randn(9, 2, 8).requires_grad_()
    other = [column.detach().clone().requires_grad_() for column in mine.unbind(1)]
    labels = torch.arange(9) % 3
    found = ours(list(layer(mine).unbind(1)), labels)
    wanted = reference([{"vectors": column} for column in other], labels)
    assert torch.equal(found, wanted)
    grads = torch.autograd.grad(found, [mine, layer.classifier.weight])
    right = torch.autograd.grad(wanted, [*other, reference.classifier.weight])
    assert torch.allclose(grads[0], torch.stack(right[:2], 1), rtol=0, atol=1e-7)
    assert torch.equal(grads[1], right[2])
