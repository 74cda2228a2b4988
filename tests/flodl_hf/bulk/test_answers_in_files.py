"""A file of texts becomes a file of the answers that the model's own methods give, for every task and format."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bulk_inputs import texts

from flodl.errors import DataError
from flodl_hf import predict_file
from flodl_hf.cli.app import app
from flodl_hf.errors import PredictError
from flodl_hf.heads.auto import AutoModelForSequenceClassification

TEXTS = texts(37)
MASKED = [f"the {word} [MASK] sat" for word in ("cat", "dog", "film")]
QUESTION = "who sat?"


def entities(found: Any) -> list[dict[str, Any]]:
    return [{"label": e.label, "score": e.score, "word": e.word, "start": e.start, "end": e.end} for e in found]


def one_label(model: Any) -> Any:
    """Return a model of one label, as cross-encoders are."""
    ranker = AutoModelForSequenceClassification.from_pretrained(model.source.folder, num_labels=1)
    ranker._mark_untrained(())
    return ranker


# Task: head, rows of the input, arguments, what the model's own method gives for the rows.
CASES: dict[str, tuple[str, list[str], dict[str, Any], Callable[[Any], list[dict[str, Any]]]]] = {
    "classes": ("sequence_classification", TEXTS, {}, lambda m: [
        {"label": r[0].label, "score": r[0].score} for r in m.predict(TEXTS)]),
    "two classes": ("sequence_classification", TEXTS, {"top_k": 2}, lambda m: [
        {"labels": [{"label": c.label, "score": c.score} for c in r]} for r in m.predict(TEXTS, top_k=2)]),
    "sure classes": ("sequence_classification", TEXTS, {"threshold": 0.4}, lambda m: [
        {"labels": [{"label": c.label, "score": c.score} for c in r]} for r in m.predict(TEXTS, threshold=0.4)]),
    "entities": ("token_classification", TEXTS, {"aggregation": "simple"}, lambda m: [
        {"entities": entities(r)} for r in m.predict(TEXTS, aggregation="simple")]),
    "answers": ("question_answering", TEXTS, {"question": QUESTION}, lambda m: [
        {"answer": r[0].text, "score": r[0].score, "start": r[0].start, "end": r[0].end}
        for r in m.answer_batch([(QUESTION, t) for t in TEXTS])]),
    "best answers": ("question_answering", TEXTS, {"question": QUESTION, "top_k": 3}, lambda m: [
        {"answers": [{"text": a.text, "score": a.score, "start": a.start, "end": a.end} for a in r]}
        for r in m.answer_batch([(QUESTION, t) for t in TEXTS], top_k=3)]),
    "masks": ("masked_lm", MASKED, {"top_k": 2}, lambda m: [
        {"masks": [[{"token": f.token, "score": f.score, "sequence": f.sequence} for f in fills] for fills in r]}
        for r in m.fill_mask(MASKED, top_k=2)]),
    "vectors": ("base", TEXTS, {}, lambda m: [{"embedding": row} for row in m.embed(TEXTS).tolist()]),
    "relevance": ("one label", TEXTS, {"query": QUESTION}, lambda m: [
        {"score": {r.index: r.score for r in m.rerank(QUESTION, TEXTS)}[i]} for i in range(len(TEXTS))]),
}  # fmt: skip


def read_back(path: Path, lists: bool) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    if path.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    delimiter, quoting = (",", csv.QUOTE_MINIMAL) if path.suffix == ".csv" else ("\t", csv.QUOTE_NONE)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter=delimiter, quoting=quoting))
    plain = {"label", "answer", "text", "id"}
    return [{k: v if k in plain else json.loads(v) for k, v in row.items()} for row in rows]


def close(found: Any, wanted: Any) -> None:
    """Compare answers; scores as 32-bit numbers, to rounding, as texts were run in other company."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            close(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            close(one, other)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-5)
    else:
        assert found == wanted


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "parquet"])
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_the_models_own_methods(
    case: str, suffix: str, model: Callable[..., Any], jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    head, given, arguments, own = CASES[case]
    chosen = one_label(model()) if head == "one label" else model(head)
    source = jsonl([{"id": f"r{i}", "text": text} for i, text in enumerate(given)])
    out = tmp_path / f"out.{suffix}"
    result = predict_file(chosen, source, out, part_rows=10, id_column="id", **arguments)
    assert (result.is_whole, result.rows, result.written, result.faulty) == (True, len(given), len(given), 0)
    found = read_back(out, lists=True)
    assert [row.pop("id") for row in found] == [f"r{i}" for i in range(len(given))]
    close(found, own(chosen))
    assert not (tmp_path / f"out.{suffix}.parts").exists()


def write_source(path: Path, rows: list[dict[str, str]]) -> None:
    if path.suffix == ".gz":
        plain = path.with_suffix("")
        write_source(plain, rows)
        path.write_bytes(gzip.compress(plain.read_bytes()))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    elif path.suffix in (".csv", ".tsv"):
        lines = [list(rows[0]), *(list(row.values()) for row in rows)]
        path.write_text("".join(("," if path.suffix == ".csv" else "\t").join(line) + "\n" for line in lines), "utf-8")
    elif path.suffix == ".txt":
        path.write_text("".join(row["text"] + "\n" for row in rows), "utf-8")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=7)
        else:
            with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as file:
                file.write_table(table, max_chunksize=7)


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.csv", "a.tsv", "a.txt", "a.jsonl.gz", "a.csv.gz", "a.parquet", "a.arrow"]
)
def test_every_input_format_gives_the_same_file(
    name: str, model: Callable[..., Any], numbered: Callable[..., Path], tmp_path: Path
) -> None:
    write_source(tmp_path / name, [{"text": text} for text in texts(50)])
    wanted, out = tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    predict_file(model(), numbered(50), wanted, keep="text", part_rows=16)
    predict_file(model(), tmp_path / name, out, part_rows=16)
    assert out.read_bytes() == wanted.read_bytes()


