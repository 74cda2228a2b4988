"""Training of vectors by others, for `benchmarks.vectors`: transformers' model in a loop, and sentence-transformers.

Each contender takes a folder, rows, how many make a batch, and a device, and returns steps a second of each timed
pass. All train in bf16 on CUDA and float32 on a processor, with AdamW, the norm of gradients clipped, and no read of
the loss.
"""

from __future__ import annotations

import importlib.util
import random
import tempfile
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

__all__ = ["CACHED", "RATE", "SCALE", "TIMED", "WARM", "contenders", "half", "has_sentence_transformers", "has_trainer",
           "their_trainer", "wait"]  # fmt: skip

WARM, TIMED = 2, 3  # epochs, or parts of a loop
RATE, SCALE = 2e-5, 20.0
CACHED = 16_384
"""Pairs from which on batches go through models in parts."""
WHOLE = {"dtype": torch.float32}
"""Weights that learn, whatever the folder stores them as; products are bf16 under autocast."""
Rows = list[dict[str, str]]
Contender = Callable[[str, Rows, int, str], list[float]]


def has_sentence_transformers() -> bool:
    return importlib.util.find_spec("sentence_transformers") is not None


def has_trainer() -> bool:
    """Whether sentence-transformers' trainer can be made, which needs datasets."""
    return has_sentence_transformers() and importlib.util.find_spec("datasets") is not None


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def half(device: str) -> bool:
    return device.startswith("cuda")


def contenders(kind: str, pairs: int) -> dict[str, Contender]:
    """Return who trains beside us, by name."""
    found: dict[str, Contender] = {}
    if kind == "embedding" and pairs < CACHED:
        found["plain loop"] = plain_steps
    if has_sentence_transformers():
        found["sentence-transformers in a loop"] = lambda *given: their_steps(kind, *given)
    if kind == "embedding" and pairs < CACHED and has_trainer():
        found["sentence-transformers' trainer"] = trainer_steps
    elif not has_trainer():
        print("sentence-transformers' trainer is left out: it needs sentence-transformers and datasets", flush=True)
    return found


def plain_steps(model: str, rows: Rows, pairs: int, device: str) -> list[float]:
    """Return steps a second of transformers' model in a loop."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model, dtype=torch.float32)
    network.to(device).train()

    def loss(batch: Rows) -> torch.Tensor:
        columns = []
        for name in ("anchor", "positive"):
            texts = [row[name] for row in batch]
            given = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt").to(device)
            states, mask = network(**given).last_hidden_state.float(), given["attention_mask"][:, :, None]
            columns.append(torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
        scores = SCALE * columns[0] @ columns[1].T
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores), device=device))

    return timed(loss, network, rows, pairs, device)


def their_steps(kind: str, model: str, rows: Rows, pairs: int, device: str) -> list[float]:
    """Return steps a second of sentence-transformers' model and loss in a loop, without its trainer."""
    network, criterion = _theirs(kind, model, pairs, device)
    network.train()
    columns = ("anchor", "positive")
    if kind == "denoising":
        draw = random.Random(0)
        rows = [{"anchor": _damaged(row["text"], draw), "positive": row["text"]} for row in rows]
    prepare = getattr(network, "preprocess", None) or network.tokenize

    def loss(batch: Rows) -> Any:
        texts = [[row[name] for row in batch] for name in columns]
        if kind == "multivector":
            prepared = [prepare(part, task=task) for part, task in zip(texts, ("query", "document"), strict=True)]
        else:
            prepared = [prepare(part) for part in texts]
        value = criterion([{k: v.to(device) if hasattr(v, "to") else v for k, v in part.items()} for part in prepared],
                          None)  # fmt: skip
        return sum(value.values()) if isinstance(value, dict) else value

    return timed(loss, criterion, rows, pairs, device, parts=1 if pairs >= CACHED else 3)


