"""What a model says of held-out examples, asked for at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flodl_hf.training.judged import Judged

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.training.evaluation import Evaluation, Evaluations

__all__ = ["judge"]


def judge(
    model: EncoderModel, evaluation: Evaluation | Evaluations, figures: Mapping[str, float] | None = None
) -> Judged | None:
    """Return what the model says of the first set of held-out data; None for masked words, whose scores are too large
    to keep.

    One more evaluation, on this process alone, unless the last one came to the model's own figures; the model is in
    evaluation mode.

    Args:
        model: to be judged.
        evaluation: judges it.
        figures: of the model, where it was judged before.
    """
    from flodl_hf.training.evaluation import Evaluations

    name, one = next(iter(evaluation.sets.items())) if isinstance(evaluation, Evaluations) else ("", evaluation)
    if one.task.kind == "words":
        return None
    if one.seen is not None and figures and _are_of(one.seen, figures):
        return one.seen if one.seen.predictions is not None else None
    kept = Judged(name)
    replace(one, own=kept, seen=None)(model)
    return kept if kept.predictions is not None else None


def _are_of(seen: Judged, figures: Mapping[str, float]) -> bool:
    """Return whether these figures, of all sets, hold those of the evaluation that was seen."""
    at = f"{seen.name}/" if seen.name else ""
    return bool(seen.figures) and seen.figures == {key: figures.get(at + key) for key in seen.figures or {}}