def test_scores_are_the_shortest_text_of_their_32_bit_number(
    model: Callable[..., Any], numbered: Callable[..., Path], tmp_path: Path
) -> None:
    predict_file(model(), numbered(20), tmp_path / "out.jsonl", keep="none")
    scores = [line.split('"score": ')[1].rstrip("}\n") for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert scores == [str(np.float32(score)) for score in scores]
    assert max(map(len, scores)) < 13


@pytest.mark.parametrize(
    ("keep", "columns"),
    [
        ({}, ["n", "text", "more", "label", "score"]),
        ({"keep": "all"}, ["n", "text", "more", "label", "score"]),
        ({"keep": "none"}, ["label", "score"]),
        ({"keep": "more, n"}, ["more", "n", "label", "score"]),
        ({"keep": ["text"]}, ["text", "label", "score"]),
        ({"id_column": "more"}, ["more", "label", "score"]),
        ({"id_column": "more", "keep": "n"}, ["more", "n", "label", "score"]),
        ({"id_column": "more", "keep": "all"}, ["more", "n", "text", "label", "score"]),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_that_are_kept(
    keep: dict[str, Any], columns: list[str], suffix: str, model: Any, jsonl: Any, tmp_path: Path
) -> None:
    source = jsonl([{"n": 1, "text": "a cat", "more": "x"}, {"n": 2, "text": "a dog"}])
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    out = tmp_path / f"out.{suffix}"
    predict_file(model(), source, out, **keep)
    found = read_back(out, lists=False) if suffix == "parquet" else list(csv.DictReader(io.StringIO(out.read_text())))
    assert list(found[0]) == columns
    if "more" in columns:
        assert [row["more"] for row in found] == (["x", None] if suffix == "parquet" else ["x", ""])


def test_kept_columns_of_a_table_keep_their_types(model: Any, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    import datetime

    fields = {
        "day": ([datetime.date(2024, 2, 29), None], pyarrow.date32()),
        "tags": ([["a"], []], pyarrow.list_(pyarrow.string())),
        "deep": ([{"x": 1}, {"x": None}], pyarrow.struct([("x", pyarrow.int8())])),
        "raw": ([b"\xff", b""], pyarrow.binary()),
        "text": (["a cat", "a dog"], pyarrow.large_string()),
    }
    table = pyarrow.table({name: pyarrow.array(values, type=kind) for name, (values, kind) in fields.items()})
    parquet.write_table(table, tmp_path / "in.parquet")
    predict_file(model(), tmp_path / "in.parquet", tmp_path / "out.parquet")
    found = parquet.read_table(tmp_path / "out.parquet")
    assert found.select(list(fields)).equals(table)
    assert found.schema.field("score").type == pyarrow.float32()
    with pytest.raises(DataError, match="bytes cannot be written as text"):
        predict_file(model(), tmp_path / "in.parquet", tmp_path / "out.csv")
    predict_file(model(), tmp_path / "in.parquet", tmp_path / "out.csv", keep="day,tags,deep")
    assert (tmp_path / "out.csv").read_text().splitlines()[1].startswith('2024-02-29,"[""a""]","{""x"": 1}"')


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "parquet"])
def test_an_empty_file_gives_an_empty_file(suffix: str, model: Any, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    for name in ("in.jsonl", "in.csv", "in.txt"):
        (tmp_path / name).write_text("")
        out = tmp_path / f"{name}.{suffix}"
        assert predict_file(model(), tmp_path / name, out).rows == 0
        assert read_back(out, lists=False) == []
        if suffix == "csv" and name != "in.txt":
            assert out.read_text() == "label,score\n"


def test_pairs_are_read_from_two_columns(model: Any, jsonl: Any, tmp_path: Path) -> None:
    pairs = [("a cat", "the dog sat"), ("ada lives", "in paris")]
    wanted = [r[0].score for r in model().predict(pairs)]
    for names, said in ((("premise", "hypothesis"), {}), (("x", "y"), {"text_column": "x", "pair_column": "y"})):
        source = jsonl([dict(zip(names, pair, strict=True)) for pair in pairs])
        predict_file(model(), source, tmp_path / "out.jsonl", overwrite=True, **said)
        found = [row["score"] for row in read_back(tmp_path / "out.jsonl", lists=False)]
        assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("format", ["jsonl", "csv", "tsv", "parquet", "arrow"])
@pytest.mark.parametrize("origin", ["jsonl", "csv", "parquet"])
def test_labels_of_the_input_stay_beside_those_of_the_answer(
    origin: str, format: str, model: Any, tmp_path: Path
) -> None:
    if "parquet" in (origin, format) or format == "arrow":
        pytest.importorskip("pyarrow")
    rows = [{"text": f"a cat {i}", "label": f"gold {i}", "input_label": i, "id": i} for i in range(5)]
    source = tmp_path / f"in.{origin}"
    if origin == "jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif origin == "csv":
        source.write_text(
            "text,label,input_label,id\n" + "".join("{text},{label},{input_label},{id}\n".format(**r) for r in rows)
        )
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), source)
    out = tmp_path / f"out.{format}"
    with pytest.warns(
        UserWarning, match="'label' is written as 'input_label_', because the result has a column of that name"
    ):
        predict_file(model(), source, out, on_error="null")
    if format in ("csv", "tsv"):
        with out.open(newline="", encoding="utf-8") as file:
            found: list[Any] = list(csv.DictReader(file, delimiter="," if format == "csv" else "\t"))
    elif format == "arrow":
        found = pytest.importorskip("pyarrow").ipc.open_file(out).read_all().to_pylist()
    else:
        found = read_back(out, lists=False)
    bare = [{name: str(value).strip('"') for name, value in row.items()} for row in found]
    assert [row["input_label_"] for row in bare] == [row["label"] for row in rows]
    assert [row["input_label"] for row in bare] == [str(row["id"]) for row in rows]
    expected = model().predict([row["text"] for row in rows])
    assert [row["label"] for row in bare] == [answer.label for answer in expected]


@pytest.mark.parametrize(
    ("head", "columns", "said", "says"),
    [
        ("sequence_classification", ["a", "b"], {}, "the column of texts is ambiguous"),
        ("sequence_classification", ["headline", "b"], {"text_column": "heading"}, "did you mean 'headline'"),
        ("sequence_classification", ["text"], {"question": "who?"}, "question: not used by this model"),
        ("sequence_classification", ["text", "b"], {"keep": "c"}, "keep: no column 'c'"),
        (
            "sequence_classification",
            ["text", "label"],
            {"keep": "label"},
            "both the result and the input have 'label'",
        ),
        ("question_answering", ["text"], {}, "no column of questions"),
        ("question_answering", ["text"], {"question": "q", "question_column": "text"}, "expected only one of them"),
        ("base", ["text"], {"pair_column": "text"}, "pair_column: not used by this model"),
    ],
)
def test_columns_that_cannot_be_told_are_refused_at_once(
    head: str, columns: list[str], said: dict[str, Any], says: str, model: Any, jsonl: Any, tmp_path: Path
) -> None:
    source = jsonl([dict.fromkeys(columns, "a cat")])
    with pytest.raises(DataError, match=says.replace("?", r"\?")):
        predict_file(model(head), source, tmp_path / "out.jsonl", **said)
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("source", "target", "said", "says"),
    [
        ("absent.jsonl", "out.csv", {}, "no such file"),
        ("in.json", "out.csv", {}, "JSON lines"),
        ("in.jsonl", "out.xlsx", {}, "found the suffix"),
        ("in.jsonl", "in.jsonl", {"overwrite": True}, "are the same file"),
        ("in.jsonl", "no/out.csv", {}, "no does not exist"),
        ("in.jsonl", "out.csv", {"on_error": "ignore"}, "expected stop, skip or null"),
        ("in.jsonl", "out.csv", {"part_rows": 0}, "expected at least 1"),
        ("in.jsonl", "out.csv", {"topk": 2}, "topk, did you mean 'top_k'"),
        ("in.jsonl", "out.csv", {"devices": 2}, "need a model's folder or name"),
        ("-", "out.csv", {"format": "parquet"}, "expected one of csv, tsv, jsonl, text"),
        ("in.jsonl", "out.csv", {"query": "x"}, "needs one label"),
    ],
)
def test_calls_that_make_no_sense(
    source: str, target: str, said: dict[str, Any], says: str, model: Any, numbered: Any, tmp_path: Path
) -> None:
    numbered(3)
    (tmp_path / "in.json").write_text("[]")
    before = (tmp_path / "in.jsonl").read_bytes()
    with pytest.raises((DataError, PredictError), match=says):
        predict_file(model(), source if source == "-" else tmp_path / source, tmp_path / target, **said)
    assert (tmp_path / "in.jsonl").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.json", "in.jsonl"]


