"""Sparse vectors of texts (SPLADE, bge-m3), and a vector for each token (ColBERT, PyLate, MultiVectorEncoder, bge-m3).

Decides how sparse vectors are compared and joined, and the meaning of folders with vectors of tokens: projection,
markers, query expansion, skipped tokens. The comparison of two texts by their vectors (late interaction) is
`flodl_hf.inference.similarity.max_sim`.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flodl.errors import printable, shown
from flodl_hf.checkpoints.folders import is_entry, read_member
from flodl_hf.checkpoints.sentence.settings import bytes_of, refuse_setting, settings_in, wrong
from flodl_hf.checkpoints.sentence.steps import Dense
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint
from flodl_hf.errors import PredictError


@dataclass(frozen=True, eq=False)
class MultiVectorConfig:
    """How a folder makes the vectors of a text's tokens.

    Args:
        projections: layers applied in order to a token's state; `Dense`, or trainable modules.
        query_marker: the token inserted after the first one of a query; None for none.
        document_marker: the same of a document.
        query_prompt: the text before a query, which may begin with such a token.
        document_prompt: the same of a document.
        query_length: tokens of a query, special ones and marker included; None for the model's maximum.
        document_length: most tokens of a document, counted the same way.
        expanded: queries are filled up to their length with mask tokens, whose vectors count too.
        attended: other tokens attend to those mask tokens.
        skipped: words and punctuation without vectors in documents.
        first: whether the first token, which represents the whole text, has a vector.
        beside: the folder also defines pooling, for one vector per text (bge-m3).
    """

    projections: tuple[Callable[[Tensor], Tensor], ...]
    query_marker: str | None = None
    document_marker: str | None = None
    query_length: int | None = None
    document_length: int | None = None
    expanded: bool = False
    attended: bool = False
    skipped: Sequence[str] = field(default=(), repr=False)
    first: bool = True
    beside: bool = False
    query_prompt: str = ""
    document_prompt: str = ""

    def rows(self, tokenizer: Any, texts: Sequence[str], most: int | None, *, query: bool) -> list[Any]:
        """Return the first row of tokens of each text, with its marker and its prompt.

        Args:
            tokenizer: of the model.
            texts: queries or documents.
            most: most tokens of a row, or None.
            query: whether they are queries.

        Raises:
            PredictError: the tokenizer does not have the marker.
        """
        marker = self.query_marker if query else self.document_marker
        mark, before = None, self.query_prompt if query else self.document_prompt
        if marker is not None:
            mark = marker_id(tokenizer, marker)
        elif before:
            mark, before = _token_and_text(tokenizer, before)
        room = None if most is None else most - (mark is not None)
        read = [before + text for text in texts] if before else list(texts)
        groups = tokenizer.encode_rows(read, None, max_tokens=room, offsets=False, cut=None, overflow="truncate")
        return [group[0] if mark is None else _marked(group[0], mark) for group in groups]

    def vectors(self, states: Tensor) -> Tensor:
        """Return a vector of length 1 for each state, ``(tokens, size)``, in float32."""
        for projection in self.projections:
            states = projection(states)
        return torch.nn.functional.normalize(states.float(), dim=-1)


def _length(settings: Mapping[str, Any], key: str, usual: int, path: Path) -> int:
    value = settings.get(key, usual)
    if type(value) is not int or not 3 < value <= 1_000_000:
        raise wrong(path, f"{key} is {shown(value, 60)}", "an integer from 4")
    return value


def _marker(settings: Mapping[str, Any], key: str, usual: str, path: Path) -> str | None:
    """Return the token that marks texts; None if the file disables it."""
    value = settings.get(key, usual)
    if not isinstance(value, str | None):
        raise wrong(path, f"{key} is {shown(value, 60)}", "a token")
    return value or None


def _prompt(prompts: Any, kind: str, path: Path) -> str:
    """Return the prompt that follows the marker of queries or documents."""
    found = prompts.get(kind) if isinstance(prompts, dict) else prompts
    if not isinstance(found, str | None):
        raise wrong(path, f"prompts is {shown(prompts, 60)}", "a table of texts")
    return found or ""


def colbert_recipe(folder: Path) -> tuple[MultiVectorConfig, dict[str, bytes]]:
    """Return the recipe of a folder of the class HF_ColBERT, with its small file.

    Raises:
        ConfigError: ``artifact.metadata`` is damaged, or the projection is missing.
    """
    name = "artifact.metadata"
    where, said = folder / name, settings_in(folder, name, optional=True)
    files = {name: bytes_of(folder, name)} if is_entry(folder, name) else {}
    if said.get("similarity", "cosine") != "cosine":
        raise refuse_setting(where, "similarity", said["similarity"], "cosine")
    usual = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]"}
    markers = [_marker(said, key, token, where) for key, token in usual.items()]
    if None in markers:
        raise wrong(where, "found no token for queries or for documents", " and ".join(usual))
    with Checkpoint.open(folder) as held:
        stored = [key for key in held.manifest.tensors if key in ("linear.weight", "module.linear.weight")]
        if not stored:
            raise wrong(folder, "no linear.weight, ColBERT's projection", "the weights of a ColBERT")
        weight = held.read_all(stored[:1])[stored[0]].float()
    skipped = tuple(string.punctuation) if said.get("mask_punctuation", True) else ()
    return MultiVectorConfig(
        (Dense(weight),),
        *markers,
        query_length=_length(said, "query_maxlen", 32, where),
        document_length=_length(said, "doc_maxlen", 220, where),
        expanded=True,
        attended=said.get("attend_to_mask_tokens") is True,
        skipped=skipped,
    ), files


def pylate_recipe(settings: Mapping[str, Any], projections: Sequence[Dense], path: Path) -> MultiVectorConfig:
    """Return the recipe in PyLate's ``config_sentence_transformers.json``.

    Raises:
        ConfigError: a setting is invalid.
    """
    skipped = settings.get("skiplist_words", list(string.punctuation))
    if not isinstance(skipped, list) or not all(isinstance(word, str) for word in skipped):
        raise wrong(path, f"skiplist_words is {shown(skipped, 60)}", "a list of words")
    prompts = settings.get("prompts") or {}
    return MultiVectorConfig(
        tuple(projections),
        _marker(settings, "query_prefix", "[Q] ", path),
        _marker(settings, "document_prefix", "[D] ", path),
        _length(settings, "query_length", 32, path),
        _length(settings, "document_length", 180, path),
        expanded=settings.get("do_query_expansion") is not False,
        attended=settings.get("attend_to_expansion_tokens") is True,
        skipped=tuple(skipped),
        query_prompt=_prompt(prompts, "query", path),
        document_prompt=_prompt(prompts, "document", path),
    )


def multivector_recipe(
    settings: Mapping[str, Any],
    transformer: Mapping[str, Any],
    mask: Mapping[str, Any],
    projections: Sequence[Dense],
    folder: Path,
) -> MultiVectorConfig:
    """Return the recipe of a folder of sentence-transformers' MultiVectorEncoder.

    Args:
        settings: ``config_sentence_transformers.json``.
        transformer: ``sentence_bert_config.json``.
        mask: the settings of its module MultiVectorMask.
        projections: its dense layers.
        folder: the folder.

    Raises:
        ConfigError: a setting is invalid or not supported.
    """
    expansion, prompts = transformer.get("query_expansion"), settings.get("prompts") or {}
    skipped = mask.get("skiplist_words") or []
    supported = {
        "query_expansion": expansion is None
        or (isinstance(expansion, dict) and expansion.get("strategy") == "fixed" and not expansion.get("token")),
        "skiplist_words": isinstance(skipped, list) and all(isinstance(word, str) for word in skipped),
        "skiplist_tasks": mask.get("skiplist_tasks", ["document"]) == ["document"],
        "keep_only_token_ids": mask.get("keep_only_token_ids") is None,
        "prompts": isinstance(prompts, dict),
        "similarity_fn_name": settings.get("similarity_fn_name") in (None, "maxsim", "MaxSim"),
    }
    for name in (name for name, is_supported in supported.items() if not is_supported):
        value = {**settings, **transformer, **mask}.get(name)
        expected = "queries of one length or unexpanded, and skipped words in documents only"
        raise refuse_setting(folder, name, value, expected)
    lengths = {name: _length(transformer, name, 32, folder) for name in ("query_length", "document_length")
               if transformer.get(name) is not None}  # fmt: skip
    filled = None if expansion is None else _length(expansion, "length", 32, folder)
    return MultiVectorConfig(
        tuple(projections),
        query_length=filled or lengths.get("query_length"),
        document_length=lengths.get("document_length"),
        expanded=expansion is not None,
        attended=expansion is not None and expansion.get("attend") is True,
        skipped=tuple(skipped),
        query_prompt=_prompt(prompts, "query", folder),
        document_prompt=_prompt(prompts, "document", folder),
    )


def m3_layer(root: Path, name: str) -> tuple[Dense, bytes]:
    """Return one of bge-m3's layers, a state dictionary in a pickle that is read without executing it.

    Raises:
        ConfigError: it contains no layer.
        CheckpointError: it is damaged.
    """
    with Checkpoint.open(root, named=name) as held:
        values = held.read_all()
    weight, bias = values.pop("weight", None), values.pop("bias", None)
    if weight is None or weight.dim() != 2 or values:
        raise wrong(root / name, f"found tensors {shown(sorted(values), 60)}", "weight and bias")
    return Dense(weight.float(), None if bias is None else bias.float()), read_member(root, name, 1 << 30)


def _token_and_text(tokenizer: Any, prompt: str) -> tuple[int | None, str]:
    """Return the token that a prompt begins with, if texts do not contain it as a word, and the rest of the prompt."""
    for token in (prompt.strip(), *prompt.split(None, 1)[:1]):
        found = marker_id(tokenizer, token, None) if token else None
        if found is not None and (found in tokenizer.all_special_ids or tokenizer.tokenize(token) != [token]):
            rest = prompt.split(token, 1)[1]
            return found, rest if rest.strip() else ""
    return None, prompt


def _marked(row: Any, mark: int) -> Any:
    """Return a row of tokens with a marker behind its first one."""
    return replace(
        row, ids=[row.ids[0], mark, *row.ids[1:]], type_ids=[row.type_ids[0], *row.type_ids],
        sequence_ids=[row.sequence_ids[0], None, *row.sequence_ids[1:]],
        special=[row.special[0], True, *row.special[1:]],
    )  # fmt: skip


def marker_id(tokenizer: Any, token: str, *missing: Any) -> Any:
    """Return the id of a token, which may be written with a space around.

    Raises:
        PredictError: there is none, and nothing is given for that.
    """
    for name in (token, token.strip()):
        found = tokenizer.convert_tokens_to_ids(name)
        if found is not None and (found != tokenizer.unk_token_id or name == tokenizer.unk_token):
            return int(found)
    if missing:
        return missing[0]
    raise PredictError(
        f"embed_tokens: the tokenizer has no token {printable(token)}, which marks texts; add it to tokenizer.json",
        token=token,
    )


@dataclass(frozen=True)
class SpladePooling:
    """How scores of words at tokens become the weights of a text (Formal et al. 2021, arXiv 2109.10086).

    Args:
        strategy: over a text's tokens: "max" or "sum".
        activation: of a score: "relu" for log(1 + relu), "log1p_relu" for the logarithm of one plus that.
    """

    strategy: str = "max"
    activation: str = "relu"

    def activated(self, scores: Tensor) -> Tensor:
        """Return weights shaped like ``scores``, none below zero."""
        found = torch.log1p(torch.relu(scores))
        return torch.log1p(found) if self.activation == "log1p_relu" else found


class SparseVectors(Sequence[dict[int, float]]):
    """One sparse vector a text; each read alone is a dictionary from a word's id to its weight, largest first.

    Args:
        ids: of the words of each text, ascending.
        weights: of the same words, float32.
        size: how many words there are in all.
        tokens: the words of ids, for `words`; None where there is no tokenizer.
    """

    def __init__(
        self, ids: Sequence[np.ndarray], weights: Sequence[np.ndarray], size: int, words: dict[int, str] | None = None
    ) -> None:
        self.ids = list(ids)
        self.weights = list(weights)
        self.size = size
        self._words = words

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[int, float]:  # type: ignore[override]
        order = np.argsort(-self.weights[index], kind="stable")
        return dict(zip(self.ids[index][order].tolist(), self.weights[index][order].tolist(), strict=True))

    def __repr__(self) -> str:
        mean = sum(map(len, self.ids)) / max(1, len(self))
        return f"SparseVectors({len(self)} texts, {mean:.1f} of {self.size} words each)"

    def words(self, index: int) -> dict[str, float]:
        """Return a text's words with their weights, largest first.

        Raises:
            PredictError: no vocabulary for the ids is known.
        """
        if self._words is None:
            raise PredictError("words: these vectors know ids alone; they were made without a tokenizer")
        return {self._words[token]: weight for token, weight in self[index].items()}

    def _flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return text, word and weight of each entry."""
        rows = np.repeat(np.arange(len(self)), np.array([*map(len, self.ids)], np.int64))
        ids, weights = [*self.ids, np.zeros(0, np.int64)], [*self.weights, np.zeros(0, np.float32)]
        return rows, np.concatenate(ids), np.concatenate(weights)

    def to_tensor(self) -> Tensor:
        """Return all vectors as a sparse tensor, ``(texts, size)``, as sentence-transformers' SparseEncoder does."""
        rows, columns, values = self._flat()
        places = torch.from_numpy(np.stack([rows, columns.astype(np.int64)]))
        with torch.sparse.check_sparse_tensor_invariants():  # torch 2.11 warns although the argument requests the check
            return torch.sparse_coo_tensor(
                places, torch.from_numpy(values), (len(self), self.size), check_invariants=True, is_coalesced=True
            )

    def similarity(self, other: SparseVectors) -> Tensor:
        """Return the inner product of each vector with each of ``other``, ``(len(self), len(other))``.

        Raises:
            PredictError: the vocabularies are of different sizes.
        """
        if self.size != other.size:
            raise PredictError(
                f"similarity: vectors over {self.size} and over {other.size} words; expected one vocabulary"
            )
        scores = np.zeros((len(self), len(other)), np.float32)
        rows, ids, weights = self._flat()
        for column, (own, given) in enumerate(zip(other.ids, other.weights, strict=True)):
            whole = np.zeros(self.size, np.float32)
            whole[own] = given
            scores[:, column] = np.bincount(rows, weights * whole[ids], len(self))
        return torch.from_numpy(scores)

    def top(self, most: int) -> SparseVectors:
        """Return vectors that keep their ``most`` largest weights."""
        kept = [np.sort(np.argsort(-weights, kind="stable")[:most]) for weights in self.weights]
        return SparseVectors(
            [ids[keep] for ids, keep in zip(self.ids, kept, strict=True)],
            [weights[keep] for weights, keep in zip(self.weights, kept, strict=True)], self.size, self._words,
        )  # fmt: skip

    @classmethod
    def joined(cls, parts: Iterable[SparseVectors]) -> SparseVectors:
        """Return the vectors of all parts, one after another."""
        found = list(parts)
        words = {token: word for part in found for token, word in (part._words or {}).items()}
        return cls([i for p in found for i in p.ids], [w for p in found for w in p.weights], found[0].size, words)


def from_dense(
    rows: np.ndarray, owners: np.ndarray, texts: int, strategy: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ids and weights of each text from the weights of all words in each of its windows, ``(rows, size)``."""
    for text in range(texts):
        own = rows[owners == text]
        whole = own.max(0) if strategy == "max" else own.sum(0)
        ids = np.flatnonzero(whole)
        yield ids, whole[ids].astype(np.float32)


def from_tokens(ids: np.ndarray, weights: np.ndarray, left_out: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and weights of a text from the weights of its tokens: a word has its largest, none has zero."""
    kept = (weights > 0) & ~np.isin(ids, list(left_out))
    words, places = np.unique(ids[kept], return_inverse=True)
    largest = np.zeros(len(words), np.float32)
    np.maximum.at(largest, places, weights[kept])
    return words.astype(np.int64), largest
