"""``flodl-hf search``: the texts of a file that are most like a query."""

from __future__ import annotations

from typing import Any

from flodl_hf.cli import options as shared
from flodl_hf.cli.options import REQUIRED, argument, option, with_parameters
from flodl_hf.cli.shared import emit_json, reporting, say, stdin_lines, tell


@reporting
@with_parameters((
    shared.MODEL,
    argument("query", list[str] | None, "QUERY", "Queries; none reads lines from stdin.", None),
    option("corpus", str, "File of the texts to search.", "--in", "-i", default=REQUIRED),
    option("vectors", str, "Their vectors as `flodl-hf encode` wrote them; else they are made."),
    shared.TEXT_COLUMN,
    option("top_k", int, "Most texts for each query.", min=1, default=5),
    option("prompt", str, "Put before each query.", default=""),
    *shared.ENCODER, shared.JSON,
))  # fmt: skip
def command(
    model: str,
    query: list[str] | None,
    corpus: str,
    vectors: str | None,
    text_column: str | None,
    top_k: int,
    prompt: str,
    json_output: bool,
    **values: Any,
) -> None:
    """Find the texts of a file that are most like each query, exactly, by their vectors."""
    from flodl.errors import DataError
    from flodl_hf.checkpoints.folders import expect_tokenizer
    from flodl_hf.cli.vectors import encoder, texts_of
    from flodl_hf.inference.quantize import binary_search, byte_search
    from flodl_hf.inference.search import semantic_search
    from flodl_hf.inference.vector_files import ranges_path, read_vectors

    expect_tokenizer(model, "search")
    queries = query or [line for line in stdin_lines() if line.strip()]
    if not queries:
        say("no query was given: as arguments, or one a line on standard input")
    texts = texts_of(corpus, text_column)
    encode = encoder(model, values)
    # An empty line is never a result, although it has a vector.
    places = [place for place, text in enumerate(texts) if text.strip()]
    if not places:
        raise DataError(f"{corpus}: all {len(texts)} texts are empty; expected some to search")
    kept = encode([texts[place] for place in places], "document") if vectors is None else read_vectors(vectors)
    wanted = encode(queries, "query", prompt=prompt or None)
    size = wanted.shape[1]
    bits = kept.dtype.kind != "f" and kept.shape[1] == -(-size // 8)
    if (vectors is not None and len(kept) != len(texts)) or (kept.shape[1] != size and not bits):
        raise DataError(
            f"{vectors}: {len(kept)} vectors of {kept.shape[1]} numbers ({kept.dtype}) for {len(texts)} texts and a "
            f"model of {size}; expected vectors of this file and model"
        )
    if vectors is not None and len(places) < len(kept):
        kept = kept[places]
    if bits:
        hits_of = binary_search(wanted, kept, top_k=top_k)
    elif kept.dtype.kind != "f":
        hits_of = byte_search(wanted, kept, read_vectors(ranges_path(vectors or "")), top_k=top_k)
    else:
        hits_of = semantic_search(wanted, kept, top_k=top_k)
    found = [
        {"query": text, "found": [{"score": hit["score"], "index": place, "text": texts[place]}
                                  for hit in hits for place in (places[hit["corpus_id"]],)]}
        for text, hits in zip(queries, hits_of, strict=True)
    ]  # fmt: skip
    if json_output:
        emit_json(found)
        return
    for entry in found:
        tell(entry["query"], bold=True)
        for hit in entry["found"]:
            tell(f"{hit['score']:8.4f}  {hit['text']}")
