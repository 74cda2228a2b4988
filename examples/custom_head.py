"""A custom head: one encoder that predicts a label and a rating, trained with the Trainer.

    python examples/custom_head.py

The same code runs on several GPUs with `Trainer(..., devices=2)` or under torchrun.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flodl.train import Loss, Trainer, adamw
from flodl_hf import AutoModel
from flodl_hf.training.demo import sentences, write_demo


class LabelAndRating(nn.Module):
    """Two linear heads on the state of the first token."""

    def __init__(self, name: str, labels: int) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(name)
        width = self.encoder.config.hidden_size
        self.label, self.rating = nn.Linear(width, labels), nn.Linear(width, 1)

    def forward(self, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the labels and the ratings."""
        first = self.encoder(**inputs).last_hidden_state[:, 0]
        return self.label(first), self.rating(first)[:, 0]


def step(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Return the sum of both losses and the number of rows."""
    labels = batch["labels"]
    scores, ratings = model(**{name: value for name, value in batch.items() if name != "labels"})
    loss = cross_entropy(scores, labels, reduction="sum") + (ratings - 4.0 * labels - 1).square().sum()
    return Loss(loss, len(labels))


def main() -> None:
    """Train and print both predictions of a text."""
    if not Path("demo-model").exists():
        write_demo("demo-model")
    torch.manual_seed(0)
    model = LabelAndRating("demo-model", 2)
    tokenizer = model.encoder.tokenizer
    rows = sentences()[:128]
    batches = []
    for start in range(0, len(rows), 16):
        texts, labels = zip(*rows[start : start + 16], strict=True)
        batches.append({**tokenizer(list(texts), padding=True, return_tensors="pt"), "labels": torch.tensor(labels)})
    trained = Trainer(model, adamw(1e-3), step, num_epochs=3).fit(batches)
    print("loss per epoch:", [round(epoch.loss, 3) for epoch in trained.metrics])
    model.eval()
    with torch.no_grad():
        scores, ratings = model(**tokenizer(["The breakfast was delicious."], return_tensors="pt"))
    print(f"label {scores.argmax(1).item()}, rating {ratings.item():.1f} of 5")
    assert trained.metrics[-1].loss < trained.metrics[0].loss


if __name__ == "__main__":
    main()