def test_without_pyarrow_the_way_out_is_named(model: Any, numbered: Any, tmp_path: Path, monkeypatch: Any) -> None:
    import builtins

    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(DataError, match=r"flodl-hf\[data\]"):
        predict_file(model(), numbered(3), tmp_path / "out.parquet")


def test_tokens_and_rows_are_counted(model: Any, numbered: Any, tmp_path: Path) -> None:
    seen: list[int] = []
    tokenizer = model().tokenizer
    result = predict_file(
        model(), numbered(64), tmp_path / "out.jsonl", part_rows=8, on_progress=lambda p: seen.append(p.rows)
    )
    real = sum(len(tokenizer.encode(text)) for text in texts(64))
    assert real <= result.tokens <= real + 8
    assert seen == sorted(seen)
    assert model().tokenizer is tokenizer
    assert result.to_dict()["rows_per_s"] > 0


def test_a_first_line_that_may_be_a_text_is_told(model: Any, tmp_path: Path) -> None:
    source = tmp_path / "plain.csv"
    source.write_text("good film\nbad film\n")
    with pytest.warns(UserWarning, match=r"the first line, 'good film', is used as a header\. .* set header=False"):
        assert predict_file(model(), source, tmp_path / "one.csv").rows == 1
    for name, said in (("none", {"header": False}), ("all", {"header": True}), ("named", {"text_column": "good film"})):
        assert predict_file(model(), source, tmp_path / f"{name}.csv", **said).rows == 1 + (name == "none")


def test_ranking_of_a_file_shows_no_rate_of_tokens(model: Any, tmp_path: Path) -> None:
    runner = pytest.importorskip("typer.testing").CliRunner()
    one_label(model("sequence_classification")).save_pretrained(tmp_path / "ranker")
    (tmp_path / "in.txt").write_text("a text\nanother text\n", "utf-8")
    given = ["--in", str(tmp_path / "in.txt"), "--out", str(tmp_path / "out.jsonl")]
    found = runner.invoke(app, ["predict", str(tmp_path / "ranker"), *given, "--query", QUESTION])
    assert found.exit_code == 0, found.output
    assert "rows/s)" in found.output
    assert "tokens/s" not in found.output
