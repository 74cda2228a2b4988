"""Rows that cannot be answered stop a run, are left out, or are written with the reason; each is named by its number."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl.errors import DataError
from flodl_hf import load, predict_file
from flodl_hf.inference.results import Classification
from flodl_hf.tokenization.readers import rows

GOLDEN = Path(__file__).parents[2] / "golden"
GOOD = {"id": 0, "text": "a cat"}

# A faulty line, and what is said of it.
FAULTY: dict[str, tuple[str, str]] = {
    "no JSON": ("{bad", "invalid JSON"),
    "no object": ("[1, 2]", "found list: '[1, 2]', expected a JSON object"),
    "no column": ('{"id": 1}', "found no column 'text'"),
    "null": ('{"id": 1, "text": null}', "column 'text': found null"),
    "number": ('{"id": 1, "text": 3}', "column 'text': found int"),
    "half a character": ('{"id": 1, "text": "a \\ud800 b"}', "surrogate"),
    "the answer's name": ('{"id": 1, "text": "a", "score": 1}', "the row has a column 'score'"),
    "too deep": ("[" * 100_000, "invalid JSON"),
}


def lines(faulty: str) -> list[str]:
    return [json.dumps({"id": i, "text": f"a cat {i}"}) for i in range(5)] + [
        faulty,
        "",
        *(json.dumps({"id": i, "text": f"a dog {i}"}) for i in range(5, 9)),
    ]


@pytest.mark.parametrize("head", ["sequence_classification", "token_classification"])
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_an_empty_row_is_answered_as_an_empty_text(
    head: str, suffix: str, model: Any, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = jsonl(lines('{"id": 9, "text": " \\n\\t"}')), tmp_path / f"out.{suffix}"
    result = predict_file(model(head), source, out, part_rows=4)
    assert (result.rows, result.written, result.faulty, result.empty) == (10, 10, 0, 1)
    assert result.to_dict()["empty"] == 1
    (found,) = model(head).predict([" \n\t"])
    if suffix == "csv":
        with out.open(newline="") as file:
            row = list(csv.DictReader(file))[5]
    else:
        row = json.loads(out.read_text().splitlines()[5])
    if head == "token_classification":
        assert row["entities"] in ("[]", [])
    else:
        assert (row["label"], float(row["score"])) == (found.label, pytest.approx(found.score, abs=1e-6))


@pytest.mark.parametrize("case", FAULTY)
def test_a_faulty_row_stops_is_left_out_or_says_why(
    case: str, model: Any, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    line, says = FAULTY[case]
    source, out = jsonl(lines(line)), tmp_path / "out.jsonl"
    with pytest.raises(DataError) as stopped:
        predict_file(model(), source, out, part_rows=4)
    assert stopped.value.rows == [6]
    assert stopped.value.problems[0].startswith("row 6 (line 6): ")
    assert says in stopped.value.problems[0]
    assert not out.exists()
    # What was finished before is gone on from, and is as if rows had been skipped from the start.
    result = predict_file(model(), source, out, on_error="skip")
    assert (result.resumed, result.rows, result.written, result.faulty) == (1, 10, 9, 1)
    assert result.faults == stopped.value.problems
    assert [json.loads(found)["id"] for found in out.read_text().splitlines()] == list(range(9))
    predict_file(model(), source, tmp_path / "skipped.jsonl", on_error="skip", part_rows=4)
    assert (tmp_path / "skipped.jsonl").read_bytes() == out.read_bytes()
    result = predict_file(model(), source, tmp_path / "null.jsonl", on_error="null", part_rows=4)
    assert (result.rows, result.written, result.faulty) == (10, 10, 1)
    found = [json.loads(text) for text in (tmp_path / "null.jsonl").read_text().splitlines()]
    assert [row["error"] for row in found[:5] + found[6:]] == [None] * 9
    assert (found[5]["label"], found[5]["score"]) == (None, None)
    assert found[5]["error"] == stopped.value.problems[0]


def test_all_faults_of_a_part_come_at_once(model: Any, jsonl: Any, tmp_path: Path) -> None:
    source = jsonl([GOOD, "{", GOOD, '{"id": 3}', GOOD, GOOD, "{"])
    with pytest.raises(DataError) as stopped:
        predict_file(model(), source, tmp_path / "out.jsonl", part_rows=6)
    assert stopped.value.rows == [2, 4]


def test_texts_too_long_for_one_window_with_strict(model: Any, jsonl: Any, tmp_path: Path) -> None:
    limit = model().max_tokens
    long = "cat " * (limit * 2)
    source, out = jsonl([GOOD, {"id": 1, "text": long}, GOOD, {"id": 3, "text": long}]), tmp_path / "out.jsonl"
    assert predict_file(model(), source, tmp_path / "windows.jsonl").faulty == 0
    with pytest.raises(DataError) as stopped:
        predict_file(model(), source, out, strict=True)
    assert stopped.value.rows == [2, 4]
    assert f"at most {limit}" in stopped.value.problems[0]
    result = predict_file(model(), source, out, strict=True, on_error="skip")
    assert (result.written, result.faulty) == (2, 2)


def test_what_a_task_refuses_is_a_faulty_row(model: Any, jsonl: Any, tmp_path: Path) -> None:
    source = jsonl([{"text": "the [MASK] sat"}, {"text": "no mask"}, {"text": "a [MASK]"}, {"text": "none"}])
    result = predict_file(model("masked_lm"), source, tmp_path / "out.jsonl", on_error="null")
    assert (result.written, result.faulty) == (4, 2)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["masks"] is None for row in found] == [False, True, False, True]
    assert "the text has no [MASK]" in found[1]["error"]
    assert len(found[2]["masks"][0]) == 5


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_score_that_is_no_number_is_a_fault(
    score: float, suffix: str, model: Any, numbered: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    scores = [0.5, score, 0.25]
    monkeypatch.setattr(
        model(),
        "predict",
        lambda texts, top_k=None: ([Classification("a", s)] for s, _ in zip(scores, texts, strict=False)),
    )
    with pytest.raises(DataError) as stopped:
        predict_file(model(), numbered(3), tmp_path / f"out.{suffix}")
    assert stopped.value.rows == [2]
    result = predict_file(model(), tmp_path / "in.jsonl", tmp_path / f"out.{suffix}", on_error="skip")
    assert (result.written, result.faulty) == (2, 1)


def test_a_model_that_fails_on_everything_is_not_the_rows_fault(
    model: Any, numbered: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    def broken(texts: Any, top_k: Any = None) -> Any:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(model(), "predict", broken)
    with pytest.raises(torch.OutOfMemoryError):
        predict_file(model(), numbered(3), tmp_path / "out.jsonl", on_error="skip")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"one,two,three\n", "found 3 cells: 'one,two,three', expected 2"),
        (b'1,"a " b\n', "expected after '\"'"),
        (b"1,caf\xe9\n", "byte 0xe9 at position 6, expected UTF-8"),
    ],
)
def test_faults_of_csv_files_keep_the_count_of_rows(line: bytes, says: str, model: Any, tmp_path: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes(b'id,text\n0,a cat\n1,"two\nlines"\n' + line + b"3,a dog\n")
    with pytest.raises(DataError) as stopped:
        predict_file(model(), source, out)
    assert stopped.value.rows == [3]
    assert stopped.value.problems[0].startswith("row 3 (line 5): ")
    assert says in stopped.value.problems[0]
    predict_file(model(), source, out, on_error="null", keep="id")
    with out.open(newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == ["0", "1", "", "3"]


def test_what_tsv_cannot_hold_is_a_fault_there_alone(model: Any, jsonl: Any, tmp_path: Path) -> None:
    source = jsonl([GOOD, {"id": 1, "text": "a\tcat"}, {"id": 2, "text": 'a "dog", it was'}])
    with pytest.raises(DataError, match="TSV does not support"):
        predict_file(model(), source, tmp_path / "out.tsv")
    result = predict_file(model(), source, tmp_path / "out.tsv", on_error="skip")
    assert result.written == 2
    assert '\ta "dog", it was\t' in (tmp_path / "out.tsv").read_text()
    assert predict_file(model(), source, tmp_path / "out.csv").faulty == 0


def test_values_of_another_type_than_their_column(model: Any, jsonl: Any, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"id": i, "text": "a cat", "mixed": i if i % 2 else "x"} for i in range(8)]
    rows[6]["id"] = "six"
    source, out = jsonl(rows), tmp_path / "out.parquet"
    with pytest.raises(DataError) as stopped:
        predict_file(model(), source, out, part_rows=4)
    assert stopped.value.rows == [7]
    assert "column 'id'" in stopped.value.problems[0]
    predict_file(model(), source, out, on_error="skip")
    found = parquet.read_table(out).to_pylist()
    assert [row["id"] for row in found] == [0, 1, 2, 3, 4, 5, 7]
    # Values of several types from the first are JSON.
    assert [row["mixed"] for row in found][:3] == ['"x"', "1", '"x"']


def test_columns_that_come_late(model: Any, jsonl: Any, tmp_path: Path) -> None:
    source = jsonl([GOOD, GOOD, {**GOOD, "new": 1}])
    assert predict_file(model(), source, tmp_path / "out.jsonl", part_rows=2).faulty == 0
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[2])["new"] == 1
    with pytest.raises(DataError, match=r"columns \['new'\] were in none of the first rows"):
        predict_file(model(), source, tmp_path / "out.csv", part_rows=2)
    assert predict_file(model(), source, tmp_path / "out.csv", keep="id", overwrite=True).faulty == 0


def test_a_cut_gzip_file_is_no_end_of_data(model: Any, numbered: Any, tmp_path: Path) -> None:
    import gzip

    whole = gzip.compress(numbered(2000).read_bytes())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataError, match="found unreadable data"):
        predict_file(model(), tmp_path / "cut.jsonl.gz", tmp_path / "out.jsonl", on_error="skip", part_rows=100)
    assert not (tmp_path / "out.jsonl").exists()


def test_the_command_counts_and_names_faulty_rows(folder: Any, jsonl: Any, tmp_path: Path) -> None:
    from_cli = pytest.importorskip("typer.testing")
    from flodl_hf.cli.app import app

    source, out = jsonl([GOOD, "{", GOOD]), tmp_path / "out.csv"
    args = ["predict", str(folder("sequence_classification")), "--in", str(source), "--out", str(out)]
    stopped = from_cli.CliRunner().invoke(app, args)
    assert stopped.exit_code == 1
    assert "row 2 (line 2): found invalid JSON" in stopped.stderr
    done = from_cli.CliRunner().invoke(app, [*args, "--on-error", "skip"])
    assert done.exit_code == 0, done.stderr
    assert "2 rows in" in done.stdout
    assert "1 of 3 rows could not be answered (1 left out):\n  row 2 (line 2): found invalid JSON" in done.stderr
    told = from_cli.CliRunner().invoke(app, [*args, "--on-error", "null", "--overwrite", "--json"])
    figures = json.loads(told.stdout)
    assert (figures["rows"], figures["written"], figures["faulty"], figures["is_whole"]) == (3, 3, 1, True)
    assert figures["out"] == str(out)
    assert told.stderr.startswith("on cpu")
    assert len(told.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--in", "x.csv"], "--in needs --out FILE"),
        (["--out", "x.csv"], "--out needs --in FILE"),
        (["a text", "--in", "x.csv", "--out", "y.csv"], "cannot be combined with text"),
        (["a text", "--keep", "none"], "--keep: needs --in FILE and --out FILE"),
        (["a text", "--overwrite"], "--overwrite: needs --in"),
        (["--in", "x.csv", "--out", "y.csv", "--on-error", "ignore"], "is not one of 'stop', 'skip', 'null'"),
        (["a text", "--top-k", "0"], "--top-k"),
    ],
)
def test_wrong_usage_is_status_2(args: list[str], says: str, folder: Any) -> None:
    from_cli = pytest.importorskip("typer.testing")
    from flodl_hf.cli.app import app

    done = from_cli.CliRunner().invoke(app, ["predict", str(folder("sequence_classification")), *args])
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.replace("│", " ").split())


def test_a_line_without_end_is_refused_before_it_is_in_memory(
    model: Any, jsonl: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1000)
    source = jsonl([json.dumps(GOOD), "x" * 1001])
    with pytest.raises(DataError, match="line 2: found a line with more than 1,000 bytes") as caught:
        predict_file(model("sequence_classification"), source, tmp_path / "out.jsonl", text_column="text")
    assert caught.value.line == 2


LONG = " ".join(["cat"] * 60)


@pytest.mark.parametrize(
    "pair", [(LONG, "a dog"), ("a dog", LONG), (LONG, LONG), ("", "a dog"), ("a dog", ""), ("", "")]
)
def test_pairs_have_the_answers_of_python(pair: tuple[str, str], model: Any, jsonl: Any, tmp_path: Path) -> None:
    source, out = jsonl([{"text": pair[0], "text_pair": pair[1]}]), tmp_path / "out.jsonl"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = predict_file(model("sequence_classification"), source, out)
        (best,) = model("sequence_classification").predict([pair], top_k=1)[0]
    assert len(caught) == 2 * (pair == (LONG, LONG))
    row = json.loads(out.read_text())
    assert (row["label"], row["score"]) == (best.label, pytest.approx(best.score, abs=1e-6))
    assert (result.empty, result.faulty, result.truncated) == (pair == ("", ""), 0, pair == (LONG, LONG))


@pytest.mark.parametrize("on_error", ["skip", "null"])
def test_a_long_document_of_a_query_is_one_faulty_row(on_error: str, jsonl: Any, tmp_path: Path) -> None:
    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.heads.sequence_classification import SequenceClassifier

    base: Any = load(GOLDEN / "bert-sequence_classification")
    config = ModelConfig.from_dict({**base.config.source, "id2label": {"0": "fits"}, "label2id": {"fits": 0}})
    ranker = SequenceClassifier.from_config(config)
    ranker.tokenizer = base.tokenizer
    documents = [{"query": f"who {n % 2}", "text": text} for n, text in enumerate(["a cat", "a dog", LONG, "a mat"])]
    source, out = jsonl(documents), tmp_path / "out.jsonl"
    how: Any = {"query_column": "query", "untrained": True, "on_error": on_error}
    assert predict_file(ranker, source, out, **how).faulty == 0  # read in windows
    result = predict_file(ranker, source, out, overwrite=True, strict=True, **how)
    assert (result.rows, result.faulty) == (4, 1)
    assert result.faults[0].startswith("row 3 (line 3): ")
    assert "text " not in result.faults[0].partition(": ")[2][:8]
    with pytest.raises(DataError) as refused:
        predict_file(ranker, source, out, overwrite=True, strict=True, **{**how, "on_error": "stop"})
    assert refused.value.rows == [3]
