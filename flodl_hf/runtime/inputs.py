"""What users pass as texts, brought to one shape, and the rows of tokens made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flodl.errors import PredictError

if TYPE_CHECKING:
    from flodl_hf.tokenizer import Row, Tokenizer

__all__ = ["Encoded", "Text", "encode", "split_pairs"]

Text = str | tuple[str, str] | Mapping[str, str]
"""A text; or a pair ``(a, b)``, also as ``{"text": a, "text_pair": b}``."""


@dataclass(frozen=True)
class Encoded:
    """The windows of many texts in one list.

    Attributes:
        rows: the windows, text after text.
        owners: the text of each window.
        counts: content tokens of each window, specials left out.
    """

    rows: list[Row]
    owners: list[int]
    counts: list[int]


def split_pairs(items: Sequence[Any], task: str) -> tuple[list[str], list[str] | None]:
    """Return first and second texts; the second is None when no item is a pair.

    Raises:
        PredictError: an item is neither a text nor a pair, or texts and pairs are mixed.
    """
    firsts: list[str] = []
    seconds: list[str | None] = []
    for place, item in enumerate(items):
        if isinstance(item, Mapping):
            item = (item.get("text"), item.get("text_pair")) if "text_pair" in item else item.get("text")
        pair: Any = (item, None) if isinstance(item, str) else item
        valid = isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)
        if not valid or not isinstance(pair[1], (str, type(None))):
            raise PredictError(
                f"{task}: item {place} is {type(item).__name__}; expected a string, a pair (a, b), or "
                '{"text": a, "text_pair": b}',
                place=place,
            )
        firsts.append(pair[0])
        seconds.append(pair[1])
    if all(second is None for second in seconds):
        return firsts, None
    alone = [place for place, second in enumerate(seconds) if second is None]
    if alone:
        raise PredictError(
            f"{task}: items {alone[:8]} are single texts among pairs; expected one kind in a call",
            places=alone,
        )
    return firsts, [second or "" for second in seconds]


def encode(
    tokenizer: Tokenizer,
    texts: Sequence[Any],
    pairs: Sequence[Any] | None = None,
    *,
    max_tokens: int | None,
    stride: int = 0,
    strict: bool = False,
    words: bool = False,
    offsets: bool = False,
    cut: str | None = None,
    snap: bool = True,
) -> Encoded:
    """Return the windows of all texts.

    Args:
        tokenizer: whose tokens.
        texts: texts, or lists of words with ``words``.
        pairs: second texts, which are the ones that are cut into windows unless ``cut`` says otherwise.
        max_tokens: most tokens of a window, specials included.
        stride: tokens that neighbouring windows share.
        strict: raise on a text that needs several windows.
        words: the texts are split into words already.
        offsets: note where each token stands in its text.
        cut: "first" or "second": which text of a pair is cut.
        snap: let windows begin and end between words.
    """
    windows = tokenizer.encode_rows(
        texts, pairs, max_tokens=max_tokens, stride=stride, words=words, offsets=offsets,
        overflow="error" if strict else "windows", cut=cut,  # type: ignore[arg-type]
        snap=snap,
    )  # fmt: skip
    rows = [row for group in windows for row in group]
    owners = [text for text, group in enumerate(windows) for _ in group]
    return Encoded(rows, owners, [row.special.count(False) for row in rows])
