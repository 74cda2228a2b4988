"""Compare an endpoint with its model in several steps, and explain differences.

A known mistake explains a difference if computing with that mistake is several times nearer to the endpoint's
output. Later comparisons include the mistakes found before, so that each reports only a new cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flodl_hf.parity.endpoint_checks.opening import open_target
from flodl_hf.parity.endpoint_checks.reference import Reference, Way
from flodl_hf.parity.endpoint_checks.report import Report, Row
from flodl_hf.parity.endpoint_checks.targets import QUERY, Target, TargetError

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
_WORDS = (
    "the",
    "river",
    "rises",
    "in",
    "the",
    "cold",
    "mountains",
    "and",
    "runs",
    "through",
    "towns",
    "to",
    "the",
    "sea",
)
_CUTS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)


def verify_endpoint(
    target: str, source: str, *, tolerance: float = TOLERANCE, local_files_only: bool = False, **options: Any
) -> Report:
    """Return the comparison of an endpoint's outputs with its model's.

    Args:
        target: a URL, a folder, or an ONNX file.
        source: the model: a local folder or a name of the Hub.
        tolerance: the largest difference that counts as equal, as a share of the largest number of the reference.
        local_files_only: open no connection to the Hub.
        **options: ``style``, ``model``, ``api_key`` and ``timeout_s`` of
            `flodl_hf.parity.endpoint_checks.http.open_http`.

    Raises:
        TargetError: nothing answers there.
        PredictError: the source is no model of vectors, labels or ranks.
    """
    reference = Reference(source, local_files_only=local_files_only)
    opened = open_target(target, reference.task, reference.labels, pooling=reference.pooling, **options)
    return Comparison(opened, reference, tolerance).report()


class Comparison:
    """A comparison of a target with a reference.

    Args:
        target: the endpoint.
        reference: the expected outputs.
        tolerance: see `verify_endpoint`.
    """

    def __init__(self, target: Target, reference: Reference, tolerance: float = TOLERANCE) -> None:
        self.target, self.reference, self.tolerance = target, reference, tolerance
        right = Way()
        if reference.task == "vectors" and target.scales:
            right = Way(scaled=True)
        self.right = right
        self.way = right
        """How the target has been found to compute."""
        self.texts = _fitting(reference)
        self._alone: np.ndarray | None = None

    def report(self) -> Report:
        """Return all comparisons."""
        rows = []
        for check in (self.tokens, self.answers, self.length, self.prompts, self.batch, self.order, self.long_text):
            for what, run in check():
                try:
                    rows.append(run(what))
                except TargetError as fault:
                    rows.append(Row(what, "differs", None, fault.message))
        return Report(self.target.name, self.reference.source, rows)

    # ---- comparisons -------------------------------------------------------------------------------

    def tokens(self) -> Iterable[tuple[str, Callable[[str], Row]]]:
        """Compare ids of tokens."""

        def run(what: str) -> Row:
            found = self.target.token_ids(self.texts)
            if found is None:
                return Row(what, "not run", None, "the endpoint has no path for them")
            expected = self.reference.token_ids(self.texts)
            if found == expected:
                return Row(what, "equal", 0.0)
            for way in (Way(lower=True), Way(special=False), Way(lower=True, special=False)):
                if found == self.reference.token_ids(self.texts, way):
                    return Row(what, "differs", None, way.said())
            place = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), 0)
            mine = f"{found[place][:6]} for {expected[place][:6]}" if len(found) == len(expected) else ""
            return Row(what, "differs", None, f"another tokenizer: text {place} has {mine or len(found)}")

        yield "token ids", run

    def answers(self) -> Iterable[tuple[str, Callable[[str], Row]]]:
        """Compare short texts, one per request."""

        def run(what: str) -> Row:
            found = np.concatenate([self.target.answers([text]) for text in self.texts])
            expected = self.reference.answers(self.texts, self.right)
            if found.shape != expected.shape:
                return Row(
                    what, "differs", None,
                    f"{found.shape[1]} numbers for {expected.shape[1]}: cut, another layer, or another model",
                )  # fmt: skip
            self._alone = found
            return self._explained(what, found, expected, self.texts, self.reference.ways(self.right))

        yield (
            {"vectors": "vectors", "labels": "scores of labels", "ranking": "scores of documents"}[self.reference.task],
            run,
        )

    def length(self) -> Iterable[tuple[str, Callable[[str], Row]]]:
        """Compare vectors without scaling, if the endpoint supports this."""

        def run(what: str) -> Row:
            given = self.target.answers(self.texts[:2], normalize=False)
            way = replace(self.way, scaled=False)
            expected = self.reference.answers(self.texts[:2], way)
            return self._explained(what, given, expected, self.texts[:2], [replace(way, scaled=True)], way)

        if self.reference.task == "vectors" and self._can("normalize"):
            yield "vectors not scaled", run

    def prompts(self) -> Iterable[tuple[str, Callable[[str], Row]]]:
        """Compare vectors with each prompt of the folder, if the endpoint supports this."""
        recipe = self.reference.recipe
        known = recipe.prompts if recipe else {}
        for name, prompt in known.items():

            def run(what: str, name: str = name, prompt: str = prompt) -> Row:
                way = replace(self.way, prompt=prompt)
                found = self.target.answers(self.texts[:3], prompt_name=name)
                others = [replace(way, prompt=other) for other in ("", *known.values()) if other != prompt]
                return self._explained(
                    what, found, self.reference.answers(self.texts[:3], way), self.texts[:3], others, way
                )  # fmt: skip

            if self._can("prompt_name"):
                yield f"prompt {name}", run

    def batch(self) -> Iterable[tuple[str, Callable[[str], Row]]]:
        """Compare outputs of a batch with outputs of single texts."""

        def run(what: str) -> Row:
            if self._alone is None:
                return Row(what, "not run", None, "requests of single texts failed")
            found = self._together()
            found = found[self._places(found)]
            most = max(map(len, self.reference.token_ids(self.texts)))
            ways = [
                replace(self.way, padded=most, masked=masked, counted=counted)
                for masked, counted in ((False, False), (True, True), (False, True))
                if masked or self.reference.task == "vectors" or not counted
            ]
            return self._explained(
                what, found, self._alone, self.texts, ways, beside="answers depend on their neighbours"
            )

        yield "in a batch", run

    def order(self) -> Iterable[tuple[str, Callable[[str], Row]]]:
        """Look whether the answers of a batch come in the order of its texts."""

        def run(what: str) -> Row:
            if self._alone is None:
                return Row(what, "not run", None, "requests of single texts failed")
            places = self._places(self._together())
            if places == list(range(len(self.texts))):
                return Row(what, "equal")
            lengths = np.array([len(ids) for ids in self.reference.token_ids(self.texts)])
            cause = "answers come in another order than their texts"
            # The length of the text that each answer is of, as they came.
            came = lengths[np.argsort(places)]
            if (np.diff(came) >= 0).all() or (np.diff(came) <= 0).all():
                cause += ": sorted by length, and not put back"
            return Row(what, "differs", None, cause)

        yield "order", run

    def long_text(self) -> Iterable[tuple[str, Callable[[str], Row]]]:
        """Compare a text that does not fit into one window."""
        limit = self.reference.limit

        def run(what: str) -> Row:
            assert limit is not None
            draw = np.random.default_rng(3)
            text = " ".join(draw.choice(_WORDS, limit * 2))
            refused = ""
            try:
                found = self.target.answers([text])
            except TargetError as fault:
                if fault.status not in (400, 413, 422):
                    raise
                refused = f"refused with status {fault.status}"
                try:
                    found = self.target.answers([text], truncate=True)
                except TargetError:
                    return Row(what, "equal", None, f"{refused}, so nothing is truncated silently")
                refused += ", and with truncate "
            # Texts that are never truncated must fit: in a ranking, the query.
            least = 2 + len(self.reference.token_ids([QUERY])[0]) if self.reference.task == "ranking" else 0
            sizes = sorted({limit, *(size for size in _CUTS if least < size < limit)}, reverse=True)
            sides = (False, True) if self.reference.task != "ranking" else (False,)
            ways = [replace(self.way, limit=size, left=left) for left in sides for size in sizes]
            tried = [(_distance(found, self.reference.answers([text], way)), _cut(way)) for way in ways]
            whole = self.reference.whole([text], self.way)
            if whole is not None:
                tried.append((_distance(found, whole), "all of it is read, in windows"))
            difference, cause = min(tried)
            rounding = 4 * self._rounding([text], ways[0])
            if difference > max(self.tolerance, rounding):
                return Row(what, "differs", difference, "neither read whole nor cut anywhere that is known")
            right = {tried[0][1]} if self.reference.task == "vectors" else {tried[0][1], tried[-1][1]}
            if cause not in right:
                return Row(what, "differs", tried[0][0], f"{refused}{cause}, where the model takes {limit}")
            return Row(what, "equal" if difference <= self.tolerance else "rounded", difference, refused + cause)

        if limit is not None:
            yield "a long text", run

    # ---- shared functions --------------------------------------------------------------------------

    def _can(self, option: str) -> bool:
        try:
            given = False if option == "normalize" else next(iter(self.reference.recipe.prompts))  # type: ignore[union-attr]
            self.target.answers(self.texts[:1], **{option: given})
        except TargetError as fault:
            return fault.status != 0
        return True

    def _together(self) -> np.ndarray:
        return self.target.answers(self.texts)

    def _places(self, found: np.ndarray) -> list[int]:
        """Return where in a batch's answers each text's own is."""
        assert self._alone is not None
        apart = np.abs(np.nan_to_num(found)[None] - np.nan_to_num(self._alone)[:, None]).max(-1)
        own, left, best = np.diag(apart), list(range(len(apart))), []
        for row in apart:
            best.append(min(left, key=lambda place: row[place]))
            left.remove(best[-1])
        moved = max(apart[i, other] for i, other in enumerate(best)) <= own.max() / _NEARER
        # Texts that are as near in their own place as in any other are in their own.
        return [other if moved and own[i] > apart[i, other] + self.tolerance else i for i, other in enumerate(best)]

    def _explained(
        self, what: str, found: np.ndarray, expected: np.ndarray, items: Sequence[str], ways: Iterable[Way],
        base: Way | None = None, beside: str = "",
    ) -> Row:  # fmt: skip
        """Return a row: equal, or with the mistake nearest to the endpoint's output."""
        difference = _distance(found, expected)
        if difference <= self.tolerance:
            return Row(what, "equal", difference)
        best: tuple[float, Way] | None = None
        for way in ways:
            whole = way if base is not None or beside else self.right.and_(way)
            apart = _distance(found, self.reference.answers(items, whole))
            if best is None or apart < best[0]:
                best = (apart, whole)
            if apart <= self.tolerance:
                break
        if best is not None and best[0] <= max(self.tolerance, difference / _NEARER):
            if base is None and not beside:
                self.way = best[1]
            cause = _said(best[1], base or (self.way if beside else self.right))
            return Row(what, "differs", difference, f"{beside}: {cause}" if beside else cause)
        most = self._rounding(items, base or (self.way if beside else self.right))
        if difference <= 4 * most:
            return Row(what, "rounded", difference, f"of the size of half precision's rounding ({most:.1e} in bf16)")
        return Row(what, "differs", difference, beside or "none of the known mistakes gives these numbers")

    def _rounding(self, items: Sequence[str], way: Way) -> float:
        """Return how far answers in bfloat16 are from those in float32."""
        exact = self.reference.answers(items, way)
        return _distance(self.reference.answers(items, replace(way, half=True)), exact)


