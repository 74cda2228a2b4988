"""Compare an endpoint with its model in several steps, and explain differences.

A known mistake explains a difference if computing with that mistake is several times nearer to the endpoint's
output. Later comparisons include the mistakes found before, so that each reports only a new cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from flodl_hf.parity.endpoint_checks.reference import QUERY, Reference, Variant, describe
from flodl_hf.parity.endpoint_checks.targets import Target, TargetError, open_target

Status = Literal["equal", "rounded", "differs", "not run"]

TOLERANCE = 2e-5
"""Differences that other orders of summation may make in float32, as a share of the largest number."""
_NEARER = 3.0
# Capitals, accents, digits, marks, another script, and lengths from one word to some thirty.
TEXTS = [
    "The river rises in the mountains.",
    "Where does the river rise?",
    "RIVERS OF EUROPE",
    "Café au lait, s'il vous plaît!",
    "In 1998, 12.5% of the 4,300 houses near the river were flooded.",
    "вода и горы",
    "no",
    "a long walk along the river in the cold morning, with two dogs, a cat that came by itself, and nobody to talk to",
]
_CUTS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)


_Outcome = tuple[Status, float | None, str]
"""Status, difference and cause of a `Row`."""


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        what: the compared property.
        status: "equal", "rounded" (of the size of half precision's rounding), "differs" or "not run".
        difference: the largest, as a share of the largest number of the reference; None if not measured.
        cause: the explanation of a difference, or a further remark.
    """

    what: str
    status: Status
    difference: float | None = None
    cause: str = ""


@dataclass
class Report:
    """All comparisons of one endpoint.

    Attributes:
        target: the endpoint.
        source: the expected model.
        rows: the comparisons.
    """

    target: str
    source: str
    rows: list[Row]

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing differs."""
        ran = [row for row in self.rows if row.status != "not run"]
        return bool(ran) and all(row.status != "differs" for row in ran)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON types."""
        return {"passed": self.passed, **asdict(self)}

    def table(self) -> str:
        """Return the rows as aligned text."""
        cells = [("compared", "", "difference", "cause")]
        cells += [(row.what, row.status, _number(row.difference), row.cause) for row in self.rows]
        widths = [max(len(cell[i]) for cell in cells) for i in range(3)]
        return "\n".join("  ".join([*(cell[i].ljust(widths[i]) for i in range(3)), cell[3]]).rstrip() for cell in cells)


def _number(difference: float | None) -> str:
    """Return a difference as text; differences by summation order are not shown as numbers."""
    if difference is None:
        return ""
    return f"{difference:.1e}" if difference >= 1e-6 else "below 1e-6"


def verify_endpoint(
    target: str, source: str, *, tolerance: float = TOLERANCE, local_files_only: bool = False, **options: Any
) -> Report:
    """Return the comparison of an endpoint's outputs with its model's.

    Args:
        target: a URL, a folder, or an ONNX file.
        source: the model: a local folder or a name of the Hub.
        tolerance: the largest difference that counts as equal, as a share of the largest number of the reference.
        local_files_only: open no connection to the Hub.
        **options: ``style`` ("auto", "tei", "openai" or "hf"), ``model``, ``api_key`` and ``timeout_s`` of an endpoint
            over HTTP.

    Raises:
        TargetError: nothing answers there.
        PredictError: the source is no model of vectors, labels or ranks.
    """
    reference = Reference(source, local_files_only=local_files_only)
    return Comparison(open_target(target, reference, **options), reference, tolerance).report()


