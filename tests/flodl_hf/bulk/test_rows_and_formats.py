"""What is read by rows is what is read whole, wherever reading begins; what is written reads back as it was."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flodl.errors import DataError
from flodl_hf.jobs.write import json_of, writer_for
from flodl_hf.tokenization.readers.files import open_rows, read_rows
from flodl_hf.tokenization.readers.rows import Row

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
BUDGET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ANSWER = {"label": "text", "score": "float"}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" * (1 + i % 2) for i, row in enumerate(rows)), "utf-8")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            out = csv.DictWriter(file, ["id", "text"], lineterminator="\n", quoting=csv.QUOTE_ALL)
            out.writeheader()
            out.writerows(rows)
    elif path.suffix == ".txt":
        path.write_text("".join(row["text"] + "\n" * (1 + i % 3) for i, row in enumerate(rows)), "utf-8")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.table(
            {"id": [r["id"] for r in rows], "text": pyarrow.array([r["text"] for r in rows], "string")}
        )
        if path.suffix == ".parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=5)
        elif path.name.startswith("stream"):
            with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as file:
                file.write_table(table, max_chunksize=3)
        else:
            with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as file:
                file.write_table(table, max_chunksize=3)


@BUDGET
@given(
    texts=st.lists(TEXT.filter(lambda t: t.strip()), min_size=1, max_size=30),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=8),
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt", "a.parquet", "a.arrow", "stream.arrow"])
def test_rows_taken_and_passed_over_are_the_rows_of_the_file(
    name: str, texts: list[str], steps: list[tuple[bool, int]], tmp_path: Path
) -> None:
    if name == "a.txt":
        texts = [text.replace("\r", " ").replace("\n", " ") or "x" for text in texts]
        texts = [text if text.strip() else "x" for text in texts]
    path = tmp_path / name
    write(path, [{"id": f"{i}", "text": text} for i, text in enumerate(texts)])
    whole = list(read_rows(path, header=True)) if name == "a.csv" else list(read_rows(path, blank_lines=True))
    rows = open_rows(path, header=True)
    at = 0
    try:
        for is_taken, count in [*steps, (True, len(whole) + 1)]:
            left = min(count, len(whole) - at)
            if is_taken:
                found = rows.take(count)
                assert [row.values for row in found] == whole[at : at + left]
                assert [row.number for row in found] == list(range(at + 1, at + left + 1))
                assert [row.fault for row in found] == [None] * left
            else:
                assert rows.skip(count) == left
            at += left
        assert (rows.take(1), rows.skip(1)) == ([], 0)
    finally:
        rows.close()


def writer(suffix: str, names: list[str], first: list[Row] | None = None) -> Any:
    return writer_for(
        suffix, tuple(names), ANSWER, with_errors=False, lead=None, names=names, types=None, first=first or []
    )


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('\n"text";"label"\n"a;b";c\n"two\nlines";d\n', [["a;b", "c"], ["two\nlines", "d"]]),
        ("text\tlabel\nking, queen\tgood\n", [["king, queen", "good"]]),
        ("text,label;no\nking,a;b\n", [["king", "a;b"]]),
    ],
)
def test_a_header_says_what_stands_between_cells(text: str, rows: list[list[str]], tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text, "utf-8")
    rows_of = open_rows(path)
    found = rows_of.take(9)
    rows_of.close()
    assert [list((row.values or {}).values()) for row in found] == rows
    assert [row.values for row in found] == list(read_rows(path, blank_lines=True))
    assert found[0].line == text.count("\n", 0, text.index("label")) + 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_a_file_in_utf_16_is_told_as_such(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\ufeff" * (encoding != "utf-16") + "text,label\nking,good\n", encoding)
    for read in (lambda: open_rows(path), lambda: list(read_rows(path))):
        with pytest.raises(DataError, match=r"UTF-16 starts like this; iconv -f UTF-16 -t UTF-8 converts it"):
            read()


@BUDGET
@given(texts=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=8))
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_texts_read_back_as_they_were(suffix: str, texts: list[tuple[str, str]], tmp_path: Path) -> None:
    out = writer(suffix, ["a", "b"])
    lines = [*out.lines([out.keep(Row(1, 1, {"a": a, "b": b})) for a, b in texts], [(a + b, 0.1) for a, b in texts])]
    part = tmp_path / "part"
    part.write_bytes(b"".join(out.part(iter(lines))))
    path = tmp_path / f"all.{suffix}"
    path.write_bytes(b"".join(out.joined([[part.read_bytes()]])))
    found = list(read_rows(path, header=True)) if suffix == "csv" else list(read_rows(path))
    assert [(row["a"], row["b"], row["label"]) for row in found] == [(a, b, a + b) for a, b in texts]
    with path.open(newline="", encoding="utf-8") as file:
        if suffix == "csv":
            assert len(list(csv.reader(file, strict=True))) == len(texts) + 1


@BUDGET
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_score_reads_back_as_its_32_bits(score: float) -> None:
    text = json_of("float")(score)
    assert np.float32(json.loads(text)).tobytes() == np.float32(score).tobytes()
    assert json.loads(json_of("vector")(np.asarray([score], np.float32))) == [json.loads(text)]
    assert json_of([{"score": "float"}])([{"score": score}]) == f'[{{"score": {text}}}]'


def test_an_input_is_read_as_far_as_it_is_needed(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write(tmp_path / "a.parquet", [{"id": str(i), "text": "x"} for i in range(23)])
    assert parquet.ParquetFile(tmp_path / "a.parquet").metadata.num_row_groups == 5
    rows: Any = open_rows(tmp_path / "a.parquet")
    rows.want(["text"])
    asked: list[int] = []
    real = rows._file.iter_batches

    class Watched:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def iter_batches(self, *args: Any, **options: Any) -> Any:
            asked.extend(options["row_groups"])
            return real(*args, **options)

    rows._file = Watched(rows._file)
    assert rows.skip(16) == 16
    assert [row.number for row in rows.take(3)] == [17, 18, 19]
    assert asked == [3]
    assert rows.take(1)[0].values == {"text": "x"}
    rows.close()


def test_a_kept_json_object_stays_as_it_was_written(tmp_path: Path) -> None:
    line = '  {"text":"caf\\u00e9","n":1.0,  "deep": [1e400, -0.0, {"a": "\\ud800"}] } \r\n'
    (tmp_path / "in.jsonl").write_text(line)
    rows = open_rows(tmp_path / "in.jsonl")
    out = writer_for(
        "jsonl", None, ANSWER, with_errors=False, lead=None, names=["text", "n", "deep"], types=None, first=[]
    )
    (row,) = rows.take(2)
    rows.close()
    written = b"".join(out.lines([out.keep(row)], [("a", 0.5)])).decode()
    assert written == line.strip()[:-1].rstrip() + ', "label": "a", "score": 0.5}\n'
    assert json.loads(written)["text"] == "café"


def test_a_folder_is_not_called_absent(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path, "is a folder"),
        (tmp_path / "a.csv", "no such file"),
    ):
        with pytest.raises(DataError, match=says):
            open_rows(path)
