"""Labels for whole texts: one of several, multiple labels, or a number.

Transformers' class: ``BertForSequenceClassification`` and its siblings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor

from flodl.errors import shown
from flodl_hf.checkpoints.config.file import tuned_thresholds
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.checkpoints.keywords import accept_keywords
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
from flodl_hf.errors import PredictError
from flodl_hf.heads.prediction_keywords import CLASSES, RERANK, ZERO_SHOT
from flodl_hf.heads.scoring import ScoringModel
from flodl_hf.inference.batch import Pending, Scores
from flodl_hf.inference.classes import (
    Activation,
    Ranked,
    activation_for,
    contradiction_id,
    decide,
    decode_classes,
    decode_ranking,
    decode_zero_shot,
    entailment_id,
    score_function,
)
from flodl_hf.inference.inputs import Encoded, Text, as_text_list, encode, prompted, split_pairs
from flodl_hf.inference.options import RunKeywords
from flodl_hf.inference.pipeline import Session
from flodl_hf.inference.results import Labels, Ranking
from flodl_hf.inference.transformers_results import text_classification, zero_shot_classification
from flodl_hf.models.outputs import SequenceClassificationOutput
from flodl_hf.nn.task_heads import check_labels, classification_loss

__all__ = ["SequenceClassifier"]


class SequenceClassifier(ScoringModel):
    """An encoder that labels whole texts; logits are ``(batch, labels)``."""

    head: ClassVar[str] = "sequence_classification"
    _per_text: ClassVar[bool] = True
    output = SequenceClassificationOutput

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss, a scalar.

        Args:
            logits: ``(batch, labels)``.
            labels: ids ``(batch,)``; 0/1 floats ``(batch, labels)`` for multiple labels; numbers for regression.
        """
        own = self.config.family.heads[self.head].untyped_loss
        if own is not None and self.config.problem_type is None:
            return own(logits, labels)
        if self.num_labels > 1:
            check_labels(labels, self.num_labels)
        return classification_loss(logits, labels, self.config.problem_type)

    @accept_keywords(CLASSES)
    def predict(
        self,
        texts: Text | Iterable[Text],
        *,
        top_k: int | None = None,
        threshold: float | Sequence[float] | Mapping[str, float] | Literal["tuned"] | None = None,
        function_to_apply: str | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        strict: bool = False,
        truncate: bool = False,
        max_length: int | None = None,
        untrained: bool = False,
        compat: Literal["transformers"] | None = None,
        **run: Unpack[RunKeywords],
    ) -> Any:
        """Return for each text its labels with scores, best first: `flodl_hf.inference.results.Labels`, several in a
        list.

        The folder of a cross-encoder stores the activation of its scores and its default prompt, which are applied as
        sentence-transformers applies them; ``compat="transformers"`` ignores both, as transformers does.

        A longer text than the model's maximum is read in windows; scores are the mean over windows, weighted by their
        tokens; ``windows`` of each result is their number. Windows of a pair cut its longer text and repeat the other
        one; if both are long, both are truncated as by transformers, the longer one first, with a warning.

        Args:
            texts: texts, or pairs ``(a, b)``; an iterator gives an iterator. One text alone gives its labels.
            top_k: most labels of a text; None for all.
            threshold: minimum score of a label, for all or by label; "tuned" for the model's stored thresholds: of
                several labels all above it, of two the selected one. None returns all labels.
            function_to_apply: "softmax", "sigmoid", "none" or the name of an activation of ``torch.nn`` ("Tanh"),
                instead of the function that the folder or its problem type specifies.
            prompt: text before each text, or before the first one of each pair; None for the folder's default prompt.
            prompt_name: name of a prompt of the folder, instead of ``prompt``.
            strict: raise on a text that does not fit into one window.
            truncate: cut a long text to one window, of a pair the longer of the two, as transformers does.
            max_length: most tokens of a text or pair, at least 3; longer ones are truncated.
            untrained: predict although parts of the model have random values.
            compat: "transformers" gives the dictionaries of its pipeline.
            **run: how to run (``precision``, ``devices``, ``batch_invariant``, ``token_budget``, ...), see
                `flodl_hf.inference.RunOptions`; options that are not passed keep their `runtime` values.

        Raises:
            PredictError: the model has no tokenizer or an untrained head, or an option makes no sense.
            TokenizerError: a text is not a valid string, or too long with ``strict``.
        """
        self._ready("predict", untrained=untrained)
        if max_length is not None and (not isinstance(max_length, Integral) or max_length < 3):
            raise PredictError(
                f"predict: max_length={shown(max_length, 60)}; expected an integer from 3, or None",
                max_length=max_length,
            )
        if isinstance(texts, tuple) and len(texts) == 2 and all(isinstance(part, str) for part in texts):
            raise PredictError(
                "predict: a tuple of two texts may be one pair or two texts; write predict([(a, b)]) for one pair of "
                "texts that belong together, predict([a, b]) for two texts",
                found=texts,
            )
        texts = as_text_list(texts, "predict", mapping=True)

        between: Mapping[str, float] | None = None
        if compat is None and (prompt_name is not None or self.cross_encoder is not None):
            recipe = self.cross_encoder or SentenceTransformerConfig()
            prompt = recipe.resolve_prompt("predict", prompt, prompt_name)
        if isinstance(threshold, str):
            threshold = tuned_thresholds(self.config.label_thresholds, threshold, function_to_apply)
            if self.config.problem_type != "multi_label_classification":
                threshold, between = None, threshold
        if compat is None and function_to_apply is None and self.config.score_activation is not None:
            function_to_apply = score_function(self.config)

        # Not a function of this call alone: the process of another device does it too.
        encode = partial(
            self._encode, strict=strict or compat is not None, truncate=truncate or max_length is not None,
            prompt=prompt or "", max_length=max_length,
        )  # fmt: skip

        def finish(chunk: list[Text], encoded: Encoded, scores: Pending) -> list[Any]:
            if compat is not None:
                return text_classification(
                    scores.stacked(), self.config.labels, problem_type=self.config.problem_type,
                    function_to_apply=function_to_apply, top_k=top_k,
                )  # fmt: skip
            found = decode_classes(
                scores.stacked(), self.config.labels, problem_type=self.config.problem_type,
                function_to_apply=function_to_apply, top_k=None if between else top_k, threshold=threshold,
                owners=encoded.table.owners, weights=encoded.table.counts, texts=len(chunk),
            )  # fmt: skip
            return found if between is None else [decide(labels, between) for labels in found]

        return Session(self, run).answer(
            texts, encode, Scores(True), finish, single=isinstance(texts, (str, Mapping)),
            kind=Labels if compat is None else None, given=_as_given,
        )  # fmt: skip

    @accept_keywords(ZERO_SHOT)
    def zero_shot(
        self,
        texts: str | Iterable[str],
        labels: Sequence[str],
        *,
        template: str = "This example is {}.",
        multi_label: bool = False,
        strict: bool = False,
        untrained: bool = False,
        compat: Literal["transformers"] | None = None,
        **run: Unpack[RunKeywords],
    ) -> Any:
        """Return for each text the labels that a natural language inference model sees in it, best first.

        All pairs of texts and labels are run as one flat list.

        Args:
            texts: one text or several; an iterator gives an iterator.
            labels: the candidate labels.
            template: the hypothesis, with ``{}`` where the label goes.
            multi_label: whether several labels may be true together.
            strict: raise on a text that does not fit into one window.
            untrained: answer although parts of the model have random values.
            compat: "transformers" gives the dictionaries of its pipeline.
            **run: how to run (``precision``, ``devices``, ``batch_invariant``, ``token_budget``, ...), see
                `flodl_hf.inference.RunOptions`; options that are not passed keep their `runtime` values.

        Raises:
            PredictError: no labels, a template without ``{}``, or a model without an entailment label.
        """
        self._ready("zero_shot", untrained=untrained)
        texts, labels = as_text_list(texts, "zero_shot"), as_text_list(labels, "zero_shot")
        if isinstance(labels, str) or not labels:
            raise PredictError(
                f"zero_shot: labels are {shown(labels, 60)}; expected a list of at least one; put each label into it "
                "as a separate text"
            )
        hypotheses = _hypotheses(template, labels)
        entailment = entailment_id(self.config.labels) if compat is None else 0

        def encode(chunk: list[str]) -> Encoded:
            pairs = [(text, hypothesis) for text in chunk for hypothesis in hypotheses]
            return self._encode(pairs, strict=strict or compat is not None)

        def finish(chunk: list[str], encoded: Encoded, scores: Pending) -> list[Any]:
            logits = scores.stacked()
            if compat is not None:
                return zero_shot_classification(logits, chunk, labels, self.config.labels, multi_label=multi_label)
            return decode_zero_shot(
                logits, labels, entailment=entailment,
                contradiction=contradiction_id(self.config.labels, entailment), multi_label=multi_label,
                owners=encoded.table.owners, weights=encoded.table.counts,
            )  # fmt: skip

        session = Session(self, run)
        return session.answer(
            texts, encode, Scores(True), finish, single=isinstance(texts, str), rows=max(4, len(labels)),
            kind=Labels if compat is None else None, what="zero_shot",
        )  # fmt: skip

    @accept_keywords(RERANK)
    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        top_k: int | None = None,
        function_to_apply: str | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        strict: bool = False,
        truncate: bool = False,
        untrained: bool = False,
        **run: Unpack[RunKeywords],
    ) -> Ranking:
        """Return the documents that fit the query, best first, with their texts and places in the list.

        A cross-encoder's folder stores the activation of its scores; without one it is the sigmoid, as in
        sentence-transformers. Empty documents and queries are scored like others, as sentence-transformers does, and
        ``empty`` of their results is True.

        Args:
            query: the query.
            documents: what may fit; a long one is as good as its best window.
            top_k: most documents; None for all.
            function_to_apply: "sigmoid", "none" or the name of an activation of ``torch.nn`` ("Tanh"), instead of the
                stored activation.
            prompt: text before the query; None for the folder's default prompt.
            prompt_name: name of a prompt of the folder, instead of ``prompt``.
            strict: raise on a document that does not fit into one window with the query.
            truncate: cut a long pair to one window, the longer of the two first, as sentence-transformers does.
            untrained: rank although parts of the model have random values.
            **run: how to run (``precision``, ``devices``, ``batch_invariant``, ``token_budget``, ...), see
                `flodl_hf.inference.RunOptions`; options that are not passed keep their `runtime` values.

        Raises:
            PredictError: the model has more than one label, or documents are no list of strings.
        """
        self._ready("rerank", untrained=untrained)
        activation = ranking_activation(self.config, function_to_apply)
        recipe = self.cross_encoder or SentenceTransformerConfig()
        before = recipe.resolve_prompt("rerank", prompt, prompt_name)
        texts = _documents(query, documents)

        def encode(chunk: list[str]) -> Encoded:
            return self._encode([(query, text) for text in chunk], strict=strict, truncate=truncate, prompt=before)

        def finish(chunk: list[str], encoded: Encoded, scores: Pending) -> list[Ranked]:
            found = decode_ranking(scores.stacked(), activation="none", owners=encoded.table.owners)
            return sorted(found, key=lambda document: document.index)

        best: Any = Session(self, run).answer(texts, encode, Scores(True), finish, what="rerank")
        values = torch.tensor([document.score for document in best], dtype=torch.float32)
        ranked = [
            Ranked(found.index, found.score, best[found.index].windows, text, not (query.strip() and text.strip()))
            for found in decode_ranking(values.view(-1, 1), activation=activation, top_k=top_k)
            for text in [texts[found.index]]
        ]
        return Ranking(ranked, query)

    @property
    def cross_encoder(self) -> SentenceTransformerConfig | None:
        """Settings of the folder if sentence-transformers wrote it as a cross-encoder of these labels; else None."""
        recipe, activation = self.sentence_recipe, self.config.score_activation
        return recipe if recipe is not None and activation is not None and recipe.activation == activation else None

    def _encode(
        self,
        items: Sequence[Text],
        *,
        strict: bool = False,
        truncate: bool = False,
        prompt: str = "",
        max_length: int | None = None,
    ) -> Encoded:
        tokenizer = self.tokenizer
        assert tokenizer is not None
        firsts, seconds = split_pairs(items, "predict")
        recipe = self.cross_encoder
        lower = recipe is not None and recipe.lower_case
        if prompt or lower:
            firsts, seconds = prompted(prompt, firsts, lower=lower), seconds and prompted("", seconds, lower=lower)
        limit = self._most_tokens(recipe.max_tokens if recipe is not None else None)
        limit = min(filter(None, (limit, max_length)), default=None)
        return encode(tokenizer, firsts, seconds, max_tokens=limit, strict=strict, truncate=truncate)


