"""One of several continuations of a text, or of several answers to a question.

Transformers' class: ``BertForMultipleChoice`` and its siblings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.nn import functional as F

from flodl_hf.checkpoints.keywords import accept_keywords
from flodl_hf.errors import PredictError
from flodl_hf.heads.prediction_keywords import CHOICES
from flodl_hf.heads.scoring import ScoringModel
from flodl_hf.inference.batch import Pending, Scores
from flodl_hf.inference.classes import mean_over_windows
from flodl_hf.inference.inputs import Encoded, encode
from flodl_hf.inference.options import RunKeywords
from flodl_hf.inference.pipeline import Session
from flodl_hf.inference.results import Ranked, Ranking
from flodl_hf.models.outputs import MultipleChoiceOutput
from flodl_hf.nn.task_heads import check_labels

__all__ = ["MultipleChoice"]


class MultipleChoice(ScoringModel):
    """An encoder that scores each choice with its prompt; logits are ``(batch, choices)``."""

    head: ClassVar[str] = "multiple_choice"
    _per_text: ClassVar[bool] = True
    output = MultipleChoiceOutput

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        **how: Any,
    ) -> MultipleChoiceOutput | tuple[Any, ...]:
        """Return a score for each choice, and the loss if labels were given.

        Args:
            input_ids: token ids, ``(batch, choices, seq)``; ``(batch, seq)`` is one choice each.
            attention_mask: 1 for tokens to keep, shaped like the ids; None keeps all.
            token_type_ids: 0 for the prompt, 1 for the choice, shaped like the ids.
            position_ids: places in the position table, shaped like the ids; None counts them.
            labels: the right choice of each, ``(batch,)``.
            inputs_embeds: embeddings of words, the ids' shape and ``embedding_size``, instead of ids.
            **how: ``output_hidden_states`` and ``output_attentions``, which return a row for each choice, and
                ``return_dict``, as in other tasks.

        Raises:
            PredictError: a label that is no choice.
        """
        given = inputs_embeds[..., 0] if input_ids is None and inputs_embeds is not None else input_ids
        choices = given.shape[1] if given is not None and given.dim() == 3 else 1
        whole = how.pop("return_dict", True)
        inputs = map(_rows, (input_ids, attention_mask, token_type_ids, position_ids))
        output: Any = super().forward(*inputs, inputs_embeds=_rows(inputs_embeds, 4), **how)
        output.logits = output.logits.view(-1, choices)
        if labels is not None:
            output.loss = self.loss(output.logits, labels)
        return output if whole else output.to_tuple()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss, a scalar.

        Args:
            logits: ``(batch, choices)``.
            labels: the right choice of each, ``(batch,)``.
        """
        check_labels(labels, logits.shape[-1])
        return F.cross_entropy(logits, labels.to(logits.device))

    @accept_keywords(CHOICES)
    def predict(
        self,
        items: Any,
        *,
        strict: bool = False,
        untrained: bool = False,
        **run: Unpack[RunKeywords],
    ) -> Any:
        """Return for each prompt its choices with probabilities, best first: `flodl_hf.inference.results.Ranking`.

        Prompt and choice are read as a pair of texts. A prompt too long for the model is read in windows, and a
        choice's score is then the mean over the windows, weighted by their tokens.

        Args:
            items: ``(prompt, [choice, ...])``, also as ``{"prompt": ..., "choices": [...]}``; or several in a list.
            strict: raise on a pair that does not fit into one window.
            untrained: answer although parts of the model have random values.
            **run: how to run (``precision``, ``devices``, ``batch_invariant``, ``token_budget``, ...), see
                `flodl_hf.inference.RunOptions`; options that are not passed keep their `runtime` values.

        Raises:
            PredictError: an item is no prompt with choices, or the model has no tokenizer or an untrained head.
        """
        tokenizer = self._ready("predict", untrained=untrained)
        single = isinstance(items, Mapping) or (isinstance(items, tuple) and _is_item(items))
        if isinstance(items, str):
            raise PredictError("predict: found a string; expected (prompt, [choice, ...]), or several in a list")

        def encoded(chunk: list[Any]) -> Encoded:
            pairs = [(prompt, choice) for prompt, choices in map(_item, chunk) for choice in choices]
            first, second = [prompt for prompt, _ in pairs], [choice for _, choice in pairs]
            return encode(tokenizer, first, second, max_tokens=self.max_tokens, strict=strict)

        def finish(chunk: list[Any], rows: Encoded, scores: Pending) -> list[list[Ranked]]:
            merged = mean_over_windows(scores.stacked(), rows.table.owners, rows.texts, rows.table.counts)[:, 0]
            given = [_item(item)[1] for item in chunk]
            return [
                _ranked(own, choices) for own, choices in zip(merged.split(list(map(len, given))), given, strict=True)
            ]

        # Looked at before anything runs, so that a fault names its place in the list.
        given = _item(items) if single else [_item(item, place) for place, item in enumerate(items)]
        return Session(self, run).answer(
            given, encoded, Scores(True), finish, single=single, rows=4, kind=Ranking,
            given=lambda item: _item(item)[0],
        )  # fmt: skip


def _rows(values: Tensor | None, dimensions: int = 3) -> Tensor | None:
    """Return a row for each choice."""
    return values.flatten(0, 1) if values is not None and values.dim() == dimensions else values


def _ranked(scores: Tensor, choices: list[str]) -> list[Ranked]:
    chances = scores.softmax(0)
    order = chances.argsort(descending=True, stable=True).tolist()
    return [Ranked(place, float(chances[place]), 1, choices[place]) for place in order]


def _is_item(item: Any) -> bool:
    choices = item[1] if isinstance(item, (tuple, list)) and len(item) == 2 else None
    return (
        isinstance(choices, (list, tuple))
        and len(choices) > 0
        and isinstance(item[0], str)
        and all(isinstance(choice, str) for choice in choices)
    )


def _item(item: Any, index: int = 0) -> tuple[str, list[str]]:
    """Return a prompt with its choices.

    Raises:
        PredictError: it is something else.
    """
    if isinstance(item, Mapping):
        item = (item.get("prompt"), item.get("choices"))
    if not _is_item(item):
        raise PredictError(
            f"predict: item {index} is no prompt with choices; expected (prompt, [choice, ...]) or "
            '{"prompt": ..., "choices": [...]} with at least one choice, all of them strings',
            place=index,
        )
    return item[0], list(item[1])
