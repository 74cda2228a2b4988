"""Precision, recall and F1 of whole spans (entities), from sequences of tags.

Decides what a span is. Without a scheme, by the rules of the CoNLL-2000 evaluation: a span starts where a
tag says so or where the type changes, so a stray ``I-`` opens one; these are the rules of seqeval's default
mode. With a scheme, only well-formed spans count, as in seqeval's strict mode. Which token carries the tag
of a word is decided elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from flodl.errors import DataError, capped
from flodl.metrics.classification import Average, averaged

__all__ = ["Scheme", "Span", "SpanF1", "spans_of"]

Span = tuple[str, int, int]
"""``(type, first, end)``: tags ``first`` to ``end - 1``."""

Scheme = Literal["IOB2", "IOBES", "BILOU"]

_BEGIN_INSIDE_END_SINGLE = {"IOB2": "BI  ", "IOBES": "BIES", "BILOU": "BILU"}


def spans_of(tags: Sequence[str], scheme: Scheme | None = None) -> list[Span]:
    """Return the spans of one sequence of tags, in order.

    Args:
        tags: ``"O"``, or a prefix and a type, ``"B-person"``.
        scheme: the scheme to hold tags to; None takes them as they come.

    Raises:
        DataError: a tag has a prefix that the scheme does not know.
    """
    return _loose(tags) if scheme is None else _strict(tags, scheme)


def _split(tag: str) -> tuple[str, str]:
    # a type may hold dashes itself; a tag without a type has the type "_"
    return tag[:1], tag[1:].split("-", 1)[-1] or "_"


def _loose(tags: Sequence[str]) -> list[Span]:
    spans: list[Span] = []
    start = 0
    before, before_kind = "O", "O"
    for at, (prefix, kind) in enumerate([*map(_split, tags), ("O", "_")]):
        inside = prefix not in ("O", ".")
        changed = kind != before_kind
        if before in ("E", "S") or (
            before not in ("O", ".") and (changed or (before in ("B", "I") and prefix in ("B", "S", "O")))
        ):
            spans.append((before_kind, start, at))
        if prefix in ("B", "S") or (inside and (changed or (before in ("E", "S", "O") and prefix in ("E", "I")))):
            start = at
        before, before_kind = prefix, kind
    return spans


def _strict(tags: Sequence[str], scheme: Scheme) -> list[Span]:
    if scheme not in _BEGIN_INSIDE_END_SINGLE:
        raise DataError(f"spans: scheme is {scheme!r}; expected 'IOB2', 'IOBES' or 'BILOU'", scheme=scheme)
    begin, inside, end, single = _BEGIN_INSIDE_END_SINGLE[scheme]
    allowed = {"O", begin, inside, end, single} - {" "}
    split = [_split(tag) for tag in tags]
    wrong = [f"tag {i}: {tags[i]!r}" for i, (prefix, _) in enumerate(split) if prefix not in allowed]
    if wrong:
        raise DataError(
            f"spans: tags outside the scheme {scheme}:\n{capped(wrong)}\nexpected prefixes {sorted(allowed)}",
            problems=wrong,
            scheme=scheme,
        )
    spans: list[Span] = []
    at = 0
    while at < len(split):
        prefix, kind = split[at]
        first = at
        at += 1
        if prefix == single:
            spans.append((kind, first, at))
        elif prefix == begin:
            while at < len(split) and split[at] == (inside, kind):
                at += 1
            if end == " ":
                spans.append((kind, first, at))
            elif at < len(split) and split[at] == (end, kind):
                at += 1
                spans.append((kind, first, at))
    return spans


class SpanF1:
    """Precision, recall and F1 of spans, and the share of right tags; a span is right if type and both ends
    are.

    Args:
        scheme: None for the rules of the CoNLL-2000 evaluation, or a scheme that spans must keep to.
        average: ``"micro"`` (pooled counts), ``"macro"`` (mean over types) or ``"weighted"`` (by true spans).
    """

    def __init__(self, scheme: Scheme | None = None, average: Average = "micro") -> None:
        if average not in ("micro", "macro", "weighted"):
            raise DataError(f"SpanF1: average is {average!r}; expected 'micro', 'macro' or 'weighted'", average=average)
        self.scheme: Scheme | None = scheme
        self.average: Average = average
        self.reset()

    def reset(self) -> None:
        """Forget everything counted."""
        self._right: Counter[str] = Counter()
        self._predicted: Counter[str] = Counter()
        self._true: Counter[str] = Counter()
        self._tags = [0, 0]

    def update(self, predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> None:
        """Count sequences of tags.

        Args:
            predictions: tags for each sequence.
            references: the true tags, as many.

        Raises:
            DataError: numbers of sequences or of tags differ; ``problems`` lists each.
        """
        problems = [
            f"sequence {i}: {len(p)} predicted tags for {len(r)} true ones"
            for i, (p, r) in enumerate(zip(predictions, references, strict=False))
            if len(p) != len(r)
        ]
        if len(predictions) != len(references):
            problems.append(f"{len(predictions)} predicted sequences for {len(references)} true ones")
        if problems:
            raise DataError("SpanF1: sequences do not match:\n" + capped(problems), problems=problems)
        for predicted, true in zip(predictions, references, strict=True):
            said, meant = set(spans_of(predicted, self.scheme)), set(spans_of(true, self.scheme))
            self._right.update(kind for kind, _, _ in said & meant)
            self._predicted.update(kind for kind, _, _ in said)
            self._true.update(kind for kind, _, _ in meant)
            self._tags[0] += sum(p == t for p, t in zip(predicted, true, strict=True))
            self._tags[1] += len(true)

    def update_ids(
        self, predictions: Tensor, labels: Tensor, names: Sequence[str], *, ignore_index: int = -100
    ) -> None:
        """Count a batch of token labels, where each word has one token that counts.

        Args:
            predictions: label numbers ``(batch, seq)``, or logits ``(batch, seq, labels)``.
            labels: true label numbers ``(batch, seq)``, ``ignore_index`` where a token does not count.
            names: the tag of each label number.
            ignore_index: labels of this value do not count.
        """
        if predictions.dim() == labels.dim() + 1:
            predictions = predictions.argmax(-1)
        said, meant = [], []
        for line, true in zip(predictions.tolist(), labels.tolist(), strict=True):
            kept = [k for k, label in enumerate(true) if label != ignore_index]
            said.append([names[line[k]] for k in kept])
            meant.append([names[true[k]] for k in kept])
        self.update(said, meant)

    def merge(self, other: SpanF1) -> None:
        """Add what another rank has counted."""
        self._right.update(other._right)
        self._predicted.update(other._predicted)
        self._true.update(other._true)
        self._tags = [a + b for a, b in zip(self._tags, other._tags, strict=True)]

    def compute(self) -> dict[str, float]:
        """Return ``precision``, ``recall``, ``f1``, and ``f1/<type>`` for each type.

        Beside them ``accuracy`` is the share of right tags, ``count`` the number of true spans.
        """
        kinds = sorted(self._predicted.keys() | self._true.keys())
        counts = [[table[kind] for kind in kinds] for table in (self._right, self._predicted, self._true)]
        right, total = self._tags
        figures = {
            **averaged(counts[0], counts[1], counts[2], self.average),
            "accuracy": right / total if total else 0.0,
            "count": float(sum(counts[2])),
        }
        for kind, scores in self.per_type().items():
            figures[f"f1/{kind}"] = scores["f1"]
        return figures

    def per_type(self) -> dict[str, dict[str, float]]:
        """Return ``precision``, ``recall``, ``f1`` and ``support`` (true spans) of each type."""
        return {
            kind: {
                **averaged([self._right[kind]], [self._predicted[kind]], [self._true[kind]], "micro"),
                "support": float(self._true[kind]),
            }
            for kind in sorted(self._predicted.keys() | self._true.keys())
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counts; JSON-able."""
        return {
            "right": dict(self._right),
            "predicted": dict(self._predicted),
            "true": dict(self._true),
            "tags": list(self._tags),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over counts."""
        self._right, self._predicted = Counter(state["right"]), Counter(state["predicted"])
        self._true, self._tags = Counter(state["true"]), list(state["tags"])
