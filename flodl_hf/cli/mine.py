"""``flodl-hf mine``: turn pairs into triplets with hard negatives."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flodl_hf.cli.options import Device, Precision
from flodl_hf.cli.shared import Json, Local, Model, Revision, emit_json, reporting, tell


class Sampling(StrEnum):
    """Which of the texts found become negatives."""

    top = "top"
    random = "random"


@reporting
def command(
    model: Model,
    source: Annotated[str, typer.Option("--in", "-i", help="File of pairs: anchor and positive, or named columns.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write, JSON lines: anchor, positive, negative_1 ...")
    ],
    corpus: Annotated[
        str | None, typer.Option("--corpus", help="File of texts to take negatives from, in addition to all positives.")
    ] = None,
    columns: Annotated[str | None, typer.Option("--columns", help="anchor=question,positive=context.")] = None,
    negatives: Annotated[
        int, typer.Option("--negatives", min=1, help="Negatives per pair; pairs with fewer are dropped.")
    ] = 1,
    range_min: Annotated[int, typer.Option("--range-min", min=0, help="Skip this many of the nearest texts.")] = 0,
    range_max: Annotated[
        int, typer.Option("--range-max", min=1, help="Consider this many of the nearest texts.")
    ] = 100,
    max_score: Annotated[float | None, typer.Option("--max-score", help="Maximum similarity of a negative.")] = None,
    absolute_margin: Annotated[
        float | None,
        typer.Option("--absolute-margin", help="Minimum score gap to the positive."),
    ] = None,
    relative_margin: Annotated[
        float | None, typer.Option("--relative-margin", help="The same, relative to the score of the positive.")
    ] = None,
    sampling: Annotated[
        Sampling, typer.Option("--sampling", help="Take the nearest negatives, or a random sample.")
    ] = Sampling.top,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the sampling.")] = 42,
    precision: Precision = None,
    device: Device = "auto",
    revision: Revision = None,
    local_files_only: Local = False,
    json_output: Json = False,
) -> None:
    """Find negatives for pairs: texts near to an anchor that do not belong to it, to train vectors and rankers with."""
    from flodl.errors import DataError
    from flodl.files import write_atomically
    from flodl_hf.checkpoints.hub.folders import expect_tokenizer
    from flodl_hf.cli.finetune import parse
    from flodl_hf.cli.vectors import check_target, encoder, texts_of
    from flodl_hf.inference.mining import hard_negatives
    from flodl_hf.readers import load_rows
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
        candidates += [text for text in texts_of(corpus, None)[0] if text.strip()]
    texts = list(dict.fromkeys(candidates))
    places = {text: i for i, text in enumerate(texts)}
    anchors: list[str] = list(dict.fromkeys(anchor for anchor, _ in pairs))
    own: dict[str, set[int]] = {}
    for anchor, positive in pairs:
        own.setdefault(anchor, set()).add(places[positive])
        if anchor in places:  # a text is no negative of itself
            own[anchor].add(places[anchor])
    encode = encoder(model, revision, local_files_only, device, precision)
    found = hard_negatives(
        encode(anchors), encode(texts), [own[anchor] for anchor in anchors], count=negatives, range_min=range_min,
        range_max=range_max, max_score=max_score, absolute_margin=absolute_margin, relative_margin=relative_margin,
        sampling=str(sampling), seed=seed,
    )  # fmt: skip
    of = dict(zip(anchors, found, strict=True))
    rows = [
        {"anchor": a, "positive": b} | {f"negative_{k}": texts[place] for k, place in enumerate(of[a], 1)}
        for a, b in pairs
        if len(of[a]) == negatives
    ]
    write_atomically(out, ((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows))
    if json_output:
        emit_json({"file": str(out), "pairs": len(pairs), "written": len(rows), "negatives": negatives})
    else:
        each = "1 negative" if negatives == 1 else f"{negatives} negatives"
        tell(f"{len(rows):,} of {len(pairs):,} pairs with {each} each in {out}")