class Comparison:
    """A comparison of a target with a reference.

    Args:
        target: the endpoint.
        reference: the expected outputs.
        tolerance: see `verify_endpoint`.

    Attributes:
        right: the right settings.
        way: the settings with which the target was found to compute.
    """

    def __init__(self, target: Target, reference: Reference, tolerance: float = TOLERANCE) -> None:
        self.target, self.reference, self.tolerance = target, reference, tolerance
        self.right: Variant = {"scaled": True} if reference.task == "vectors" and target.scales else {}
        self.way = self.right
        self.texts = _fitting(reference)

    def report(self) -> Report:
        """Return all comparisons."""
        rows = []
        for what, check in self._checks():
            try:
                rows.append(Row(what, *check()))
            except TargetError as fault:
                rows.append(Row(what, "differs", None, fault.message))
        return Report(self.target.name, self.reference.source, rows)

    def _checks(self) -> Iterator[tuple[str, Callable[[], _Outcome]]]:
        outputs = {"vectors": "vectors", "labels": "scores of labels", "ranking": "scores of documents"}
        yield "token ids", self.tokens
        yield outputs[self.reference.task], self.answers
        if "normalize" in self.target.options:
            yield "vectors not scaled", self.unscaled
        if "prompt_name" in self.target.options:
            yield from ((f"prompt {name}", partial(self.prompt, name)) for name in self.reference.prompts)
        yield "in a batch", self.batch
        yield "order", self.order
        if self.reference.limit is not None:
            yield "a long text", partial(self.long_text, self.reference.limit)

    @cached_property
    def _alone(self) -> np.ndarray:
        return np.concatenate([self.target.answers([text]) for text in self.texts])

    @cached_property
    def _together(self) -> np.ndarray:
        return self.target.answers(self.texts)

    def tokens(self) -> _Outcome:
        """Compare ids of tokens."""
        found = self.target.token_ids(self.texts)
        if found is None:
            return "not run", None, "the endpoint has no path for them"
        expected = self.reference.token_ids(self.texts)
        if found == expected:
            return "equal", 0.0, ""
        for way in ({"lower": True}, {"special": False}, {"lower": True, "special": False}):
            if found == self.reference.token_ids(self.texts, way):
                return "differs", None, describe(way, {})
        place = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        ids = f"{found[place][:6]} for {expected[place][:6]}"
        return "differs", None, f"another tokenizer: text {place} has {ids}"

    def answers(self) -> _Outcome:
        """Compare short texts, one per request."""
        found, expected = self._alone, self.reference.answers(self.texts, self.right)
        if found.shape != expected.shape:
            sizes = f"{found.shape[1]} numbers for {expected.shape[1]}"
            return "differs", None, f"{sizes}: cut, another layer, or another model"
        outcome, self.way = self._explained(found, expected, self.texts, self.reference.ways(self.right), self.right)
        return outcome

    def unscaled(self) -> _Outcome:
        """Compare vectors without scaling."""
        way = self.way | {"scaled": False}
        found = self.target.answers(self.texts[:2], normalize=False)
        expected = self.reference.answers(self.texts[:2], way)
        return self._explained(found, expected, self.texts[:2], [way | {"scaled": True}], way)[0]

    def prompt(self, name: str) -> _Outcome:
        """Compare vectors with a prompt of the folder."""
        prompts = self.reference.prompts
        way = self.way | {"prompt": prompts[name]}
        found = self.target.answers(self.texts[:3], prompt_name=name)
        others = [way | {"prompt": other} for other in ("", *prompts.values()) if other != prompts[name]]
        expected = self.reference.answers(self.texts[:3], way)
        return self._explained(found, expected, self.texts[:3], others, way)[0]

    def batch(self) -> _Outcome:
        """Compare outputs of a batch with outputs of single texts."""
        found = self._together[self._places()]
        longest = max(map(len, self.reference.token_ids(self.texts)))
        ways = [self.way | way for way in self.reference.padding(longest)]
        (status, difference, cause), _ = self._explained(found, self._alone, self.texts, ways, self.way)
        if status == "differs":
            cause = f"answers depend on their neighbours: {cause}"
        return status, difference, cause

    def order(self) -> _Outcome:
        """Compare the order of a batch's answers with the order of its texts."""
        places = self._places()
        if places == list(range(len(self.texts))):
            return "equal", None, ""
        lengths = np.array([len(ids) for ids in self.reference.token_ids(self.texts)])
        cause = "answers come in another order than their texts"
        # The length of the text of each answer, in the order of the answers.
        steps = np.diff(lengths[np.argsort(places)])
        if (steps >= 0).all() or (steps <= 0).all():
            cause += ": sorted by length, and not put back"
        return "differs", None, cause

    def long_text(self, limit: int) -> _Outcome:
        """Compare a text that does not fit into one window."""
        draw = np.random.default_rng(3)
        text = " ".join(draw.choice(TEXTS[-1].split(), limit * 2))
        refused = ""
        try:
            found = self.target.answers([text])
        except TargetError as fault:
            if fault.status not in (400, 413, 422):
                raise
            refused = f"refused with status {fault.status}"
            silent = "equal", None, f"{refused}, so nothing is truncated silently"
            if "truncate" not in self.target.options:
                return silent
            try:
                found = self.target.answers([text], truncate=True)
            except TargetError:
                return silent
            refused += ", and with truncate "
        # Texts that are never truncated must fit: in a ranking, the query.
        ranking = self.reference.task == "ranking"
        least = 2 + len(self.reference.token_ids([QUERY])[0]) if ranking else 0
        sizes = sorted({limit, *(size for size in _CUTS if least < size < limit)}, reverse=True)
        ways: list[Variant] = [self.way | {"limit": size} for size in sizes]
        if not ranking:
            ways += [way | {"left": True} for way in ways]
        tried = [(_distance(found, self.reference.answers([text], way)), _cut(way)) for way in ways]
        right = {_cut(ways[0])}
        # Only these settings are possible for whole texts.
        if self.way.keys() <= {"tanh", "pooling", "scaled", "function", "prompt", "lower"}:
            whole = "all of it is read, in windows"
            tried.append((_distance(found, self.reference.predicted([text], self.way, windows=True)), whole))
            if self.reference.task != "vectors":
                right.add(whole)
        difference, cause = min(tried)
        if difference > max(self.tolerance, 4 * self._rounding([text], ways[0])):
            return "differs", difference, "neither read whole nor cut anywhere that is known"
        if cause not in right:
            return "differs", tried[0][0], f"{refused}{cause}, where the model takes {limit}"
        return "equal" if difference <= self.tolerance else "rounded", difference, refused + cause

    def _places(self) -> list[int]:
        """Return where in a batch's answers each text's own is."""
        apart = np.abs(np.nan_to_num(self._together)[None] - np.nan_to_num(self._alone)[:, None]).max(-1)
        own, left, best = np.diag(apart), list(range(len(apart))), []
        for row in apart:
            best.append(min(left, key=lambda index: row[index]))
            left.remove(best[-1])
        moved = max(apart[i, other] for i, other in enumerate(best)) <= own.max() / _NEARER
        # Texts that are as near in their own place as in any other are in their own.
        return [other if moved and own[i] > apart[i, other] + self.tolerance else i for i, other in enumerate(best)]

    def _explained(
        self, actual: np.ndarray, expected: np.ndarray, items: Sequence[str], ways: Iterable[Variant], base: Variant
    ) -> tuple[_Outcome, Variant]:
        """Return the outcome, with the mistake nearest to the endpoint's output, and the settings that explain it.

        Args:
            actual: outputs of the endpoint.
            expected: outputs of the model.
            items: the texts.
            ways: the settings with each possible mistake.
            base: the settings with which ``expected`` was computed.
        """
        difference = _distance(actual, expected)
        if difference <= self.tolerance:
            return ("equal", difference, ""), base
        nearest, best = float("inf"), base
        for way in ways:
            apart = _distance(actual, self.reference.answers(items, way))
            if apart < nearest:
                nearest, best = apart, way
            if apart <= self.tolerance:
                break
        if nearest <= max(self.tolerance, difference / _NEARER):
            return ("differs", difference, describe(best, base)), best
        rounding = self._rounding(items, base)
        if difference <= 4 * rounding:
            cause = f"of the size of half precision's rounding ({rounding:.1e} in bf16)"
            return ("rounded", difference, cause), base
        return ("differs", difference, "none of the known mistakes gives these numbers"), base

    def _rounding(self, items: Sequence[str], way: Variant) -> float:
        """Return how far answers in bfloat16 are from those in float32."""
        exact = self.reference.answers(items, way)
        return _distance(self.reference.answers(items, way | {"half": True}), exact)


def _fitting(reference: Reference) -> list[str]:
    """Return the texts, with fewer words where the model takes few tokens."""
    if reference.limit is None:
        return list(TEXTS)
    # A ranking also contains the query. Half of the length stays free, so that only long texts are truncated.
    before = [*reference.prompts.values(), QUERY if reference.task == "ranking" else ""]
    room = reference.limit - max(map(len, reference.token_ids(before)))
    room = min(room, reference.limit // 2)
    found = []
    for text in TEXTS:
        words = text.split()
        while len(words) > 1 and max(map(len, reference.token_ids([" ".join(words), " ".join(words).lower()]))) > room:
            words.pop()
        found.append(" ".join(words))
    return found


def _cut(way: Variant) -> str:
    return f"it is cut {'at its beginning ' if way.get('left') else ''}to {way['limit']} tokens"


def _distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference as a share of the largest number, ignoring absent scores."""
    if actual.shape != expected.shape:
        return float("inf")
    there = ~np.isnan(actual)
    if not there.any() or not np.isfinite(actual[there]).all():
        return float("inf")
    return float(np.abs(actual - expected)[there].max() / max(1e-12, np.abs(expected).max()))