def _theirs(kind: str, model: str, pairs: int, device: str) -> tuple[Any, Any]:
    """Return sentence-transformers' model and its loss."""
    import sentence_transformers as library  # pyright: ignore[reportMissingImports]

    if kind in ("embedding", "denoising"):
        from sentence_transformers.sentence_transformer import losses  # pyright: ignore[reportMissingImports]

        network = library.SentenceTransformer(model, device=device, model_kwargs=WHOLE)
        network.max_seq_length = 128
        if kind == "denoising":
            return network, losses.DenoisingAutoEncoderLoss(network, model, tie_encoder_decoder=True).to(device).float()
        if pairs >= CACHED:
            return network, losses.CachedMultipleNegativesRankingLoss(network, scale=SCALE, mini_batch_size=1024)
        return network, losses.MultipleNegativesRankingLoss(network, scale=SCALE)
    if kind == "sparse":
        from sentence_transformers.sparse_encoder import losses as sparse  # pyright: ignore[reportMissingImports]

        network = library.SparseEncoder(model, device=device, model_kwargs=WHOLE)
        network.max_seq_length = 128
        inner = sparse.SparseMultipleNegativesRankingLoss(network)
        return network, sparse.SpladeLoss(network, inner, document_regularizer_weight=3e-5,
                                          query_regularizer_weight=5e-5)  # fmt: skip
    from sentence_transformers.multi_vector_encoder import losses as late  # pyright: ignore[reportMissingImports]

    network = library.MultiVectorEncoder(model, device=device, model_kwargs=WHOLE)
    return network, late.MultiVectorMultipleNegativesRankingLoss(network)


def _damaged(text: str, draw: random.Random) -> str:
    """Return a text of which six in ten words are gone, and one stays."""
    words = text.split()
    kept = [word for word in words if draw.random() > 0.6]
    return " ".join(kept or words[:1])


def timed(
    loss: Callable[[Rows], Any], network: Any, rows: Rows, pairs: int, device: str, *, parts: int = 3
) -> list[float]:
    """Return steps a second of passes over the rows, the first of which warms up; of one alone after a small step."""
    learning = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=RATE, fused=half(device))

    def step(batch: Rows) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=half(device)):
            value = loss(batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if parts == 1:
        step(rows[: max(2, pairs // 32)])
    found = []
    for part in range(parts):
        wait(device)
        began = perf_counter()
        count = pairs if parts == 1 else len(rows)
        for start in range(0, count, pairs):
            step(rows[start : start + pairs])
        wait(device)
        if part or parts == 1:
            found.append(count / pairs / (perf_counter() - began))
    return found


def trainer_steps(model: str, rows: Rows, pairs: int, device: str) -> list[float]:
    """Return steps a second of sentence-transformers' trainer."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        trainer = their_trainer(model, rows, pairs, device, place, epochs=WARM + TIMED, times=times)
        trainer.train()
    steps = [b - a for a, b in pairwise(times)][-TIMED:]
    return [len(rows) / pairs / seconds for seconds in steps]


def their_trainer(
    model: str, rows: Rows, pairs: int, device: str, place: str, *, times: list[float] | None = None, seed: int = 42,
    **further: Any,
) -> Any:  # fmt: skip
    """Return sentence-transformers' trainer with our recipe."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer  # pyright: ignore[reportMissingImports]
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments  # pyright: ignore[reportMissingImports]
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss  # pyright: ignore[reportMissingImports]
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            wait(device)
            if times is not None:
                times.append(perf_counter())

    settings = {"num_train_epochs": further.pop("epochs", 1), **further}
    arguments = Arguments(
        place, per_device_train_batch_size=pairs, learning_rate=RATE, bf16=half(device), report_to=[], seed=seed,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=not half(device), warmup_steps=0,
        lr_scheduler_type=settings.pop("schedule", "constant"), **settings,
    )  # fmt: skip
    network = SentenceTransformer(model, device=device, model_kwargs=WHOLE)
    network.max_seq_length = min(128 if times is not None else 256, network.max_seq_length or 512)
    loss = MultipleNegativesRankingLoss(network, scale=SCALE)
    return SentenceTransformerTrainer(
        network, arguments, train_dataset=Dataset.from_list(rows), loss=loss, callbacks=[Clock()]
    )
