"""Store embeddings in faiss, usearch, LanceDB and pgvector, and compare their results with exact search.

    python examples/vector_stores.py

Installed stores run; others are reported. pgvector needs psycopg and a database with its address in FLODL_PGVECTOR
(postgresql://user@host/name); the table is temporary.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from flodl_hf import encode_file
from flodl_hf.heads.base import BaseModel
from flodl_hf.inference.search import semantic_search
from flodl_hf.training.demo import demo_model, learn_vocabulary, sentences

TOP = 3


def with_faiss(file: Path, queries: np.ndarray) -> Any:
    """Search a `.npy` file of vectors of length 1 by their products."""
    import faiss  # pyright: ignore[reportMissingImports]

    vectors = np.load(file)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return index.search(queries, TOP)[1]


def with_usearch(file: Path, queries: np.ndarray) -> Any:
    """Search a graph of neighbours."""
    from usearch.index import Index  # pyright: ignore[reportMissingImports]

    vectors = np.load(file)
    index = Index(ndim=vectors.shape[1], metric="ip", dtype="f32")
    index.add(np.arange(len(vectors)), vectors)
    return index.search(queries, TOP, exact=True).keys


def with_lancedb(file: Path, queries: np.ndarray) -> Any:
    """Search a table that is created from an Arrow file of texts and vectors."""
    import lancedb  # pyright: ignore[reportMissingImports]
    import pyarrow

    with pyarrow.memory_map(str(file.with_suffix(".arrow"))) as source:
        rows = pyarrow.ipc.open_file(source).read_all()
    table = lancedb.connect(file.parent / "lance").create_table("passages", rows)
    found = [table.search(query).distance_type("dot").limit(TOP).to_list() for query in queries]
    return [[row["id"] for row in rows] for rows in found]


def with_pgvector(file: Path, queries: np.ndarray) -> Any:
    """Search a column of a database."""
    import psycopg  # pyright: ignore[reportMissingImports]

    vectors = np.load(file)
    with psycopg.connect(os.environ["FLODL_PGVECTOR"]) as base:
        base.execute("CREATE EXTENSION IF NOT EXISTS vector")
        base.execute(f"CREATE TEMPORARY TABLE passages (id int, vector vector({vectors.shape[1]}))")
        with base.cursor().copy("COPY passages FROM STDIN") as rows:
            for number, vector in enumerate(vectors.tolist()):
                rows.write_row((number, str(vector)))
        ask = "SELECT id FROM passages ORDER BY vector <#> %s::vector LIMIT %s"
        return [[row[0] for row in base.execute(ask, (str(query), TOP))] for query in queries.tolist()]


STORES: dict[str, Callable[[Path, np.ndarray], Any]] = {
    "faiss": with_faiss, "usearch": with_usearch, "LanceDB": with_lancedb, "pgvector": with_pgvector,
}  # fmt: skip


def main() -> dict[str, bool | None]:
    """Return for each store whether its results equal exact search; None if it is not installed."""
    found: dict[str, bool | None] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = demo_model(learn_vocabulary()).save_pretrained(folder / "model")
        texts = list(dict.fromkeys(text for text, _ in sentences()))[:200]
        (folder / "passages.csv").write_text("id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(texts)))
        encoder = BaseModel.from_pretrained(model)
        encode_file(encoder, folder / "passages.csv", folder / "passages.npy", normalize_embeddings=True)
        queries = encoder.encode(["The soup was cold.", "A rude waiter."], normalize_embeddings=True)
        exact = semantic_search(queries, np.load(folder / "passages.npy"), top_k=TOP)
        for store, search in STORES.items():
            try:
                if store == "LanceDB" and find_spec("lancedb") is not None:
                    encode_file(encoder, folder / "passages.csv", folder / "passages.arrow", normalize_embeddings=True)
                hits = [[int(place) for place in row] for row in search(folder / "passages.npy", queries)]
            except (ImportError, KeyError) as absent:
                found[store] = None
                print(f"{store:<10}is not installed: {absent}")
                continue
            found[store] = hits == exact.indices.tolist()
            print(f"{store:<10}{hits}  {'equal to' if found[store] else 'different from'} exact search")
    return found


if __name__ == "__main__":
    main()
