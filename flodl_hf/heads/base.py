"""The encoder alone: a state for each token, and for each text where there is a pooler.

Transformers' class: ``BertModel`` and its siblings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from flodl_hf.checkpoints.keywords import accept_keywords
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig, recipe_on
from flodl_hf.errors import PredictError
from flodl_hf.heads.chunks import embed_chunks
from flodl_hf.heads.prediction_keywords import EMBED, ENCODE
from flodl_hf.heads.vectors import (
    batches_of,
    convolved,
    embed_sparse,
    embed_tokens,
    keywords_for,
    most_sentence_tokens,
    pooled_beyond,
    token_embeddings,
)
from flodl_hf.inference.batch import Pooled
from flodl_hf.inference.graph_model import route_within
from flodl_hf.inference.inputs import Encoded, as_text_list, encode, prompted
from flodl_hf.inference.options import RunKeywords
from flodl_hf.inference.pipeline import Session
from flodl_hf.inference.pooling import Pooling, check_pooling, finish_embeddings
from flodl_hf.inference.quantize import STORED_PRECISIONS, check_store, quantize_embeddings
from flodl_hf.inference.similarity import Similarity, measure_of, pairwise_of, similarity_of
from flodl_hf.inference.vectors import Vectors
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.models.outputs import BaseOutput

__all__ = ["BaseModel"]


class BaseModel(EncoderModel):
    """An encoder without a task's head."""

    head: ClassVar[str] = "base"

    @property
    def has_pooler(self) -> bool:
        """Whether calls also give ``pooler_output``."""
        return "pooler" in dict(self.graph.named_children())

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        return_dict: bool = True,
    ) -> BaseOutput | tuple[Any, ...]:
        """Return the states.

        Args:
            input_ids: token ids, ``(batch, seq)``.
            attention_mask: 1 for tokens to keep, ``(batch, seq)``; None keeps all.
            token_type_ids: 0 for the first text, 1 for the second, ``(batch, seq)``.
            position_ids: places in the position table, ``(batch, seq)``; None counts them.
            inputs_embeds: embeddings of words, ``(batch, seq, embedding_size)``, instead of ids.
            output_hidden_states: also return the states after the embeddings and each layer.
            output_attentions: also return each layer's weights, ``(batch, heads, seq, seq)``; eager attention has them.
            return_dict: False gives a tuple.
        """
        wanted = ["pooler_output"] if self.has_pooler else []
        states, named, seen = self._run_graph(
            input_ids, attention_mask, token_type_ids, position_ids, wanted, embeds=inputs_embeds,
            hidden_states=output_hidden_states, attentions=output_attentions,
        )  # fmt: skip
        output = BaseOutput(states, named.get("pooler_output"), **seen)
        return output if return_dict else output.to_tuple()

    @accept_keywords(EMBED)
    def embed(
        self,
        texts: str | Iterable[str],
        *,
        pooling: Pooling | Sequence[Pooling] | None = None,
        normalize: bool | None = None,
        truncate_dim: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        task: str | None = None,
        route: str | None = None,
        windows: bool = False,
        strict: bool = False,
        untrained: bool = False,
        **run: Unpack[RunKeywords],
    ) -> Tensor | Iterator[Tensor]:
        """Return one vector for each text, ``(texts, size)``; for an iterator, an iterator of vectors.

        A folder of sentence-transformers specifies the pooling; elsewhere tokens are averaged and vectors have
        length 1. A text longer than the folder's ``max_seq_length`` is truncated, as in sentence-transformers, and one
        warning for the call counts the truncated texts.

        Args:
            texts: one text or several.
            pooling: "mean", "cls", "max", "mean_sqrt_len", "weighted_mean", "last_token", "pooler", or several;
                None uses the folder's pooling and dense layers, else "mean".
            normalize: scale vectors to length 1; None uses the folder's setting, else True.
            truncate_dim: keep this many features; None uses the folder's setting, else all.
            prompt: text before each text; None for the folder's default prompt.
            prompt_name: name of a prompt of the folder ("query"), instead of ``prompt``.
            task: a task that the file has adapters for ("retrieval.query"); its prompt is then the default.
                The first call of a task makes a copy of the model. Where the folder has routes, as ``route``.
            route: the route of these texts in a folder with separate layers for queries and documents
                ("query", "document"); None for the folder's usual one.
            windows: read all of a long text in windows and average their vectors, weighted by their tokens.
            strict: raise on a text that is too long.
            untrained: embed although the model has random values.
            **run: how to run (``precision``, ``devices``, ``batch_invariant``, ``token_budget``, ...), see
                `flodl_hf.inference.RunOptions`; options that are not passed keep their `runtime` values.

        Raises:
            PredictError: the model has no tokenizer, or an option makes no sense.
        """
        self._ready("embed", untrained=untrained)
        recipe = self.sentence_recipe
        if task is not None and recipe is not None and recipe.routes and route in (None, task):
            task, route = None, task
        how: dict[str, Any] = {
            "pooling": pooling, "normalize": normalize, "truncate_dim": truncate_dim, "prompt_name": prompt_name,
            "windows": windows, "strict": strict, "untrained": untrained, **run,
        }  # fmt: skip
        if task is not None:
            from flodl_hf.models.adapters.task_adapters import adapted, instruction_of

            before = instruction_of(self, task) if prompt is None and prompt_name is None else prompt
            found: Any = adapted(self, task)
            return found.embed(texts, prompt=before, route=route, **how)
        if (own := self.on_route(route)) is not self:
            return own.embed(texts, prompt=prompt, route=route_within(own.sentence_recipe, route), **how)
        texts = as_text_list(texts, "embed")
        recipe = recipe_on(recipe, route)
        names = check_pooling(pooling or (recipe.pooling if recipe else "mean"))
        wanted = normalize if normalize is not None else (recipe.normalize if recipe else True)
        truncate_dim = recipe.kept(truncate_dim) if recipe else truncate_dim

        before = (recipe or SentenceTransformerConfig()).resolve_prompt("embed", prompt, prompt_name)
        # The process of another device also calls it, so it is a method and not a function of this call.
        encode = partial(self._embeddable, windows=windows, strict=strict, prompt=before)
        single = isinstance(texts, str)
        session = Session(self, run)
        given: dict[str, Any] = {"single": single, "what": "embed", "limit": most_sentence_tokens(self)}
        dense = recipe.dense if recipe and pooling is None else ()
        if isinstance(texts, Sequence) and not single and not len(texts):
            size = self.config.encoder.hidden_size
            whole = recipe.width(size) if recipe and pooling is None else len(names) * size
            return torch.zeros(0, truncate_dim or whole, dtype=torch.float32)
        if recipe is not None and recipe.reads_padding and isinstance(texts, Sequence) and not (pooling or windows):
            found = convolved(
                self, recipe, names, before, dense, [texts] if single else texts, truncate_dim=truncate_dim,
                normalize=wanted, strict=strict,
            )  # fmt: skip
            return found[0] if single else found
        if recipe is not None and (dense or recipe.changes_states or (before and not recipe.include_prompt)):
            work, take = pooled_beyond(
                self, recipe, names, before, dense, truncate_dim=truncate_dim, normalize=wanted,
                batch_invariant=session.options.batch_invariant,
            )  # fmt: skip
            return session.answer(texts, encode, work, take, join=torch.cat, **given)
        vectors = Vectors(len(texts) if isinstance(texts, Sequence) and not single else None, normalize=wanted)
        work = Pooled(names, truncate_dim, wanted)
        return session.answer(texts, encode, work, vectors.take, join=vectors.joined, **given)

    @accept_keywords(ENCODE)
    def encode(
        self,
        sentences: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        *,
        normalize_embeddings: bool | None = None,
        convert_to_tensor: bool = False,
        convert_to_numpy: bool = True,
        truncate_dim: int | None = None,
        output_value: str | None = "sentence_embedding",
        task: str | None = None,
        route: str | None = None,
        store: str | None = None,
        ranges: Any = None,
        windows: bool = False,
        strict: bool = False,
        untrained: bool = False,
        **run: Unpack[RunKeywords],
    ) -> Any:
        """Return vectors as sentence-transformers does: an array, scaled only if the folder specifies it.

        `embed` computes the same vectors with its own defaults: a tensor, vectors of length 1.

        Args:
            sentences: one text or several.
            prompt_name: name of a prompt of the folder; None for its default prompt.
            prompt: text before each text, instead of ``prompt_name``.
            batch_size: most texts of a batch; None for what suits the device.
            normalize_embeddings: scale vectors to length 1; None and False use the folder's setting.
            convert_to_tensor: a tensor instead of an array.
            convert_to_numpy: an array; a tensor comes first. Without both several texts give a list of tensors.
            truncate_dim: keep this many features; None uses the folder's setting. They are not scaled again if the
                folder scales vectors and ``normalize_embeddings`` is not set.
            output_value: "sentence_embedding"; or "token_embeddings" for the vectors of each text's tokens,
                ``(tokens, size)``, in a list.
            task: as in `embed`.
            route: as in `embed`.
            store: how numbers come back: "float32", "float16", "int8", "uint8", "binary" or "ubinary", as
                `flodl_hf.vectors.quantize_embeddings` makes them; None as they are. ``precision`` of
                sentence-transformers ("float32", "int8", "uint8", "binary", "ubinary") is the same; with ``store``,
                ``precision`` is the precision that the model computes in.
            ranges: ``store`` in bytes: the least and greatest number of each feature, ``(2, size)``; None takes those
                of these vectors.
            windows: as in `embed`.
            strict: as in `embed`.
            untrained: encode although the model has random values.
            **run: how to run; see `flodl_hf.inference.RunOptions`.

        Raises:
            PredictError: the model has no tokenizer, or an option makes no sense.
        """
        texts = as_text_list(sentences, "encode")
        texts = texts if isinstance(texts, str) else list(texts)
        given: dict[str, Any] = {**run, **({} if batch_size is None else {"batch_size": batch_size})}
        if store is None and given.get("precision") in STORED_PRECISIONS:
            store = given.pop("precision")
        if store is not None:
            check_store(store)
        recipe = self.sentence_recipe
        if prompt is None and prompt_name is not None:
            prompt = (recipe or SentenceTransformerConfig()).resolve_prompt("encode", None, prompt_name)
        if output_value != "sentence_embedding":
            if windows or strict:
                raise PredictError(
                    f"encode: found long_texts={'error' if strict else 'windows'!r} and output_value={output_value!r}, "
                    "expected long_texts='truncate'. Only vectors of whole texts support other values."
                )
            return token_embeddings(
                self, texts, output_value, prompt=prompt, route=route, untrained=untrained, run=given
            )
        own = recipe.on(route or task) if recipe is not None and recipe.routes else recipe
        scaled = bool(own and own.normalize)
        kept = own.kept(truncate_dim) if own else truncate_dim
        # A folder scales whole vectors, and a call scales the remaining features.
        whole = own.width(self.config.encoder.hidden_size) if own and scaled and not normalize_embeddings else kept
        with batches_of(batch_size):
            found: Any = self.embed(
                texts, normalize=scaled or bool(normalize_embeddings), windows=windows, strict=strict,
                truncate_dim=whole, prompt=prompt, task=task, route=route, untrained=untrained, **given,
            )  # fmt: skip
        found = finish_embeddings(found, truncate_dim=kept)
        if store is not None:
            stored = quantize_embeddings(found, store, ranges=ranges)
            found = torch.from_numpy(stored[0] if found.dim() == 1 else stored)
        if convert_to_tensor:
            return found
        return found.numpy() if convert_to_numpy else found if isinstance(texts, str) else list(found)

    @accept_keywords(ENCODE, like=encode)
    def encode_query(
        self,
        sentences: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        **how: Any,
    ) -> Any:
        """Return vectors of queries, as sentence-transformers does.

        `encode` with the folder's prompt "query" or else none, by the route "query" where the folder has routes, and
        with the adapter of queries where the file has adapters of tasks.
        """
        given = {**how, "prompt_name": prompt_name, "prompt": prompt, "batch_size": batch_size}
        return self.encode(sentences, **keywords_for("query", self, given))

    @accept_keywords(ENCODE, like=encode)
    def encode_document(
        self,
        sentences: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        **how: Any,
    ) -> Any:
        """Return vectors of documents, as sentence-transformers does.

        `encode` with the folder's prompt "document" or else none, by the route "document" where the folder has routes,
        and with the adapter of passages where the file has adapters of tasks. A prompt of another name ("passage")
        is put there with ``prompt_name``.
        """
        given = {**how, "prompt_name": prompt_name, "prompt": prompt, "batch_size": batch_size}
        return self.encode(sentences, **keywords_for("document", self, given))

    def similarity(self, a: Any, b: Any, *, measure: str | None = None, **run: Unpack[RunKeywords]) -> Similarity:
        """Return how alike each of ``a`` is to each of ``b``, a tensor ``(len(a), len(b))``; the larger the more.

        Args:
            a: texts, or vectors ``(n, size)`` of `embed` or `encode`.
            b: texts, or vectors ``(m, size)``.
            measure: "cosine", "dot", "euclidean" or "manhattan" (distances below zero); None as the folder of
                sentence-transformers specifies it, else cosine.
            **run: how to run where texts are embedded; see `flodl_hf.inference.RunOptions`.

        Raises:
            PredictError: the measure is unknown, or vectors are of different lengths.
        """
        (first, rows), (second, columns) = (self._as_vectors(x, run) for x in (a, b))
        return similarity_of(first, second, self._measure(measure), rows, columns)

    def similarity_pairwise(self, a: Any, b: Any, *, measure: str | None = None, **run: Unpack[RunKeywords]) -> Tensor:
        """Return how alike each of ``a`` is to the one at its place in ``b``, a tensor ``(len(a),)``.

        Args:
            a: texts, or vectors ``(n, size)`` of `embed` or `encode`.
            b: as many texts or vectors.
            measure: as of `similarity`.
            **run: how to run where texts are embedded; see `flodl_hf.inference.RunOptions`.

        Raises:
            PredictError: the measure is unknown, or the vectors differ in number or length.
        """
        (first, _), (second, _) = (self._as_vectors(x, run) for x in (a, b))
        return pairwise_of(first, second, self._measure(measure))

    def _measure(self, measure: str | None) -> str:
        return measure or measure_of(self.sentence_recipe.files if self.sentence_recipe else {})

    def _as_vectors(self, values: Any, run: RunKeywords) -> tuple[Any, list[str]]:
        """Return vectors, and the texts that they are of where texts were given."""
        if isinstance(values, str):
            values = [values]
        if isinstance(values, Tensor) or (hasattr(values, "dtype") and values.dtype.kind not in "OUT"):
            return values, []
        texts = list(as_text_list(values, "similarity"))
        return (self.embed(texts, **run), texts) if texts and isinstance(texts[0], str) else (texts, [])

    embed_tokens = embed_tokens
    embed_chunks = embed_chunks
    embed_sparse = embed_sparse

    def _embeddable(self, texts: list[str], *, windows: bool, strict: bool, prompt: str = "") -> Encoded:
        """Return the rows of texts as the folder's recipe wants them read."""
        tokenizer, recipe = self.tokenizer, self.sentence_recipe
        assert tokenizer is not None
        texts = prompted(prompt, texts, lower=recipe is not None and recipe.lower_case)
        limit = most_sentence_tokens(self)
        return encode(tokenizer, texts, max_tokens=limit, strict=strict, truncate=not windows)
