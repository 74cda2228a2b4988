"""Masks of a masked language model: which tokens are chosen, and their replacements.

The choice depends on the given random numbers only, so a row has other masks in each epoch and the same in each run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flodl.data.rng import Rng
from flodl.errors import DataError
from flodl_hf.tokenization.alignment.tags import IGNORE


def num_masked(free: int, probability: float) -> int:
    """Return how many of ``free`` tokens of a row are chosen, where words are not chosen whole: one at least."""
    return max(1, int(probability * free + 0.5))


def chosen_tokens(
    special: Sequence[bool], *, rng: Rng, probability: float, words: Sequence[int | None] | None = None
) -> NDArray[np.int64]:
    """Return which tokens are chosen, ascending; arguments as of `mask_tokens`, which draws further numbers."""
    free = [i for i, is_special in enumerate(special) if not is_special]
    if not free:
        return np.empty(0, np.int64)
    groups = _groups(free, words)
    wanted = num_masked(len(free), probability)
    chosen: list[int] = []
    for g in rng.permutation(len(groups)):
        if len(chosen) + len(groups[g]) <= wanted:
            chosen += groups[g]
    return np.array(sorted(chosen or min(groups, key=len)))


def mask_tokens(
    ids: Sequence[int],
    special: Sequence[bool],
    *,
    mask_id: int,
    random_ids: int | Sequence[int],
    rng: Rng,
    probability: float = 0.15,
    words: Sequence[int | None] | None = None,
    mask_share: float = 0.8,
    random_share: float = 0.1,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return token ids with some hidden, and labels that ask for them, -100 everywhere else; both ``(seq,)``.

    Of the tokens of the text a share of ``probability`` (rounded, at least one) is chosen; of these 80 %
    become the mask token, 10 % a random token, and 10 % stay (Devlin et al., "BERT", 2019, section 3.1).

    Args:
        ids: token ids, special ones included.
        special: which tokens are special and never chosen.
        mask_id: the mask token.
        random_ids: the size of the vocabulary, or the ids that a random token may be.
        rng: for example ``Rng(seed, "mask", epoch, row)``.
        probability: share of tokens to choose.
        words: the word of each token, to choose whole words; words that would pass the share are passed over,
            and if none fits, the shortest word is chosen.
        mask_share: share of the chosen tokens that become the mask token.
        random_share: share that becomes a random token.

    Raises:
        DataError: lengths differ, or shares are outside their range.
    """
    lengths = (len(ids), len(special), len(ids) if words is None else len(words))
    if len(set(lengths)) != 1:
        raise DataError(
            f"mask_tokens: {lengths[0]} ids, {lengths[1]} special flags, {lengths[2]} words; expected one each",
            lengths=lengths,
        )
    if not 0 < probability <= 1 or min(mask_share, random_share) < 0 or mask_share + random_share > 1:
        raise DataError(
            f"mask_tokens: probability {probability}, shares {mask_share} and {random_share}; expected a "
            "probability in (0, 1] and shares from 0 up that add up to at most 1",
            probability=probability,
        )
    hidden = np.array(ids, dtype=np.int64)
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    at = chosen_tokens(special, rng=rng, probability=probability, words=words)
    if not at.size:
        return hidden, labels
    labels[at] = hidden[at]
    fate = rng.uniforms(at.size)
    hidden[at[fate < mask_share]] = mask_id
    swap = at[(fate >= mask_share) & (fate < mask_share + random_share)]
    pool = np.arange(random_ids) if isinstance(random_ids, int) else np.asarray(random_ids, dtype=np.int64)
    hidden[swap] = pool[rng.integers(pool.size, swap.size)]
    return hidden, labels


def _groups(free: list[int], words: Sequence[int | None] | None) -> list[list[int]]:
    """Return positions chosen together; only neighbours, since word numbers start anew in a pair."""
    if words is None:
        return [[i] for i in free]
    groups: list[list[int]] = []
    for i in free:
        joins = groups and i == groups[-1][-1] + 1 and words[i] is not None and words[i] == words[i - 1]
        if joins:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
