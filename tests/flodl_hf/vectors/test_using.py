"""Vectors written, read, found again and mined; the commands that do so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from flodl.errors import DataError
from flodl_hf.errors import PredictError
from flodl_hf.heads.base import BaseModel
from flodl_hf.inference.mining import hard_negatives, paraphrase_mining
from flodl_hf.inference.quantize import PRECISIONS, binary_search, quantize_embeddings, ranges_of
from flodl_hf.inference.vector_files import read_vectors
from flodl_hf.training import demo

TEXTS = [text for text, _ in demo.sentences()[:24]]
VECTORS = F.normalize(torch.randn(24, 16, generator=torch.Generator().manual_seed(1)), dim=-1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.demo_model(demo.learn_vocabulary()).save_pretrained(tmp_path_factory.mktemp("base") / "tiny")


def ran(*words: object) -> Any:
    from flodl_hf.cli.app import app

    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in words else result.stdout


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("suffix", [".npy", ".jsonl", ".parquet", ".arrow"])
def test_vectors_come_back_from_files_as_they_were(precision: str, suffix: str, tmp_path: Path) -> None:
    kept = quantize_embeddings(VECTORS, precision)
    path = tmp_path / f"vectors{suffix}"
    if suffix == ".npy":
        np.save(path, kept)
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": "a", "vector": row}) + "\n" for row in kept.tolist()))
    else:
        arrow = pytest.importorskip("pyarrow")
        flat = arrow.array(np.ascontiguousarray(kept).reshape(-1))
        table = arrow.table({"vector": arrow.FixedSizeListArray.from_arrays(flat, kept.shape[1])})
        if suffix == ".parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        else:
            with arrow.ipc.new_file(str(path), table.schema) as file:
                file.write_table(table)
    assert np.array_equal(read_vectors(path), kept)


def test_fewer_bytes() -> None:
    whole = VECTORS.numpy()
    steps = (whole.max(0) - whole.min(0)) / 255
    counted = quantize_embeddings(VECTORS, "uint8")
    assert np.abs(whole.min(0) + (counted + 0.5) * steps - whole).max() <= steps.max() / 2 + 1e-6
    assert np.array_equal(quantize_embeddings(VECTORS, "int8"), counted.astype(np.int16) - 128)
    bits = quantize_embeddings(VECTORS, "ubinary")
    assert np.array_equal(np.unpackbits(bits, axis=1).astype(bool), whole > 0)
    assert np.array_equal(quantize_embeddings(VECTORS, "binary"), bits.astype(np.int16) - 128)
    with pytest.raises(PredictError, match="int8"):
        quantize_embeddings(VECTORS, "int9")
    for precision in ("int8", "uint8"):
        with pytest.raises(PredictError, match=r"one vector alone has no ranges.*ranges_of"):
            quantize_embeddings(VECTORS[:1], precision)
        found = quantize_embeddings(VECTORS[:1], precision, ranges=ranges_of(VECTORS))
        assert np.array_equal(found, quantize_embeddings(VECTORS, precision)[:1])
        assert quantize_embeddings(VECTORS[:0], precision).shape == (0, VECTORS.shape[1])


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_search_among_bits_is_put_in_order_by_the_query(precision: str) -> None:
    corpus = quantize_embeddings(VECTORS, precision)
    found = binary_search(VECTORS, corpus, top_k=3)
    assert found.indices[:, 0].tolist() == list(range(24))
    signs = torch.where(VECTORS > 0, 1.0, -1.0)
    everything = binary_search(VECTORS, corpus, top_k=24, rescore_multiplier=1)
    torch.testing.assert_close(everything.scores, (VECTORS @ signs.T).sort(descending=True).values)


@pytest.mark.filterwarnings("ignore")
def test_bytes_are_those_of_sentence_transformers() -> None:
    util = pytest.importorskip("sentence_transformers.util")
    for precision in ("int8", "uint8", "binary", "ubinary"):
        assert np.array_equal(
            util.quantize_embeddings(VECTORS.numpy(), precision), quantize_embeddings(VECTORS, precision)
        )
    pairs = util.paraphrase_mining_embeddings(VECTORS, top_k=5)
    ours = paraphrase_mining(VECTORS, top_k=5)
    assert [sorted(pair[1:]) for pair in pairs] == [list(pair[1:]) for pair in ours]


def test_pairs_that_say_the_same() -> None:
    found = paraphrase_mining(VECTORS, top_k=23)
    table = VECTORS @ VECTORS.T
    hand = sorted(((float(table[i, j]), i, j) for i in range(24) for j in range(i + 1, 24)), reverse=True)
    assert [pair[1:] for pair in found] == [pair[1:] for pair in hand]
    assert len(paraphrase_mining(VECTORS, max_pairs=4)) == 4


def test_negatives_are_near_and_do_not_belong_to_the_anchor() -> None:
    corpus = torch.cat([VECTORS, VECTORS.flip(1)])
    anchors, own = VECTORS + 0.1, [{i} for i in range(24)]
    scores = F.normalize(anchors, dim=-1) @ F.normalize(corpus, dim=-1).T
    found = hard_negatives(anchors, corpus, own, count=4)
    for i, places in enumerate(found):
        assert places == [k for k in scores[i].sort(descending=True).indices.tolist() if k != i][:4]
    skipped = hard_negatives(anchors, corpus, own, count=3, range_min=1)
    assert [row[0] for row in skipped] == [row[1] for row in found]
    margin = hard_negatives(anchors, corpus, own, count=4, relative_margin=0.5, max_score=0.6)
    for i, places in enumerate(margin):
        assert all(scores[i, k] <= min(0.5 * scores[i, i], 0.6) for k in places)
    drawn = hard_negatives(anchors, corpus, own, count=4, sampling="random", seed=3)
    assert drawn != found
    assert drawn == hard_negatives(anchors, corpus, own, count=4, sampling="random", seed=3)
    with pytest.raises(DataError, match="some for each"):
        hard_negatives(anchors, corpus, [set()] * 24)


def test_files_of_vectors_by_the_command(base: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)))
    expected = BaseModel.from_pretrained(base).encode(TEXTS)
    said = ran("encode", base, "--in", texts, "--out", tmp_path / "v.npy", "--json")
    assert (said["out"], said["written"]) == (str(tmp_path / "v.npy"), 24)
    assert np.array_equal(read_vectors(tmp_path / "v.npy"), expected)
    ran("encode", base, "--in", texts, "--out", tmp_path / "v.jsonl", "--store", "float16", "--dim", 8)
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [(line["id"], line["text"]) for line in lines] == list(enumerate(TEXTS))
    short = BaseModel.from_pretrained(base).encode(TEXTS, truncate_dim=8).astype(np.float16)
    assert np.array_equal(np.array([line["vector"] for line in lines], np.float16), short)
    ran("encode", base, "--in", texts, "--out", tmp_path / "p.npy", "--prompt", "query: ")
    prompted = BaseModel.from_pretrained(base).encode([f"query: {text}" for text in TEXTS])
    assert np.abs(read_vectors(tmp_path / "p.npy") - prompted).max() < 1e-6
    found = ran("search", base, TEXTS[3], "--in", texts, "--top-k", 2, "--json")
    assert found[0]["found"][0]["text"] == TEXTS[3]
    again = ran("search", base, TEXTS[3], "--in", texts, "--vectors", tmp_path / "v.npy", "--top-k", 2, "--json")
    assert [hit["index"] for hit in again[0]["found"]] == [hit["index"] for hit in found[0]["found"]]
    for name, store in (("b.npy", "int8"), ("b.jsonl", "uint8"), ("c.npy", "ubinary"), ("c.jsonl", "binary")):
        ran("encode", base, "--in", texts, "--out", tmp_path / name, "--store", store)
        among = ran("search", base, TEXTS[3], "--in", texts, "--vectors", tmp_path / name, "--top-k", 2, "--json")
        assert among[0]["found"][0]["text"] == TEXTS[3]
    assert TEXTS[3] in ran("search", base, TEXTS[3], "--in", texts, "--top-k", 1)


@pytest.mark.parametrize("store", ["float32", "int8", "ubinary"])
def test_vectors_of_a_text_file_are_its_lines_and_empty_ones_are_not_found(
    base: Path, tmp_path: Path, store: str
) -> None:
    texts, lines = tmp_path / "texts.txt", ["", TEXTS[0], "", TEXTS[1], "  ", TEXTS[2]]
    texts.write_text("".join(f"{line}\n" for line in lines))
    ran("encode", base, "--in", texts, "--out", tmp_path / "v.npy", "--store", store)
    assert len(read_vectors(tmp_path / "v.npy")) == len(lines)
    for given in ((), ("--vectors", tmp_path / "v.npy")):
        hits = ran("search", base, TEXTS[1], "--in", texts, *given, "--top-k", 6, "--json")[0]["found"]
        assert {hit["index"]: hit["text"] for hit in hits} == {1: TEXTS[0], 3: TEXTS[1], 5: TEXTS[2]}


def test_negatives_by_the_command(base: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"question": TEXTS[i], "context": TEXTS[12 + i // 2]} for i in range(12)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = ran("mine", base, "--in", pairs, "--out", tmp_path / "t.jsonl", "--negatives", 2, "--json")
    assert said["written"] == 12
    found = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [(row["anchor"], row["positive"]) for row in found] == [tuple(row.values()) for row in rows]
    for row in found:
        assert len({row["positive"], row["negative_1"], row["negative_2"]}) == 3
        assert {row["negative_1"], row["negative_2"]} <= {other["context"] for other in rows}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("encode", "BASE", "--in", "ROWS", "--out", "v.txt"), "names no format"),
        (("encode", "no-model", "--in", "ROWS", "--out", "nowhere/v.npy"), "its folder does not exist"),
        (("search", "BASE", "a", "--in", "ROWS", "--vectors", "none.npy"), "none.npy: no such file"),
        (("search", "BASE", "a", "--in", "ROWS", "--vectors", "ROWS"), "no vectors that can be read"),
        (("encode", "BASE", "--in", "ROWS", "--out", "v.npy", "--text-column", "b"), "no column 'b'"),
    ],
)
def test_what_cannot_be_is_said(words: tuple[str, ...], said: str, base: Path, tmp_path: Path) -> None:
    from flodl_hf.cli.app import app

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    given = [{"BASE": str(base), "ROWS": str(rows)}.get(word, word) for word in words]
    result = CliRunner().invoke(app, given)
    assert result.exit_code != 0
    assert said in " ".join(result.output.split())
