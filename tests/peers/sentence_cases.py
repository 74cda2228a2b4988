"""Folders that sentence-transformers writes, of all three kinds of model, in every call."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flodl.errors import FlodlError
from flodl_hf.parity.cell import Bench, Cell
from tests.peers.case import Case

__all__ = ["cases"]

TEXTS = ["The staff was friendly, and the food was great!", "x", "I'd never go there again; it's awful.", "été 東京 😀"]
DOCUMENTS = ["good food", "The driver was late.", "staff"]
PAIRS = [(TEXTS[0], DOCUMENTS[0]), (TEXTS[2], DOCUMENTS[1]), ("a", "b c d")]
LONG = [(TEXTS[0], " ".join(TEXTS * 12)), (" ".join(TEXTS * 12), "a")]
SIZE = 32
MODES = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
PROMPTS = {"prompts": {"query": "query: ", "document": "passage: "}}
# Modules after the transformer, and settings of the model.
VECTORS: dict[str, tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]] = {
    **{mode: ([("Pooling", {"pooling_mode": mode})], {}) for mode in MODES},
    "two poolings": ([("Pooling", {"pooling_mode": ("cls", "mean")})], {}),
    "normalised": ([("Pooling", {}), ("Normalize", {})], {}),
    "dense": ([("Pooling", {}), ("Dense", {"in_features": SIZE, "out_features": 6})], {}),
    "dense with activation": (
        [("Pooling", {}), ("Dense", {"in_features": SIZE, "out_features": 6, "activation_function": torch.nn.GELU()})], {},
    ),
    "dense without bias": (
        [("Pooling", {}), ("Dense", {"in_features": SIZE, "out_features": 6, "bias": False}), ("Normalize", {})], {},
    ),
    "layer norm": ([("Pooling", {}), ("LayerNorm", {"dimension": SIZE})], {}),
    "dropout": ([("Pooling", {}), ("Dropout", {"dropout": 0.4})], {}),
    "CNN": ([("CNN", {"in_word_embedding_dimension": SIZE, "out_channels": 4, "kernel_sizes": [1, 3]}),
             ("Pooling", {"embedding_dimension": 8})], {}),
    "LSTM": ([("LSTM", {"word_embedding_dimension": SIZE, "hidden_dim": 4}), ("Pooling", {"embedding_dimension": 8})], {}),
    "prompts": ([("Pooling", {})], PROMPTS),
    "default prompt": ([("Pooling", {})], {**PROMPTS, "default_prompt_name": "query"}),
    "prompt left out": ([("Pooling", {"include_prompt": False})], PROMPTS),
    "truncated": ([("Pooling", {}), ("Normalize", {})], {"truncate_dim": 5}),
    **{f"similarity {name}": ([("Pooling", {})], {"similarity_fn_name": name}) for name in ("dot", "euclidean", "manhattan")},
}  # fmt: skip
ONE = {"batch_size": 1}
ENCODE: dict[str, Callable[[Any], Any]] = {
    "list": lambda model: model.encode(TEXTS, **ONE),
    "one text": lambda model: model.encode(TEXTS[0]),
    "empty text": lambda model: model.encode(["", "a"], **ONE),
    "no texts": lambda model: len(model.encode([])),
    "batches": lambda model: model.encode(TEXTS * 3, batch_size=4),
    "default batches": lambda model: model.encode(TEXTS * 11),
    "states of a batch": lambda model: model.encode(TEXTS, output_value="token_embeddings"),
    "query in a batch": lambda model: model.encode_query(TEXTS),
    "tensor": lambda model: model.encode(TEXTS, **ONE, convert_to_tensor=True),
    "normalised": lambda model: model.encode(TEXTS, **ONE, normalize_embeddings=True),
    "shorter": lambda model: model.encode(TEXTS, **ONE, truncate_dim=4),
    "prompt": lambda model: model.encode(TEXTS, **ONE, prompt="for: "),
    "query": lambda model: model.encode_query(TEXTS, **ONE),
    "documents": lambda model: model.encode_document(DOCUMENTS, **ONE),
    "prompt name": lambda model: model.encode(TEXTS, **ONE, prompt_name="query"),
    "unknown prompt": lambda model: model.encode(TEXTS, **ONE, prompt_name="none"),
    "states": lambda model: model.encode(TEXTS, **ONE, output_value="token_embeddings"),
    "binary": lambda model: model.encode(TEXTS, **ONE, precision="binary"),
    "similarity": lambda model: model.similarity(model.encode(TEXTS, **ONE), model.encode(DOCUMENTS, **ONE)),
    "pairs": lambda model: model.similarity_pairwise(model.encode(TEXTS[:3], **ONE), model.encode(DOCUMENTS, **ONE)),
    "length": lambda model: model.max_seq_length,
    "long": lambda model: model.encode(" ".join(TEXTS * 20)),
}
CROSS: dict[str, dict[str, Any]] = {
    "one label": {"num_labels": 1}, "five labels": {"num_labels": 5}, "two labels": {"num_labels": 2},
    "sigmoid": {"num_labels": 1, "activation_fn": torch.nn.Sigmoid()}, "tanh": {"num_labels": 1, "activation_fn": torch.nn.Tanh()},
    "identity": {"num_labels": 1, "activation_fn": torch.nn.Identity()},
    "prompts": {"num_labels": 1, "prompts": {"query": "find: "}, "default_prompt_name": "query"},
    "length": {"num_labels": 1, "max_length": 12},
}  # fmt: skip
# What is called there, and here.
PREDICT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "pairs": (lambda model: model.predict(PAIRS), lambda model: scores(model, PAIRS)),
    "softmax": (
        lambda model: model.predict(PAIRS, apply_softmax=True, activation_fn=torch.nn.Identity()),
        lambda model: scores(model, PAIRS, function_to_apply="softmax" if model.config.num_labels > 1 else "none"),
    ),
    "logits": (
        lambda model: model.predict(PAIRS, activation_fn=torch.nn.Identity()),
        lambda model: scores(model, PAIRS, function_to_apply="none"),
    ),
    "prompt": (lambda model: model.predict(PAIRS, prompt="for: "), lambda model: scores(model, PAIRS, prompt="for: ")),
    "empty": (lambda model: model.predict([("", "a"), ("a", "")]), lambda model: scores(model, [("", "a"), ("a", "")])),
    "long": (lambda model: model.predict(LONG), lambda model: scores(model, LONG)),
    "rank": (
        lambda model: [[one["corpus_id"], float(one["score"])] for one in model.rank(TEXTS[0], [*DOCUMENTS, ""])],
        lambda model: [[one.index, one.score] for one in model.rerank(TEXTS[0], [*DOCUMENTS, ""], truncate=True)],
    ),
    "rank of two": (
        lambda model: [
            [one["text"], float(one["score"])] for one in model.rank("x", DOCUMENTS, top_k=2, return_documents=True)
        ],
        lambda model: [[one.text, one.score] for one in model.rerank("x", DOCUMENTS, top_k=2)],
    ),
}
SPARSE: dict[str, dict[str, Any]] = {
    "max": {"pooling_strategy": "max"}, "sum": {"pooling_strategy": "sum"}, "log1p": {"activation_function": "log1p_relu"},
    "few": {"max_active_dims": 5}, "prompts": {**PROMPTS, "default_prompt_name": "query"},
}  # fmt: skip
WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "list": lambda model: model.encode(TEXTS),
    "one": lambda model: model.encode(TEXTS[0]),
    "few": lambda model: model.encode(TEXTS, max_active_dims=3),
    "query": lambda model: model.encode_query(TEXTS),
    "documents": lambda model: model.encode_document(DOCUMENTS),
    "prompt": lambda model: model.encode(TEXTS, prompt="for: "),
}


def cases(room: Path, *, quick: bool = False) -> Iterator[Case]:
    """Return each call on each folder; both sides read the folder that sentence-transformers wrote."""
    import sentence_transformers as st

    from flodl_hf import load

    number = itertools.count()
    kinds: list[tuple[str, Any, dict[str, Any], Callable[..., Any], dict[str, Any]]] = [
        ("vectors", st.SentenceTransformer, VECTORS, vectors, ENCODE),
        ("cross", st.CrossEncoder, CROSS, cross, PREDICT),
        ("sparse", st.SparseEncoder, SPARSE, sparse, WEIGHTS),
    ]
    for kind, original, table, make, calls in kinds:
        for name, settings in list(table.items())[:: 4 if quick else 1]:
            folder = room / str(next(number))
            title = f"{kind}, {name}"
            make(room, settings).save_pretrained(str(folder))
            theirs = original(str(folder), device="cpu")
            try:
                ours = load(folder)
            except FlodlError:
                yield Case(title, partial(original, str(folder)), partial(load, folder))
                continue
            for what, call in calls.items():
                there, here = call if isinstance(call, tuple) else (call, call)
                yield Case(f"{title}: {what}", partial(there, theirs), partial(here, ours))


def scores(model: Any, pairs: list[tuple[str, str]], **options: Any) -> Any:
    """Return the scores of this library as sentence-transformers returns them: an array in the order of the labels."""
    labels = list(model.config.id2label.values())
    found = [{one.label: one.score for one in answer} for answer in model.predict(pairs, truncate=True, **options)]
    table = np.array([[row[label] for label in labels] for row in found], dtype=np.float32)
    return table[:, 0] if len(labels) == 1 else table


def base(room: Path, head: str) -> str:
    folder = room / head
    if not folder.exists():
        with Bench(Cell("bert", head)) as bench:
            shutil.copytree(bench.folder, folder)
    return str(folder)


def vectors(room: Path, settings: Any) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as parts

    chain, options = settings
    torch.manual_seed(3)
    found = [parts.Transformer(base(room, "base"))]
    for name, values in chain:
        first = {"embedding_dimension": found[0].get_embedding_dimension()} if name == "Pooling" else {}
        found.append(getattr(parts, name)(**{**first, **values}))
    return SentenceTransformer(modules=found, device="cpu", **options)


def cross(room: Path, settings: dict[str, Any]) -> Any:
    from sentence_transformers import CrossEncoder

    torch.manual_seed(3)
    return CrossEncoder(base(room, "base"), device="cpu", **settings)


def sparse(room: Path, settings: dict[str, Any]) -> Any:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder import modules as parts

    of_model = {key: settings[key] for key in ("prompts", "default_prompt_name", "max_active_dims") if key in settings}
    pooling = parts.SpladePooling(**{key: value for key, value in settings.items() if key not in of_model})
    return SparseEncoder(modules=[parts.MLMTransformer(base(room, "masked_lm")), pooling], device="cpu", **of_model)
