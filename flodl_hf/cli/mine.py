"""``flodl-hf mine``: turn pairs into triplets with hard negatives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flodl_hf.cli import options as shared
from flodl_hf.cli.options import REQUIRED, SAMPLINGS, option, with_parameters
from flodl_hf.cli.shared import emit, reporting

_SOURCE = "File of pairs: anchor and positive, or named columns."
_OUT = "File to write, JSON lines: anchor, positive, negative_1 ..."
_CORPUS = "File of texts to take negatives from, in addition to all positives."
OPTIONS = (
    option("range_min", int, "Skip this many of the nearest texts.", min=0, default=0),
    option("range_max", int, "Consider this many of the nearest texts.", min=1, default=100),
    option("max_score", float, "Maximum similarity of a negative."),
    option("absolute_margin", float, "Minimum score gap to the positive."),
    option("relative_margin", float, "The same, relative to the score of the positive."),
    option("sampling", SAMPLINGS, "Take the nearest negatives, or a random sample.", default="top"),
    option("seed", int, "Random seed of the sampling.", default=42),
)
"""Keywords of `flodl_hf.inference.mining.hard_negatives`."""


@reporting
@with_parameters((
    shared.MODEL,
    option("source", str, _SOURCE, "--in", "-i", default=REQUIRED),
    option("out", Path, _OUT, "--out", "-o", default=REQUIRED),
    option("corpus", str, _CORPUS),
    option("columns", str, "anchor=question,positive=context."),
    option("negatives", int, "Negatives per pair; pairs with fewer are dropped.", min=1, default=1),
    *OPTIONS, *shared.ENCODER, shared.JSON,
))  # fmt: skip
def command(
    model: str,
    source: str,
    out: Path,
    corpus: str | None,
    columns: str | None,
    negatives: int,
    json_output: bool,
    **values: Any,
) -> None:
    """Find negatives for pairs: texts near to an anchor that do not belong to it, to train vectors and rankers with."""
    from flodl.errors import DataError
    from flodl.files import write_atomically
    from flodl_hf.checkpoints.folders import expect_tokenizer
    from flodl_hf.cli.finetune import parse
    from flodl_hf.cli.vectors import check_target, encoder, texts_of
    from flodl_hf.inference.mining import hard_negatives
    from flodl_hf.tokenization.readers import load_rows
    from flodl_hf.training.vectors.tables import read_table

    check_target(Path(out), (".jsonl",))
    expect_tokenizer(model, "mine")
    table = read_table(load_rows(source), parse("columns", columns), source)
    if table.width < 2:
        raise DataError(
            f"{source}: found one column of texts; expected pairs, an anchor and a positive in each "
            "row. Name the columns: columns={'anchor': ..., 'positive': ...}"
        )
    pairs = [(row[0], row[1]) for row in table.texts]
    candidates: list[str] = [positive for _, positive in pairs]
    if corpus:
        candidates += [text for text in texts_of(corpus, None) if text.strip()]
    texts = list(dict.fromkeys(candidates))
    places = {text: i for i, text in enumerate(texts)}
    anchors: list[str] = list(dict.fromkeys(anchor for anchor, _ in pairs))
    own: dict[str, set[int]] = {}
    for anchor, positive in pairs:
        own.setdefault(anchor, set()).add(places[positive])
        if anchor in places:  # a text is no negative of itself
            own[anchor].add(places[anchor])
    encode = encoder(model, values)
    wrong = [own[anchor] for anchor in anchors]
    found = hard_negatives(encode(anchors), encode(texts), wrong, count=negatives, **values)
    of = dict(zip(anchors, found, strict=True))
    rows = [
        {"anchor": a, "positive": b} | {f"negative_{k}": texts[place] for k, place in enumerate(of[a], 1)}
        for a, b in pairs
        if len(of[a]) == negatives
    ]
    write_atomically(out, ((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows))
    result = {"file": str(out), "pairs": len(pairs), "written": len(rows), "negatives": negatives}
    each = "1 negative" if negatives == 1 else f"{negatives} negatives"
    emit(result, f"{len(rows):,} of {len(pairs):,} pairs with {each} each in {out}", json_output)
