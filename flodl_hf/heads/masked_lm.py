"""The word behind each mask.

Transformers' class: ``BertForMaskedLM`` and its siblings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from flodl_hf.checkpoints.keywords import accept_keywords
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
from flodl_hf.checkpoints.sentence.vectors import SparseVectors, SpladePooling, from_dense
from flodl_hf.errors import PredictError
from flodl_hf.heads.prediction_keywords import MASKS, SPARSE, SPARSE_ENCODE
from flodl_hf.heads.scoring import ScoringModel
from flodl_hf.heads.vectors import keywords_for, most_sentence_tokens, sparse_vectors
from flodl_hf.inference.batch import BestAt, Pending, Placed, ScoresAt, Splade
from flodl_hf.inference.inputs import Encoded, as_text_list, encode, prompted
from flodl_hf.inference.options import RunKeywords
from flodl_hf.inference.pipeline import Session
from flodl_hf.inference.results import Fill, Fills, build_records, is_empty, not_finite
from flodl_hf.inference.token_table import TokenTable
from flodl_hf.inference.transformers_results import fill_mask
from flodl_hf.models.outputs import MaskedLMOutput
from flodl_hf.nn.task_heads import check_labels, token_loss

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer

__all__ = ["MaskedLM"]

TOKENS = 2048
"""Maximum tokens of a batch with whole word scores: a quarter of a gigabyte at 30,000 words."""


class MaskedLM(ScoringModel):
    """An encoder that scores every word at every token; logits are ``(batch, seq, vocab)``."""

    head: ClassVar[str] = "masked_lm"
    output = MaskedLMOutput

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss, a scalar.

        Args:
            logits: ``(batch, seq, vocab)``.
            labels: ids ``(batch, seq)``; -100 for tokens that do not count.
        """
        check_labels(labels, logits.shape[-1])
        return token_loss(logits, labels, upcast=True)

    @accept_keywords(MASKS)
    def fill_mask(
        self,
        texts: str | Iterable[str],
        *,
        top_k: int = 5,
        targets: Sequence[str] | str | None = None,
        untrained: bool = False,
        compat: Literal["transformers"] | None = None,
        **run: Unpack[RunKeywords],
    ) -> Any:
        """Return for each mask of a text its most probable words, best first; for several texts a list of that.

        Masks of one text are filled independently. In a long text the window around each mask is read.

        Args:
            texts: one text or several, each with at least one mask token; an iterator gives an iterator.
            top_k: proposals for each mask.
            targets: words to choose from instead of the whole vocabulary. A target that is in the vocabulary
                is that token; a word of several tokens is scored with as many masks.
            untrained: predict although parts of the model have random values.
            compat: "transformers" gives the dictionaries of its pipeline.
            **run: how to run (``precision``, ``devices``, ``batch_invariant``, ``token_budget``, ...), see
                `flodl_hf.inference.RunOptions`; options that are not passed keep their `runtime` values.

        Raises:
            PredictError: a text has no mask, ``top_k`` is below 1, or the model has no tokenizer or an untrained
                head.
        """
        tokenizer = self._ready("fill_mask", untrained=untrained)
        texts = as_text_list(texts, "fill_mask")
        targets = [targets] if isinstance(targets, str) else targets
        if targets is not None and not targets:
            raise PredictError("fill-mask: found no targets, expected at least one word or None", targets=[])
        if tokenizer.mask_token is None or tokenizer.mask_token_id is None:
            raise PredictError("fill_mask: the tokenizer has no mask token; name one in tokenizer_config.json")
        best = targets is None and compat is None
        if best and top_k < 1:
            raise PredictError(f"fill-mask: top_k={top_k}; expected at least 1", top_k=top_k)
        session, written = Session(self, run), dict[int, str]()

        def start(masked: Masks) -> Pending | None:
            work = BestAt(top_k=top_k) if best else ScoresAt()
            # Scores of targets are computed for each text alone.
            return session.start(masked.table, work, masked.columns) if best or compat is not None else None

        def finish(chunk: list[str], rows: Masks, scores: Any) -> list[Any]:
            if best:
                return _best_words(tokenizer, chunk, rows, rows.scores(scores.placed()).numpy(), written)
            if compat is not None:
                return _as_pipeline(tokenizer, chunk, rows, rows.scores(scores.placed()), top_k, targets)
            return [self._fill_targets(tokenizer, session, text, top_k, targets or ()) for text in chunk]

        # Scores over a whole vocabulary need much memory, so windows are small.
        return session.answer(
            texts, self._masked, None, finish, start_rows=start, kind=Fills if compat is None else None, blank=is_empty,
            single=isinstance(texts, str), rows=4 if best else 16, what="fill_mask",
        )  # fmt: skip

    @accept_keywords(SPARSE)
    def embed_sparse(
        self,
        texts: str | Iterable[str],
        *,
        most: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        windows: bool = False,
        strict: bool = False,
        untrained: bool = False,
        **run: Unpack[RunKeywords],
    ) -> SparseVectors:
        """Return SPLADE's weights of words: log(1 + relu) of their scores, the largest over a text's tokens.

        The folder of a SparseEncoder of sentence-transformers may specify another pooling, prompts and ``most``.

        Args:
            texts: one text or several.
            most: keep the words with the largest weights; None for the folder's setting, else all above zero.
            prompt: text before each text; None for the folder's default prompt.
            prompt_name: name of a prompt of the folder, instead of ``prompt``.
            windows: read all of a long text in windows, joined as its tokens are. Otherwise it is truncated.
            strict: raise on a text that is too long.
            untrained: embed although the model has random values.
            **run: how to run; see `flodl_hf.inference.RunOptions`.

        Raises:
            PredictError: the model has no tokenizer or an untrained head, or the folder no such prompt.
        """
        tokenizer = self._ready("embed_sparse", untrained=untrained)
        # The recipe of an encoder that makes dense vectors has prompts for those.
        recipe = self.sentence_recipe
        if recipe is None or recipe.splade is None:
            recipe = SentenceTransformerConfig(splade=SpladePooling())
        pooling = recipe.splade or SpladePooling()
        before = recipe.resolve_prompt("embed_sparse", prompt, prompt_name)

        def encoded(chunk: list[str]) -> Encoded:
            read = prompted(before, chunk, lower=recipe.lower_case)
            return encode(tokenizer, read, max_tokens=most_sentence_tokens(self), strict=strict, truncate=not windows)

        def finish(chunk: list[str], rows: Encoded, weights: Pending) -> list[tuple[np.ndarray, np.ndarray]]:
            return list(from_dense(weights.stacked().numpy(), rows.table.owners, len(chunk), pooling.strategy))

        if self.run_options.token_budget is None:
            run = {"token_budget": TOKENS, **run}
        found = sparse_vectors(self, texts, encoded, Splade(pooling), finish, run, rows=16)
        kept = recipe.most_words if most is None else most
        return found if kept is None else found.top(kept)

    @accept_keywords(SPARSE_ENCODE)
    def encode(
        self,
        sentences: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        *,
        max_active_dims: int | None = None,
        convert_to_tensor: bool = True,
        convert_to_sparse_tensor: bool = True,
        windows: bool = False,
        strict: bool = False,
        untrained: bool = False,
        **run: Unpack[RunKeywords],
    ) -> Any:
        """Return sparse vectors as sentence-transformers' SparseEncoder does: a sparse tensor ``(texts, words)``.

        Args:
            sentences: one text or several.
            prompt_name: name of a prompt of the folder; None for its default prompt.
            prompt: text before each text, instead of ``prompt_name``.
            batch_size: most texts of a batch; None for what suits the device.
            max_active_dims: maximum number of words of a text; None for the folder's setting.
            convert_to_tensor: False returns a list of tensors.
            convert_to_sparse_tensor: False returns dense tensors.
            windows: as in `embed_sparse`.
            strict: as in `embed_sparse`.
            untrained: encode although the model has random values.
            **run: how to run; see `flodl_hf.inference.RunOptions`.

        Raises:
            PredictError: the model has no tokenizer or an untrained head, or the folder no such prompt.
        """
        texts = as_text_list(sentences, "encode")
        given: dict[str, Any] = {**run, **({} if batch_size is None else {"batch_size": batch_size})}
        found = self.embed_sparse(
            texts, most=max_active_dims, prompt=prompt, prompt_name=prompt_name, windows=windows, strict=strict,
            untrained=untrained, **given,
        ).to_tensor()  # fmt: skip
        found = found if convert_to_sparse_tensor else found.to_dense()
        if isinstance(texts, str):
            return found[0]
        return found if convert_to_tensor else [found[place] for place in range(len(found))]

    @accept_keywords(SPARSE_ENCODE, like=encode)
    def encode_query(self, sentences: str | Iterable[str], **how: Any) -> Any:
        """Return sparse vectors of queries: `encode` with the folder's prompt "query", or none if it has none."""
        return self.encode(sentences, **keywords_for("query", self, how))

    @accept_keywords(SPARSE_ENCODE, like=encode)
    def encode_document(self, sentences: str | Iterable[str], **how: Any) -> Any:
        """Return sparse vectors of documents: `encode` with the folder's prompt "document", or none if it has none."""
        return self.encode(sentences, **keywords_for("document", self, how))

    def _masked(self, texts: list[str]) -> Masks:
        """Return windows that contain every mask of the texts once."""
        tokenizer: Any = self.tokenizer
        limit = self.max_tokens
        table = encode(tokenizer, texts, max_tokens=limit, stride=(limit or 0) // 4, snap=False).table
        masked = masks_of(table, tokenizer.mask_token_id)
        if len(np.unique(masked.text)) < len(texts):
            hint = ""
            if self.sentence_recipe is not None and self.sentence_recipe.splade is not None:
                hint = ". This model makes sparse vectors: call embed_sparse or encode, or run `flodl-hf serve`"
            raise PredictError(
                f"fill_mask: the text has no {tokenizer.mask_token}; put one where a word is to be found{hint}"
            )
        return masked

    def _fill_targets(
        self, tokenizer: Tokenizer, session: Session, text: str, top_k: int, targets: Sequence[str]
    ) -> list[Any]:
        ids = [_target_ids(tokenizer, word) for word in targets]
        found = masked = self._masked([text])
        scores: list[Tensor] = []
        at: dict[tuple[int, int], list[int]] = {}  # (mask, size) -> rows of the joined scores
        first = total = 0
        for size in sorted({len(i) for i in ids}):
            for mask in range(len(masked.text)):
                if size > 1:
                    found = self._masked([_put(tokenizer, text, mask, (tokenizer.mask_token or "") * size)])
                if size > 1 or mask == 0:  # one run of the text scores one token at every mask
                    scores.append(found.scores(session.start(found.table, ScoresAt(), found.columns).placed()))
                    first, total = total, total + len(scores[-1])
                at[mask, size] = list(range(first + mask, first + mask + size))
        order = [at[mask, len(i)] for mask in range(len(masked.text)) for i in ids]
        proposals = decode_targets(torch.cat(scores), ids, order, top_k)
        return [
            [
                Fill(targets[target], score, tuple(ids[target]), _put(tokenizer, text, mask, targets[target]))
                for target, score in fills
            ]
            for mask, fills in enumerate(proposals)
        ]


def _best_words(
    tokenizer: Tokenizer, texts: list[str], masked: Masks, values: np.ndarray, written: dict[int, str]
) -> list[Any]:
    """Return the best words of the whole vocabulary for each mask of each text.

    Args:
        tokenizer: the tokenizer.
        texts: texts.
        masked: their masks.
        values: results of `BestAt`.
        written: known tokens as text; others are added.
    """
    if not values[:, -1].all():
        raise not_finite("fill-mask")
    wide = (values.shape[1] - 1) // 2
    scores, ids = values[:, :wide].tolist(), values[:, wide:-1].astype(np.int64).tolist()
    for token in {token for row in ids for token in row} - written.keys():
        written[token] = tokenizer.decode([token]).strip()
    answers: list[list[list[Fill]]] = [[] for _ in texts]
    for text, own, tokens in zip(masked.text.tolist(), scores, ids, strict=True):
        before, after = _around(tokenizer, texts[text], len(answers[text]))
        words = [written[token] for token in tokens]
        given = [(token,) for token in tokens]
        answers[text].append(build_records(Fill, words, own, given, [before + word + after for word in words]))
    return answers


def _as_pipeline(
    tokenizer: Tokenizer, texts: list[str], masked: Masks, logits: Tensor, top_k: int, targets: Sequence[str] | None
) -> list[Any]:
    """Return the words for the masks of each text as the pipeline of transformers has them."""
    ids = [_target_ids(tokenizer, word)[0] for word in targets] if targets else None
    table, answers = masked.table, []
    for text in range(len(texts)):
        first = int(np.flatnonzero(table.owners == text)[0])
        row = table.ids[table.starts[first] : table.starts[first] + table.lengths[first]].tolist()
        answers.append(
            fill_mask(
                logits[torch.from_numpy(masked.text == text)], row,
                mask_id=tokenizer.mask_token_id or 0, pad_id=tokenizer.pad_token_id,
                decode=lambda i, skip: tokenizer.decode(i, skip_special_tokens=skip), top_k=top_k, targets=ids,
            )
        )  # fmt: skip
    return answers


def _target_ids(tokenizer: Tokenizer, word: str) -> list[int]:
    """Return the token that is written so in the vocabulary, as which transformers takes it; else its pieces."""
    known = tokenizer.token_to_id(word)
    if known is not None:
        return [known]
    ids = tokenizer.encode(word, add_special_tokens=False)
    if not ids:
        raise PredictError(f"fill_mask: the target {word!r} has no tokens; expected a word", target=word)
    return ids


def _around(tokenizer: Tokenizer, text: str, mask: int) -> tuple[str, str]:
    """Return the text before and after mask number ``mask`` of a text."""
    token = tokenizer.mask_token or ""
    parts = text.split(token)
    return token.join(parts[: mask + 1]), token.join(parts[mask + 1 :])


def _put(tokenizer: Tokenizer, text: str, mask: int, word: str) -> str:
    """Return ``text`` with its mask number ``mask`` replaced."""
    before, after = _around(tokenizer, text, mask)
    return before + word + after


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """The windows of many texts that have masks, each mask in the window where it has most context.

    Attributes:
        table: the windows.
        columns: positions of the masks of each window, specials counted.
        text: the text of each mask, in the order of texts and of their masks, ``(masks,)``.
        order: index of each mask among all ``columns``, ``(masks,)``.
    """

    table: TokenTable
    columns: list[list[int]]
    text: np.ndarray
    order: np.ndarray

    def scores(self, placed: Placed) -> Tensor:
        """Return the results of the masks in their order, ``(masks, ...)``; ``placed`` has one for each column."""
        sizes = [len(own) for own in self.columns]
        starts = np.repeat(placed.starts, sizes) + np.concatenate([np.arange(size) for size in sizes])
        return placed.values[torch.from_numpy(starts[self.order])]


def masks_of(table: TokenTable, mask_id: int) -> Masks:
    """Return the masks of texts.

    Args:
        table: the windows of the texts.
        mask_id: the mask's token.
    """
    found = np.flatnonzero((table.ids == mask_id) & (table.sequence >= 0))
    row = np.searchsorted(np.cumsum(table.lengths), found, side="right")
    column = found - table.starts[row]
    text = table.owners[row]
    # Of several windows the one counts in which a mask is farthest from both ends, the first of equal ones.
    content = np.flatnonzero(table.sequence >= 0)
    lead = content[np.searchsorted(content, table.starts[row])] - table.starts[row]
    whole = table.first_token[row] + column - lead
    context = np.minimum(column, table.lengths[row] - 1 - column)
    order = np.lexsort((table.window[row], -context, whole, text))
    new = np.ones(len(order), bool)
    new[1:] = (text[order][1:] != text[order][:-1]) | (whole[order][1:] != whole[order][:-1])
    order = order[new]
    text, row, column = text[order], row[order], column[order]
    keep = np.isin(np.arange(len(table)), row)
    by_row = np.lexsort((column, row))
    stops = np.cumsum(np.unique(row, return_counts=True)[1])[:-1]
    columns = [own.tolist() for own in np.split(column[by_row], stops)]
    return Masks(table.picked(np.repeat(keep, table.lengths), keep), columns, text, np.argsort(by_row))


def decode_targets(
    logits: Tensor, targets: Sequence[Sequence[int]], places: Sequence[Sequence[int]], top_k: int | None = None
) -> list[list[tuple[int, float]]]:
    """Return for each mask the indices of targets with their scores, best first; equal scores in the caller's order.

    A target of one token has the token's probability over the whole vocabulary, not renormalised over the targets.
    A target of ``n`` tokens is scored in a separate text, in which the mask occurs ``n`` times: its score is the
    product of the probability of each token at its mask while all ``n`` are hidden (a pseudo-likelihood). Such products
    shrink with length.

    Args:
        logits: vocabulary logits at mask positions, ``(positions, vocabulary)``.
        targets: token ids of each target.
        places: for each mask and target, in the order mask 0 target 0, mask 0 target 1, ..., the rows of ``logits`` for
            the target's tokens.
        top_k: most targets per mask; all without it.

    Raises:
        PredictError: logits are not finite.
    """
    values = logits.float()
    if not bool(torch.isfinite(values).all()):
        raise PredictError(
            f"fill-mask: logits of shape {tuple(values.shape)}; expected finite numbers (masks, vocabulary)",
            found=tuple(values.shape),
        )
    masks = len(places) // len(targets)
    row = torch.tensor([r for place in places for r in place], dtype=torch.int64, device=values.device)
    token = torch.tensor([t for target in targets for t in target] * masks, device=values.device)
    group = torch.repeat_interleave(torch.tensor(list(map(len, places)), device=values.device))
    log = values[row, token] - values.logsumexp(1)[row]
    total = torch.zeros(len(places), device=values.device, dtype=log.dtype).index_add_(0, group, log)
    ordered, index = torch.sort(total.view(masks, len(targets)), dim=1, descending=True, stable=True)
    scores = ordered[:, :top_k].exp().tolist()
    return [list(zip(*both, strict=True)) for both in zip(index[:, :top_k].tolist(), scores, strict=True)]