def ranking_activation(config: ModelConfig, function: str | None = None) -> Activation:
    """Return the function that makes scores of a cross-encoder's logits: the given, else the stored one, else sigmoid.

    Raises:
        ConfigError: as of `score_function`.
        PredictError: the given function is not known.
    """
    stored = None if function is not None else score_function(config)
    return stored or activation_for(None, config.num_labels, function or "sigmoid")


def _hypotheses(template: Any, labels: Sequence[str]) -> list[str]:
    """Return the hypothesis of each label.

    Raises:
        PredictError: the template has no place for a label.
    """
    try:
        found = [template.format(label) for label in labels]
    except (AttributeError, LookupError, TypeError, ValueError):
        found = [template]
    if template in found:
        raise PredictError(
            f"zero_shot: found template={shown(template, 60)}, expected a sentence with {{}} in place of the label. "
            "Put {} into it."
        )
    return found


def _documents(query: Any, documents: Any) -> list[str]:
    """Return the documents of a ranking as a list.

    Raises:
        PredictError: query or documents have an unexpected type.
    """
    texts = as_text_list(documents, "rerank")
    if not isinstance(query, str) or isinstance(texts, str):
        raise PredictError(
            f"rerank: found query {type(query).__name__} and documents {type(texts).__name__}; expected a string and a "
            "list of strings; write rerank(query, [document]) for one document",
        )
    texts = list(texts)
    wrong = [place for place, text in enumerate(texts) if not isinstance(text, str)]
    if wrong:
        raise PredictError(
            f"rerank: document {wrong[0]} is {type(texts[wrong[0]]).__name__}; expected a string; correct or drop it",
            places=wrong,
        )
    return texts


def _as_given(item: Any) -> Any:
    """Return a text as it is, and a pair as a tuple, however it was written."""
    if isinstance(item, Mapping):
        item = (item.get("text"), item.get("text_pair"))
    if isinstance(item, (tuple, list)):
        return item[0] if item[1] is None else tuple(item)
    return item
