"""The span of a context that answers a question.

Transformers' class: ``BertForQuestionAnswering`` and its siblings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

from torch import Tensor

from flodl_hf.checkpoints.keywords import accept_keywords
from flodl_hf.errors import PredictError
from flodl_hf.heads.prediction_keywords import ANSWER
from flodl_hf.inference.batch import Pending, Scores
from flodl_hf.inference.inputs import FIRST_PLACE, Encoded, as_text_list, encode, plain_pairs
from flodl_hf.inference.options import RunKeywords
from flodl_hf.inference.pipeline import Session
from flodl_hf.inference.results import Answers
from flodl_hf.inference.spans import decode_answers_batch
from flodl_hf.inference.transformers_results import question_answering
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.models.outputs import QuestionAnsweringOutput
from flodl_hf.nn.task_heads import span_loss

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer

__all__ = ["QuestionAnswerer"]

# What models are trained on for SQuAD (Devlin et al. 2018, the released script): windows and their overlap.
WINDOW_TOKENS = 384
STRIDE = 128


class QuestionAnswerer(EncoderModel):
    """An encoder that scores each token as the first and as the last of the answer."""

    head: ClassVar[str] = "question_answering"

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        return_dict: bool = True,
    ) -> QuestionAnsweringOutput | tuple[Any, ...]:
        """Return both scores of each token, each ``(batch, seq)``, and the loss if positions were given.

        Args:
            input_ids: token ids of question and context, ``(batch, seq)``.
            attention_mask: 1 for tokens to keep, ``(batch, seq)``; None keeps all.
            token_type_ids: 0 for the question, 1 for the context, ``(batch, seq)``.
            position_ids: places in the position table, ``(batch, seq)``; None counts them.
            start_positions: token of the answer's start, ``(batch,)``; outside the row it does not count.
            end_positions: token of the answer's end, ``(batch,)``.
            inputs_embeds: embeddings of words, ``(batch, seq, embedding_size)``, instead of ids.
            output_hidden_states: also return the states after the embeddings and each layer.
            output_attentions: also return each layer's weights, ``(batch, heads, seq, seq)``; eager attention has them.
            return_dict: False gives a tuple.
        """
        logits, _, seen = self._run_graph(
            input_ids, attention_mask, token_type_ids, position_ids, embeds=inputs_embeds,
            hidden_states=output_hidden_states, attentions=output_attentions,
        )  # fmt: skip
        start, end = self.split(logits)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = span_loss(start, end, start_positions, end_positions)
        output = QuestionAnsweringOutput(loss, start, end, **seen)
        return output if return_dict else output.to_tuple()

    @staticmethod
    def split(logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return start and end scores, each ``(...)``, of the head's ``(..., 2)``."""
        start, end = logits.split(1, dim=-1)
        return start.squeeze(-1).contiguous(), end.squeeze(-1).contiguous()

    @accept_keywords(ANSWER)
    def answer_batch(
        self,
        pairs: Iterable[tuple[str, str] | Mapping[str, str]],
        *,
        top_k: int = 1,
        max_answer_length: int = 30,
        no_answer: bool = False,
        null_margin: float = 0.0,
        whole_words: bool = True,
        distinct: Literal["span", "place", "text"] = "place",
        window_tokens: int = WINDOW_TOKENS,
        stride: int = STRIDE,
        strict: bool = False,
        untrained: bool = False,
        compat: Literal["transformers-4.57"] | None = None,
        **run: Unpack[RunKeywords],
    ) -> Any:
        """Return for each question and context its answers, best first: a list of `flodl_hf.inference.results.Answers`.

        A context of any length is read in overlapping windows, over which probabilities are normalised
        once, so that scores of one context can be compared.

        Args:
            pairs: ``(question, context)``, also as ``{"question": ..., "context": ...}``; an iterator gives an
                iterator.
            top_k: most answers of a context.
            max_answer_length: most tokens of an answer.
            no_answer: whether "there is no answer" may be returned.
            null_margin: how much likelier, in nats, no answer has to be.
            whole_words: widen answers that begin or end inside a word.
            distinct: which answers count as one: overlapping ("place"), of one wording ("text"), or only equal
                spans ("span").
            window_tokens: most tokens of a window, question and specials included.
            stride: tokens that neighbouring windows share.
            strict: raise on a context that does not fit into one window.
            untrained: answer although parts of the model have random values.
            compat: "transformers-4.57" repeats the pipeline that transformers has since removed.
            **run: how to run (``precision``, ``devices``, ``batch_invariant``, ``token_budget``, ...), see
                `flodl_hf.inference.RunOptions`; options that are not passed keep their `runtime` values.

        Raises:
            PredictError: the model has no tokenizer or an untrained head, a context without text, or an option
                that makes no sense.
        """
        tokenizer = self._ready("answer", untrained=untrained)
        pairs = as_text_list(pairs, "answer", mapping=True)
        # The former pipeline applies the tokenizer's length to its default alone.
        stated = compat is not None and window_tokens != WINDOW_TOKENS
        width = min(window_tokens, (self.config.max_tokens if stated else self.max_tokens) or window_tokens)

        tokens = partial(
            _tokens, tokenizer, max_tokens=width, stride=min(stride, width // 2), strict=strict,
            snap=compat is None, records=compat is not None,
        )  # fmt: skip

        def finish(chunk: list[Any], encoded: Encoded, scores: Pending) -> list[Any]:
            _, contexts = _questions(chunk)
            placed = scores.placed()
            if compat is not None:
                windows = zip(encoded.by_text(placed.rows(encoded.table)), contexts, strict=True)
                return [
                    question_answering(
                        logits, rows, context, cls_id=tokenizer.cls_token_id, top_k=top_k,
                        max_answer_len=max_answer_length, handle_impossible_answer=no_answer,
                        align_to_words=whole_words,
                    )
                    for (logits, rows), context in windows
                ]  # fmt: skip
            return decode_answers_batch(
                placed, encoded.table, contexts, top_k=top_k,
                max_answer_length=max_answer_length, no_answer=no_answer, null_margin=null_margin,
                whole_words=whole_words, distinct=distinct,
            )  # fmt: skip

        return Session(self, run).answer(
            pairs, tokens, Scores(False), finish, single=isinstance(pairs, Mapping), rows=4, what="answer",
            kind=Answers if compat is None else None, given=_given, blank=_without_context,
        )  # fmt: skip

    @accept_keywords(ANSWER)
    def answer(
        self,
        question: str | Mapping[str, str],
        context: str | None = None,
        *,
        top_k: int = 1,
        max_answer_length: int = 30,
        no_answer: bool = False,
        null_margin: float = 0.0,
        whole_words: bool = True,
        distinct: Literal["span", "place", "text"] = "place",
        window_tokens: int = WINDOW_TOKENS,
        stride: int = STRIDE,
        strict: bool = False,
        untrained: bool = False,
        compat: Literal["transformers-4.57"] | None = None,
        **run: Unpack[RunKeywords],
    ) -> Any:
        """Return the answers to one question, best first, of the same shape as each of `answer_batch`.

        A `flodl_hf.inference.results.Answers`: ``top_k`` answers; its ``text``, ``score``, ``start`` and ``end``
        are the best one's; ``text`` is exactly ``context[start:end]``.

        Args:
            question: the question; or ``{"question": ..., "context": ...}``.
            context: where the answer is.
            top_k: as in `answer_batch`, like all others.
            max_answer_length: most tokens of an answer.
            no_answer: whether "there is no answer" may be returned.
            null_margin: how much likelier, in nats, no answer has to be.
            whole_words: widen answers that begin or end inside a word.
            distinct: which answers count as one.
            window_tokens: most tokens of a window.
            stride: tokens that neighbouring windows share.
            strict: raise on a context that does not fit into one window.
            untrained: answer although parts of the model have random values.
            compat: "transformers-4.57" repeats the pipeline that transformers has since removed.
            **run: how to run; see `flodl_hf.inference.RunOptions`.

        Raises:
            PredictError: as in `answer_batch`.
        """
        item: Any = question if isinstance(question, Mapping) else (question, context)
        found = self.answer_batch(
            [item], top_k=top_k, max_answer_length=max_answer_length, no_answer=no_answer, null_margin=null_margin,
            whole_words=whole_words, distinct=distinct, window_tokens=window_tokens, stride=stride, strict=strict,
            untrained=untrained, compat=compat, **run,
        )  # fmt: skip
        (answers,) = found
        # The removed pipeline returns one dictionary if one answer was requested.
        return answers[0] if compat is not None and top_k == 1 and isinstance(answers, list) and answers else answers


def _pair(item: Any, index: int) -> tuple[str, str]:
    """Return question and context.

    Raises:
        PredictError: an item is no pair of texts.
    """
    pair: Any = (item.get("question"), item.get("context")) if isinstance(item, Mapping) else item
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(p, str) for p in pair)):
        kinds = ", ".join(type(part).__name__ for part in pair) if isinstance(pair, (tuple, list)) else ""
        found = f"({kinds})" if kinds else type(item).__name__
        raise PredictError(
            f"answer: item {index} is {found}; expected (question, context), two strings; several go to "
            "answer_batch([(question, context), ...])",
            place=index,
        )
    return pair[0], pair[1]


def _given(item: Any) -> tuple[str, str]:
    return item if type(item) is tuple else _pair(item, 0)


def _without_context(item: Any) -> bool:
    """Return whether an item is a pair with an empty context; faulty items are not, so that reading them raises."""
    try:
        return not _pair(item, 0)[1].strip()
    except PredictError:
        return False


def _tokens(tokenizer: Tokenizer, chunk: Sequence[Any], **options: Any) -> Encoded:
    questions, contexts = _questions(chunk)
    return encode(tokenizer, questions, contexts, offsets=True, cut="second", **options)


def _questions(chunk: Sequence[Any]) -> tuple[list[str], list[str]]:
    places = enumerate(chunk, FIRST_PLACE.get())
    pairs = chunk if plain_pairs(chunk) else [_pair(item, place) for place, item in places]
    questions, contexts = zip(*pairs, strict=True) if pairs else ((), ())
    return list(questions), list(contexts)
