"""A small model that is trained on this machine for ``flodl-hf demo``.

The sentences in this folder were written for the purpose. A WordPiece vocabulary and a small BERT
classifier (praise or complaint) are trained on them. The result is a complete, very small
checkpoint for use without a network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from flodl_hf.heads.sequence_classification import SequenceClassifier
    from flodl_hf.tokenization.tokenizer import Tokenizer

__all__ = ["LABELS", "sentences", "train_wordpiece", "write_demo"]

LABELS = ("complaint", "praise")
MAX_TOKENS = 64
STEPS = 200
BATCH = 24

UNSEEN = (
    ("The breakfast was delicious and the people were kind.", "praise"),
    ("Our room was dirty and the staff were rude.", "complaint"),
    ("I love the beautiful music in this film.", "praise"),
    ("The parcel arrived late and it was broken.", "complaint"),
    ("A fantastic evening with excellent wine.", "praise"),
    ("This is the worst and most boring game.", "complaint"),
    ("The driver was friendly and the train was comfortable.", "praise"),
    ("The pizza was cold and tasteless.", "complaint"),
)
"""Sentences that are in no training file, with the label they should get."""


def sentences() -> list[tuple[str, int]]:
    """Return the training sentences with their label's id, alternating."""
    folder = files(__name__)
    bad, good = ((folder / name).read_text("utf-8").splitlines() for name in ("bad.txt", "good.txt"))
    return [pair for b, g in zip(bad, good, strict=True) for pair in ((b, 0), (g, 1))]


def learn_vocabulary(size: int = 600) -> Tokenizer:
    """Return a WordPiece tokenizer learned from the training sentences."""
    return train_wordpiece([text for text, _ in sentences()], vocab_size=size, max_length=MAX_TOKENS)


def train_wordpiece(
    texts: Iterable[str], *, vocab_size: int = 2000, lowercase: bool = True, max_length: int = 512
) -> Tokenizer:
    """Return a BERT tokenizer with a vocabulary learned from ``texts``, see `flodl_hf.tokenization.python_words`."""
    from flodl_hf.tokenization.python_words import wordpiece_files
    from flodl_hf.tokenization.tokenizer import Tokenizer

    files = wordpiece_files(texts, vocab_size, lowercase=lowercase, max_length=max_length)
    built = Tokenizer.from_files(files, folder="trained", model_type="bert")
    return Tokenizer.from_files(built.files(), folder="trained", model_type="bert")


def demo_model(tokenizer: Tokenizer, seed: int = 0) -> SequenceClassifier:
    """Return the small, untrained classifier."""
    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.heads.auto import AutoModelForSequenceClassification

    torch.manual_seed(seed)
    config = ModelConfig.for_model(
        "bert",
        architectures=["BertForSequenceClassification"],
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=MAX_TOKENS,
        type_vocab_size=2,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
        labels=list(LABELS),
        problem_type="single_label_classification",
    )
    model = AutoModelForSequenceClassification.from_config(config)
    model.tokenizer = tokenizer
    return model


def train(
    model: SequenceClassifier, steps: int = STEPS, seed: int = 0, report: Callable[[int, float], None] | None = None
) -> float:
    """Train on the sentences; return the mean loss of the last twenty steps.

    Args:
        model: from `demo_model`.
        steps: optimiser steps.
        seed: of the order and of dropout.
        report: called with each step and its loss.
    """
    data = sentences()
    tokenizer: Any = model.tokenizer
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.05)
    model.train()
    losses: list[float] = []
    for step, batch in enumerate(_batches(data, steps, seed)):
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        encoding = tokenizer([text for text, _ in batch], padding=True, return_tensors="pt")
        loss = model.compute_loss(encoding, [label for _, label in batch])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if report is not None:
            report(step, losses[-1])
    model.eval()
    return sum(losses[-20:]) / len(losses[-20:])


def _batches(data: list[tuple[str, int]], steps: int, seed: int) -> Iterator[list[tuple[str, int]]]:
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(steps):
        if len(order) < BATCH:
            order += torch.randperm(len(data), generator=generator).tolist()
        taken, order = order[:BATCH], order[BATCH:]
        yield [data[i] for i in taken]


def write_demo(folder: str | Path, steps: int = STEPS) -> Path:
    """Train the demo's model and write it to ``folder``; return the folder."""
    model = demo_model(learn_vocabulary())
    train(model, steps)
    return model.save_pretrained(folder, overwrite=True)


def is_demo(folder: Path) -> bool:
    """Return whether a folder contains only a demo model, without files that fine-tuning adds."""
    files = {path.name for path in folder.iterdir()}
    if not {"config.json", "model.safetensors"} <= files <= _FILES:
        return False
    try:
        labels = json.loads((folder / "config.json").read_text("utf-8"))["id2label"]
        return [labels[str(number)] for number in range(len(labels))] == [*LABELS]
    except (OSError, ValueError, LookupError, TypeError):
        return False


_FILES = {
    *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"),
    *("checksums.json", "verification.json"),
}
