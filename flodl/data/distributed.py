"""Which rank takes which part of an epoch, so that every sample is used exactly once whatever the shares.

Two ways to split. ``"batch"``: each global batch is cut among the ranks, which therefore step together; some
ranks may get an empty part of a small last batch. ``"epoch"``: whole batches are dealt to the ranks, which
therefore step at their own pace; the numbers of batches follow the shares.

For loops of one's own; `flodl.train.Trainer` divides by itself. Shares come from outside (measured speed, the
user), their arithmetic is `flodl.distributed.shares`'. No clock and no collective is here: all ranks that hold the
same plan compute the same division.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flodl.data.batches import BatchSource, EpochPlan
from flodl.distributed.shares import split as parts_of
from flodl.errors import DataError, TrainError

__all__ = ["DistributedPlan", "RankBatches"]

Split = Literal["batch", "epoch"]


class DistributedPlan:
    """The division of each epoch's batches over ranks.

    Args:
        source: gives the global batches of an epoch.
        shares: one number per rank, any scale; ``[2, 1]`` gives rank 0 twice the work.
        split: ``"batch"`` cuts every global batch, ``"epoch"`` deals whole batches.

    With ``split="epoch"`` the shares may change in the middle of an epoch: :meth:`reshare` takes what each
    rank has used and divides the rest anew, also over another number of ranks.
    """

    def __init__(self, source: BatchSource, shares: Sequence[float], split: Split = "epoch") -> None:
        if split not in ("batch", "epoch"):
            raise DataError(f"DistributedPlan: split is {split!r}; expected 'batch' or 'epoch'", split=split)
        self.source = source
        self.split: Split = split
        self.shares = _checked(shares)
        # epoch -> [(shares, batches used per rank before the next division), ...]; the last entry is open
        self.revision = 0
        self._divisions: dict[int, list[tuple[list[float], list[int] | None]]] = {}

    @property
    def num_ranks(self) -> int:
        """Return how many ranks share the work now."""
        return len(self.shares)

    def plan(self, epoch: int, rank: int) -> EpochPlan:
        """Return the batches that ``rank`` takes in ``epoch``; after a :meth:`reshare`, those still to come.

        Raises:
            DataError: there is no such rank.
        """
        whole = self.source.plan(epoch)
        if self.split == "batch":
            self._check_rank(rank, len(self.shares))
            return self._cut(whole, rank)
        hands = self._deal(epoch, len(whole))
        self._check_rank(rank, len(hands))
        return whole.select(hands[rank])

    def for_rank(self, rank: int) -> RankBatches:
        """Return the view of one rank, which a loader takes as its batch source."""
        self._check_rank(rank, self.num_ranks)
        return RankBatches(self, rank)

    def reshare(self, epoch: int, used: Sequence[int], shares: Sequence[float]) -> None:
        """Divide what is left of ``epoch`` by new shares; later epochs start with them.

        Args:
            epoch: the running epoch.
            used: batches of the present division that each rank has used.
            shares: the new shares; their number may differ from the present number of ranks.

        Raises:
            DataError: ``used`` does not fit the division, or shares cannot be.
        """
        new = _checked(shares)
        self.revision += 1
        if self.split == "batch":
            # global batches are cut afresh each step: new shares simply hold from the next step on
            self.shares = new
            return
        hands = self._deal(epoch, len(self.source.plan(epoch)))
        wrong = [r for r, hand in enumerate(hands) if r >= len(used) or not 0 <= used[r] <= len(hand)]
        if wrong or len(used) != len(hands):
            raise DataError(
                f"DistributedPlan.reshare: used batches {list(used)} do not fit the division of epoch {epoch}, "
                f"which holds {[len(hand) for hand in hands]} batches per rank",
                epoch=epoch,
                used=list(used),
                held=[len(hand) for hand in hands],
            )
        divisions = self._divisions.setdefault(epoch, [(self.shares, None)])
        divisions[-1] = (divisions[-1][0], [int(n) for n in used])
        divisions.append((new, None))
        self.shares = new

    def state_dict(self) -> dict[str, Any]:
        """Return the shares and the divisions made in mid-epoch; JSON-able."""
        return {
            "split": self.split,
            "shares": list(self.shares),
            "divisions": {
                str(e): [{"shares": list(s), "used": u} for s, u in parts] for e, parts in self._divisions.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved shares and divisions.

        Raises:
            DataError: the state was saved under the other way of splitting.
        """
        if state["split"] != self.split:
            raise DataError(
                f"DistributedPlan: the saved split is {state['split']!r}, this plan splits by {self.split!r}; "
                "build the plan with the saved split",
                found=self.split,
                expected=state["split"],
            )
        self.revision += 1
        self.shares = [float(s) for s in state["shares"]]
        self._divisions = {
            int(e): [([float(s) for s in p["shares"]], None if p["used"] is None else list(p["used"])) for p in parts]
            for e, parts in state["divisions"].items()
        }

    def forget(self, epoch: int) -> None:
        """Drop the divisions of epochs up to ``epoch``, which are finished."""
        self._divisions = {e: parts for e, parts in self._divisions.items() if e > epoch}

    def _deal(self, epoch: int, num_batches: int) -> list[list[int]]:
        remaining = list(range(num_batches))
        hands: list[list[int]] = []
        for shares, used in self._divisions.get(epoch, [(self.shares, None)]):
            ends = np.cumsum(parts_of(len(remaining), shares)).tolist()
            starts = [0, *ends[:-1]]
            hands = [remaining[a:b] for a, b in zip(starts, ends, strict=True)]
            if used is not None:
                remaining = [k for hand, n in zip(hands, used, strict=True) for k in hand[n:]]
        return hands

    def _cut(self, whole: EpochPlan, rank: int) -> EpochPlan:
        parts = []
        for batch in whole:
            ends = np.cumsum(parts_of(batch.size, self.shares))
            parts.append(batch[ends[rank - 1] if rank else 0 : ends[rank]])
        return EpochPlan.of(parts)

    def _check_rank(self, rank: int, num_ranks: int) -> None:
        if not 0 <= rank < num_ranks:
            raise DataError(
                f"DistributedPlan: rank {rank} of {num_ranks} ranks; expected 0 to {num_ranks - 1}",
                rank=rank,
                num_ranks=num_ranks,
            )


def _checked(shares: Sequence[float]) -> list[float]:
    """Return ``shares`` as floats.

    Raises:
        DataError: there are none, one is negative or not finite, or all are zero.
    """
    values = [float(share) for share in shares]
    try:
        parts_of(0, values)
    except TrainError as error:
        raise DataError(f"DistributedPlan: {error}", shares=values) from None
    return values


@dataclass(frozen=True)
class RankBatches:
    """One rank's view of a :class:`DistributedPlan`; follows the plan when its shares change."""

    whole: DistributedPlan
    rank: int

    def plan(self, epoch: int) -> EpochPlan:
        """Return this rank's batches of ``epoch``."""
        return self.whole.plan(epoch, self.rank)

    def identity(self) -> dict[str, Any]:
        """Return what defines the batches of this rank; JSON-able."""
        return {**self.whole.source.identity(), "rank": self.rank, "split": self.whole.split}

    @property
    def revision(self) -> int:
        """Return how often the division changed, so that whoever keeps a plan knows when to ask anew."""
        return self.whole.revision

    def state_dict(self) -> dict[str, Any]:
        """Return the shares and divisions; JSON-able."""
        return self.whole.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved shares and divisions."""
        self.whole.load_state_dict(state)
