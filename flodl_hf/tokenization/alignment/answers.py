"""Positions of an answer in the windows of its context, and back to characters.

Windows without the whole answer have a position for no answer. The decoder compares answers of several windows.
"""

from __future__ import annotations

from collections.abc import Sequence

from flodl.errors import DataError
from flodl_hf.tokenization.alignment.units import Extent, TokenWindow, with_offsets


def answer_positions(
    windows: Sequence[TokenWindow],
    answer: Extent | None,
    *,
    sequence: int = 1,
    outside: int = 0,
) -> list[tuple[int, int]]:
    """Return for each window the first and last token of an answer, both inclusive.

    A window with only a part of the answer counts as a window without it.

    Args:
        windows: all windows of a question with its context.
        answer: characters of the context, None for a question without an answer.
        sequence: which text of the pair is the context.
        outside: the position of windows without the answer: of the class token, or -100 to
            leave the window out of the loss.

    Raises:
        DataError: the answer has no characters, or the rows have no offsets.
    """
    if answer is None:
        return [(outside, outside) for _ in windows]
    start, end = answer
    if not 0 <= start < end:
        raise DataError(f"alignment: the answer {answer} contains no characters", answer=answer)
    touched = [
        [
            i
            for i, ((a, b), s) in enumerate(zip(win.offsets, win.sequence_ids, strict=True))
            if s == sequence and a < end and b > start
        ]
        for win in with_offsets(windows)
    ]
    # Compared with the other windows rather than with the answer's own ends, because an answer may begin or
    # end with characters that no token has.
    spots = [win.offsets[i] for win, held in zip(windows, touched, strict=True) for i in held]
    first = min((a for a, _ in spots), default=0)
    last = max((b for _, b in spots), default=0)
    return [
        (held[0], held[-1])
        if held and win.offsets[held[0]][0] == first and win.offsets[held[-1]][1] == last
        else (outside, outside)
        for win, held in zip(windows, touched, strict=True)
    ]


def answer_span(window: TokenWindow, first: int, last: int, *, sequence: int = 1) -> Extent | None:
    """Return the characters of tokens ``first`` to ``last``, or None if they are no stretch of the context."""
    if not 0 <= first <= last < len(window.offsets):
        return None
    if window.sequence_ids[first] != sequence or window.sequence_ids[last] != sequence:
        return None
    return window.offsets[first][0], window.offsets[last][1]