def _fitting(reference: Reference) -> list[str]:
    """Return the texts, with fewer words where the model takes few tokens."""
    if reference.limit is None:
        return list(TEXTS)
    prompts = reference.recipe.prompts.values() if reference.recipe else ()
    # A ranking also contains the query. Half of the length stays free, so that only long texts are truncated.
    before = [*prompts, QUERY if reference.task == "ranking" else ""]
    room = reference.limit - max(map(len, reference.token_ids(before)))
    room = min(room, reference.limit // 2)
    found = []
    for text in TEXTS:
        words = text.split()
        while len(words) > 1 and max(map(len, reference.token_ids([" ".join(words), " ".join(words).lower()]))) > room:
            words.pop()
        found.append(" ".join(words))
    return found


def _said(way: Way, right: Way) -> str:
    """Return a description of the settings that differ from the right ones."""
    same = {name: getattr(Way(), name) for name, value in vars(way).items() if value == getattr(right, name)}
    return replace(way, **same).said()


def _cut(way: Way) -> str:
    return f"it is cut {'at its beginning ' if way.left else ''}to {way.limit} tokens"


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference as a share of the largest number, ignoring absent scores."""
    if found.shape != expected.shape:
        return float("inf")
    there = ~np.isnan(found)
    if not there.any() or not np.isfinite(found[there]).all():
        return float("inf")
    return float(np.abs(found - expected)[there].max() / max(1e-12, np.abs(expected).max()))
