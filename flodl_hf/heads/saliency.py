"""Attribution of a score to tokens: integrated gradients over the word embeddings of one text.

The score's gradient is integrated along the line from a baseline, in which every token of the text is the padding
token and special tokens stay, to the text itself (Sundararajan, Taly and Yan 2017, eq. 3). Shares of all tokens add up
to the score's difference from the baseline's (completeness); the deviation is measured and reported, and the
integral is refined until that is small. Computed on the model as it is, in the dtype of its weights, one window of
text.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flodl.errors import nearest
from flodl_hf.errors import PredictError
from flodl_hf.inference.hidden_states import embedded
from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["Saliency", "saliency"]

MOST_STEPS = 512
BATCH_ROWS = 16
"""Points of the line that go through the model together."""


@dataclass(frozen=True)
class Saliency:
    """Attribution of a score to tokens.

    Attributes:
        text: the text, or the pair.
        target: the score that is attributed.
        tokens: of the row, special ones included.
        spans: for each token ``(start, end)`` in characters of its text; ``(0, 0)`` for special ones.
        sides: 0 or 1 for the text of a pair that a token is of; None for special ones.
        scores: each token's share of the score, ``(tokens,)``; special tokens have none.
        score: the model's logit for the text.
        baseline: the same for the baseline.
        steps: points of the line that were computed.
    """

    text: str | tuple[str, str]
    target: str
    tokens: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    sides: tuple[int | None, ...]
    scores: np.ndarray
    score: float
    baseline: float
    steps: int

    @property
    def gap(self) -> float:
        """By how much the shares miss ``score - baseline``; 0 by the axiom of completeness."""
        return float(self.scores.sum()) - (self.score - self.baseline)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        columns = zip(self.tokens, self.spans, self.sides, self.scores.tolist(), strict=True)
        tokens = [
            {"token": token, "start": start, "end": end, "side": side, "score": score}
            for token, (start, end), side, score in columns
        ]
        text = list(self.text) if isinstance(self.text, tuple) else self.text
        scores = {"score": self.score, "baseline": self.baseline, "gap": self.gap}
        return {"text": text, "target": self.target, "tokens": tokens, **scores}

    def __repr__(self) -> str:
        order = np.argsort(-np.abs(self.scores))[:5]
        most = ", ".join(f"{self.tokens[i]} {self.scores[i]:+.3f}" for i in order if self.sides[i] is not None)
        return f"Saliency({self.target} {self.score:.3f}: {most})"

    def _repr_html_(self) -> str:
        texts = self.text if isinstance(self.text, tuple) else (self.text,)
        most = float(np.abs(self.scores).max()) or 1.0
        shown = "<br>".join(self._marked(text, side, most) for side, text in enumerate(texts))
        return (
            f"<div><b>{escape(self.target)}</b> {self.score:.3f} (baseline {self.baseline:.3f})"
            f'<div style="line-height:1.9">{shown}</div></div>'
        )

    def _marked(self, text: str, side: int, most: float) -> str:
        parts, at = [], 0
        for (start, end), of, score in zip(self.spans, self.sides, self.scores.tolist(), strict=True):
            if of != side or start < at or end <= start:
                continue
            hue = 210 if score > 0 else 15
            paint = f"background:hsla({hue},80%,55%,{0.75 * abs(score) / most:.3f});border-radius:.2em"
            parts += [
                escape(text[at:start]),
                f'<span style="{paint}" title="{score:+.4f}">{escape(text[start:end])}</span>',
            ]
            at = end
        return "".join(parts) + escape(text[at:])


def saliency(
    model: EncoderModel,
    text: str | tuple[str, str],
    *,
    target: str | tuple[str, int] | None = None,
    steps: int = 16,
    tolerance: float = 0.01,
) -> Saliency:
    """Return the contribution of each token of a text to a score.

    Args:
        model: a classifier of texts or of tokens, or one that answers questions.
        text: a text, or a pair; for questions ``(question, context)``.
        target: for texts a label, None for the likeliest; for tokens ``(label, character)``, the label of the token at
            a character of the text, None for the surest entity; for answers None: first and last token of the best.
        steps: points at first; doubled, up to 512, until completeness is reached.
        tolerance: how far shares may miss the score's difference, as a share of it.

    Raises:
        PredictError: the model has no scores of this kind, the text does not fit into a window, or there is no such
            target.
    """
    model._ready("saliency", untrained=True)
    if model.head not in ("sequence_classification", "token_classification", "question_answering"):
        raise PredictError(
            f"saliency: this model ({model.head}) has no score to attribute to tokens; expected a "
            "classifier of texts or tokens, or one that answers questions",
            head=model.head,
        )
    most = model.max_tokens
    encoded: Any = model.tokenizer(  # type: ignore[misc]
        text if isinstance(text, str) else [text], truncation=most is not None, max_length=most and most + 1,
        return_tensors="pt",
    )  # fmt: skip
    if len(encoded.rows) != 1 or (most is not None and len(encoded.rows[0]) > most):
        raise PredictError(
            f"saliency: the text has more tokens than a window of {most}; give a part of it",
            max_tokens=most,
        )
    row = encoded.rows[0]
    inputs = {name: value.to(model.device) for name, value in encoded.data.items() if name != "input_ids"}
    ids = encoded.data["input_ids"].to(model.device)
    words: Any = model.network.get_submodule("encoder.embeddings.word")
    special = torch.tensor(row.special, device=ids.device)
    filler = words.padding_idx if words.padding_idx is not None else 0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            there = embedded(model.network, ids)
            nothing = embedded(model.network, torch.where(special, ids, torch.full_like(ids, filler)))
            name, score_of = _score(model, model(inputs_embeds=there, **inputs), row, text, target)

            def scores(embeds: Tensor) -> Tensor:
                expanded = {name: value.expand(len(embeds), *value.shape[1:]) for name, value in inputs.items()}
                return score_of(model(inputs_embeds=embeds, **expanded))

            # As the points between them are computed.
            wanted, baseline = (float(scores(nothing + at * (there - nothing))[0]) for at in (1.0, 0.0))
        bound = tolerance * max(abs(wanted - baseline), 1e-3)
        while True:
            shares = _integral(scores, nothing, there, steps).masked_fill(special, 0.0)
            gap = abs(float(shares.sum()) - (wanted - baseline))
            if gap <= bound or steps >= MOST_STEPS:
                break
            steps *= 2
    finally:
        model.train(was_training)
    if gap > bound:
        warnings.warn(
            f"saliency: with {steps} points the shares still miss the score's difference by {gap:.2g} of "
            f"{abs(wanted - baseline):.2g}",
            stacklevel=2,
        )
    tokenizer: Any = model.tokenizer
    return Saliency(
        text, name, tuple(tokenizer.convert_ids_to_tokens(list(row.ids))),
        tuple((int(start), int(end)) for start, end in row.offsets),
        tuple(row.sequence_ids), shares.double().cpu().numpy(), wanted, baseline, steps,
    )  # fmt: skip


def _integral(score_of: Callable[[Tensor], Tensor], start: Tensor, end: Tensor, steps: int) -> Tensor:
    """Return the integral of the gradient times the way, by token, by Gauss and Legendre's rule.

    Args:
        score_of: the score of each of some embeddings, ``(points, tokens, size)``.
        start: the baseline, ``(1, tokens, size)``.
        end: the text alike.
        steps: points of the line.
    """
    points, weights = np.polynomial.legendre.leggauss(steps)
    total = torch.zeros(end.shape[1], dtype=torch.float64, device=end.device)
    way = (end - start)[0].double()
    for first in range(0, steps, BATCH_ROWS):
        part = slice(first, first + BATCH_ROWS)
        places = torch.as_tensor((points[part] + 1) / 2, device=end.device)
        embeds = (start + places.to(end.dtype)[:, None, None] * (end - start)).detach().requires_grad_()
        with torch.enable_grad():
            (grads,) = torch.autograd.grad(score_of(embeds).sum(), embeds)
        share = torch.as_tensor(weights[part] / 2, device=end.device)
        total += ((grads.double() * way).sum(-1) * share[:, None]).sum(0)
    return total


def _score(model: EncoderModel, output: Any, row: Any, text: Any, target: Any) -> tuple[str, Callable[[Any], Tensor]]:
    """Return the name of the score, and a function that extracts it from the model's output."""
    if model.head == "question_answering":
        if target is not None:
            raise PredictError("saliency: the target of an answer is the best one; expected target=None")
        context = torch.tensor([side == 1 for side in row.sequence_ids], device=output.start_logits.device)
        starts, ends = (
            logits[0].masked_fill(~context, -torch.inf) for logits in (output.start_logits, output.end_logits)
        )
        pairs = (starts[:, None] + ends[None, :]).triu()
        pairs = pairs.masked_fill(torch.ones_like(pairs).tril(-1).bool(), -torch.inf)
        first, last = divmod(int(pairs.argmax()), len(starts))
        said = text[1][row.offsets[first][0] : row.offsets[last][1]]
        return said, lambda out: out.start_logits[:, first] + out.end_logits[:, last]
    labels = model.config.labels
    if model.head == "sequence_classification":
        if isinstance(target, tuple):
            raise PredictError(f"saliency: target={target!r}; expected a label, since the model reads whole texts")
        label = int(output.logits[0].argmax()) if target is None else _label(target, labels)
        return labels[label], lambda out: out.logits[:, label]
    place, label = _of_tokens(output.logits[0], row, text, target, labels)
    return f"{labels[label]} at {row.offsets[place][0]}", lambda out: out.logits[:, place, label]


def _of_tokens(logits: Tensor, row: Any, text: Any, target: Any, labels: Sequence[str]) -> tuple[int, int]:
    """Return the token and the label that are meant."""
    if target is None:
        sure = logits.softmax(-1)
        sure[torch.tensor(row.special)] = 0.0
        if "O" in labels and len(labels) > 1:
            sure[:, labels.index("O")] = 0.0
        place, label = divmod(int(sure.argmax()), len(labels))
        return place, label
    if not isinstance(target, tuple) or len(target) != 2:
        raise PredictError(f"saliency: target={target!r}; expected (label, character), such as ('B-PER', 0)")
    name, character = target
    label = _label(name, labels)
    for place, (start, end) in enumerate(row.offsets):
        if not row.special[place] and start <= character < end:
            return place, label
    raise PredictError(f"saliency: no token is at character {character} of {str(text)[:60]!r}", target=target)


def _label(name: Any, labels: Sequence[str]) -> int:
    if name not in labels:
        raise PredictError(
            f"saliency: no label {name!r}{nearest(str(name), labels)}; expected one of {', '.join(labels[:20])}",
            target=name,
        )
    return list(labels).index(name)
