"""The matrix on published checkpoints, each pinned by name.

Needs a network (or a cache that holds them); without one every cell says "not run" and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from flodl.errors import FlodlError
from flodl_hf.parity.cell import Bench, Cell
from flodl_hf.parity.checks import CHECKS, Evidence
from flodl_hf.parity.matrix import CellResult, _guarded

__all__ = ["PINNED", "live_cells"]

# family -> head -> repository. Base and masked-word checkpoints of a family are one.
PINNED: dict[str, dict[str, str]] = {
    "bert": {
        "base": "google-bert/bert-base-uncased",
        "sequence_classification": "nateraw/bert-base-uncased-emotion",
        "token_classification": "dslim/bert-base-NER",
        "question_answering": "csarron/bert-base-uncased-squad-v1",
        "masked_lm": "google-bert/bert-base-uncased",
    },
    "roberta": {
        "base": "FacebookAI/roberta-base",
        "sequence_classification": "cardiffnlp/twitter-roberta-base-sentiment-latest",
        "token_classification": "Jean-Baptiste/roberta-large-ner-english",
        "question_answering": "deepset/roberta-base-squad2",
        "masked_lm": "FacebookAI/roberta-base",
    },
    "distilbert": {
        "base": "distilbert/distilbert-base-uncased",
        "sequence_classification": "lxyuan/distilbert-base-multilingual-cased-sentiments-student",
        "token_classification": "dslim/distilbert-NER",
        "question_answering": "distilbert/distilbert-base-cased-distilled-squad",
        "masked_lm": "distilbert/distilbert-base-uncased",
    },
    "xlm-roberta": {
        "base": "FacebookAI/xlm-roberta-base",
        "sequence_classification": "cardiffnlp/twitter-xlm-roberta-base-sentiment",
        "token_classification": "Davlan/xlm-roberta-large-ner-hrl",
        "question_answering": "deepset/xlm-roberta-large-squad2",
        "masked_lm": "FacebookAI/xlm-roberta-base",
    },
    "albert": {
        "base": "albert/albert-base-v2",
        "sequence_classification": "bhadresh-savani/albert-base-v2-emotion",
        "token_classification": "ArBert/albert-base-v2-finetuned-ner",
        "question_answering": "twmkn9/albert-base-v2-squad2",
        "masked_lm": "albert/albert-base-v2",
    },
    "deberta-v2": {
        "base": "microsoft/deberta-v3-base",
        "sequence_classification": "MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli",
        "token_classification": "blaze999/Medical-NER",
        "question_answering": "deepset/deberta-v3-base-squad2",
    },
}
# Their files differ from run to run of the hub's conversion only in what these checks do not read.
LIVE_CHECKS = ("config_triage", "strict_load", "forward", "layouts", "gradients", "export_bytes", "half_precision")


def live_cells(cells: Iterable[Cell], checks: Sequence[str] = ()) -> Iterator[CellResult]:
    """Yield the result of each cell on its pinned checkpoint."""
    from flodl_hf.source import BIN_FILES, MODEL_FILES, resolve_folder

    chosen = [c for c in CHECKS if c.__name__ in (checks or LIVE_CHECKS)]
    for cell in cells:
        name = PINNED.get(cell.family, {}).get(cell.head)
        reason = "no checkpoint is pinned for this cell"
        result = CellResult(cell)
        if name is not None and cell.variant == "base":
            try:
                folder, _ = resolve_folder(name, {}, (*MODEL_FILES, *BIN_FILES))
                with Bench(cell, source=folder) as bench:
                    result.evidence = [_guarded(check, bench) for check in chosen]
            except FlodlError as fault:
                reason = str(fault)
        if not result.evidence:
            result.evidence = [Evidence(check.__name__, "not run", reason) for check in chosen]
        yield result
